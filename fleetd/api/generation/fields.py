"""Fields that bodies of several dialects have, and how a body is decoded.

Every field a client may send is in one of five classes, ``other_fields.py`` has the second and the fourth:
    known        a field of a body's Struct: typed and ranged there, turned into work by translate.py
    unsupported  would change the answer, not implemented: refused by name, unless its value asks for nothing
    misspelt     so close to a known field that ignoring it would change the answer: refused with the nearest
    harmless     changes no answer: ignored
    foreign      anything else: ignored, because client libraries add fields every month
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.api.generation import other_fields
from fleetd.api.generation.reasoning import ReasoningFields
from fleetd.api.http.body import parse
from fleetd.compression.policy import SmartPrefillBody
from fleetd.engine.protocol import Speculate
from fleetd.engine.speculation.local_sources import SOURCE_NAMES, SourceName
from fleetd.errors import InvalidValue, UnsupportedParameter

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LocalOnly = Annotated[
    bool | None, Meta(description="True: the prompt does not leave the machine that was asked.")
]
ExactnessField = Annotated[
    Literal["exact", "equivalent"] | None,
    Meta(
        description="exact: other machines have a part in the answer only if it then has the bytes that the "
        "machine which was asked gives alone; equivalent: also if they round in another order. By default "
        "the setting `fleet.exactness`. An `exact` prompt is not shortened."
    ),
]
PlacementField = Annotated[
    Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=limits.CONTROL_TEXT_CHARS)]],
        Meta(max_length=limits.PLACEMENT_MACHINES),
    ]
    | None,
    Meta(
        description='The machines that are to answer: one, or several that hold the model together. "this" '
        "is the machine that was asked, and the first of several. By default the planner chooses."
    ),
]
SmartPrefillField = Annotated[
    bool | SmartPrefillBody | None,
    Meta(description="Leaves out what a small model finds does not matter. Lossy, and labelled so."),
]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SpeculateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object form of ``speculate``. Drafts change how soon an answer comes, not the answer."""

    enabled: bool = True
    sources: Annotated[
        Annotated[list[SourceName], Meta(max_length=len(SOURCE_NAMES))] | None,
        Meta(
            description="Sources of drafts: the answer's grammar, its own text (suffix, lookup) or another "
            "model (drafter). By default all that there are.",
        ),
    ] = None
    width: Annotated[
        int,
        Meta(ge=0, le=limits.SPEC_WIDTH, description="Most tokens of one pass; 0 leaves it to what pays."),
    ] = 0
    draft_model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS, pattern="^[^/~]")] | None,
        Meta(
            description="The model that drafts, on this machine or a peer: a small one of the same family. "
            "By default the one that the settings name."
        ),
    ] = None


class FleetFields(ReasoningFields, frozen=True, kw_only=True):
    """What bodies of OpenAI's dialects say besides the prompt: how the model reasons, where and how it is
    computed. All fields here but the last are fleetd's."""

    local_only: LocalOnly = None
    placement: PlacementField = None
    exactness: ExactnessField = None
    smart_prefill: SmartPrefillField = None
    speculate: Annotated[
        bool | SpeculateBody | None,
        Meta(description="How tokens are guessed ahead and verified. The answer is the same without it."),
    ] = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Names the conversation, which then stays on its machine if it can.")
    ] = None


def speculate(asked: bool | SpeculateBody | None) -> Speculate | None:
    """None leaves speculation to the settings."""
    match asked:
        case None:
            return None
        case bool(enabled):
            return Speculate(enabled)
        case _:
            sources = None if asked.sources is None else list[str](asked.sources)
            return Speculate(asked.enabled, sources, asked.width, asked.draft_model or "")


# ---- Decoding --------------------------------------------------------------------------------------------

_TYPO_CUTOFF = 0.86

Body = TypeVar("Body", bound=msgspec.Struct)


def decode(data: bytes, kind: type[Body], *, spelling: bool = True) -> Body:
    """Bytes → body. Without ``spelling`` misspelt fields pass for foreign ones.

    Raises:
        BadRequest: not JSON, with the position.
        InvalidValue: a field of the wrong type or out of range, or a misspelt name; says which.
        UnsupportedParameter: a field that would change the answer and is not implemented.
    """
    fields = parse(data, dict[str, msgspec.Raw])
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in fields:
        if name in known:
            continue
        if name in other_fields.REFUSED:
            _refuse_unsupported(name, fields)
        elif spelling and name not in other_fields.HARMLESS:
            _refuse_misspelling(name, known)
    return parse(data, kind)


def _refuse_unsupported(name: str, fields: Mapping[str, msgspec.Raw]) -> None:
    if _asks(name, fields, other_fields.REFUSED[name]):
        beside = other_fields.BESIDE.get(name)
        if beside is None or any(_asks(other, fields, nothing) for other, nothing in beside.items()):
            raise UnsupportedParameter(
                f"The parameter {name!r} is not supported, and ignoring it would change the answer.",
                hint=f"Leave {name!r} out.",
                param=name,
            )


def _asks(name: str, fields: Mapping[str, msgspec.Raw], nothing: tuple[Any, ...]) -> bool:
    return name in fields and parse(bytes(fields[name]), Any) not in nothing


def _refuse_misspelling(name: str, known: set[str]) -> None:
    nearest = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=_TYPO_CUTOFF)
    if other_fields.ELSEWHERE.get(name) in known:
        nearest = [other_fields.ELSEWHERE[name]]
    if nearest:
        raise InvalidValue(
            f"Unknown parameter {name[:64]!r}.", hint=f"Did you mean {nearest[0]!r}?", param=name[:64]
        )
