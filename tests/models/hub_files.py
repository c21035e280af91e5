"""The hub, small: a cache as huggingface_hub lays it out, and a server that speaks the endpoints it uses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from model_files import make_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@cache
def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@cache
def git_sha1(raw: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()


def make_snapshot(cache: Path, hub_id: str, commit: str = COMMIT, *, main: bool = True) -> Path:
    root = cache / f"models--{hub_id.replace('/', '--')}"
    source = make_folder(cache / ".made" / commit)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    for file in source.iterdir():
        raw = file.read_bytes()
        large = file.suffix == ".safetensors"
        name = hashlib.sha256(raw).hexdigest() if large else git_sha1(raw)
        (root / "blobs" / name).write_bytes(raw)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    if main:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(commit)
    return snapshot


@dataclass
class Hub:
    """What the server has and was asked; after ``cut_after`` bytes of a file it drops the line, once."""

    url: str
    models: dict[str, dict[str, bytes]]
    commit: str = COMMIT
    gated: set[str] = field(default_factory=set)
    gguf: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut_after: dict[str, int] = field(default_factory=dict)
    replaced: dict[str, bytes] = field(default_factory=dict)
    stall: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    stall_after: dict[str, int] = field(default_factory=dict)
    # Only requests that begin behind so many bytes of a file are cut or stalled.
    faults_from: int = 0
    asked: list[tuple[str, str]] = field(default_factory=list)
    # Bytes of files that were given, by name. ``whole_only``: it gives no parts of files, as some mirrors.
    given: Counter[str] = field(default_factory=Counter)
    whole_only: bool = False
    # It has one version of a model, and gives that for each, as some mirrors.
    one_version: bool = False
    # Files' hashes that it names with what it gives, if these are others than it lists.
    tagged: dict[str, str] = field(default_factory=dict)
    # What a search finds, by the filter that it has or "", and the searches.
    listed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    searched: list[dict[str, list[str]]] = field(default_factory=list)
    # Searches are not answered until this is set.
    answers: threading.Event | None = None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/models":
            self._search(parse_qs(urlsplit(self.path).query))
        elif (match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)) is not None:
            self._info(match[1], match[2] or "main")
        elif (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) is not None:
            self._file(match[1], match[2], match[3])
        else:
            self._fail(404, "EntryNotFound")

    def _search(self, asked: dict[str, list[str]]) -> None:
        self.hub.searched.append(asked)
        if self.hub.answers is not None:
            self.hub.answers.wait(30)
            return  # who asked has gone
        found = self.hub.listed.get("".join(asked.get("filter", [])), [])
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _info(self, hub_id: str, revision: str) -> None:
        files = self.hub.models.get(hub_id)
        if files is None:
            self._fail(401, "RepoNotFound")
        elif hub_id in self.hub.gated:
            self._fail(403, "GatedRepo")
        elif revision not in ("main", self.hub.commit) and not self.hub.one_version:
            self._fail(404, "RevisionNotFound")
        else:
            siblings: list[dict[str, Any]] = []
            for name, raw in files.items():
                entry: dict[str, Any] = {"rfilename": name, "size": len(raw), "blobId": git_sha1(raw)}
                if name.endswith(".safetensors"):
                    entry["lfs"] = {
                        "sha256": sha256(raw),
                        "size": len(raw),
                        "pointerSize": 130,
                    }
                siblings.append(entry)
            body = {"id": hub_id, "sha": self.hub.commit, "siblings": siblings, "tags": [], "private": False}
            if hub_id in self.hub.gguf:
                body["gguf"] = self.hub.gguf[hub_id]
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, hub_id: str, revision: str, name: str) -> None:
        wanted = self.headers.get("Range", "")
        self.hub.asked.append((name, wanted))
        raw = self.hub.replaced.get(name, self.hub.models[hub_id][name])
        assert revision == self.hub.commit, "every file is asked for at the pinned commit"
        if self.hub.whole_only:
            wanted = ""
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, behind = int(first or 0), min(len(raw), int(last) + 1) if last else len(raw)
        headers = {"ETag": f'"{git_sha1(raw)}"', "X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        if name.endswith(".safetensors"):
            tag = self.hub.tagged.get(name, sha256(raw))
            headers["X-Linked-Etag"] = f'"{tag}"'
        is_part = bool(start or last) and bool(wanted)
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{behind - 1}/{len(raw)}"
        body = raw[start:behind]
        self.hub.given[name] += len(body)
        strikes = start >= self.hub.faults_from
        end = self.hub.cut_after.pop(name, None) if strikes else None
        pause = self.hub.stall_after.pop(name, None) if strikes else None
        if end is None and pause is None:
            self._send(206 if is_part else 200, body, headers)
            return
        self.send_response(206 if is_part else 200)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[: end if end is not None else pause])
        self.wfile.flush()
        if pause is not None:
            self.hub.stalled.set()
            self.hub.stall.wait(30)
        self.close_connection = True


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub("", {})
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.stall.set()
            server.shutdown()
            thread.join()
