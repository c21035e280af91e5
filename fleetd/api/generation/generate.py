"""Runs the choices of one request and sends what comes back, streamed or whole, in any dialect.

An endpoint brings a ``Streamer`` or a ``Collector``, which turns events into its objects; the dialect of the
route turns objects into bytes.

A streamed request waits up to ``limits.HEADERS_GRACE_S`` for a first event, which comes at once from a model
that is loaded (Tokenized, however busy it is) or that has to be: so an early refusal (unknown model, prompt
too long) gets its own status.
After that the headers go out, and a failure is a frame. The headers name the plan as it stands then; if the
job moves to another machine later, or exactness changes, a comment says so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import quote

import msgspec
from aiohttp import web

from fleetd import limits
from fleetd.api.generation import smart_prefill_reports
from fleetd.api.generation.choices import Choices
from fleetd.api.generation.progress_comments import ProgressComments
from fleetd.api.generation.streamer import Collector, Streamer
from fleetd.api.http import token
from fleetd.api.http.body import json_answer
from fleetd.api.http.client_name import client_name
from fleetd.api.http.context import SERVICES
from fleetd.api.http.deadlines import is_trusted
from fleetd.api.http.http_stream import HttpStream
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import Accepted, Event, Generate, Loading, Prompt, Tokenized
from fleetd.errors import EngineError
from fleetd.requests.job import Exactness, Job, Origin, Planned


class GenerationRequest(msgspec.Struct, frozen=True):
    """What to generate for one HTTP request."""

    #: The answer's id, as clients see it.
    id: str
    #: The model that the client named; "" is the default model.
    model: str
    #: The endpoint's name in the ledger.
    route: str
    #: One per choice, the choices of one prompt next to each other.
    generates: Sequence[Generate]
    #: No prompt leaves this machine.
    local_only: bool = False
    #: How the prompts are shortened; None reads them whole.
    smart: SmartPrefillPolicy | None = None
    #: How many choices answer each prompt.
    per_prompt: int = 1
    #: The name of the client's session (``client_sessions.session_of``); "" if it has none.
    session: str = ""
    #: The machines that are to hold the model, by name; none leaves it to the planner.
    placement: Sequence[str] = ()
    #: Whether other machines may round otherwise; None leaves it to the settings.
    exactness: Exactness | None = None


def _choices(request: web.Request, work: GenerationRequest) -> Choices:
    services = request.app[SERVICES]
    token.check_model(request, work.model)
    origin: Origin = "socket" if is_trusted(request) else "http"
    # A request that asks for a shortened prompt takes what that gives.
    exact = (work.exactness or services.exactness) == "exact" and work.smart is None
    jobs = [
        Job(
            work.model,
            _by_settings(generate, services.answer_tokens, exact=exact),
            origin,
            work.route,
            local_only=work.local_only,
            smart=work.smart,
            session=work.session,
            client=client_name(request),
            placement=tuple(work.placement),
        )
        for generate in work.generates
    ]
    return Choices([partial(services.runner.run, job) for job in jobs])


def _by_settings(generate: Generate, answer_tokens: int | None, *, exact: bool) -> Generate:
    most = generate.max_tokens
    if most is None and answer_tokens is not None:
        most = max(answer_tokens, generate.min_tokens)
    return msgspec.structs.replace(generate, max_tokens=most, exact=exact)


_LOSS: Mapping[str, int] = {"exact": 0, "equivalent": 1, "lossy": 2}
_BITS: Mapping[str, str] = {"kv": "X-Fleet-KV-Bits", "wire": "X-Fleet-Wire-Bits"}


class _Plans:
    """How the choices of one request are answered. Several may run on several machines."""

    def __init__(self) -> None:
        self._latest: dict[int, Planned] = {}
        # The model is shown tools in a text of fleetd's, and held to their form.
        self._tools_by_grammar = False

    def feed(self, index: int, planned: Planned) -> bool:
        """True if it differs from this choice's plan so far or, at first, from that of another choice."""
        before = self._latest.get(index) or next(iter(self._latest.values()), None)
        self._latest[index] = planned
        return before is None or str(before) != str(planned)

    def learns_of_tools(self, event: Planned | Loading | Event) -> bool:
        """True if an event is the first that says that tools are by grammar."""
        told = isinstance(event, Tokenized | Accepted) and event.tools_by_grammar
        new = told and not self._tools_by_grammar
        self._tools_by_grammar |= told
        return new

    @property
    def known(self) -> bool:
        return bool(self._latest)

    @property
    def exactness(self) -> Exactness | None:
        """The least of the choices'; None before any is planned."""
        told = (planned.exactness for planned in self._latest.values())
        return max(told, key=_LOSS.__getitem__, default=None)

    @property
    def bits(self) -> Mapping[str, int]:
        """Bits of keys and values as they are held ("kv") and were sent ("wire"); none where as computed.

        Choices on several machines may differ; the fewest bits say the most.
        """
        found = list(self._latest.values())
        told: dict[str, list[int]] = {
            "kv": [one.kv_bits for one in found],
            "wire": [one.wire_bits for one in found],
        }
        return {name: min(filter(None, each)) for name, each in told.items() if any(each)}

    @property
    def smart(self) -> SmartPrefillResult | None:
        return next((planned.smart for planned in self._latest.values() if planned.smart), None)

    def _results(self, per_prompt: int) -> list[SmartPrefillResult]:
        """The smart prefill of each prompt, as one of its choices has it."""
        found = {
            index // per_prompt: planned.smart
            for index, planned in self._latest.items()
            if planned.smart is not None
        }
        return list(found.values())

    def headers(self, work: GenerationRequest) -> Mapping[str, str]:
        found, exactness = list(self._latest.values()), self.exactness
        tools = {"X-Fleet-Tools": "grammar"} if self._tools_by_grammar else {}
        tools |= {_BITS[name]: str(bits) for name, bits in self.bits.items()}
        if exactness is None:
            undecided = {"X-Fleet-Request": work.id, "X-Fleet-Plan": "undecided; nodes="}
            # Parts of the prompt may yet be left out, so "exact" is not promised.
            return undecided | ({"X-Fleet-Exactness": "lossy"} if work.smart is not None else {}) | tools
        nodes = dict.fromkeys(node for planned in found for node in planned.nodes)
        kind = found[0].kind if len({planned.kind for planned in found}) == 1 else "mixed"
        return {
            "X-Fleet-Request": work.id,
            # A machine's name is whatever its owner typed; a header holds one line of ASCII.
            "X-Fleet-Plan": f"{kind}; nodes={','.join(quote(node, safe=' ') for node in nodes)}",
            "X-Fleet-Exactness": exactness,
            **smart_prefill_reports.headers(self._results(work.per_prompt)),
            **tools,
        }


