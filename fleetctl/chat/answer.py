"""One streamed answer: the request, the events, what is printed while it runs, and what it amounts to.

Shared by one-shot `fleetctl chat` and its REPL.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import click

from fleetctl.chat import quiet_terminal, smart_prefill
from fleetctl.connection.client import Client, daemon_error
from fleetctl.connection.event_stream import Comment
from fleetctl.exits import ConnectionBroken
from fleetctl.render.live_text import LiveText, live_dim, live_markdown
from fleetctl.render.progress_line import Progress, live_terminal, of_members
from fleetctl.render.text import count, duration, joined, listed, one_line, size, wrapped
from fleetctl.text_files import SchemaFile
from fleetd import limits
from fleetd.control.model_change import MemberProgress
from fleetd.errors import FleetError, InvalidValue
from fleetd.text.terminal_text import printable

_KEEPALIVE = re.compile(r"keepalive (\d+)/(\d+)")
_LOADING = re.compile(r"loading (.+?)(?: (\d+)/(\d+)((?:; .+?: .*? \d+/\d+)*))?")
# Another machine of a model over several.
_MEMBER = re.compile(r"; (.+?): (.*?) (\d+)/(\d+)")
# The machine that a request moved to, and the reason.
_EXACTNESS = re.compile(r"exactness (\w+)")
_BITS = re.compile(r"(kv|wire) bits (\d+)")
_PLAN = re.compile(r"plan (\w+; nodes=.*?)(?:: (.*))?")
# Stages of loading count bytes, layers or files; no count of the latter kinds comes near this.
_LOOKS_LIKE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """The fields of a request besides the messages; None, and an empty model, leave the daemon's default.

    ``smart``: True asks for smart prefill, a number for that share of the tokens. ``schema``: what the answer
    follows; None leaves it free.
    """

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    local_only: bool = False
    smart: bool | float | None = None
    schema: SchemaFile | None = None

    def body(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model:
            body["model"] = self.model
        for name in ("temperature", "top_p", "max_tokens", "seed"):
            if (value := getattr(self, name)) is not None:
                body[name] = value
        if self.stop:
            body["stop"] = list(self.stop)
        if self.local_only:
            body["local_only"] = True
        if self.smart is not None:
            body["smart_prefill"] = (
                self.smart if isinstance(self.smart, bool) else {"target_ratio": self.smart}
            )
        if self.schema is not None:
            form = {"name": "answer", "strict": True, "schema": self.schema.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


@dataclass(slots=True)
class Answer:
    """An answer, as much of it as has arrived."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    model: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    smart: dict[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None
    #: Why the prompt was read whole although smart prefill was asked for; "" if that is not so.
    not_shortened: str = ""
    stopped: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "content": self.content,
            "reasoning": self.reasoning or None,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "timings": self.timings,
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 4),
            "request": self.headers.get("x-fleet-request"),
            "plan": self.headers.get("x-fleet-plan"),
            "exactness": self.headers.get("x-fleet-exactness"),
            "kv_bits": _whole_number(self.headers.get("x-fleet-kv-bits", "")),
            "wire_bits": _whole_number(self.headers.get("x-fleet-wire-bits", "")),
            **({"smart_prefill": self.smart} if self.smart else {}),
        }

    def closing_facts(self) -> list[str]:
        """Prompt size, time to the first token, both speeds, model, machines, and the label of an answer that
        is not exact, as far as they are known."""
        parts = []
        cached = self.timings.get("cache_n", 0)
        details = self.usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens", cached)
        prompt = self.usage.get("prompt_tokens", self.timings.get("prompt_n", 0) + cached)
        if prompt:
            parts.append(f"{count(prompt)} prompt tokens" + (f" ({count(cached)} cached)" if cached else ""))
        if self.smart.get("mode") in ("text", "sparse"):
            kept = count(self.smart.get("compressed_tokens", 0))
            parts.append(f"{kept} of them read, chosen by {one_line(str(self.smart.get('compressor', '')))}")
        if self.first_token_s is not None:
            parts.append(f"first token {duration(self.first_token_s)}")
        if speed := self.timings.get("prompt_per_second"):
            parts.append(f"prefill {_speed(speed)} tok/s")
        tokens = self.usage.get("completion_tokens", self.timings.get("predicted_n"))
        if tokens is not None:
            speed = self.timings.get("predicted_per_second")
            parts.append(
                f"{count(tokens)} token{'' if tokens == 1 else 's'}"
                + (f" at {_speed(speed)} tok/s" if speed else "")
            )
        if self.model:
            parts.append(one_line(self.model))
        if others := _others(self.headers.get("x-fleet-plan", "")):
            parts.append(others)
        if (exactness := self.headers.get("x-fleet-exactness", "")) in ("equivalent", "lossy"):
            parts.append(exactness)
        if kv_bits := self.headers.get("x-fleet-kv-bits", ""):
            parts.append(f"KV {one_line(kv_bits)} bits")
        if wire_bits := self.headers.get("x-fleet-wire-bits", ""):
            parts.append(f"wire {one_line(wire_bits)} bits")
        return parts


