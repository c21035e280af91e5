"""Images of one conversation: where they stand in its prompt, and the rows that stand for tokens there.

    messages with images ──marks──► template ──parts──► text with placeholders ──► what stands for each image
    tokens ──► places of rows ──► the prefix cache's numbers for them, by the images' content

A chat template is given an image as a part of a message's content, as its makers have it, and writes a
placeholder. What stands in its place in the text has one token for each row.

    file ──► pixels ──► rows ──► nothing, once a prefill is behind them

A prompt that waits for memory has its files only, as it came; an image is decoded again then.
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

from fleetd import limits
from fleetd.engine.protocol import IMAGES, ImageList, Message
from fleetd.engine.vision.image_file import read_image
from fleetd.engine.vision.image_reader import ImagePatches, ImageReader
from fleetd.errors import BadRequest, InvalidValue
from fleetd.text.decoding import from_plain

# Above the numbers of all tokens, and of tokens with their positions (``slot_tokens``).
_ABOVE = 1 << 62


@dataclass(slots=True)
class _PromptImage:
    """One image, as far as it has come.

    ``file``: until it is read. ``patches``: until then, unless the prompt has waited. ``rows``: until a
    prefill is behind them.
    """

    file: bytes
    digest: bytes
    patches: ImagePatches | None
    # Of rows in the prompt, and what stands for the image in its text.
    count: int
    text: str
    # Bytes of its pixels and of its rows, of which there are either, and of the pass that makes rows of them.
    waits_bytes: int
    pass_bytes: int
    rows: mx.array | None = None
    over: bool = False

    def let_go(self) -> None:
        """Nothing of it is needed any more."""
        self.file, self.patches, self.rows, self.over = b"", None, None, True


@dataclass(slots=True)
class PromptImages:
    """The images of a conversation, in the order in which it has them.

    ``word``: what marks an image in a content until the template is given it; nothing else has it.
    """

    reader: ImageReader
    images: list[_PromptImage] = field(default_factory=list)
    word: str = field(default_factory=lambda: f"image{secrets.token_hex(8)}n")
    # Of the work for rows, that are done.
    steps: int = 0
    # Ascending places of rows in the prompt, all images' one after the other.
    places: list[int] = field(default_factory=list)
    # The image that is being read, if one is.
    _reading: tuple[_PromptImage, Generator[None, None, mx.array]] | None = None

    @classmethod
    def of(
        cls, messages: Sequence[Message], reader: ImageReader, seen: Callable[[], None] = lambda: None
    ) -> tuple[list[Message], PromptImages | None]:
        """Messages with a mark for each image, and the images; None if there are none.

        Args:
            seen: called after each image, which may take seconds.

        Raises InvalidValue, PayloadTooLarge: from ``read_image``; InvalidValue also for too many; and what
        ``seen`` raises.
        """
        found = cls(reader)
        marked = [
            found._marked(message, f"messages[{index}]", seen) for index, message in enumerate(messages)
        ]
        return marked, found if found.images else None

    def _marked(self, message: Message, where: str, seen: Callable[[], None]) -> Message:
        if IMAGES not in message:
            return message
        content = message.get("content") or ""
        pieces: list[str] = []
        at = 0
        for chars, file in _images(message, where):
            if len(self.images) == limits.IMAGES:
                raise InvalidValue(f"{where}: these are more than {limits.IMAGES} images.", param=where)
            pieces += [content[at:chars], f"{self.word}{len(self.images)}n"]
            at = chars
            self.images.append(self._read(file, where))
            seen()
        return without_images(message) | {"content": "".join([*pieces, content[at:]])}

    def _read(self, file: bytes, where: str) -> _PromptImage:
        patches = self.reader.patches(read_image(file, where))
        return _PromptImage(
            file,
            _digest(patches.pixels),
            patches,
            patches.rows,
            patches.text,
            max(patches.pixels.nbytes, self.reader.row_bytes(patches)),
            self.reader.pass_bytes(patches),
        )

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

    def shown(self, message: Message) -> Message:
        """A message with what stands for each image in the place of its mark."""
        content = message.get("content")
        if not isinstance(content, str) or self.word not in content:
            return message
        pieces = re.split(f"{self.word}([0-9]+)n", content)
        pieces[1::2] = [self.images[int(image)].text for image in pieces[1::2]]
        return message | {"content": "".join(pieces)}

    def shown_marks(
        self, messages: Sequence[Message], marks: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """``marks``, (message, characters of its content), as they are in what ``shown`` gives of messages.
        One where an image stands is behind it."""
        lengths = iter([len(each.text) for each in self.images])
        before = [[(at, next(lengths)) for at, _ in message.get(IMAGES, ())] for message in messages]
        return [
            (message, chars + sum(length for at, length in before[message] if at <= chars))
            for message, chars in marks
            if message < len(messages)
        ]

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
        shown = (self.images[image].text for image in order)
        return pieces[0] + "".join(stands + piece for stands, piece in zip(shown, pieces[1:], strict=True))

    # ---- tokens ----------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> None:
        """Find the rows' places in the prompt. Raises BadRequest if they are not as many as rows, or the last
        token is one: it is left to decoding, which knows no rows."""
        self.places = [at for at, token in enumerate(tokens) if token == self.reader.row_token]
        wanted = sum(each.count for each in self.images)
        if len(self.places) != wanted:
            raise BadRequest(
                f"The prompt has {len(self.places)} places for {wanted} rows of images.",
                hint="The model's tokenizer and its config do not belong together; choose another copy.",
                param="model",
            )
        if self.places[-1] == len(tokens) - 1:
            raise BadRequest(
                "The model's chat template ends with an image, and leaves nothing to answer from.",
                hint="Send text behind the image, or choose another model.",
                param="messages",
            )

    def keys(self, tokens: Sequence[int]) -> list[int]:
        """A number for each token: for a row one that its image's content decides, 62 bits of a hash. Two
        prompts whose numbers begin alike have the same keys and values there."""
        found = list(tokens)
        for image, places in self._by_image():
            stream = hashlib.shake_128(image.digest).digest(8 * len(places))
            numbers = np.frombuffer(stream, dtype="<u8") % _ABOVE + _ABOVE
            for place, number in zip(places, numbers.tolist(), strict=True):
                found[place] = number
        return found

    def _by_image(self) -> Iterator[tuple[_PromptImage, list[int]]]:
        """Each image, and the places of its rows."""
        end = 0
        for each in self.images:
            first, end = end, end + each.count
            yield each, self.places[first:end]

    # ---- memory ----------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Memory that images take, or will take until a prefill is behind them. They are read one at a time,
        and each waits as pixels, then as rows."""
        left = [each for each in self.images if not each.over]
        reading = max((each.pass_bytes for each in left if each.rows is None), default=0)
        return reading + sum(each.waits_bytes for each in left)

    def wait(self) -> None:
        """Let the pixels go: the prompt has to wait. They are made of the files again when they are needed,
        which takes no more than WORKING_BYTES."""
        for each in self.images:
            each.patches = None

    def begin_behind(self, tokens: int) -> None:
        """Let those images go whose rows are among the prompt's first ``tokens``."""
        for image, places in self._by_image():
            if places[-1] < tokens:
                image.let_go()

    def end(self) -> None:
        """Let all go."""
        self._reading = None
        for each in self.images:
            each.let_go()

    # ---- prefill ---------------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """[first, end) of the prompt's tokens that see each other both ways, ascending."""
        if not self.reader.both_ways:
            return []
        return [(places[0], places[-1] + 1) for _, places in self._by_image()]

    def embedded(
        self, embed: Callable[[mx.array], mx.array], tokens: mx.array, first: int
    ) -> mx.array | None:
        """What ``embed`` gives (1, n, D) for a chunk's tokens (1, n), the prompt's from ``first`` on, with
        rows of images, which are read, in their places; None if the chunk has none."""
        end = first + tokens.shape[1]
        chunk: mx.array | None = None
        for image, places in self._by_image():
            inside = [row for row, place in enumerate(places) if first <= place < end]
            if inside:
                if image.rows is None:
                    raise RuntimeError("an image is not read yet whose rows stand in this chunk")
                chunk = embed(tokens) if chunk is None else chunk
                rows = image.rows[inside[0] : inside[-1] + 1].astype(chunk.dtype)
                chunk[:, mx.array([places[row] - first for row in inside])] = rows[None]
            if places[-1] < end:
                image.let_go()
        return chunk

    def read_on(self, first: int, end: int) -> bool:
        """Take a step of reading the first image that the prompt's tokens [first, end) need and that is not
        read yet. False if there is none."""
        for image, places in self._by_image():
            if image.over or image.rows is not None or places[0] >= end or places[-1] < first:
                continue
            self.steps += 1
            _, reading = self._reading = self._reading or (image, self._reading_of(image))
            try:
                next(reading)
            except StopIteration as ended:
                mx.eval(ended.value)
                image.rows, self._reading = ended.value, None
            return True
        return False

    def _reading_of(self, image: _PromptImage) -> Generator[None, None, mx.array]:
        patches = image.patches or self.reader.patches(read_image(image.file, "messages"))
        image.file, image.patches = b"", None
        return self.reader.reading(patches)


def without_images(message: Message) -> Message:
    """A message without its images; its text is the same."""
    return {key: value for key, value in message.items() if key != IMAGES}


def _digest(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """A hash of pixels, and not of the file: another version of a decoder may make others of it."""
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


def _images(message: Message, where: str) -> ImageList:
    """A message's images. Raises InvalidValue: another machine sent something else."""
    try:
        found = from_plain(message[IMAGES], ImageList)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"{where}: its images are not understood: {error}.", param=where) from error
    if sorted(chars for chars, _ in found) != [chars for chars, _ in found]:
        raise InvalidValue(f"{where}: its images are in no order.", param=where)
    return found
