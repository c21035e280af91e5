"""Planning one prompt's prefill: who may help, how it is split, and what each split takes."""
