"""What a coding agent's session of 30,000 tokens reads again, through Anthropic's dialect."""

from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.figures import Figure, Measured, at_least, at_most
from bench.harness import prompts
from bench.harness.child import Child
from bench.harness.daemon import MODEL, Daemon
from bench.harness.samples import Samples
from fleetd.models.catalog import DEFAULT_MODEL

SYSTEM_TOKENS, SAID_TOKENS, RESULT_TOKENS = 12_000, 18_000, 600
CHUNK_TOKENS = 512
_LAYERS = 2
_ANSWER_S = 600.0
_MARK = {"cache_control": {"type": "ephemeral"}}


def measure() -> Measured:
    """Once: tokens are counted, and their number depends on no machine."""
    seen = Samples()
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        with Child("long_model", str(Path(folder) / DEFAULT_MODEL), str(MODEL), str(_LAYERS)) as child:
            child.ask()
        with Daemon(models=Path(folder), FLEETD_ENGINE_PREFILL_CHUNK_TOKENS=str(CHUNK_TOKENS)) as daemon:
            daemon.warm()
            _session(daemon, seen)
    figures = [
        Figure(
            "Prefix kept when the billing header, the marks of the cache and a date behind it change",
            "%",
            seen["kept"],
            at_least(0.99),
            of="worst",
        ),
        Figure(
            "Turn two of a session of 30,000 tokens, tokens read that are not new",
            "count",
            seen["again"],
            at_most(CHUNK_TOKENS),
            of="worst",
            note=f"{seen['new'][0]:,} of its {seen['second'][0]:,} tokens were new",
        ),
    ]
    return Measured(figures, _HOW)


def _session(daemon: Daemon, seen: Samples) -> None:
    system = prompts.text(MODEL, 20_000, SYSTEM_TOKENS)
    said = prompts.text(MODEL, 21_000, SAID_TOKENS)
    first, _ = _asked(daemon, _body(system, said, "2026-11-23", marked=True))
    changed, cached = _asked(daemon, _body(system, said, "2027-01-02", marked=False))
    seen.add(kept=cached / changed)
    answer = {"role": "assistant", "content": "I shall look at the file."}
    result = {"role": "user", "content": [_block(prompts.text(MODEL, 22_000, RESULT_TOKENS), marked=True)]}
    going_on = _body(system, said, "2026-11-23", marked=False)
    going_on["messages"] += [answer, result]
    second, cached = _asked(daemon, going_on)
    seen.add(second=second, new=second - first, again=max(0, first - cached))


def _block(text: str, *, marked: bool) -> dict[str, Any]:
    return {"type": "text", "text": text, **(_MARK if marked else {})}


def _body(system: str, said: str, date: str, *, marked: bool) -> dict[str, Any]:
    """In the likeness of Claude Code's: a number for billing first, a date last, marks that move."""
    billing = f"x-anthropic-billing-header: cc_version=2.1; cch={date};"
    return {
        "model": DEFAULT_MODEL,
        "max_tokens": 4,
        "temperature": 0,
        "system": [_block(billing, marked=False), _block(system, marked=True)],
        "messages": [
            {"role": "user", "content": [_block(said, marked=marked), _block(f"Date {date}.", marked=False)]}
        ],
    }


def _asked(daemon: Daemon, body: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them came from the prefix cache."""
    headers = {"Authorization": f"Bearer {daemon.token}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=_ANSWER_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/messages", json.dumps(body), headers)
        response = connection.getresponse()
        told = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"/v1/messages: {response.status} {told}")
    usage = told["usage"]
    cached = int(usage["cache_read_input_tokens"])
    return int(usage["input_tokens"]) + int(usage["cache_creation_input_tokens"]) + cached, cached


_HOW = (
    f"Session: a model of {_LAYERS} layers and random weights that takes 32,768 tokens, asked through "
    f"/v1/messages as Claude Code asks: a system prompt of {SYSTEM_TOKENS:,} tokens behind a billing header, "
    f"a first message of {SAID_TOKENS:,} and a date. The same again with another number, other marks of "
    "the cache and another date: kept is the share of the whole prompt that came from the prefix cache. Then "
    f"its second turn, with an answer and a tool's result of {RESULT_TOKENS} tokens behind; new is what its "
    f"prompt has more than the first. A chunk of prefill has {CHUNK_TOKENS} tokens."
)
