"""A machine and the accelerator that it has: what `doctor --prove` says, and two daemons on one card."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.figures import Figure, Measured, alternated
from bench.harness import prompts
from bench.harness.child import ROOT
from bench.harness.daemon import MODEL, MODELS, Daemon
from bench.harness.fleet import Fleet
from bench.harness.samples import Samples
from fleetd.control.hardware_proof import HardwareProof
from fleetd.models.catalog import DEFAULT_MODEL

# Also what a report to the project would hold.
REPORT = ROOT / ".cache" / "gpu" / "proof.json"
_NAMES = ("home", "helper")
_TOKENS, _ANSWER_TOKENS = 4000, 32
_SMART_RATIO = 0.25
_QUESTION = "\n\nWhat is the text about? Answer in one sentence."


def measure(runs: int) -> Measured:
    proof = _proved()
    seen, how = Samples(), list[str]()
    half = str(proof.memory.usable_bytes // 2)
    settings = {"FLEETD_ENGINE_MAX_MEMORY_BYTES": half, "FLEETD_ENGINE_PREFIX_CACHE_BYTES": "1"}
    with Fleet(_NAMES, mdns=False) as fleet:
        peers = ""
        for name in _NAMES:
            started = fleet.start(name, FLEETD_FLEET_PEERS=peers, **settings)
            peers = f"127.0.0.1:{started.status()['fleet']['port']}"
        fleet.until_usable(*_NAMES)
        for name in _NAMES:
            fleet[name].warm()
        # By the speeds that each has measured alone: what sharing one card costs shows after the first split,
        # and then the planner keeps prompts at home.
        fleet.until_priced(_NAMES[0], _NAMES[1:], _TOKENS)
        for run in range(runs):
            how.append(_shared(fleet[_NAMES[0]], run, seen))
            _smart(fleet[_NAMES[0]], run, seen)
    return Measured([*_proof_figures(proof), *_daemon_figures(seen, how)], _HOW)


def _proved() -> HardwareProof:
    """Raises CalledProcessError if a step failed; the report is then there all the same."""
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"FLEETD_MODELS_DIR": str(MODELS)}
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as home:
        command = [str(Path(sys.executable).with_name("fleetctl")), "--home", home, "doctor", "--prove"]
        command += ["--model", DEFAULT_MODEL, "--report", str(REPORT)]
        subprocess.run(command, env=environ, check=True)
    return msgspec.json.decode(REPORT.read_bytes(), type=HardwareProof)


def _shared(daemon: Daemon, run: int, seen: Samples) -> str:
    """The same prompt alone and as the planner decides, by turns; returns the plan."""
    prompt, plan, texts = prompts.tokens(MODEL, 51_000 + run, _TOKENS), "", set()
    for alone in alternated(run, (True, False)):
        with daemon.stream(
            "completions", prompt=prompt, max_tokens=_ANSWER_TOKENS, local_only=alone
        ) as stream:
            heard = stream.hear()
            seen["alone_s" if alone else "together_s"].append(heard.began_s)
            texts.add(heard.text)
            plan = plan if alone else stream.plan.partition(";")[0]
    seen.add(same=float(len(texts) == 1))
    return plan


def _smart(daemon: Daemon, run: int, seen: Samples) -> None:
    text = prompts.text(MODEL, 52_000 + run, _TOKENS) + _QUESTION
    for ratio in (None, _SMART_RATIO):
        body = {"smart_prefill": {"target_ratio": ratio}} if ratio else {}
        messages = [{"role": "user", "content": text}]
        with daemon.stream(
            "chat/completions", messages=messages, max_tokens=1, local_only=True, **body
        ) as stream:
            seen["smart_s" if ratio else "whole_s"].append(stream.hear().began_s)


def _proof_figures(proof: HardwareProof) -> list[Figure]:
    other = [f"{w.width} at {w.context}" for w in proof.widths if not w.same]
    return [
        Figure(
            "Widths and contexts at which a block has the bytes of single steps",
            "%",
            [sum(w.same for w in proof.widths) / max(1, len(proof.widths))],
            note="; ".join([proof.model.speculation, *other]),
        ),
        Figure(
            "Shared prefills with the bytes of a local one",
            "%",
            [sum(s.same is True for s in proof.shared) / max(1, len(proof.shared))],
        ),
        *(Figure(f"Prefill in chunks of {c.tokens:,} tokens", "tok/s", [c.tok_s]) for c in proof.chunks),
        *(
            Figure(f"fleetd over mlx-lm in one process, {speed.mode}", "x", [speed.ratio])
            for speed in proof.speeds
        ),
    ]


def _daemon_figures(seen: Samples, how: list[str]) -> list[Figure]:
    plans = "; ".join(f"{how.count(plan)} x {plan}" for plan in dict.fromkeys(how))
    gained = [a / b for a, b in zip(seen["alone_s"], seen["together_s"], strict=True)]
    smart = [a / b for a, b in zip(seen["whole_s"], seen["smart_s"], strict=True)]
    return [
        Figure(f"Two daemons on one card over one, TTFT at {_TOKENS:,} tokens", "x", gained, note=plans),
        Figure("TTFT of one", "s", seen["alone_s"]),
        Figure("Answers of both equal to one's", "%", seen["same"]),
        Figure(f"Smart prefill at {_SMART_RATIO} over whole, TTFT", "x", smart),
    ]


_HOW = (
    "One accelerator. First `fleetctl doctor --prove` in a process of its own; then two paired daemons on "
    "loopback, each with half of the memory that models may take, and no prefix cache: the same prompt kept "
    "to one and as the planner decides, by turns, once it has a price for the other's help, and a prompt "
    "whole and by smart prefill. On one card sharing divides the same hardware: the figure shows what it "
    "costs, not what two machines would gain."
)
