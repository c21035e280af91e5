"""`fleetctl doctor --prove`: what is collected, what is left out of the report, and what the owner reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
import sharing
from fake_daemon import FLEET, STATUS, FakeDaemon, Reply, Run, data, delta, final
from mlx_lm.models.cache import ArraysCache

from fleetctl.connection.client import Client
from fleetctl.connection.home import locate
from fleetctl.doctor import prove
from fleetctl.render.proof_page import page
from fleetd.control.hardware_proof import HardwareProof, ProofStep
from fleetd.engine.cpu import products
from fleetd.engine.protocol import Accepted
from fleetd.plan.prefill.split import SplitKind, checked
from fleetd.proof import measurements, sleep_assertion

# What a test's own machine may say in a report: its home, its user, the models and peers of the fakes.
_SECRETS = ("studio", "air", "k3f9a2b", "192.168.1", "smollm2", "Qwen3", "/home", "capital")


def line(**told: Any) -> str:
    return json.dumps(told) + "\n"


def step(name: str, **found: Any) -> list[str]:
    return [line(began=name), line(step={"name": name, "seconds": 1.0}, found=found)]


WIDTHS = [
    {"context": 250, "width": 2, "same": True},
    {"context": 250, "width": 3, "same": False},
    {"context": 1020, "width": 2, "same": True, "rows": 2},
]
SPEED = {"mode": "greedy", "tokens": 64, "runs": 3, "fleetd_tok_s": 50.0, "mlx_lm_tok_s": 40.0}


def scripted(monkeypatch: pytest.MonkeyPatch, lines: list[str], said: str = "") -> None:
    """The process of the measurements says these lines."""

    def run(_command: list[str], stderr: Any) -> list[str]:
        stderr.write(said)
        return lines

    monkeypatch.setattr(prove, "run", run)


def test_steps_are_collected_and_a_process_that_ends_early_is_told() -> None:
    begun: list[str] = []
    lines = [
        *step("widths", widths=WIDTHS),
        *step("prefill", speeds=[SPEED]),
        *step("decode", speeds=[SPEED]),
    ]
    fields = prove.collect([*lines, line(began="shared")], begun.append)
    assert begun == ["widths", "prefill", "decode", "shared"]
    assert (len(fields["widths"]), len(fields["speeds"])) == (3, 2)
    assert [(s.name, s.error) for s in fields["steps"]][-1] == ("shared", "the process ended")
    assert "widths" in page(msgspec.convert(fields, HardwareProof))


def test_a_process_that_hangs_is_ended() -> None:
    # A shell, which says its line long before the limit however slowly it starts.
    lines = prove.run(["sh", "-c", "echo '{}'; exec sleep 600"], subprocess.DEVNULL, limit_s=2.0)
    assert list(lines) == ["{}\n"]


def test_the_report_names_nobody(monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon) -> None:
    failed = line(step={"name": "load", "seconds": 1.0, "error": "OutOfMemory"}, found={})
    scripted(monkeypatch, [line(began="load"), failed], "load: /home/me/models/x is too large\nother noise\n")
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    daemon.on("POST", "/fleet/v1/models/unload", Reply({"unloaded": True}))
    plan = ": plan layers; nodes=studio,this: because it is faster\n\n"
    ended = [{"finish_reason": "stop", "delta": {}}]
    usage = {"prompt_tokens": 1500, "prompt_tokens_details": {"cached_tokens": 0}}
    end = [data({"choices": ended, "usage": usage}), "data: [DONE]\n\n"]
    daemon.chat(Reply(stream=[plan, delta(content="The capital"), *end]))
    begun: list[str] = []
    client = Client(locate(daemon.home, None))
    proof, errors = prove.prove(daemon.home, client, "smollm2-135m", begun.append)
    report = msgspec.json.encode(proof).decode()
    assert [secret for secret in _SECRETS if secret in report.replace("pair", "")] == []
    assert (begun, errors) == (["load", "links", "together"], ["load: /home/me/models/x is too large"])
    assert [(link.state, link.kind, link.rtt_ms) for link in proof.links] == [
        ("usable", "wired", 0.42),
        ("unreachable", "", None),
    ]
    (together,) = proof.together
    assert (together.plan, together.same) == ("layers", True)
    # The prompt is new each time, and the second answer comes without what the first has left in memory.
    asked = [
        (seen.path, (seen.body or {}).get("local_only")) for seen in daemon.seen if seen.method == "POST"
    ]
    chat = "/v1/chat/completions"
    assert asked == [
        (chat, True),
        (chat, None),
        ("/fleet/v1/models/unload", None),
        (chat, True),
        (chat, True),
    ]


def test_an_answer_from_cached_tokens_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon
) -> None:
    scripted(monkeypatch, [])
    daemon.on("GET", "/fleet/v1/peers", Reply(FLEET))
    daemon.on("POST", "/fleet/v1/models/unload", Reply({}))
    # Its usage tells of cached tokens.
    daemon.chat(Reply(stream=[delta(content="The capital"), *final()]))
    proof, _ = prove.prove(daemon.home, Client(locate(daemon.home, None)), "x", lambda _: None)
    assert [both.same for both in proof.together] == [None]


def test_without_a_daemon_the_machine_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, step("chunks", chunks=[{"tokens": 64, "tok_s": 9.0}]))
    proof, _ = prove.prove(Path("/nowhere"), None, "", lambda _: None)
    assert [(s.name, s.skipped) for s in proof.steps[1:]] == [
        ("links", "no daemon runs"),
        ("together", "no daemon runs"),
    ]


def test_the_page_shows_what_differs() -> None:
    found = {
        "widths": WIDTHS,
        "speeds": [SPEED],
        "shared": [{"kind": "layers", "tokens": 512, "same": False}],
        "steps": [ProofStep("load", 2.0, "OutOfMemory")],
        "machine": {"product": "Mac15,14", "others_share": 0.4},
    }
    shown = page(msgspec.convert(found, HardwareProof))
    for words in (
        "2; NOT 3",
        "two rows wide 2",
        "1.25",
        "OTHER BYTES",
        "FAILED: OutOfMemory",
        "40% of the processor",
        "Mac15,14",
    ):
        assert words in shown


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0, 1, 1, 0], (True, True)),
        ([2, 3, 2], (True, True)),
        ([None], (None, None)),
    ],
)
async def test_a_sleep_assertion_is_seen_while_it_is_held(
    counts: list[int | None], expected: tuple[bool | None, bool | None]
) -> None:
    left, looked = list(counts), []

    async def look() -> None:
        looked.append(len(left))

    def listed() -> int | None:
        return left.pop(0) if len(left) > 1 else left[0]

    found = await sleep_assertion.taken_and_released(look, lambda: looked.append(-1), listed)
    assert (found["awake_held"], found["awake_released"]) == expected
    assert (-1 in looked) == (expected != (None, None))


# ---- The real measurements -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[HardwareProof, str]:
    """Everything with a model of four layers, as quickly as it can be; and all that was said about it."""
    folder = tmp_path_factory.mktemp("private-name")
    (folder / "model").mkdir()
    model = sharing.write(folder / "model")
    command = [sys.executable, "-m", "fleetd.proof", "--home", str(folder), "--model", str(model)]
    environ = {**os.environ, "FLEETD_ENGINE_DEVICE": "cpu", "FLEETD_ENGINE_THREADS": "1"}
    command += ["--steps", "widths=0.9", "chunks=0.45", "prefill=0.45", "decode=0.45", "shared=0.3"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=True)
    sys.stderr.write(done.stderr)  # why a step failed, where one did
    fields = prove.collect(done.stdout.splitlines(), lambda _: None)
    assert [p.name for p in folder.iterdir()] == ["model"], "the home is as it was"
    return msgspec.convert(fields, HardwareProof), done.stdout


def test_every_step_is_measured(measured: tuple[HardwareProof, str]) -> None:
    proof, _ = measured
    assert [s.name for s in proof.steps if s.error] == []
    assert [s.name for s in proof.steps][1:] == [
        "load", "widths", "chunks", "prefill", "decode", "shared", "machine",
    ]  # fmt: skip
    assert [speed.mode for speed in proof.speeds] == [
        "prefill",
        "greedy",
        "temperature 0.8",
        "greedy, drafts",
    ]
    assert all(speed.fleetd_tok_s > 0 and speed.mlx_lm_tok_s > 0 for speed in proof.speeds)
    assert [chunk.tokens for chunk in proof.chunks][:1] == [64]
    assert proof.memory.usable_bytes > proof.model.shape.weights_bytes > 0
    assert proof.machine.device == "cpu"


def test_the_real_arithmetic_is_proved(measured: tuple[HardwareProof, str]) -> None:
    proof, _ = measured
    assert [shared.kind for shared in proof.shared] == ["layers", "tokens"]
    if products._blas is None:
        pytest.skip("MKL could not be loaded: exactness of blocks is NOT proved here")
    assert [shared.same for shared in proof.shared] == [True, True]
    assert proof.widths
    assert all(width.same for width in proof.widths)


def test_running_states_are_compared_byte_for_byte() -> None:
    def running(value: float) -> list[ArraysCache]:
        cache = ArraysCache(size=2)
        cache[0], cache[1] = mx.ones((1, 3)), mx.array([[value]])
        return [cache]

    assert measurements._same(running(2.0), running(2.0))
    assert not measurements._same(running(0.0), running(-0.0))


@pytest.mark.parametrize("cached", [0, 1, 200])
@pytest.mark.parametrize("kind", ["layers", "tokens"])
def test_a_prompt_that_begins_as_an_earlier_one_is_halved_too(kind: SplitKind, cached: int) -> None:
    split = measurements.in_two(kind, 4, Accepted("proof-1", 513, cached))
    assert checked(split) == split
    assert (split.cached, split.tokens, split.layers) == (cached, 512, 4)


def test_the_measurements_name_nothing_of_the_owner(measured: tuple[HardwareProof, str]) -> None:
    _, said = measured
    assert "private-name" not in said
    assert os.uname().nodename not in said


def test_the_command_writes_the_report(run: Run, daemon: FakeDaemon, short_dir: Path) -> None:
    """A model that is not there: every step is told, and nothing but the report is written."""
    daemon.on("GET", "/fleet/v1/status", Reply({**STATUS, "home": str(daemon.home)}))
    file = short_dir / "report.json"
    done = run(
        "doctor", "--prove", "--model", "absent", "--report", str(file), home=daemon.home, timeout_s=110
    )
    assert done.returncode == 1
    assert "load: ModelNotFound" in done.stderr
    assert "FAILED: ModelNotFound" in done.stdout
    proof = msgspec.json.decode(file.read_bytes(), type=HardwareProof)
    assert [(s.name, s.error) for s in proof.steps if s.error] == [("load", "ModelNotFound")]
    assert "absent" not in file.read_text()
