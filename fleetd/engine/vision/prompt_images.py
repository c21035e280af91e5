"""Images of one conversation: where they stand in its prompt, and the rows that stand for tokens there.

    messages with images ──marks──► template ──parts──► text with placeholders ──► what stands for each image
    tokens ──► places of rows ──► the prefix cache's numbers for them, by the images' content

A chat template is given an image as a part of a message's content, as its makers have it, and writes a
placeholder. What stands in its place in the text has one token for each row.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from fleetd.engine.protocol import IMAGES, ImageList, Message
from fleetd.engine.vision.image_file import read_image
from fleetd.engine.vision.image_reader import ImagePatches, ImageReader
from fleetd.errors import BadRequest, InvalidValue
from fleetd.text.decoding import from_plain

# Above the numbers of all tokens, and of tokens with their positions (``slot_tokens``).
_ABOVE = 1 << 62


@dataclass(slots=True)
class PromptImages:
    """The images of a conversation, in the order in which it has them.

    ``word``: what marks an image in a content until the template is given it; nothing else has it.
    """

    reader: ImageReader
    patches: list[ImagePatches]
    digests: list[bytes]
    word: str = field(default_factory=lambda: f"image{secrets.token_hex(8)}n")
    # Of the work for rows, that are done.
    steps: int = 0
    # Ascending places of rows in the prompt, all images' one after the other.
    places: list[int] = field(default_factory=list)
    # Rows of images that were read, by the image; let go once a prefill is behind them.
    _rows: dict[int, mx.array] = field(default_factory=dict)
    # Those that are being read.
    _readings: dict[int, Generator[None, None, mx.array]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, messages: Sequence[Message], reader: ImageReader
    ) -> tuple[list[Message], PromptImages | None]:
        """Messages with a mark for each image, and the images; None if there are none.

        Raises InvalidValue, PayloadTooLarge: from ``read_image``.
        """
        found = cls(reader, [], [])
        marked = [found._marked(message, f"messages[{index}]") for index, message in enumerate(messages)]
        return marked, found if found.patches else None

    def _marked(self, message: Message, where: str) -> Message:
        if IMAGES not in message:
            return message
        content = message.get("content") or ""
        pieces: list[str] = []
        at = 0
        for chars, data in _images(message, where):
            pieces += [content[at:chars], f"{self.word}{len(self.patches)}n"]
            at = chars
            self.patches.append(self.reader.patches(read_image(data, where)))
            self.digests.append(hashlib.sha256(data).digest())
        plain = {key: value for key, value in message.items() if key != IMAGES}
        return plain | {"content": "".join([*pieces, content[at:]])}

    # ---- text ------------------------------------------------------------------------------------------

    def in_parts(self, messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """Messages whose marks are parts of type ``image``, and the images in their order there."""
        order: list[int] = []
        return [self._in_parts(message, order) for message in messages], order

    def _in_parts(self, message: Message, order: list[int]) -> Message:
        content = message.get("content")
        if not isinstance(content, str) or self.word not in content:
            return message
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(re.split(f"{self.word}([0-9]+)n", content)):
            if number % 2:
                parts.append({"type": "image"})
                order.append(int(piece))
            elif piece:
                parts.append({"type": "text", "text": piece})
        return message | {"content": parts}

    def put_into(self, text: str, order: list[int], model: str) -> str:
        """``text`` with what stands for each image in the place of its placeholder.

        Raises BadRequest: the template shows no such places, or not as many, or in another order.
        """
        pieces = text.split(self.reader.placeholder)
        if len(pieces) != len(order) + 1 or sorted(order) != order:
            raise BadRequest(
                f"{model}'s chat template shows {len(pieces) - 1} of {len(order)} images.",
                hint="Send images in messages of the user, or choose another model.",
                param="messages",
            )
        shown = (self.patches[image].text for image in order)
        return pieces[0] + "".join(stands + piece for stands, piece in zip(shown, pieces[1:], strict=True))

    # ---- tokens ----------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> None:
        """Find the rows' places in the prompt. Raises BadRequest if they are not as many as rows."""
        self.places = [at for at, token in enumerate(tokens) if token == self.reader.row_token]
        wanted = sum(each.rows for each in self.patches)
        if len(self.places) != wanted:
            raise BadRequest(
                f"The prompt has {len(self.places)} places for {wanted} rows of images.",
                hint="The model's tokenizer and its config do not belong together; choose another copy.",
                param="model",
            )

    def keys(self, tokens: Sequence[int]) -> list[int]:
        """A number for each token: for a row one that its image's content decides, 62 bits of a hash. Two
        prompts whose numbers begin alike have the same keys and values there."""
        found = list(tokens)
        for image, places in enumerate(self._by_image()):
            stream = hashlib.shake_128(self.digests[image]).digest(8 * len(places))
            numbers = np.frombuffer(stream, dtype="<u8") % _ABOVE + _ABOVE
            for place, number in zip(places, numbers.tolist(), strict=True):
                found[place] = number
        return found

    def _by_image(self) -> Iterator[list[int]]:
        """The places of each image's rows."""
        end = 0
        for each in self.patches:
            first, end = end, end + each.rows
            yield self.places[first:end]

    # ---- prefill ---------------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """[first, end) of the prompt's tokens that see each other both ways, ascending."""
        if not self.reader.both_ways:
            return []
        return [(places[0], places[-1] + 1) for places in self._by_image()]

    def embedded(
        self, embed: Callable[[mx.array], mx.array], tokens: mx.array, first: int
    ) -> mx.array | None:
        """What ``embed`` gives (1, n, D) for a chunk's tokens (1, n), the prompt's from ``first`` on, with
        rows of images, which are read, in their places; None if the chunk has none."""
        end = first + tokens.shape[1]
        chunk: mx.array | None = None
        for image, places in enumerate(self._by_image()):
            inside = [row for row, place in enumerate(places) if first <= place < end]
            if inside:
                chunk = embed(tokens) if chunk is None else chunk
                rows = self._rows[image][inside[0] : inside[-1] + 1].astype(chunk.dtype)
                at = mx.array([places[row] - first for row in inside])
                chunk[:, at] = rows[None]
            if places[-1] < end:
                self._rows.pop(image, None)
        return chunk

    def read_on(self, first: int, end: int) -> bool:
        """Read a layer's worth of the first image that the prompt's tokens [first, end) need and that is not
        read yet. False if there is none."""
        for image, places in enumerate(self._by_image()):
            if image in self._rows or places[0] >= end or places[-1] < first:
                continue
            self.steps += 1
            reading = self._readings.setdefault(image, self.reader.reading(self.patches[image]))
            try:
                next(reading)
            except StopIteration as ended:
                mx.eval(ended.value)
                self._rows[image] = ended.value
                del self._readings[image]
            return True
        return False


def _images(message: Message, where: str) -> ImageList:
    """A message's images. Raises InvalidValue: another machine sent something else."""
    try:
        found = from_plain(message[IMAGES], ImageList)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{where}: its images are not understood: {error}.", param=where) from error
    if sorted(chars for chars, _ in found) != [chars for chars, _ in found]:
        raise InvalidValue(f"{where}: its images are in no order.", param=where)
    return found
