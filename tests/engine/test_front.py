"""The worker's side of the socket: what it does with commands, and when nobody is there to give any."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest

from fleetd.cache.block_names import LateBasis
from fleetd.control.model_facts import ModelShape, StateSizes
from fleetd.engine import protocol, worker
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prompt import prompt_encoding
from fleetd.engine.protocol import (
    IMAGES,
    AssistPrefill,
    Cancel,
    ChatPrompt,
    Failed,
    Finished,
    Generate,
    PrefillAlone,
    PrefillWithHelpers,
    Report,
    TextPrompt,
    Tokenized,
)
from fleetd.errors import BadRequest
from fleetd.plan.prefill.split import Split


class Exited(BaseException):
    pass


class Ends:
    """A worker's Front on one end of a socket pair, the test on the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status: list[int] = []
        monkeypatch.setattr(os, "_exit", self._exit)
        self.daemon, theirs = socket.socketpair()
        self.link = worker.DaemonSocket(theirs.detach())
        self.sent: list[Report] = []
        monkeypatch.setattr(self.link, "send", self.sent.append)
        self.calls: list[tuple[str, Any]] = []
        self.inbox = self
        self.front = worker.Front(self.link, self, self)  # type: ignore[arg-type]  # stands for both
        self.tokenizer = None
        self.keeps_states = True
        self.grammars = None
        self.images, self.imageless = None, ""
        self.basis = LateBasis(lambda: b"")
        self.facts = protocol.Ready(
            "cpu", ModelShape("x", 1, 64, "f32", 1, StateSizes(1)), 8, 1, True, False, False, 0.0, {}
        )
        self.sparse = None
        self.budget = KvBudget.of(40, 1)

    def _exit(self, status: int) -> None:
        self.status.append(status)
        raise Exited

    def put(self, prepared: Any) -> None:
        self.calls.append(("submit", prepared))

    def tell(self, command: Any) -> None:
        self.calls.append(("told", command))

    def note_prepared(self) -> None:
        self.calls.append(("progress", None))

    def finish(self) -> None:
        """Wait until all prompts that came are prepared."""
        self.front._prompts.shutdown()
        self.front._long_prompts.shutdown()

    def close(self) -> None:
        self.finish()
        self.daemon.close()
        self.link.flush()
        self.link._socket.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Ends(monkeypatch)
    yield made
    made.close()


def read(ends: Ends, *frames: bytes) -> None:
    """Everything the worker reads before its end closes."""
    for frame in frames:
        ends.daemon.sendall(frame)
    ends.daemon.shutdown(socket.SHUT_WR)
    with pytest.raises(Exited):
        ends.front.read(protocol.commands())
    ends.finish()


@pytest.mark.parametrize("rubbish", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b""])
def test_a_worker_that_cannot_understand_its_daemon_ends(ends: Ends, rubbish: bytes) -> None:
    read(ends, rubbish)
    assert ends.status == [worker.EXIT_ORPHANED]


