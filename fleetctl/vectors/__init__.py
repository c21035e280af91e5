"""What `embed` and `rerank` read and write: texts with names, files of vectors, and the model for both."""
