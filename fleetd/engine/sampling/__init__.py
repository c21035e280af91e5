"""How the next token is chosen: what a request may say about it, and its arithmetic on logits."""