async def whole(request: web.Request, work: GenerationRequest, collector: Collector) -> web.StreamResponse:
    """Answer with one JSON body when every choice has ended. Raises FleetError."""
    plans = _Plans()
    async with _choices(request, work) as choices:
        while (item := await choices.next(None)) is not None:
            index, event = item
            if isinstance(event, Planned):
                plans.feed(index, event)
            plans.learns_of_tools(event)
            if not isinstance(event, Loading):
                collector.feed(index, event)
    return json_answer(collector.whole(), headers=plans.headers(work))


async def prompt_tokens(request: web.Request, work: GenerationRequest) -> int:
    """The length of a prompt that is only counted. Raises FleetError."""
    async with _choices(request, work) as choices:
        while (item := await choices.next(None)) is not None:
            if isinstance(item[1], Accepted):
                return item[1].prompt_tokens
    raise EngineError("The engine did not count the prompt.", hint="Try again.")


async def count(request: web.Request, prompt: Prompt, model: str | None, *, local_only: bool) -> int:
    """How many tokens the model's own template and tokenizer make of a prompt. Raises FleetError."""
    name = f"count_{uuid.uuid4().hex}"
    # A machine that does not know ``count_only`` reads the prompt and answers nothing.
    counted = Generate(id=name, prompt=prompt, max_tokens=0, count_only=True)
    return await prompt_tokens(
        request, GenerationRequest(name, model or "", "count_tokens", [counted], local_only)
    )


