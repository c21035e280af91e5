"""Images in prompts: from a file to rows that take the place of tokens' embeddings."""
