"""From strings and token ids to what a model reads: what is put around a text, and how long it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from fleetd import limits
from fleetd.engine.protocol import EmbedTexts, RerankTexts
from fleetd.engine.vectors.token_rows import TokenRow
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    InvalidValue,
    ModelCorrupt,
    ModelUnsupported,
    UnsupportedParameter,
)

_SHORTER = "Cut it into parts, or leave out its end with truncate."


@dataclass(frozen=True)
class QuestionFrame:
    """Tokens that stand before and behind what a reranker is asked."""

    before: list[int]
    after: list[int]


@dataclass(frozen=True)
class TextReader:
    """A model's tokenizer, with what bounds its texts."""

    tokenizer: Tokenizer
    # Token ids that the model knows are below this.
    vocab_size: int
    # Tokens of the longest text, what is put around it included.
    longest: int

    @classmethod
    def of(cls, path: Path, vocab_size: int, longest: int) -> TextReader:
        """Raises ModelUnsupported if the model has no tokenizer.json, ModelCorrupt if that is not one."""
        file = path / "tokenizer.json"
        if not file.exists():
            raise ModelUnsupported(
                f"{path.name} has no tokenizer.json.", hint="Choose another copy of the model."
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ModelCorrupt(f"{file} cannot be read: {str(error)[:200]}.") from error
        # Publishers leave bounds of their own in the file.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # No text can say what only a model's format says: the end of a document, or of a turn.
        tokenizer.encode_special_tokens = True
        return cls(tokenizer, vocab_size, longest)

    def frame(self, before: str, after: str) -> QuestionFrame:
        """A frame of a model's own words, in which special tokens are what they look like."""
        own = Tokenizer.from_str(self.tokenizer.to_str())
        own.encode_special_tokens = False
        return QuestionFrame(*(own.encode(text, add_special_tokens=False).ids for text in (before, after)))

    def token(self, text: str) -> int:
        """The id of a token. Raises ModelUnsupported if there is none of this text."""
        found = self.tokenizer.token_to_id(text)
        if found is None:
            raise ModelUnsupported(f"The model has no token for {text!r}.")
        return int(found)

    def rows(self, request: EmbedTexts, prompt: str) -> list[TokenRow]:
        """The texts of a request, with ``prompt`` before those that are strings.

        Raises (no number of a text is told: these are a part of what a client has sent):
            ContextLengthExceeded: one is too long, and its end may not be left out.
            BadRequest: there are too many, one is empty, or a token id is unknown.
        """
        _check_count(len(request.texts), "texts", "input")
        strings = [
            prompt + _bounded(text, request.truncate, "input")
            for text in request.texts
            if isinstance(text, str)
        ]
        encoded = iter(self._encoded(strings, "input"))
        rows = []
        for text in request.texts:
            if isinstance(text, str):
                row = TokenRow(self._whole(None, next(encoded), request.truncate).ids)
            else:
                row = TokenRow(self._checked(text, request.truncate))
            if not row.tokens:
                raise InvalidValue("A text is empty.", param="input")
            rows.append(row)
        return rows

    def pairs(self, request: RerankTexts) -> list[TokenRow]:
        """The query with each document, as a sequence classifier reads them. Raises as ``rows``."""
        if request.instruction:
            raise UnsupportedParameter("This model takes no instruction.", param="instruction")
        query = self._query(request)
        documents = self._encoded(
            [_bounded(text, request.truncate, "documents") for text in request.documents], "documents"
        )
        both = (self._whole(query, document, request.truncate) for document in documents)
        return [TokenRow(each.ids, each.type_ids) for each in both]

    def framed(self, request: RerankTexts, asked: str, frame: QuestionFrame) -> list[TokenRow]:
        """Each document behind ``asked``, which has the query, within a frame. Raises as ``rows``."""
        around = len(frame.before) + len(frame.after)
        self._query(request, within=around)
        room = self.longest - around
        rows = []
        # A word's token may begin with the space before it: what asks is tokenized with what is asked about.
        texts = [asked + _bounded(each, request.truncate, "documents") for each in request.documents]
        for text in self._encoded(texts, "documents"):
            self._check_length(len(text.ids), room, request.truncate, "documents")
            rows.append(TokenRow([*frame.before, *text.ids[:room], *frame.after]))
        return rows

    def _query(self, request: RerankTexts, *, within: int = 0) -> Encoding:
        """The query, tokenized. ``within``: tokens that stand around it and a document besides."""
        _check_count(len(request.documents), "documents", "documents")
        if len(request.query) > limits.VECTOR_TEXT_CHARS:
            raise ContextLengthExceeded(
                f"The query has {len(request.query)} characters; {limits.VECTOR_TEXT_CHARS} are the most.",
                param="query",
            )
        (query,) = self._encoded([request.query], "query")
        if len(query.ids) + self._special_pair + within >= self.longest:
            raise ContextLengthExceeded(
                f"The query has {len(query.ids)} tokens; {self.longest} are the most with a document.",
                param="query",
            )
        return query

    def _encoded(self, texts: Sequence[str], param: str) -> list[Encoding]:
        """Each text by itself, with nothing around it."""
        try:
            found: list[Encoding] = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise InvalidValue("A text has half of a surrogate pair.", param=param) from error
        return found

    def _whole(self, query: Encoding | None, text: Encoding, truncate: bool) -> Encoding:
        """A text with what the model's format puts around it, behind the query if there is one."""
        around = self._special if query is None else self._special_pair + len(query.ids)
        room = self.longest - around
        self._check_length(len(text.ids), room, truncate, "input" if query is None else "documents")
        if len(text.ids) > room:
            text.truncate(room)
        if query is None:
            return self.tokenizer.post_process(text, None, True)
        return self.tokenizer.post_process(query, text, True)

    def _check_length(self, tokens: int, room: int, truncate: bool, param: str) -> None:
        if tokens > room and not truncate:
            around = self.longest - room
            raise ContextLengthExceeded(
                f"A text has {tokens + around} tokens; this model reads {self.longest}.",
                hint=_SHORTER,
                param=param,
            )

    def _checked(self, ids: Sequence[int], truncate: bool) -> list[int]:
        self._check_length(len(ids), self.longest, truncate, "input")
        odd = next((token for token in ids if token >= self.vocab_size), None)
        if odd is not None:
            raise InvalidValue(
                f"A text has token {odd}; this model knows those below {self.vocab_size}.",
                param="input",
            )
        return list(ids[: self.longest])

    @cached_property
    def _special(self) -> int:
        return int(self.tokenizer.num_special_tokens_to_add(is_pair=False))

    @cached_property
    def _special_pair(self) -> int:
        return int(self.tokenizer.num_special_tokens_to_add(is_pair=True))


def _check_count(count: int, what: str, param: str) -> None:
    if count > limits.VECTOR_PART_TEXTS:
        raise BadRequest(f"{count} {what} are more than {limits.VECTOR_PART_TEXTS}.", param=param)


def _bounded(text: str, truncate: bool, param: str) -> str:
    """A text, or as much of it as can matter: tokenizing takes a hundred times a text's own memory."""
    if len(text) > limits.VECTOR_TEXT_CHARS and not truncate:
        raise ContextLengthExceeded(
            f"A text has {len(text)} characters; {limits.VECTOR_TEXT_CHARS} are the most.",
            hint=_SHORTER,
            param=param,
        )
    return text[: limits.VECTOR_TEXT_CHARS]
