"""A daemon on a Unix socket that answers what the test tells it to."""

from __future__ import annotations

import json
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
FLEETCTL = [sys.executable, "-c", "import sys; from fleetctl.cli import main; sys.exit(main())"]
# `run("status", home=..., stdin=...)`, the fixture that starts fleetctl.
Run = Callable[..., "subprocess.CompletedProcess[str]"]

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 4242,
    "home": "/home",
    "socket": "/home/fleetd.sock",
    "http": {"host": "127.0.0.1", "port": 8114},
    "uptime_s": 7325.0,
    "ready": True,
    "draining": False,
    "default_model": "smollm2-135m",
    "machine": {
        "platform": "Linux x86_64",
        "cpu": "Test CPU",
        "cores": 2,
        "memory_bytes": 8_000_000_000,
        "available_bytes": 5_000_000_000,
        "tier": "tiny",
        "accelerator": "cpu",
    },
    "engines": [
        {
            "model": "smollm2-135m",
            "state": "ready",
            "stage": "",
            "done": 0,
            "total": 0,
            "device": "cpu",
            "shape": {"dtype": "float32", "weights_bytes": 538_000_000, "context_tokens": 8192},
            "memory_bytes": 600_000_000,
            "kv_bytes": 12_000_000,
            "kv_budget_bytes": 1_000_000_000,
            "prefix_bytes": 0,
            "prefix_entries": 0,
            "prefilling": 0,
            "decoding": 1,
            "waiting": 2,
            "steps": 99,
            "progress_age_s": 0.1,
            "idle_s": 0.0,
            "restarts": 0,
            "pid": 4243,
            "error": None,
        }
    ],
    "requests": {"running": 1, "waiting": 2, "completed": 1234, "failed": 0},
}

FLEET: dict[str, Any] = {
    "enabled": True,
    "node_id": "MINI",
    "short_id": "m1n1abc",
    "name": "mini",
    "host": "*",
    "port": 8115,
    "mdns": "running",
    "local_only": False,
    "pairing": False,
    "removed_by": "",
    "peers": [
        {
            "node_id": "STUDIO",
            "short_id": "k3f9a2b",
            "name": "studio",
            "state": "usable",
            "sees_prompts": True,
            "allowed_here": True,
            "allowed_by_fleet": True,
            "tier": "large",
            "memory_bytes": 256_000_000_000,
            "available_bytes": 210_400_000_000,
            "running": 1,
            "waiting": 2,
            "models": [
                {"name": "smollm2-135m", "state": "installed"},
                {"name": "mlx-community/Qwen3-32B-4bit", "state": "loaded"},
                {"name": "mlx-community/Qwen3-0.6B-4bit", "state": "loading"},
            ],
            "address": "192.168.1.7:8115",
            "rtt_ms": 0.42,
            "bytes_per_s": 1_150_000_000.0,
            "heard_s": 0.2,
            "paths": [{"host": "192.168.1.7", "port": 8115, "kind": "wired", "in_use": True}],
        },
        {
            "node_id": "AIR",
            "short_id": "q7w2e3r",
            "name": "air",
            "state": "unreachable",
            "reason": "No address of it answers: 192.168.1.9 was silent for 3 s.",
            "hint": "See that it is switched on and on this network.",
            "sees_prompts": False,
            "allowed_here": True,
            "allowed_by_fleet": False,
            "tier": "tiny",
            "memory_bytes": 16_000_000_000,
            "available_bytes": 0,
            "models": [],
            "rtt_ms": None,
            "bytes_per_s": None,
        },
    ],
    "neighbours": [
        {"node_id": "PRO", "short_id": "z9y8x7w", "name": "pro", "addresses": ["192.168.1.12:8115"]}
    ],
}


