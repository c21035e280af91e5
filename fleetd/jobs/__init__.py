"""Jobs: one request from admission to its last token."""
