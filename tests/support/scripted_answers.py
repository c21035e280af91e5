"""Answers that a test writes, from real workers: each token is forced where it would be sampled.

All else is real: chat template, tokenizer, prefix cache, prefill, decoding, the text that becomes reasoning
and tool calls. A daemon whose environment names a file in ``VARIABLE`` has workers that obey it; others are
left as they are. Only programs that the tests fork have this.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

VARIABLE = "SCRIPTED_ANSWERS"
DONE = "All done."


class ScriptedTurns(msgspec.Struct):
    """One turn is played per tool result that a conversation has, then ``DONE``.

    ``thought``: the reasoning before each turn. ``until``: once a message has this text, all is done.
    """

    turns: list[tuple[str, dict[str, Any]]] = []
    thought: str = ""
    until: str = ""

    def write(self, path: Path) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(self))
        draft.replace(path)

    def answer(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        """The answer to a conversation, as the model writes it."""
        done = sum(message["role"] == "tool" for message in messages)
        if not tools or done >= len(self.turns) or (self.until and self.until in str(messages)):
            return DONE
        name, arguments = self.turns[done]
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thought else ""
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"{thought}Now {name}.\n<tool_call>\n{call}\n</tool_call>"


def install() -> None:
    """Called in the process that all programs are forked from."""
    from fleetd.engine.loop.decoding import Decoding

    usual = Decoding._processors

    def processors(self: Decoding, request: Any, prompt_tokens: int) -> list[Any]:
        found = usual(self, request, prompt_tokens)
        if (path := os.environ.get(VARIABLE)) is None:
            return found
        script = msgspec.json.decode(Path(path).read_bytes(), type=ScriptedTurns)
        text = script.answer(request.prompt.messages, request.prompt.tools)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return [*found, _forced([*tokens, min(self._ends)], prompt_tokens)]

    Decoding._processors = processors  # type: ignore[method-assign]


def _forced(answer: Sequence[int], prompt_tokens: int) -> Callable[[Any, Any], Any]:
    """A logits processor that leaves one token to choose; by its place, so drafts change nothing."""
    import mlx.core as mx

    def processor(tokens: Any, logits: Any) -> Any:
        at = min(tokens.size - prompt_tokens, len(answer) - 1)
        column = mx.array([[answer[at]]])
        value = mx.zeros((1, 1), logits.dtype)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), column, value, axis=-1)

    return processor
