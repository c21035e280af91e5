"""Anthropic's Messages dialect, as Claude Code and Anthropic's libraries speak it."""
