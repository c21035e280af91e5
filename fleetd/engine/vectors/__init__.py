"""Vectors of texts, and how well texts answer a query: the models, and the loop of a worker that has one."""
