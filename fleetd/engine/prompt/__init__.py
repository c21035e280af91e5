"""From messages to tokens: chat templates, control tokens, and where messages begin."""
