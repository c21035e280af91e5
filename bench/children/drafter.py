"""A drafter that replays texts it has seen: another machine's worker as far as an answer can tell.

    python -m bench.children.drafter FD          sockets come over the channel FD, each with its ``Order``

It runs the workers' own drafter, frames and sealed streams; only its model is played. The first time that a
text comes it is learnt, from what is committed. From then on each guess takes ``step_s`` and is wrong with
the chance ``wrong``; half of the mistakes have the truth as their runner-up.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from fleetd.engine.speculation.drafter import DraftWriter
from fleetd.engine.speculation.lookahead import Guess, Lookahead
from fleetd.engine.streams.frames import Place
from fleetd.engine.streams.pipe import SocketPipe
from fleetd.errors import PeerLost
from fleetd.sealed import handoff

CONTEXT, VOCABULARY = 8192, 49152
# A text is known by its beginning.
_KNOWN_BY = 8


class Order(msgspec.Struct, frozen=True):
    key: bytes
    step_s: float = 0.0
    wrong: float = 0.0
    ahead: int = 32
    detours: int = 4


@dataclass
class Replay:
    """``drafter.Guesser``."""

    order: Order
    learnt: dict[tuple[int, ...], list[int]]
    text: list[int] = field(default_factory=list)
    held: int = 0

    def committed(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def missing(self, path: Sequence[int]) -> int:
        return 0

    def prefill(self, path: Sequence[int], most: int) -> None:
        raise AssertionError("nothing is missing")

    def guess(self, path: Sequence[int]) -> Guess:
        if self.order.step_s:
            time.sleep(self.order.step_s)
        at = len(self.text) + len(path)
        known = self.learnt.get(tuple(self.text[:_KNOWN_BY]), self.text)
        right = known[at] if at < len(known) else 1
        chance = random.Random(at)
        miss, other = chance.random() < self.order.wrong, (right + 1) % VOCABULARY
        if not miss:
            return Guess(right, other, 1 - self.order.wrong, self.order.wrong / 2)
        runner_up = right if chance.random() < 0.5 else (right + 2) % VOCABULARY
        return Guess(other, runner_up, 1 - self.order.wrong, self.order.wrong / 2)


def follow(sock: socket.socket, order: Order, learnt: dict[tuple[int, ...], list[int]]) -> None:
    moved, model = threading.Event(), Replay(order, learnt)

    def connect(place: Place) -> SocketPipe:
        return SocketPipe(sock, order.key, "acceptor", place=place, wake=moved.set, eager=True)

    look = Lookahead(ahead=order.ahead, detours=order.detours)
    drafter = DraftWriter(model, connect, look, context_tokens=CONTEXT, vocab_size=VOCABULARY)
    try:
        while True:
            moved.clear()
            if drafter.ready:
                drafter.step(256)
            else:
                moved.wait()
    except PeerLost:
        pass
    finally:
        drafter.close()
        beginning = tuple(model.text[:_KNOWN_BY])
        if len(model.text) > len(learnt.get(beginning, ())):
            learnt[beginning] = model.text


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    learnt: dict[tuple[int, ...], list[int]] = {}
    while True:
        try:
            body, sock = handoff.receive(channel)
        except EOFError:
            return
        assert sock is not None
        order = msgspec.msgpack.decode(body, type=Order)
        threading.Thread(target=follow, args=(sock, order, learnt), daemon=True).start()


if __name__ == "__main__":
    main()
