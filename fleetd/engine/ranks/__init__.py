"""A model whose every layer is divided between several machines: each computes its part of each product."""
