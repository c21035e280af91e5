"""Ranges of bytes of a file on the hub, by HTTP (RFC 9110, section 14), read on after a break.

huggingface_hub supplies addresses, the user's token, proxies, the mirror and the offline switch.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from fleetd.errors import DownloadFailed
from fleetd.models.hub_parts import HubCommit, RemoteFile

# Attempts without a byte in between, and seconds before the next one, which double.
_ATTEMPTS, _PAUSE_S = 5, 0.5
# Ranges with fewer bytes between them are one request: a request takes about as long as so many bytes.
GAP_BYTES = 1 << 20
_PASSING = frozenset({408, 429, 500, 502, 503, 504})


class WantedBytes(msgspec.Struct, frozen=True):
    """Bytes [``begin``, ``end``) of a file on the hub, and where the first of them is written."""

    begin: int
    end: int
    at: int


class RemoteRange(msgspec.Struct, frozen=True):
    """Bytes [``begin``, ``end``) of a file in one request, and what is wanted of them, in order."""

    begin: int
    end: int
    wanted: tuple[WantedBytes, ...]


def coalesced(wanted: Iterable[WantedBytes], gap_bytes: int = GAP_BYTES) -> list[RemoteRange]:
    """The fewest requests for ranges that do not overlap, with at most so many bytes between two that are
    one request. Pure."""
    found: list[list[WantedBytes]] = []
    for each in sorted(wanted, key=lambda each: (each.begin, each.end)):
        if each.end == each.begin:
            continue
        if found and each.begin - found[-1][-1].end <= gap_bytes:
            found[-1].append(each)
        else:
            found.append([each])
    return [RemoteRange(group[0].begin, group[-1].end, tuple(group)) for group in found]


def read(at: HubCommit, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
    """The bytes [begin, end) of a file, in pieces.

    Raises DownloadFailed if the hub has another file or gives no ranges, and errors of the library
    (``hub.typed_failures``).
    """
    from huggingface_hub import errors, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    http = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])
    address, headers = hf_hub_url(at.hub_id, file.path, revision=at.commit), build_hf_headers()
    left, position = _ATTEMPTS, begin
    while position < end:
        try:
            for piece in _one(at, file, position, end, address, headers):
                position, left = position + len(piece), _ATTEMPTS
                yield piece
            if position < end:
                raise ConnectionError("The connection ended early.")
        except (http.TransportError, ConnectionError, TimeoutError, _PassingError):
            left -= 1
            if not left:
                raise
            if left < _ATTEMPTS - 1:
                time.sleep(_PAUSE_S * 2 ** (_ATTEMPTS - 2 - left))


class _PassingError(DownloadFailed):
    """The hub is busy."""


def _one(
    at: HubCommit, file: RemoteFile, begin: int, end: int, address: str, headers: dict[str, str]
) -> Iterator[bytes]:
    """One request. A server that ends it early gives fewer bytes, one that gives more is refused."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status

    if constants.is_offline_mode():
        raise DownloadFailed(
            f"Layers of {at.hub_id} are not on this machine, and HF_HUB_OFFLINE forbids fetching them.",
            hint="Unset it, and load the model again.",
        )
    asked = {**headers, "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream(
        "GET", address, headers=asked, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as answer:
        if answer.status_code in _PASSING:
            raise _PassingError(
                f"The hub answered with status {answer.status_code}.", hint="Try again later."
            )
        hf_raise_for_status(answer)
        _check(at, file, begin, end, answer)
        left = end - begin
        for piece in answer.iter_raw():
            if len(piece) > left:
                raise DownloadFailed(f"The hub sent more of {file.path} than it was asked for.")
            left -= len(piece)
            yield piece


def _check(at: HubCommit, file: RemoteFile, begin: int, end: int, answer: Any) -> None:
    """Raises DownloadFailed unless an answer is of the range, of the file that was listed."""
    if answer.status_code != 206:
        raise DownloadFailed(
            f"{answer.url.host} gave all of {file.path} instead of the part that was asked for.",
            hint=f"Set HF_ENDPOINT to a mirror that gives parts of files, or get the whole model: "
            f"fleetctl models pull {at.name}",
        )
    found = str(answer.headers.get("Content-Range", ""))
    headers = [hop.headers for hop in (*answer.history, answer)]
    commits = {each["X-Repo-Commit"] for each in headers if "X-Repo-Commit" in each}
    tags = {each["X-Linked-Etag"].strip('"') for each in headers if "X-Linked-Etag" in each}
    if (
        found not in (f"bytes {begin}-{end - 1}/{file.size_bytes}", f"bytes {begin}-{end - 1}/*")
        or commits - {at.commit}
        or (file.sha256 is not None and tags - {file.sha256})
    ):
        raise DownloadFailed(
            f"{file.path} on the hub is not the file that was listed for {at.hub_id} (any more).",
            hint="Load the model again; if it stays, something between here and the hub changes files.",
        )


def write(
    at: HubCommit, file: RemoteFile, wanted: RemoteRange, out: Any, advance: Callable[[int], None]
) -> None:
    """Write what is wanted of a range to a file that can seek. ``advance`` is told the bytes of each piece
    that were written. Raises as ``read``."""
    pieces = read(at, file, wanted.begin, wanted.end)
    pending, position = list(wanted.wanted), wanted.begin
    for piece in pieces:
        view, behind = memoryview(piece), position + len(piece)
        while pending and pending[0].begin < behind:
            each = pending[0]
            first, last = max(each.begin, position), min(each.end, behind)
            out.seek(each.at + first - each.begin)
            out.write(view[first - position : last - position])
            advance(last - first)
            if last < each.end:
                break
            pending.pop(0)
        position = behind
