"""Contents that spell control tokens (``<|im_end|>``) stay text: they end no turn and begin none.

    contents ──stand-ins──► template ──► text, and where in it contents spell control tokens
    text ──tokenizer──► tokens; a control token that lies there ──► the tokens of its characters

All other tokens are what the tokenizer gives for the whole text, so a prompt whose contents spell none has
the very tokens that it would have without this module.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetd.errors import InvalidValue
from fleetd.models.chat_templates import named

Range = tuple[int, int]
Message = dict[str, Any]
Template = Callable[[list[Message], Any, dict[str, Any]], str]

# The application and the model write these: markers of reasoning and of tool calls are theirs, and templates
# look for them. In what users, tools and descriptions of tools say they are text.
_OWN_MARKERS = frozenset({"system", "developer", "assistant"})
# Neither word nor space at both ends, as in <think>; not a run of spaces, not a word.
_MARKUP = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)


class Rendered(msgspec.Struct, frozen=True):
    """A prompt's text."""

    text: str
    #: Ranges of the text in which contents spell control tokens, ascending.
    spelled: list[Range]
    #: The first field that spells a control token; "" if none does.
    where: str = ""


class ControlTokens(msgspec.Struct, frozen=True):
    """A tokenizer's control tokens."""

    ids: frozenset[int]
    #: Finds the tokens that the tokenizer calls special, but for markers of reasoning and of tool calls.
    special: re.Pattern[str]
    #: Finds these, the markers, and the other added tokens that the chat template writes.
    every: re.Pattern[str]
    #: The tokenizer's normaliser, if it looks for some control tokens in normalised text.
    normalise: Callable[[str], str] | None
    #: Finds these tokens in normalised text.
    normalised: re.Pattern[str]

    def render(
        self, template: Template, messages: Sequence[Message], tools: Any, options: Mapping[str, Any]
    ) -> Rendered:
        """What ``template`` makes of copies of the three: templates may change what they are given.

        Raises:
            InvalidValue: it cannot be told where control tokens are spelled.
        """
        put = _StandIns(self)
        text = template(
            [
                {
                    key: put.into(
                        value,
                        f"messages[{index}].{key}",
                        self.special if message.get("role") in _OWN_MARKERS else self.every,
                    )
                    for key, value in message.items()
                }
                for index, message in enumerate(messages)
            ],
            put.into(tools, "tools", self.every),
            put.into(dict(options), "chat_template_kwargs", self.every),
        )
        return put.taken_out(text)

    def as_text(
        self, tokenizer: Any, rendered: Rendered, tokens: Sequence[int], offsets: Sequence[Range]
    ) -> tuple[list[int], list[Range]]:
        """``tokens`` and their characters, with the tokens of its characters for each control token that
        contents spell. Raises InvalidValue if the tokenizer has no others for them."""
        texts: dict[str, list[int]] = {}
        found: list[int] = []
        places: list[Range] = []
        at = 0
        for token, (start, end) in zip(tokens, offsets, strict=True):
            while at < len(rendered.spelled) and rendered.spelled[at][1] <= start:
                at += 1
            if token in self.ids and at < len(rendered.spelled) and rendered.spelled[at][0] < end:
                shown = rendered.text[start:end]
                if shown not in texts:
                    texts[shown] = self._plain(tokenizer, shown, rendered.where)
                found += texts[shown]
                places += [(start, end)] * len(texts[shown])
            else:
                found.append(token)
                places.append((start, end))
        return found, places

    def _plain(self, tokenizer: Any, text: str, where: str) -> list[int]:
        """Tokens that decode to ``text``, no control token among them."""
        parts = []
        rest = text
        while match := self.every.search(rest):
            # No control token has one character, and without its first it is none.
            parts.append(rest[: match.start() + 1])
            rest = rest[match.start() + 1 :]
        parts.append(rest)
        encoded = [t for part in parts if part for t in tokenizer.encode(part, add_special_tokens=False)]
        # A tokenizer that puts a space before everything still has each character.
        characters = tokenizer.convert_tokens_to_ids(list(text))
        for ids in (encoded, characters):
            if None not in ids and self.ids.isdisjoint(ids) and tokenizer.decode(ids) == text:
                return list(ids)
        raise InvalidValue(f"This model's tokenizer has no text tokens for {text!r}.", param=where)


