"""Smart prefill, the pure part: which pieces of a long prompt are kept, and in which form."""
