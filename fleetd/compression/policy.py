"""What a client asks of smart prefill, and what that comes to with this machine's defaults.

smart_prefill: true | {...}  ──resolve──►  SmartPrefillPolicy, or None: the prompt is read whole
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleetd.errors import InvalidValue

Mode = Literal["text", "sparse", "auto"]
Ratio = Annotated[float, Meta(gt=0, le=1)]
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=200)]

# Below this, scoring a prompt costs about what it saves (reference: the anchors start at 1,000 to 8,192).
MIN_PROMPT_TOKENS = 2000

# Share of the tokens that is kept without a question, if none is named: nobody knows what will be asked.
UNASKED_RATIO = 0.5


class SmartPrefillBody(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The object form of ``smart_prefill``. None leaves a field to the machine's defaults."""

    enabled: bool = True
    compressor_model: Annotated[
        Name | None,
        Meta(description="The model that scores the prompt; by default the smallest suitable one."),
    ] = None
    target_ratio: Annotated[
        Ratio | None,
        Meta(description="Share of the prompt's tokens to keep; by default as many as the scores call for."),
    ] = None
    min_keep_tokens: Annotated[Tokens | None, Meta(description="Keep at least this many tokens.")] = None
    max_keep_tokens: Annotated[
        Tokens | None, Meta(description="Keep at most this many tokens, if what is always kept has fewer.")
    ] = None
    min_prompt_tokens: Annotated[Tokens | None, Meta(description="Shorter prompts are read whole.")] = None
    preserve_boundaries: Annotated[
        bool | None,
        Meta(description="Drop whole paragraphs, statements, values and rows only, never parts of them."),
    ] = None
    system_context: Annotated[
        bool | None,
        Meta(
            description="True: a long system prompt is material to choose from, but for its first and last "
            "paragraph. What it has between <context> tags (or <documents>, <sources>) always is."
        ),
    ] = None
    without_question: Annotated[
        bool | None,
        Meta(
            description="True: what is kept is chosen by the text alone, by what a reader would not expect. "
            "Whatever asks is kept, and is not looked at otherwise."
        ),
    ] = None
    mode: Annotated[
        Mode | None,
        Meta(description="text rewrites the prompt; sparse keeps tokens at their places; auto chooses."),
    ] = None


class SmartPrefillPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one prompt is to be shortened, or what a machine's defaults for that are.

    ``enabled`` matters for defaults only: whether prompts that do not ask are shortened too. ``target_ratio``
    0 means by the scores' mass, or ``UNASKED_RATIO`` of a text that is scored without a question;
    ``compressor_model`` "" the smallest suitable model, ``max_keep_tokens`` 0 no bound.
    """

    enabled: bool = False
    compressor_model: str = ""
    target_ratio: float = 0.0
    min_keep_tokens: int = 0
    max_keep_tokens: int = 0
    min_prompt_tokens: int = MIN_PROMPT_TOKENS
    preserve_boundaries: bool = True
    mode: Mode = "auto"
    system_context: bool = False
    without_question: bool = False


def wanted_ratio(policy: SmartPrefillPolicy) -> float:
    """The share of the tokens to keep; 0 if the scores decide. Surprise is spread over all of a text."""
    return policy.target_ratio or (UNASKED_RATIO if policy.without_question else 0.0)


def resolve(
    wanted: bool | SmartPrefillBody | None, defaults: SmartPrefillPolicy, *, exact: bool = False
) -> SmartPrefillPolicy | None:
    """The policy of one request; None where its prompt is to be read whole.

    Args:
        exact: the request takes no answer but an exact one, so its prompt is shortened by no default.

    Raises InvalidValue if the bounds, or the wish for exactness, contradict it.
    """
    if wanted is None:
        wanted = defaults.enabled and not exact
    if exact and (wanted if isinstance(wanted, bool) else wanted.enabled):
        raise InvalidValue(
            "An answer to a shortened prompt is not exact.",
            hint="Leave out `smart_prefill` or `exactness`.",
            param="exactness",
        )
    if not (wanted if isinstance(wanted, bool) else wanted.enabled):
        return None
    given = {} if isinstance(wanted, bool) else msgspec.structs.asdict(wanted)
    policy = msgspec.structs.replace(
        defaults, **{name: value for name, value in given.items() if value is not None} | {"enabled": True}
    )
    if 0 < policy.max_keep_tokens < policy.min_keep_tokens:
        raise InvalidValue(
            f"smart_prefill: min_keep_tokens {policy.min_keep_tokens} is over max_keep_tokens "
            f"{policy.max_keep_tokens}.",
            hint="Leave out one of them.",
            param="smart_prefill",
        )
    return policy