def _whole_number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _others(plan: str) -> str:
    """The part of other machines in this answer, from the header: ``layers; nodes=studio,air,this``."""
    kind, _, nodes = plan.partition("; nodes=")
    names = [one_line(unquote(node)) for node in nodes.split(",") if node]
    others = listed([name for name in names if name != "this"])
    if kind == "local" or not others:
        return ""
    if kind == "whole":
        return f"prefill by {others}"
    if kind == "remote" and names[1:]:
        return f"on {names[0]}, helped by {listed(names[1:])}"
    # A shared prefill names the machine that answers last, this one.
    if names[-1] == "this":
        return f"prefill shared with {others}"
    return f"on {', '.join(names)}"


def _speed(tokens_per_s: float) -> str:
    return count(tokens_per_s) if tokens_per_s >= 99.95 else f"{tokens_per_s:.1f}"


class Printer:
    """Writes the answer where it belongs: content to stdout, reasoning (dim) and notes to stderr.

    A terminal gets wrapped text without control characters, a file or pipe exactly what the model wrote.

    Args:
        plain: the answer is no Markdown, or is to be shown as it was written.
    """

    def __init__(self, *, quiet: bool = False, plain: bool = False) -> None:
        self._quiet = quiet
        self._to_terminal = sys.stdout.isatty()
        self._live_answer = not plain and live_terminal(sys.stdout)
        self._live_thoughts = live_terminal(sys.stderr)
        self._answer: LiveText | None = None
        self._thoughts: LiveText | None = None
        self._reasoning_open = False
        self._last = "\n"

    def prepare(self) -> None:
        """Load what painting needs, a tenth of a second's work, while the prompt is read."""
        if self._live_answer and not self._quiet:
            self._answer = live_markdown(sys.stdout)

    def content(self, text: str) -> None:
        if self._quiet or not text:
            return
        self._end_reasoning()
        if self._live_answer:
            self._answer = self._answer or live_markdown(sys.stdout)
            self._answer.feed(text)
            return
        # Noted first: Ctrl-C may come between any two statements, and `end` must know where the cursor is.
        self._last = text[-1]
        sys.stdout.write(printable(text) if self._to_terminal else text)
        sys.stdout.flush()

    def reasoning(self, text: str) -> None:
        if self._quiet or not text:
            return
        self._reasoning_open = True
        if self._live_thoughts:
            self._thoughts = self._thoughts or live_dim(sys.stderr)
            self._thoughts.feed(text)
        else:
            click.echo(printable(text), err=True, nl=False)

    def remark(self, text: str | None) -> None:
        """Print a note about the answer on stderr, dimmed; None prints nothing."""
        if text and not self._quiet:
            self.end()
            click.echo(click.style(wrapped(one_line(text), _stderr_width()), dim=True), err=True)

    def end(self) -> None:
        """Leave the cursor at the start of a line."""
        if self._quiet:
            return
        self._end_reasoning()
        if self._answer is not None:
            self._answer.end()
        elif self._last != "\n":
            sys.stdout.write("\n")
            self._last = "\n"
        sys.stdout.flush()

    def _end_reasoning(self) -> None:
        if self._reasoning_open:
            self._reasoning_open = False
            if self._thoughts is not None:
                self._thoughts.end()
            click.echo("" if self._thoughts is not None else "\n", err=True)


def _stderr_width() -> int | None:
    """The cells of a line on stderr's terminal; None for files and pipes, where no line is broken."""
    return shutil.get_terminal_size().columns - 1 if sys.stderr.isatty() else None


def closing(answer: Answer) -> None:
    """Print the closing line of an answer on stderr, on a terminal broken between its facts."""
    facts = answer.closing_facts()
    if answer.finish_reason == "length":
        facts.insert(0, "cut off at the token limit")
    for line in joined(facts, " · ", _stderr_width()):
        click.echo(click.style(line, dim=True), err=True)