async def stream(request: web.Request, work: GenerationRequest, streamer: Streamer) -> web.StreamResponse:
    """Answer with a stream of objects. Raises FleetError only while the headers have not gone out."""
    async with _choices(request, work) as choices:
        plans = _Plans()
        first = await _early(choices, plans, streamer)
        out = HttpStream(request, plans.headers(work))
        sender = _Sender(out, streamer, plans)
        await sender.open(first)
        return await out.finish(sender.relay(first, choices), streamer.failure)


Item = tuple[int, Loading | Event] | None


async def _early(choices: Choices, plans: _Plans, streamer: Streamer) -> Item:
    """The first event besides plans, if it comes within the grace.

    The wait for the plan itself is longer: a header that names a machine has to name the right one.
    """
    began = time.monotonic()
    try:
        while True:
            grace_s = limits.HEADERS_GRACE_S if plans.known else limits.HEADERS_PLAN_S
            item = await choices.next(max(0.0, began + grace_s - time.monotonic()))
            if item is None:
                break
            index, event = item
            if not isinstance(event, Planned):
                plans.learns_of_tools(event)
                return index, event
            plans.feed(index, event)
            streamer.feed(index, event)
    except TimeoutError:
        pass
    return None


class _Sender:
    """One stream being sent: events become frames, and comments fill any silence."""

    def __init__(self, out: HttpStream, streamer: Streamer, plans: _Plans) -> None:
        self._out = out
        # Begins with the plans that the headers name.
        self._plans = plans
        self._streamer = streamer
        self._progress = ProgressComments()
        self._sent_s = self._object_s = 0.0
        self._smart, self._exactness, self._bits = plans.smart, plans.exactness, plans.bits

    async def open(self, first: Item) -> None:
        if first is not None:
            self._progress.feed(*first)
        await self._out.start(self._progress.comment())
        self._sent_s = time.monotonic()

    async def relay(self, first: Item, choices: Choices) -> None:
        # An opening may tell what the first event has told.
        objects = self._objects(first) if first is not None else ()
        await self._send([*self._streamer.opening(), *self._streamer.progress(), *objects])
        while True:
            try:
                item = await choices.next(max(0.0, self._sent_s + limits.SSE_KEEPALIVE_S - time.monotonic()))
            except TimeoutError:
                await self._comment()
                continue
            if item is None:
                break
            index, event = item
            if isinstance(event, Planned):
                self._streamer.feed(index, event)
                if event.smart is not None and event.smart != self._smart:
                    # The headers are out.
                    self._smart = event.smart
                    await self._say(f"smart prefill {smart_prefill_reports.sentence(event.smart)}")
                if self._plans.feed(index, event) or event.reason:
                    await self._say(f"plan {event}" + (f": {event.reason}" if event.reason else ""))
                if (exactness := self._plans.exactness) != self._exactness:
                    self._exactness = exactness
                    await self._say(f"exactness {exactness}")
                if (bits := self._plans.bits) != self._bits:
                    for name in _BITS:
                        if bits.get(name) != self._bits.get(name):
                            await self._say(f"{name} bits {bits.get(name, 0)}")
                    self._bits = bits
                continue
            if self._plans.learns_of_tools(event):
                # The headers are out.
                await self._say("tools grammar")
            if self._progress.feed(index, event) and time.monotonic() - self._sent_s >= limits.SSE_PROGRESS_S:
                await self._comment()
            await self._send(self._objects((index, event)))
        await self._send(self._streamer.closing())

    async def _comment(self) -> None:
        await self._say(self._progress.comment())
        if time.monotonic() - self._object_s >= limits.STREAM_PROGRESS_S:
            await self._send(self._streamer.progress())

    async def _say(self, comment: str) -> None:
        await self._out.comment(" ".join(comment.split()))
        self._sent_s = time.monotonic()

    def _objects(self, item: tuple[int, Loading | Event]) -> Sequence[msgspec.Struct]:
        index, event = item
        return () if isinstance(event, Loading) else self._streamer.feed(index, event)

    async def _send(self, objects: Sequence[msgspec.Struct]) -> None:
        for each in objects:
            await self._out.send(each)
            self._sent_s = self._object_s = time.monotonic()
