"""One piece of work as a client asked for it: which model, what to generate, and where it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import Literal

import msgspec

from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.model_facts import KvBits, WireBits
from fleetd.control.prefill_trace import Trace
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import (
    IMAGES,
    ChatPrompt,
    Generate,
    ImageList,
    Message,
    TextPrompt,
    TokenPrompt,
)
from fleetd.plan.prefill.options import Way
from fleetd.text.decoding import from_plain

Origin = Literal["socket", "http", "peer"]
Exactness = Literal["exact", "equivalent", "lossy"]
PlanKind = Literal[Way, "remote", "group"]


# English text in common tokenizers; only prices depend on it.
CHARS_PER_TOKEN = 4
# What a picture of a thousand pixels a side takes of a prompt, about.
IMAGE_TOKENS = 1300


class Job(msgspec.Struct, frozen=True, dict=True):
    """``model`` as the client named it; "" or "default" is the configured one. ``route``: for the ledger.

    ``local_only``: this machine or none. It holds for every job that came from a peer, so that no request
    travels in circles. ``digest``: only a model of exactly this content will do; "" is any. ``smart``: how
    its prompt is to be shortened; None reads it whole. ``asked_by``: the machine that it came from, by name;
    ``traced`` is called once with what was written down of it. ``unaided``: a peer's, and no other machine
    may help with it. ``session``: what its client calls the conversation, "" if nothing; it stays here, and
    is kept nowhere but as a hash. ``client``: the program that asks, as it calls itself; "" if unknown.
    """

    model: str
    request: Generate
    origin: Origin
    route: str
    local_only: bool = False
    digest: str = ""
    smart: SmartPrefillPolicy | None = None
    asked_by: str = ""
    traced: Callable[[Trace], None] | None = None
    unaided: bool = False
    session: str = ""
    client: str = ""
    # The machines that are to hold the model, by name, "this" first of several; none leaves it open.
    placement: tuple[str, ...] = ()

    @cached_property
    def prompt_text(self) -> str:
        """``prompt_text`` of its request, built once: prompts are long, and several decisions look at it."""
        return prompt_text(self.request)

    @property
    def images(self) -> int:
        """How many its prompt has."""
        prompt = self.request.prompt
        return prompt.images if isinstance(prompt, ChatPrompt) else 0

    @property
    def shareable(self) -> bool:
        """Whether others may help; a prompt that came from another machine was allowed to leave that one."""
        return not self.unaided if self.origin == "peer" else not self.local_only


def prompt_text(request: Generate) -> str:
    """The prompt as one text, in the order in which a template renders it; roughly as long as that."""
    match request.prompt:
        case TokenPrompt(tokens):
            return "".join(f"{token:<{CHARS_PER_TOKEN}}" for token in tokens)
        case TextPrompt(text):
            return text
        case ChatPrompt(messages=messages, tools=tools):
            if not request.prompt.images:
                return f"{tools or ''}{messages}"
            return f"{tools or ''}{list(map(_with_stand_ins, messages))}"


def _with_stand_ins(message: Message) -> Message:
    """A message with a text in the place of each image, as long as what a prompt has of one."""
    content, pieces, at = message.get("content") or "", [], 0
    if IMAGES not in message or not isinstance(content, str):  # the worker refuses what is no text
        return message
    for chars, file in _images(message):
        pieces += [content[at:chars], _stand_in(file)]
        at = chars
    plain = {name: each for name, each in message.items() if name != IMAGES}
    return plain | {"content": "".join([*pieces, content[at:]])}


def _images(message: Message) -> ImageList:
    try:
        return from_plain(message[IMAGES], ImageList)
    except msgspec.ValidationError:
        return []  # the worker refuses what another machine sent so


def _stand_in(file: bytes) -> str:
    """Another text for another image: what a machine has read of one is nothing of the other."""
    # Files end with what depends on all of them, as a rule; only prices depend on it.
    ends = hashlib.blake2b(b"%d" % len(file) + file[:4096] + file[-4096:], digest_size=16)
    return ends.hexdigest().ljust(IMAGE_TOKENS * CHARS_PER_TOKEN)


class Planned(msgspec.Struct, frozen=True):
    """Comes before anything of the answer, and again when the job moves or goes on without its helpers.

    ``nodes`` are names for people, "this" for the machine that was asked: of "remote" the machine that
    answers, then its helpers; of a shared prefill the helpers, then "this"; of a "group", whose machines hold
    one model together, "this", then the others in the order of their layers.
    ``reason``: why it changed. ``smart``: what came of smart prefill, if it was asked for.
    """

    kind: PlanKind
    nodes: tuple[str, ...]
    exactness: Exactness
    reason: str = ""
    smart: SmartPrefillResult | None = None
    # Of a group, the layers at which its model is cut: machine i has those from cuts[i] to cuts[i + 1].
    cuts: tuple[int, ...] = ()
    # In how many bits the machine that answers holds keys and values; 0 is as they are computed.
    kv_bits: KvBits = 0
    # In how many bits helpers sent that machine keys and values; 0 is as they are held.
    wire_bits: WireBits = 0

    def __str__(self) -> str:
        return f"{self.kind}; nodes={','.join(self.nodes)}"

    @property
    def answered_here(self) -> bool:
        return self.kind != "remote"

    @property
    def shared(self) -> bool:
        return self.kind not in ("local", "remote", "group")

    @property
    def helpers(self) -> tuple[str, ...]:
        return self.nodes[:-1] if self.shared else ()


# What a machine is called in what it says of itself.
THIS_NAME = "this"
LOCAL = Planned("local", (THIS_NAME,), "exact")