def ask(
    client: Client,
    options: Options,
    messages: Sequence[dict[str, Any]],
    *,
    quiet: bool = False,
    plain: bool = False,
) -> Answer:
    """Stream one answer to the terminal.

    Ctrl-C stops it: the connection closes, the daemon cancels, and the answer so far is returned with
    ``stopped``. With ``quiet`` nothing but progress is printed, with ``plain`` the answer as it was written.
    """
    body = options.body(messages)
    _check_size(body)
    answer = Answer()
    # JSON that follows a schema is no Markdown.
    printer = Printer(quiet=quiet, plain=plain or options.schema is not None)
    began = time.monotonic()
    with quiet_terminal.quiet(), Progress() as progress:
        try:
            with client.stream("/v1/chat/completions", body) as stream:
                answer.headers = stream.headers
                printer.prepare()
                _not_shortened(answer, smart_prefill.told_by_headers(stream.headers), printer, progress)
                for event in stream:
                    if isinstance(event, Comment):
                        _comment(answer, event.text, printer, progress)
                    elif event.text == "[DONE]":
                        break
                    else:
                        _chunk(answer, event.text, printer, progress, began)
        except KeyboardInterrupt:
            answer.stopped = True
        except FleetError as error:
            if options.schema is not None and (error.param or "").startswith("response_format"):
                error.message = f"{options.schema.name}: {error.message}"
            raise
        finally:
            progress.clear()
            printer.end()
    if answer.finish_reason is None and not answer.stopped:
        raise ConnectionBroken(
            "The daemon ended the stream before the answer was complete.",
            hint="`fleetctl status` tells whether it still runs; its log tells why it stopped.",
        )
    return answer


def _comment(answer: Answer, text: str, printer: Printer, progress: Progress) -> None:
    """Where the answer comes from now, what was not done for it, or how far it is."""
    if plan := _PLAN.fullmatch(text):
        answer.headers["x-fleet-plan"] = plan[1]
        progress.clear()
        printer.remark(plan[2])
    elif exactness := _EXACTNESS.fullmatch(text):
        answer.headers["x-fleet-exactness"] = exactness[1]
    elif bits := _BITS.fullmatch(text):
        answer.headers[f"x-fleet-{bits[1]}-bits"] = "" if bits[2] == "0" else bits[2]
    elif reason := smart_prefill.told_by_comment(text):
        _not_shortened(answer, reason, printer, progress)
    else:
        _show(progress, text)


def _not_shortened(answer: Answer, reason: str, printer: Printer, progress: Progress) -> None:
    """Say once that the prompt is read whole although smart prefill was asked for; "" says nothing."""
    if reason and not answer.not_shortened:
        answer.not_shortened = reason
        progress.clear()
        printer.remark(smart_prefill.not_used(reason))


def _chunk(answer: Answer, text: str, printer: Printer, progress: Progress, began: float) -> None:
    try:
        chunk = json.loads(text)
    except ValueError as error:
        raise ConnectionBroken("The daemon sent an event that is not JSON.") from error
    if "error" in chunk:
        # The status line was sent long ago, so the error's code alone says which side failed.
        raise daemon_error(chunk, 500)
    answer.model = chunk.get("model") or answer.model
    answer.usage = chunk.get("usage") or answer.usage
    answer.timings = chunk.get("timings") or answer.timings
    answer.smart = chunk.get("smart_prefill") or answer.smart
    _not_shortened(answer, smart_prefill.told_by_report(answer.smart), printer, progress)
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if content or reasoning:
            if answer.first_token_s is None:
                answer.first_token_s = time.monotonic() - began
            progress.clear()
            answer.reasoning += reasoning
            answer.content += content
            printer.reasoning(reasoning)
            printer.content(content)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _show(progress: Progress, comment: str) -> None:
    if found := _KEEPALIVE.fullmatch(comment):
        done, total = int(found[1]), int(found[2])
        if done < total:
            progress.update("reading the prompt", done, total, unit="tokens")
    elif found := _LOADING.fullmatch(comment):
        done, total = int(found[2] or 0), int(found[3] or 0)
        if found[1].startswith("scoring "):
            progress.update(found[1], done, total, unit="tokens")
            return
        members = [
            MemberProgress(name, stage, int(done_bytes), int(total_bytes))
            for name, stage, done_bytes, total_bytes in _MEMBER.findall(found[4] or "")
        ]
        unit = "bytes" if members or total >= _LOOKS_LIKE_BYTES else ""
        progress.update(f"model: {found[1]}", done, total, unit=unit, detail=of_members(members))


def _check_size(body: dict[str, Any]) -> None:
    length = len(json.dumps(body))
    if length > limits.HTTP_BODY_BYTES:
        raise InvalidValue(
            f"The prompt has {size(length)}; the daemon takes {size(limits.HTTP_BODY_BYTES)}.",
            hint="Send a part of it.",
        )
