"""From logits to tokens, and from tokens to text, tool calls and log-probabilities."""
