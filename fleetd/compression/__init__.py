"""The pure part of smart prefill: which pieces of a long prompt are kept, and in which form."""
