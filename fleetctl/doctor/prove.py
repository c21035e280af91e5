"""`fleetctl doctor --prove`: collects what is measured on this machine, and with its paired machines.

The machine's own figures come from a process of their own (``python -m fleetd.proof``), those with paired
machines from the daemon. Nothing that a person has named enters the report.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fleetctl.chat.answer import Answer, Options, ask
from fleetctl.connection.client import Client
from fleetctl.connection.replies import fetch_fleet
from fleetd import __version__, limits
from fleetd.control.fleet_view import FleetView, PeerView
from fleetd.control.hardware_proof import HardwareProof, LinkProof, ProofStep, TogetherProof
from fleetd.errors import FleetError
from fleetd.text.decoding import from_plain

# Twice what its steps give themselves: a driver that hangs must not hold the terminal for ever.
LIMIT_S = 1200.0
# Of the prompt that machines read together, and of its answer.
WORDS, ANSWER_TOKENS = 1500, 16

Begun = Callable[[str], None]


def prove(home: Path, client: Client | None, model: str, begun: Begun) -> tuple[HardwareProof, list[str]]:
    """Measure everything; ``client`` is None if no daemon runs. Returns the report, and the texts of
    errors, which are for the owner."""
    start = time.monotonic()
    command = [sys.executable, "-m", "fleetd.proof", "--home", str(home), "--model", model]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        fields = collect(run(command, said), begun)
        said.seek(0)
        errors = said.read().splitlines()
    if client is None:
        skipped = "no daemon runs"
        fields["steps"] += [ProofStep(name, skipped=skipped) for name in ("links", "together")]
    else:
        errors += with_peers(client, model, fields, begun)
    fields |= {"fleetd": __version__, "seconds": time.monotonic() - start}
    failed = {step.name for step in fields["steps"] if step.error}
    return from_plain(fields, HardwareProof), [e for e in errors if e.partition(":")[0] in failed]


def run(command: Sequence[str], stderr: Any, limit_s: float = LIMIT_S) -> Iterable[str]:
    """The lines of a process, which is ended after ``limit_s`` or when no more are wanted."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            yield from process.stdout or ()
        finally:
            timer.cancel()
            process.kill()


def collect(lines: Iterable[str], begun: Begun) -> dict[str, Any]:
    """Fields of ``HardwareProof`` from the lines; a step that began and never ended has failed."""
    fields: dict[str, Any] = {"steps": []}
    open_step, since = "", 0.0
    for line in lines:
        told = json.loads(line)
        if "began" in told:
            open_step, since = str(told["began"]), time.monotonic()
            begun(open_step)
            continue
        open_step = ""
        fields["steps"].append(from_plain(told["step"], ProofStep))
        for name, value in told["found"].items():
            fields[name] = fields.get(name, []) + value if isinstance(value, list) else value
    if open_step:
        fields["steps"].append(ProofStep(open_step, time.monotonic() - since, "the process ended"))
    return fields


def with_peers(client: Client, model: str, fields: dict[str, Any], begun: Begun) -> list[str]:
    """Add the links to paired machines and a prompt that is read together. Returns the texts of errors."""
    errors = []

    def step(name: str, measure: Callable[[], str]) -> None:
        begun(name)
        start, error, skipped = time.monotonic(), "", ""
        try:
            skipped = measure()
        except FleetError as failed:
            error = type(failed).__name__
            errors.append(f"{name}: {failed.message}")
        fields["steps"].append(ProofStep(name, time.monotonic() - start, error, skipped))

    found: list[FleetView] = []

    def links() -> str:
        found.append(fetch_fleet(client))
        fields["links"] = [link(peer) for peer in found[0].peers]
        return "" if fields["links"] else "no machine is paired"

    def together() -> str:
        if not any(peer.usable for view in found for peer in view.peers):
            return "no paired machine can be used"
        fields["together"] = [compare(client, model)]
        return ""

    step("links", links)
    step("together", together)
    return errors


def link(peer: PeerView) -> LinkProof:
    kind = next((path.kind for path in peer.paths if path.in_use), "")
    return LinkProof(peer.state, kind, peer.chip, peer.rtt_ms, peer.bytes_per_s)


def compare(client: Client, model: str) -> TogetherProof:
    """Ask a new prompt as the daemon plans it, then on this machine alone without what is cached of it; and a
    prompt as long on this machine alone for its time."""
    prompt, other = _prompt(), _prompt()
    # Whichever loads the model first would pay for it.
    _ask(client, model, "Hello.", local_only=True)
    planned = _ask(client, model, prompt)
    client.post("/fleet/v1/models/unload", {"model": model}, timeout_s=limits.CLIENT_LONG_CALL_S)
    again = _ask(client, model, prompt, local_only=True)
    alone = _ask(client, model, other, local_only=True)
    cached = ((again.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    return TogetherProof(
        tokens=int((planned.usage or {}).get("prompt_tokens") or 0),
        plan=planned.headers.get("x-fleet-plan", "").partition(";")[0],
        exactness=planned.headers.get("x-fleet-exactness", ""),
        together_s=planned.first_token_s or 0.0,
        alone_s=alone.first_token_s or 0.0,
        same=None if cached else planned.content == again.content,
    )


def _ask(client: Client, model: str, prompt: str, *, local_only: bool = False) -> Answer:
    options = Options(model, temperature=0.0, max_tokens=ANSWER_TOKENS, local_only=local_only)
    return ask(client, options, [{"role": "user", "content": prompt}], quiet=True)


def _prompt() -> str:
    """Numbers that no machine has read."""
    return " ".join(str(random.randrange(100, 1000)) for _ in range(WORDS))  # noqa: S311