@dataclass(slots=True)
class _StandIns:
    """Words in place of the control tokens that contents spell, which no template takes for anything else."""

    controls: ControlTokens
    # Letters and digits: nothing that JSON or HTML escapes or that a template trims.
    word: str = field(default_factory=lambda: f"control{secrets.token_hex(8)}n")
    spelled: list[str] = field(default_factory=list)
    where: str = ""

    def into(self, value: Any, where: str, pattern: re.Pattern[str]) -> Any:
        """A copy of ``value`` with a word for each control token that ``pattern`` finds."""
        match value:
            case str():
                self._check(value, where)
                return pattern.sub(functools.partial(self._stand_in, where), value)
            case list() | tuple():
                return [self.into(one, where, pattern) for one in value]
            case dict():
                return {
                    self.into(key, where, pattern): self.into(one, where, pattern)
                    for key, one in value.items()
                }
        return value

    def taken_out(self, text: str) -> Rendered:
        """``text`` with the control tokens for their words."""
        if not self.spelled:
            return Rendered(text, [])
        pieces = re.split(f"{self.word}([0-9]+)n", text)
        if any(self.word in piece for piece in pieces[::2]):
            raise InvalidValue(
                "The chat template cuts a control token that is spelled here.", param=self.where
            )
        ranges: list[Range] = []
        at = 0
        for index, piece in enumerate(pieces):
            if index % 2:
                pieces[index] = piece = self.spelled[int(piece)]
                ranges.append((at, at + len(piece)))
            at += len(piece)
        return Rendered("".join(pieces), ranges, self.where)

    def _stand_in(self, where: str, match: re.Match[str]) -> str:
        self.where = self.where or where
        self.spelled.append(match.group())
        return f"{self.word}{len(self.spelled) - 1}n"

    def _check(self, text: str, where: str) -> None:
        controls = self.controls
        if controls.normalise is None:
            return
        normal = controls.normalised.findall(controls.normalise(text))
        if len(normal) > len(controls.every.findall(text)):
            raise InvalidValue(
                f"This model's tokenizer would read the control token {normal[0]!r} in this text.",
                hint="Leave out what looks like it.",
                param=where,
            )


@functools.lru_cache(maxsize=2)
def control_tokens(tokenizer: Any) -> ControlTokens:
    """The control tokens of an mlx-lm tokenizer. Those of the last two are remembered."""
    whole = getattr(tokenizer, "_tokenizer", tokenizer)
    # One character cannot be written otherwise, and means nothing to a template.
    added = {i: t for i, t in getattr(whole, "added_tokens_decoder", {}).items() if len(t.content) > 1}
    markers = {
        getattr(tokenizer, name, None)
        for name in ("think_start", "think_end", "tool_call_start", "tool_call_end")
    }
    source = "".join(named(getattr(tokenizer, "chat_template", None)).values())
    control = {
        i: token
        for i, token in added.items()
        if token.special
        or token.content in markers
        or (token.content in source and _MARKUP.fullmatch(token.content))
    }
    normaliser: Any = getattr(getattr(whole, "backend_tokenizer", None), "normalizer", None)
    loose = [t.content for t in control.values() if t.normalized] if normaliser is not None else []
    return ControlTokens(
        frozenset(control),
        _finds(t.content for t in control.values() if t.special and t.content not in markers),
        _finds(t.content for t in control.values()),
        normaliser.normalize_str if loose else None,
        _finds(normaliser.normalize_str(text) for text in loose),
    )


def _finds(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of ``texts``."""
    return re.compile("|".join(re.escape(t) for t in sorted(set(texts), key=len, reverse=True)) or r"(?!)")
