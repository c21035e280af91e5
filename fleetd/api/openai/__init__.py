"""The OpenAI dialect: request bodies, response objects, and the translation between them and the engine."""
