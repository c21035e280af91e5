"""From tokens to text, tool calls and log-probabilities."""
