"""Vectors of texts, and scores of documents, computed by all machines that are idle and have the model."""
