"""OpenAI's Responses dialect, as Codex and OpenAI's libraries speak it."""
