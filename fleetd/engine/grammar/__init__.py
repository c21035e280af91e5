"""Grammars of whole answers, and the masks that hold answers to them."""
