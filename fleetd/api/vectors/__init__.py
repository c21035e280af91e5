"""Requests for vectors and scores in any dialect: from a body's texts to what was found for each."""
