"""What a block of keys and values is called: a hash over everything that decides its bytes.

Each name covers the one before it, so a name stands for all tokens from the prompt's first to the block's
last. Names are the same on every machine that would compute the same bytes; what lies on a disk is called
otherwise (``MachineKey.file_name``), or a reader of the disk could try which prompts were asked.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fleetd import limits

_LENGTH = struct.Struct("<Q")
_TOKENS = struct.Struct(f"<{limits.CACHE_BLOCK_TOKENS}i")
# With rows of images, whose numbers are longer.
_LONG = struct.Struct(f"<{limits.CACHE_BLOCK_TOKENS}q")
_LONG_FROM = 2**31


@dataclass
class LateBasis:
    """A model's basis from the moment on at which its digest is known: as a rule at the load, else as soon as
    its files are hashed. ``find`` gives b"" until then; ``look`` calls it, on any thread."""

    find: Callable[[], bytes]
    value: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        with suppress(OSError):
            self.value = self.value or self.find()


def names(basis: bytes, namespace: str, tokens: Sequence[int]) -> list[bytes]:
    """The name of each whole block of ``tokens``, 32 bytes each, the first one first.

    Args:
        basis: the model's digest, the device, the libraries: equal where the same tokens give the same bytes.
        namespace: kept apart from others, whatever the tokens.
    """
    head = namespace.encode()
    before = hashlib.sha256(b"fleetd kv 1" + _LENGTH.pack(len(basis)) + basis + head).digest()
    found: list[bytes] = []
    for start in range(0, whole_blocks(len(tokens)) * limits.CACHE_BLOCK_TOKENS, limits.CACHE_BLOCK_TOKENS):
        block = tokens[start : start + limits.CACHE_BLOCK_TOKENS]
        form = _TOKENS if max(block) < _LONG_FROM else _LONG
        before = hashlib.sha256(before + form.pack(*block)).digest()
        found.append(before)
    return found


def state_name(name: bytes) -> bytes:
    """What a snapshot at the end of the block of this name is called: of what a model keeps besides rows."""
    return hashlib.sha256(b"state " + name).digest()


def kept_as(name: bytes, *, local_only: bool) -> bytes:
    """Under which name a block lies on this machine. A name that another machine asks for is never that of a
    prompt that may not leave this one, whatever it asks."""
    return hashlib.sha256((b"local only " if local_only else b"fleet ") + name).digest()


def whole_blocks(tokens: int) -> int:
    """Blocks that so many tokens fill."""
    return tokens // limits.CACHE_BLOCK_TOKENS