@dataclass
class Reply:
    """One scripted answer: JSON, or pieces of an event stream.

    In ``stream`` a str is sent as it is, a threading.Event is waited for, "drop" ends the connection without
    the closing chunk. ``gone`` is set when the client hangs up while the stream waits.
    """

    body: Any = None
    status: int = 200
    stream: Sequence[str | threading.Event] | None = None
    gone: threading.Event = field(default_factory=threading.Event)
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    method: str
    path: str
    body: Any


class FakeDaemon:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "fleetd.sock"
        self.seen: list[Seen] = []
        self.replies: dict[tuple[str, str], list[Reply]] = {}
        self.on("GET", "/fleet/v1/status", Reply(STATUS))
        self.on("GET", "/fleet/v1/peers", Reply({"enabled": False}))
        daemon = self

        class DaemonHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def address_string(self) -> str:
                return "unix"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: Any) -> None:
                path = self.path.split("?")[0]
                daemon.seen.append(Seen(self.command, self.path, body))
                replies = daemon.replies.get((self.command, path))
                if not replies:
                    missing = {"error": {"message": f"No route {path}.", "code": "not_found", "hint": ""}}
                    self.plain(404, json.dumps(missing).encode())
                    return
                reply = replies.pop(0) if len(replies) > 1 else replies[0]
                if reply.raw is not None:
                    self.plain(reply.status, reply.raw)
                elif reply.stream is None:
                    self.plain(reply.status, json.dumps(reply.body).encode())
                else:
                    try:
                        self.events(reply)
                    except (BrokenPipeError, ConnectionResetError):
                        reply.gone.set()

            def plain(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def events(self, reply: Reply) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.send_header("X-Fleet-Request", "req-1")
                self.send_header("X-Fleet-Plan", "local; nodes=this")
                self.send_header("X-Fleet-Exactness", "exact")
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in reply.stream or ():
                    if isinstance(piece, threading.Event):
                        self.wait(piece, reply)
                    elif piece == "drop":
                        self.close_connection = True
                        return
                    else:
                        data = piece.encode()
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                        self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

            def wait(self, event: threading.Event, reply: Reply) -> None:
                """Until the event, or until the client hangs up: its end of the socket then reads empty."""
                self.connection.settimeout(0.02)
                while not event.is_set():
                    try:
                        if self.connection.recv(1) == b"":
                            reply.gone.set()
                            raise BrokenPipeError
                    except TimeoutError:
                        continue
                self.connection.settimeout(None)

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = False
            block_on_close = True
            request_queue_size = 16

        self._server = Server(str(self.socket), DaemonHandler)
        self.socket.chmod(0o600)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def on(self, method: str, path: str, *replies: Reply) -> None:
        """Answer a route with these, one after the other; the last one stays."""
        self.replies[method, path] = list(replies)

    def chat(self, *replies: Reply) -> None:
        self.on("POST", "/v1/chat/completions", *replies)

    @property
    def chats(self) -> list[Any]:
        return [seen.body for seen in self.seen if seen.path == "/v1/chat/completions"]

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def data(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def delta(**fields: Any) -> str:
    return data({"model": "smollm2-135m", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def final(reason: str = "stop") -> list[str]:
    timings = {
        "prompt_n": 112,
        "cache_n": 300,
        "prompt_ms": 361.0,
        "prompt_per_second": 310.2,
        "predicted_n": 96,
        "predicted_ms": 4507.0,
        "predicted_per_second": 21.3,
        "queue_ms": 0.0,
    }
    usage = {"prompt_tokens": 412, "completion_tokens": 96, "prompt_tokens_details": {"cached_tokens": 300}}
    return [
        data({"model": "smollm2-135m", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}),
        data({"model": "smollm2-135m", "choices": [], "usage": usage, "timings": timings}),
        "data: [DONE]\n\n",
    ]


def answer(*texts: str, reason: str = "stop") -> Reply:
    """A whole good answer."""
    return Reply(
        stream=[delta(role="assistant", content=""), *(delta(content=t) for t in texts), *final(reason)]
    )