@pytest.mark.parametrize("fails", [False, True])
def test_cancelled_while_the_prompt_is_prepared_ends_once(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    cancelled = threading.Event()
    asked = threading.Event()

    def prepare(request: Generate, *_: Any, borders: bool, **__: Any) -> prompt_encoding.PreparedPrompt:
        asked.set()
        assert cancelled.wait(60)
        if fails:
            raise BadRequest("no")
        return prompt_encoding.PreparedPrompt(request, [1])

    monkeypatch.setattr("fleetd.engine.prompt.prompt_encoding.prepare", prepare)
    ends.daemon.sendall(protocol.encode(Generate("r", TextPrompt("x"))))
    decoder = protocol.commands()
    for command in decoder.feed(ends.link.receive()):
        ends.front._preparing[command.id] = False
        ends.front._prompts.submit(ends.front._prepare, command)
    assert asked.wait(60)
    with ends.front._lock:
        ends.front._preparing["r"] = True
    cancelled.set()
    ends.finish()
    assert [type(r) for r in ends.sent] == [Failed if fails else Finished]
    assert ends.calls == []


def test_cancelled_between_two_images_ends_there(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image is progress: a prompt may have many, and take longer than a template may."""
    first, cancelled = threading.Event(), threading.Event()

    def prepare(*_: Any, image_seen: Callable[[], None], **__: Any) -> prompt_encoding.PreparedPrompt:
        image_seen()
        first.set()
        assert cancelled.wait(60)
        image_seen()
        pytest.fail("it went on")

    monkeypatch.setattr("fleetd.engine.prompt.prompt_encoding.prepare", prepare)
    request = Generate("r", TextPrompt("x"))
    ends.front._preparing["r"] = False
    ends.front._long_prompts.submit(ends.front._prepare, request)
    assert first.wait(60)
    with ends.front._lock:
        ends.front._preparing["r"] = True
    cancelled.set()
    ends.finish()
    assert ends.sent == [Finished("r", "cancelled")]
    assert ends.calls == [("progress", None)] * 2


def test_an_image_of_few_bytes_holds_up_no_short_prompt(ends: Ends) -> None:
    message = {"role": "user", "content": "What?", IMAGES: [(0, b"a file")]}
    assert ends.front._thread_for(Generate("r", ChatPrompt([message]))) is ends.front._long_prompts
    del message[IMAGES]
    assert ends.front._thread_for(Generate("r", ChatPrompt([message]))) is ends.front._prompts


@pytest.mark.parametrize("keeps_states", [True, False])
def test_borders_are_looked_for_only_where_states_are_kept(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, keeps_states: bool
) -> None:
    looked: list[bool] = []

    def prepare(request: Generate, *_: Any, borders: bool, **__: Any) -> prompt_encoding.PreparedPrompt:
        looked.append(borders)
        return prompt_encoding.PreparedPrompt(request, [1])

    monkeypatch.setattr("fleetd.engine.prompt.prompt_encoding.prepare", prepare)
    ends.keeps_states = keeps_states
    counted = Generate("c", TextPrompt("x"), count_only=True)
    read(ends, protocol.encode(Generate("r", TextPrompt("x"))), protocol.encode(counted))
    assert looked == [keeps_states, False]


@pytest.mark.parametrize(
    ("tokens", "code"),
    [(20, ""), (64, "context_length_exceeded"), (40, "out_of_memory")],
    ids=["it fits", "it is too long", "there is no memory for it"],
)
def test_a_prompts_length_is_told_and_judged_while_the_compute_thread_is_busy(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, tokens: int, code: str
) -> None:
    def prepare(request: Generate, *_: Any, borders: bool, **__: Any) -> prompt_encoding.PreparedPrompt:
        return prompt_encoding.PreparedPrompt(request, [1] * tokens)

    monkeypatch.setattr("fleetd.engine.prompt.prompt_encoding.prepare", prepare)
    # What it is told, it never takes.
    read(ends, protocol.encode(Generate("r", TextPrompt("x"))))
    (report,) = ends.sent
    if code:
        assert isinstance(report, Failed)
        assert report.code == code
        assert ends.calls == []
    else:
        assert report == Tokenized("r", tokens)
        assert [call for call, _ in ends.calls] == ["told"]


SPLIT = Split("layers", (0, 1, 2), 2, 0, 300, 64)


@pytest.mark.parametrize(
    "command",
    [Cancel("r"), PrefillWithHelpers("r", SPLIT, 1.0), PrefillAlone("r"), AssistPrefill("r", SPLIT, 0)],
    ids=lambda c: type(c),
)
def test_a_command_about_an_unknown_request_reaches_the_scheduler(ends: Ends, command: Any) -> None:
    read(ends, protocol.encode(command))
    assert ends.calls == [("told", command)]


def test_a_worker_with_some_layers_answers_nothing(ends: Ends) -> None:
    ends.front._loaded = None
    read(ends, protocol.encode(Generate("r", TextPrompt("x"))))
    (failed,) = ends.sent
    assert isinstance(failed, Failed)
    assert "some of the model's layers" in failed.message


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_worker_whose_daemon_goes_while_it_loads_ends(ends: Ends, goodbye: bool) -> None:
    if goodbye:
        ends.daemon.sendall(protocol.encode(protocol.Shutdown()))
    else:
        ends.daemon.shutdown(socket.SHUT_RDWR)
    over, ours = socket.socketpair()
    with over, ours, pytest.raises(Exited):
        ends.link._watch(over)


def test_a_loaded_worker_leaves_its_commands_to_the_reader(ends: Ends) -> None:
    def watching() -> bool:
        return any(thread.name == "watch" for thread in threading.enumerate())

    with ends.link.watched():
        assert watching()
    assert not watching()
    ends.daemon.sendall(protocol.encode(Cancel("r")))
    assert ends.link.receive() == protocol.encode(Cancel("r"))


class DeepTemplate:
    """A tokenizer whose chat template recurses with what it is given."""

    chat_template = "as a publisher wrote it"
    has_chat_template = True
    has_tool_calling = False

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return self.apply_chat_template(messages, **options)


def test_attack_a_template_that_recurses_without_end_is_the_requests_fault() -> None:
    """A failure of the request's own is not tried on other machines."""
    with pytest.raises(BadRequest, match="RecursionError"):
        prompt_encoding.prepare(Generate("r", ChatPrompt([{"role": "user"}])), DeepTemplate(), 8)
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadRequest, match="RecursionError"):
        prompt_encoding.prepare(Generate("r", ChatPrompt([{"content": deep}])), DeepTemplate(), 8)


def test_a_refusal_of_a_chat_names_the_model() -> None:
    asked = Generate("r", ChatPrompt([{"role": "user", "content": "x"}]))
    silent: Any = SimpleNamespace(has_chat_template=False)
    with pytest.raises(BadRequest, match="org/tiny has no chat template"):
        prompt_encoding.prepare(asked, silent, 8, model="org/tiny")


class BrokenTemplate(DeepTemplate):
    """A tokenizer whose chat template is not Jinja."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return jinja2.Template("hello {% if %}").render()


def test_a_template_that_cannot_be_read_is_the_models_fault() -> None:
    with pytest.raises(BadRequest, match="template has an error in line 1") as refused:
        prompt_encoding.prepare(Generate("r", ChatPrompt([{"role": "user"}])), BrokenTemplate(), 8)
    assert refused.value.param == "model"
