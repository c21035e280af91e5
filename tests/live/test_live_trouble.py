"""What must not go wrong when things go wrong, on a live daemon."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import openai
import pytest
from live_daemon import STOP_S, LiveDaemon, frozen, text_of, until

pytestmark = pytest.mark.model

WEIGHTS = "model.safetensors"


def ask(daemon: LiveDaemon, model: str, text: str, **fields: Any) -> str | None:
    messages: Any = [{"role": "user", "content": text}]
    fields = {"temperature": 0} | fields
    with openai.OpenAI(base_url=daemon.base_url, api_key=daemon.key, max_retries=0, timeout=60) as client:
        reply: Any = client.chat.completions.create(model=model, messages=messages, **fields)
    content: str | None = reply.choices[0].message.content
    return content


def counted(chunks: Iterable[dict[str, Any]]) -> list[int]:
    """The numbers in an answer to <count>."""
    return [int(word) for word in "".join(map(text_of, chunks)).split()]


def test_a_pinned_model_is_loaded_again_after_a_restart(make_daemon: Callable[..., LiveDaemon]) -> None:
    daemon = make_daemon()
    assert "stays loaded" in daemon.fleetctl("models", "pin", "chain").stdout
    daemon.restart()
    until(lambda: [(e["state"], e["pinned"]) for e in daemon.status()["engines"]] == [("ready", True)], 60)
    assert "loaded, pinned" in daemon.fleetctl("models").stdout
    assert "not pinned" in daemon.fleetctl("models", "unpin", "chain").stdout
    assert [engine["pinned"] for engine in daemon.status()["engines"]] == [False]


# ---- The worker ------------------------------------------------------------------------------------------


def test_a_worker_killed_in_mid_answer(make_daemon: Callable[..., LiveDaemon], tmp_path: Path) -> None:
    """The machine is kept awake until then, by stand-ins for the commands of macOS and Linux."""
    for name in ("caffeinate", "systemd-inhibit"):
        (tmp_path / name).write_text("#!/bin/sh\nexec cat\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    daemon = make_daemon(PATH=path, FLEETD_POWER_KEEP_AWAKE="on")
    with daemon.stream("chain", "<count>") as events:
        next(filter(text_of, events))
        pid = daemon.engine_pid("chain")
        # However fast the model is: the answer does not end before the machine is kept awake.
        with frozen(pid):
            until(lambda: daemon.status()["power"]["held"])
            os.kill(pid, signal.SIGKILL)
        last = list(events)[-1]
    assert last["error"]["code"] == "engine_died"
    until(lambda: not daemon.status()["power"]["held"])
    assert ask(daemon, "chain", "<hello>") == "Hello there, world!"
    assert daemon.engine_pid("chain") != pid
    assert daemon.running == 0


def test_a_killed_worker_harms_no_other_model(make_daemon: Callable[..., LiveDaemon]) -> None:
    daemon = make_daemon()
    shutil.copytree(daemon.models_dir / "chain", daemon.models_dir / "other", dirs_exist_ok=True)
    ask(daemon, "other", "<hello>")
    with daemon.stream("chain", "<count>", max_tokens=300) as events:
        first = next(filter(text_of, events))
        os.kill(daemon.engine_pid("other"), signal.SIGKILL)
        rest = list(events)
    assert counted([first, *rest]) == [*range(1, 151)] * 2
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


# ---- Clients that leave ----------------------------------------------------------------------------------


def test_a_client_that_goes_away_frees_its_slot(live: LiveDaemon) -> None:
    ask(live, "chain", "<hello>")
    before = live.cancelled_so_far()
    with live.stream("chain", "<count>") as events:
        next(filter(text_of, events))
        # However fast the model is: the answer does not end by itself.
        with frozen(live.engine_pid("chain")):
            assert live.running == 1
    until(lambda: live.running == 0)
    # Not because the answer came to its end.
    assert live.cancelled == before + 1


# ---- Damaged models --------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def flip_one_bit(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("damage", [truncate, flip_one_bit])
def test_a_damaged_model_is_refused_and_its_file_named(
    live: LiveDaemon, damage: Callable[[Path], None]
) -> None:
    copy = live.models_dir / f"damaged-{damage.__name__}"
    shutil.copytree(live.models_dir / "smollm2-135m", copy)
    try:
        damage(copy / WEIGHTS)
        with pytest.raises(openai.APIStatusError) as caught:
            ask(live, copy.name, "Hello.")
        assert caught.value.code == "model_corrupt"
        assert WEIGHTS in str(caught.value)
        assert copy.name in str(caught.value)
    finally:
        shutil.rmtree(copy)
    assert ask(live, "chain", "<hello>") == "Hello there, world!"


# ---- Privacy ---------------------------------------------------------------------------------------------


def test_no_prompt_or_answer_is_kept_or_shown_anywhere(make_daemon: Callable[..., LiveDaemon]) -> None:
    # As users start it: arguments and environment are what the system shows of its processes.
    daemon = make_daemon(forked=False, FLEETD_LOG_LEVEL="debug")
    canary = "canary-7c1f0e-prompt"
    ask(daemon, "chain", f"{canary}<hello>")
    ask(daemon, "chain", f"{canary}<hello>", user=canary, stop=[canary])
    for model, refused in (("chain", {"temperature": 9}), ("nobody", {}), ("chain", {"max_tokens": -1})):
        with pytest.raises(openai.APIStatusError):
            ask(daemon, model, f"{canary}<hello>", **refused)
    with pytest.raises(openai.BadRequestError):
        ask(daemon, "chain", canary * 1000)
    with daemon.stream("chain", f"{canary}<count>") as events:
        next(filter(text_of, events))
        engine = daemon.engine_pid("chain")
        # However fast the model is: the answer does not end by itself.
        with frozen(engine):
            shown = [arg for process in daemon.processes() for arg in process.cmdline()]
            shown += [value for process in daemon.processes() for value in process.environ().values()]
            assert len(daemon.processes()) >= 2
            os.kill(engine, signal.SIGKILL)
        assert list(events)[-1]["error"]["code"] == "engine_died"
    places = {
        "metrics": daemon.control("GET", "/metrics"),
        "status": json.dumps(daemon.status()),
        "usage": json.dumps(daemon.control("GET", "/fleet/v1/usage")),
        "argv and environment": "\n".join(shown),
    }
    daemon.stop()
    files = [path for path in [daemon.log, *daemon.home.rglob("*")] if path.is_file()]
    assert {daemon.log.name, "fleetd.db"} <= {path.name for path in files}
    places |= {str(path): path.read_bytes().decode("latin-1") for path in files}
    assert "daemon.ready" in places[str(daemon.log)]
    # What the models said counts as much: the chain's first words.
    assert [name for name, text in places.items() if canary in text or "lo there" in text] == []


# ---- Stopping --------------------------------------------------------------------------------------------


def test_sigterm_lets_answers_finish_and_refuses_new_ones(make_daemon: Callable[..., LiveDaemon]) -> None:
    daemon = make_daemon()
    address, key = daemon.address, daemon.key
    ask(daemon, "chain", "<hello>")
    engine = daemon.engine_pid("chain")
    with daemon.stream("chain", "<count>", max_tokens=900) as events:
        began = list(itertools.islice(filter(text_of, events), 2))
        # However fast the model is: the answer does not end before the other request is refused.
        with frozen(engine):
            daemon.process.send_signal(signal.SIGTERM)
            until(lambda: daemon.status()["draining"])
            body = json.dumps({"model": "chain", "messages": [{"role": "user", "content": "<hello>"}]})
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            with contextlib.closing(http.client.HTTPConnection(*address, timeout=30)) as late:
                late.request("POST", "/v1/chat/completions", body, headers)
                with late.getresponse() as refusal:
                    assert refusal.status == 503
                    assert json.load(refusal)["error"]["code"] == "draining"
        rest = list(events)
    assert counted([*began, *rest]) == [*range(1, 151)] * 6
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert daemon.process.wait(STOP_S) == 0
    assert not (daemon.home / "fleetd.sock").exists()
