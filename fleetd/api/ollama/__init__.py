"""Ollama's dialect, as its libraries, Open WebUI and VS Code Copilot speak it."""
