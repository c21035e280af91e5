"""Keys and values of a prompt from another machine that has them, instead of computing them again."""
