"""What the tests with real coding agents share: a folder to work in, and an engine that plays the model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from api_fakes import Step

from fleetd import errors
from fleetd.engine import protocol as p
from fleetd.requests.job import Job


def hello_folder(root: Path) -> tuple[Path, Path]:
    """An empty home, and a folder to work in with one file."""
    home, work = root / "home", root / "work"
    home.mkdir()
    work.mkdir()
    (work / "hello.py").write_text('print("hello")\n')
    return home, work


class ScriptedAgent:
    """Plays one turn per tool result that a conversation has, then says that it is done.

    Args:
        limit: tokens of the longest prompt that is not refused.
        is_summary: whether a request goes on with a summary of its conversation, after which no turn is left.
    """

    def __init__(
        self,
        turns: list[tuple[str, dict[str, Any]]],
        limit: int = 10_000_000,
        *,
        is_summary: Callable[[Job], bool] = lambda job: False,
    ) -> None:
        self.turns = turns
        self.limit = limit
        self.is_summary = is_summary
        self.jobs: list[Job] = []
        self.refused = 0

    def __call__(self, job: Job) -> Iterable[Step]:
        self.jobs.append(job)
        r = job.request
        assert isinstance(r.prompt, p.ChatPrompt)
        if self.is_summary(job):
            self.turns = []
        tokens = len(str(r.prompt.messages)) // 4
        if r.count_only:
            return [p.Accepted(r.id, tokens), p.Finished(r.id, "stop")]
        if tokens > self.limit:
            self.refused += 1
            return [
                errors.ContextLengthExceeded(
                    f"The prompt is too long: {tokens} tokens > {self.limit} maximum. "
                    f"This model's maximum context length is {self.limit} tokens."
                )
            ]
        begin: list[Step] = [p.Accepted(r.id, tokens), p.Prefill(r.id, tokens, tokens)]
        done = sum(message["role"] == "tool" for message in r.prompt.messages)
        if not r.prompt.tools or done >= len(self.turns):
            return [*begin, p.Delta(r.id, "All done."), p.Finished(r.id, "stop", p.Usage(tokens, 0, 3))]
        name, arguments = self.turns[done]
        return [
            *begin,
            p.Delta(r.id, "What is next?", "reasoning"),
            p.Delta(r.id, f"Now {name}."),
            p.ToolCall(r.id, 0, f"call_{done}", name, json.dumps(arguments)),
            p.Finished(r.id, "tool_calls", p.Usage(tokens, 0, 20, 4)),
        ]


def extended(jobs: Iterable[Job]) -> bool:
    """True if each turn goes on from what was there: nothing of a prompt varies between requests."""
    prompts = [job.request.prompt for job in jobs if isinstance(job.request.prompt, p.ChatPrompt)]
    return all(
        after.messages[: len(before.messages)] == before.messages and after.tools == before.tools
        for before, after in itertools.pairwise(prompts)
    )
