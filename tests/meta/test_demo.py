"""What the demo concludes from two answers, and that it gives machines cores of their own."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``demo/together.py``, whose folder is on the path only when the demo runs."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(REPO / "demo"))
    import together

    yield together
    for name in {"together", "daemons", "run"} - before:
        sys.modules.pop(name, None)


def answered(demo: Any, plan: str, first_token_s: float, content: str = "Yes.") -> Any:
    return demo.Answered(content, first_token_s, 4600, 0, plan, "exact", "req-1")


ALONE, LAYERS = "local; nodes=this", "layers; nodes=studio,this"


@pytest.mark.parametrize(
    ("plan", "shared"),
    [
        (ALONE, False),
        ("layers; nodes=studio,this", True),
        ("tokens; nodes=studio,this", True),
        ("whole; nodes=studio,this", True),
        # It moved as a whole, or it moved to a machine that was helped.
        ("remote; nodes=studio", False),
        ("remote; nodes=studio,kitchen", True),
    ],
)
def test_what_counts_as_shared(demo: Any, plan: str, shared: bool) -> None:
    assert answered(demo, plan, 1.0).shared is shared


@pytest.mark.parametrize(
    ("plan", "together_s", "content", "said"),
    [
        (LAYERS, 20.0, "Yes.", "the first token came 1.75 times as fast; the answers are identical"),
        (LAYERS, 70.0, "Yes.", "it took 2.00 times as long: not faster here; the answers are identical"),
        (LAYERS, 20.0, "No.", "1.75 times as fast; the answers differ"),
        # Faster or not: where nothing was shared, sharing has no part in it.
        (ALONE, 20.0, "Yes.", "nothing was shared, because no clear gain was expected; the answers are id"),
        ("remote; nodes=studio", 20.0, "Yes.", "nothing was shared"),
    ],
)  # fmt: skip
def test_the_verdict_claims_no_more_than_was_seen(
    demo: Any, plan: str, together_s: float, content: str, said: str
) -> None:
    together = answered(demo, plan, together_s, content)
    assert said in demo.verdict(answered(demo, ALONE, 35.0), together)


def test_an_answer_is_told_in_the_terms_of_its_headers(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan is how a prompt is read, and exactness how its answer compares: neither is called the other."""
    import run

    answer = {
        "content": "Four.",
        "plan": "remote; nodes=kitchen",
        "exactness": "equivalent",
        "first_token_s": 0.25,
        "usage": {
            "prompt_tokens": 2259,
            "completion_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 24},
        },
        "timings": {"prompt_ms": 1500.0, "predicted_ms": 400.0},
    }
    monkeypatch.setattr(run, "fleetctl", lambda *arguments, **options: answer)
    run.ask(demo.Machine("studio", Path("home"), {}), "What is 2+2?", about_text=False)
    told = capsys.readouterr().out.splitlines()
    assert told[1:3] == ["> What is 2+2?", "  Four."]
    assert told[3] == "  way        remote; nodes=kitchen · exactness equivalent"
    assert told[4] == "  prompt     2,259 tokens, 24 of them known already; the others read in 1.50 s"
    assert told[5].startswith("  answer     9 tokens in 0.40 s; first one after 0.25 s, everything after ")
    told_together = demo.line(answered(demo, LAYERS, 20.0), SimpleNamespace(name="studio"))
    assert told_together.splitlines()[0] == "first token after 20.00 s · 4,600 tokens"
    assert told_together.endswith("answered by studio · layers; nodes=studio,this · exactness exact")


def test_a_command_that_takes_too_long_says_what_to_do(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import daemons

    def late(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(SystemExit):
        daemons.fleetctl(demo.Machine("studio", Path("home"), {}), "chat", limit_s=300.0)
    said = capsys.readouterr().err
    assert "`fleetctl chat` took longer than 300 s. If other programs keep this computer busy, try" in said


def picture_maker() -> dict[str, Any]:
    return runpy.run_path(str(REPO / "docs" / "generate_demo_picture.py"))


def test_the_picture_of_the_gain_is_read_from_what_the_demo_prints(demo: Any) -> None:
    machine = SimpleNamespace(name="studio")
    together, alone = answered(demo, LAYERS, 20.0), answered(demo, ALONE, 35.0)
    printed = (
        f"  together   {demo.line(together, machine)}\n"
        f"  alone      {demo.line(alone, machine)}\n"
        f"  {demo.verdict(alone, together)}\n"
    )
    maker = picture_maker()
    gain = maker["gain"](f"\x1b[2m{printed}\x1b[0m".replace("\n", "\r\n"))
    assert (gain.together_s, gain.alone_s, gain.tokens) == (20.0, 35.0, 4600)
    drawn = maker["draw_gain"](gain)
    assert "first token after 20.0 s on two machines, 35.0 s on one" in drawn
    long, short = (float(width) for width in re.findall(r'<rect x="150" [^>]*width="([\d.]+)"', drawn))
    assert short / long == pytest.approx(20 / 35, abs=0.001)


@pytest.mark.parametrize(("plan", "together_s"), [(LAYERS, 70.0), (ALONE, 20.0)])
def test_a_run_without_a_gain_makes_no_picture(demo: Any, plan: str, together_s: float) -> None:
    machine = SimpleNamespace(name="studio")
    together, alone = answered(demo, plan, together_s), answered(demo, ALONE, 35.0)
    printed = f"  together   {demo.line(together, machine)}\n  alone      {demo.line(alone, machine)}\n"
    with pytest.raises(SystemExit, match="no gain"):
        picture_maker()["gain"](f"{printed}  {demo.verdict(alone, together)}\n")


def test_the_prompt_begins_unlike_any_other(demo: Any) -> None:
    prompt = demo.compose()
    assert prompt.startswith(demo.OPENING)
    assert all(path.read_text(encoding="utf-8") in prompt for path in demo.TEXTS)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems pin no process to a core")
def test_every_thread_of_a_worker_moves_to_its_core(demo: Any) -> None:
    script = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True)"
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.readline()
        demo.pin(worker.pid, core)
        threads = [int(path.name) for path in Path(f"/proc/{worker.pid}/task").iterdir()]
        assert len(threads) >= 2
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
        worker.stdin.close()


# ---- a model that two machines hold ----------------------------------------------------------------------


@pytest.fixture
def held(demo: Any) -> Iterator[Any]:
    import held_by_two

    yield held_by_two
    sys.modules.pop("held_by_two", None)


def test_what_two_machines_hold_is_said_of_each(held: Any) -> None:
    front = {"members": [{"name": "garage", "first": 14, "last": 30}], "shape": {"weights_bytes": 101e6}}
    part = {"first_layer": 14, "last_layer": 30, "shape": {"weights_bytes": 80e6}}
    assert held.shares(front, part) == [
        "here       layers 0-13, both ends: 101 MB",
        "garage     layers 14-29: 80 MB",
    ]


@pytest.mark.parametrize(("content", "said"), [("Yes.", "are identical"), ("No.", "differ")])
def test_the_speed_of_two_stands_beside_that_of_one(held: Any, content: str, said: str) -> None:
    def answer(content: str, ms: float) -> dict[str, Any]:
        return {
            "content": content,
            "usage": {"completion_tokens": 60},
            "timings": {"predicted_ms": ms},
        }

    found = held.verdict(answer("Yes.", 3000), answer(content, 2000), "studio")
    assert found == (
        f"=> 20.0 tokens per second; studio, which has the whole model, writes 30.0; the answers {said}"
    )
