"""Answers with tool calls as each family of models writes them, by hand: ``tool_corpus/FAMILY.toml``.

A case is the raw text of an answer and the parts that have to come of it. ``@FILE@`` stands for the text of a
file, ``@FILE_JSON@`` for the same inside of a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

from fleetd.engine.answer.answer_parts import Channel
from fleetd.engine.answer.call_formats import CALL_FORMATS
from fleetd.engine.answer.output_text import AnswerPiece, AnswerText
from fleetd.engine.answer.token_bytes import _byte_table
from fleetd.engine.protocol import ToolCall, ToolCallPiece

FOLDER = Path(__file__).parent / "tool_corpus"
FILE = "".join(f'def f{n}(x):\n    return {{"<a>": x["é"] - {n}}}  # \\d 日本\n\n' for n in range(12))
_STRING = {"type": "string"}
_PARAMETERS: dict[str, dict[str, Any]] = {
    "weather": {"city": _STRING, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    "now": {},
    "write_file": {"path": _STRING, "content": _STRING},
    "plan": {
        "steps": {"type": "array"},
        "options": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "ratio": {"type": "number"},
    },
}


def tools(*names: str) -> list[dict[str, Any]]:
    """Tools as templates know them; all of them if none is named."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": _PARAMETERS.get(name, {})},
            },
        }
        for name in names or _PARAMETERS
    ]


class CorpusCase(msgspec.Struct, frozen=True):
    """One answer."""

    name: str
    raw: str
    #: ("thinks", TEXT), ("says", TEXT) and ("calls", NAME, ARGUMENTS) in order.
    parts: list[tuple[str, ...]]
    #: The prompt opened a thought.
    opened: bool = False
    #: Its calls may be text up to the end of the answer.
    late: bool = False
    #: What an answer says without tools; None for the raw text behind the thought.
    toolless: str | None = None

    @property
    def bytes(self) -> bytes:
        return _filled(self.raw).encode()

    @property
    def expected(self) -> list[tuple[Any, ...]]:
        """The parts, arguments as values."""
        return [
            (kind, *texts) if kind != "calls" else (kind, texts[0], json.loads(_filled(texts[1])))
            for kind, *texts in self.parts
        ]


class Family(msgspec.Struct, frozen=True):
    """A family of models."""

    #: The name of its format: CALL_FORMATS.
    parser: str
    case: list[CorpusCase]
    #: The markers before and after a thought.
    think: tuple[str, str] | None = None
    #: Markers that say nothing.
    dropped: list[str] = []
    #: How its heads of channels are written, if it has some.
    heads: str | None = None

    def tokenizer(self, pieces: Sequence[bytes]) -> Any:
        """A byte-level tokenizer whose tokens stand for given bytes, with the family's markers."""
        form = CALL_FORMATS[self.parser]
        opener, closer = self.think or (None, None)
        return SimpleNamespace(
            detokenizer=BPEStreamingDetokenizer(_Pieces(pieces)),
            init_kwargs={"tool_parser_type": self.parser},
            has_thinking=self.think is not None,
            think_start=opener,
            think_end=closer,
            has_tool_calling=True,
            tool_call_start=form.start,
            tool_call_end=form.end,
            structural_markers=self.dropped,
            response_initial_state=self.heads,
        )


class CorpusAnswer:
    """What is told of an answer whose tokens are given pieces of bytes."""

    def __init__(
        self,
        family: Family,
        pieces: Sequence[bytes],
        offered: list[dict[str, Any]] | None,
        *,
        opened: bool = False,
        cut: bool = False,
        streams: bool = True,
    ) -> None:
        initial: Channel = "reasoning" if opened else "content"
        made = family.tokenizer(pieces)
        self.state = AnswerText("r", made, [], offered, initial=initial, call_pieces=streams)
        self.by_piece = [self.state.push(token) for token in range(len(pieces))]
        self.last = self.state.finish(cut=cut)

    @property
    def events(self) -> Iterator[AnswerPiece]:
        for events in (*self.by_piece, self.last):
            yield from events

    @property
    def told(self) -> list[tuple[Any, ...]]:
        """All that is told, in order and as text, without where its pieces ended: ("thinks", TEXT), ("says",
        TEXT), ("writes", INDEX, ARGUMENTS) while a call is written, and ("calls", NAME, ARGUMENTS)."""
        found: list[tuple[Any, ...]] = []
        before: tuple[Any, ...] = ()
        for each in self.events:
            if isinstance(each, ToolCall):
                key, text = ("calls", each.name), each.arguments
            elif isinstance(each, ToolCallPiece):
                key, text = ("writes", each.index), each.text
            else:
                key, text = ("says" if each.channel == "content" else "thinks",), each.text
            if not text:
                continue
            if key == before and key[0] != "calls":
                text = found.pop()[-1] + text
            found.append((*key, text))
            before = key
        return found

    @property
    def parts(self) -> list[tuple[Any, ...]]:
        """As ``CorpusCase.expected`` has them."""
        return [
            (*part[:-1], json.loads(part[-1])) if part[0] == "calls" else part
            for part in self.told
            if part[0] != "writes"
        ]

    @property
    def streamed(self) -> dict[int, str]:
        """The arguments that were told while they were written, by call."""
        found: dict[int, str] = {}
        for each in self.events:
            if isinstance(each, ToolCallPiece):
                found[each.index] = found.get(each.index, "") + each.text
        return found


_LETTERS = {byte: letter for letter, byte in _byte_table().items()}


class _Pieces:
    """A vocabulary of given pieces of bytes, as byte-level BPE writes them."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = ["".join(map(_LETTERS.__getitem__, piece)) for piece in pieces]

    def __len__(self) -> int:
        return len(self._pieces)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self._pieces[each] for each in ids]


def _filled(text: str) -> str:
    return text.replace("@FILE_JSON@", json.dumps(FILE, ensure_ascii=False)[1:-1]).replace("@FILE@", FILE)


def families() -> dict[str, Family]:
    return {
        path.stem: msgspec.toml.decode(path.read_bytes(), type=Family)
        for path in sorted(FOLDER.glob("*.toml"))
    }
