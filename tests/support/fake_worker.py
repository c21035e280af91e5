"""A worker that misbehaves in the way its first argument names; started in the real one's place."""

from __future__ import annotations

import signal
import socket
import sys
import time

from msgspec.structs import replace

from fleetd.control.model_facts import MeasuredSpeed, ModelShape, StateSizes
from fleetd.engine import protocol
from fleetd.engine.protocol import (
    Accepted,
    Delta,
    Finished,
    Generate,
    Heartbeat,
    LoadFailed,
    Loading,
    MeasuredAgain,
    Ready,
    Shutdown,
    Tokenized,
    Usage,
)

READY = Ready(
    "cpu", ModelShape("fake", 1, 64, "float32", 1, StateSizes(1)), 8, 1, True, False, False, 0.0, {}
)


def main(behaviour: str, fd: int) -> None:
    link = socket.socket(fileno=fd)
    commands = protocol.commands()
    inbox: list[object] = []

    def send(*reports: protocol.Report) -> None:
        link.sendall(b"".join(protocol.encode(r) for r in reports))

    def request() -> str:
        while True:
            while not inbox:
                data = link.recv(1 << 16)
                if not data:
                    sys.exit(0)
                inbox.extend(commands.feed(data))
            command = inbox.pop(0)
            if isinstance(command, Generate):
                return command.id
            if isinstance(command, Shutdown):
                sys.exit(0)

    def hang() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    match behaviour:
        case "exits at once":
            sys.exit(7)
        case "refuses, then lives on":
            send(LoadFailed("out_of_memory", "It does not fit.", "Try less."))
            link.close()
            hang()
        case "hangs while loading":
            send(Loading("reading", 1, 2))
            hang()
        case "garbage while loading":
            link.sendall(b"\x00\x00\x00\x05hello")
            hang()
        case "not UTF-8":
            link.sendall(b"\x00\x00\x00\x0a\x81\xa4type\xa3\xff\xfe\xfd")
            hang()
        case "long line on stderr":
            sys.stderr.write("x" * 300_000)
            sys.stderr.flush()
    ready = replace(READY, device="cuda") if behaviour == "says nothing on a GPU" else READY
    send(Loading("reading", 1, 2), ready, Heartbeat(0))
    name = request()
    match behaviour:
        case "garbage":
            link.sendall(b"\x00\x00\x00\x05hello")
            hang()
        case "oversized frame":
            link.sendall(b"\xff\xff\xff\xff")
            hang()
        case "half a frame":
            link.sendall(protocol.encode(Accepted(name, 1))[:-3])
            sys.exit(0)
        case "accepts one":
            send(Accepted(name, 1))
            hang()
        case "tokenizes, then computes for others":
            send(Tokenized(name, 5))
            hang()
        case "says nothing" | "says nothing on a GPU":
            hang()
        case "beats without progress":
            send(Accepted(name, 1))
            while True:
                send(Heartbeat(3, decoding=1))
                time.sleep(0.02)
        case "waits for others, then hangs":
            send(Accepted(name, 1), *[Heartbeat(3, prefilling=1, blocked=True)] * 3)
            hang()
        case "closes its socket and lives on":
            send(Accepted(name, 1))
            link.close()
            hang()
        case "floods":
            send(Accepted(name, 1))
            while True:
                try:
                    send(*[Delta(name, "x" * 100)] * 500)
                except OSError:
                    sys.exit(0)
        case "others' events":
            send(Accepted("nobody", 1), Delta("nobody", "secret"), Accepted(name, 1), Finished(name, "stop"))
            send(Finished(name, "stop"), Finished("nobody", "stop"))
            request()
        case "is wrong about the first":
            send(Accepted(name, 1), Finished(name, "stop", Usage(1, -128)))
            answered = request()
            send(Accepted(answered, 1), Finished(answered, "stop"))
            while True:
                for command in commands.feed(link.recv(1 << 16)):
                    if isinstance(command, Shutdown):
                        sys.exit(0)
        case "measures again":
            speed = MeasuredSpeed(500.0, 40.0, 1e-6, 0.01)
            send(Accepted(name, 1), Finished(name, "stop"), MeasuredAgain(speed))
            hang()
        case "writes to the disk":
            # And more of it once it is told to end.
            send(Accepted(name, 1), Heartbeat(1, disk_written_bytes=700, disk_dropped=1))
            send(Finished(name, "stop"))
            while not any(isinstance(command, Shutdown) for command in commands.feed(link.recv(1 << 16))):
                pass
            send(Heartbeat(1, disk_written_bytes=1200, disk_dropped=2))
            sys.exit(0)
        case "deaf to shutdown":
            send(Accepted(name, 1), Finished(name, "stop"))
            hang()
        case _:
            while True:
                send(Accepted(name, 1), Finished(name, "stop"))
                name = request()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[sys.argv.index("--fd") + 1]))
