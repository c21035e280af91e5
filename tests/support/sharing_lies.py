"""What a lying helper makes of its frames, and a home that finds it wherever it looks."""

from __future__ import annotations

import random
from typing import Any

from fleetd.engine.streams.frames import FrameHeader

# What is sent instead of a frame.
Frames = list[tuple[FrameHeader, bytes]]


class Fixed(random.Random):
    """Draws as late a token as there is, and checks it whatever that takes."""

    def randint(self, a: int, b: int) -> int:
        return b

    def random(self) -> float:
        return 0.0


def opposite(numbers: Any) -> None:
    numbers *= -1
