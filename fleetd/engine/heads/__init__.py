"""Small networks that draft from a model's own hidden states, and lie beside its weights."""
