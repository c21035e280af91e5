"""Ask an engine pool and look at everything it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import ChatPrompt, Delta, Event, Finished, Generate, Loading, Sampling, ToolCall
from fleetd.models.folder import ModelFolder

GREEDY = Sampling(temperature=0.0)


def folder_of(path: Path, name: str = "chain") -> ModelFolder:
    return ModelFolder(
        name=name,
        path=path,
        source="folder",
        revision=None,
        config={"model_type": "llama"},
        weights_bytes=1,
        created_s=0.0,
    )


def ask(marker: str, request_id: str = "r1", **fields: Any) -> Generate:
    """A chat request whose answer is the chain of ``marker``."""
    prompt = ChatPrompt(
        messages=[{"role": "user", "content": marker}],
        tools=fields.pop("tools", None),
        tool_choice=fields.pop("tool_choice", "auto"),
    )
    return Generate(id=request_id, prompt=prompt, **{"sampling": GREEDY, **fields})


class Answer:
    """Everything one request gave."""

    def __init__(self, events: list[Loading | Event]) -> None:
        self.events = events
        self.text = "".join(e.text for e in events if isinstance(e, Delta) and e.channel == "content")
        self.reasoning = "".join(e.text for e in events if isinstance(e, Delta) and e.channel == "reasoning")
        self.calls = [e for e in events if isinstance(e, ToolCall)]
        self.logprobs = [p for e in events if isinstance(e, Delta) for p in e.logprobs or []]
        last = events[-1]
        assert isinstance(last, Finished)
        self.finished = last


async def run(pool: EnginePool, folder: ModelFolder, request: Generate) -> Answer:
    return Answer([event async for event in pool.stream(folder, request)])
