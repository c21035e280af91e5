"""A conversation in the terminal: what is typed, what is asked, and how the answer is shown as it streams."""
