"""What to say of an address where nothing is served: mostly a base URL is wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_API = "/v1"
# What base URLs are written for; the others are addresses within it.
_SHOWN = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/models",
    "/api/chat",
)


def advice(path: str, served: Iterable[str]) -> str:
    """A hint for ``path``, of which nothing is among ``served``."""
    known = set(served)
    plain = "/" + "/".join(part for part in path.split("/") if part)
    while plain.startswith(f"{_API}{_API}/"):
        plain = plain.removeprefix(_API)
    if path.startswith(f"{_API}/") and plain.removeprefix(_API) in known:
        return f"It is {plain.removeprefix(_API)}: the base URL has to be without {_API}."
    meant = plain if plain in known else _API + plain
    if meant not in known:
        shown = [each for each in _SHOWN if each in known]
        return f"Served are {', '.join(shown)}; /openapi.json lists all."
    if path.startswith(f"{_API}{_API}"):
        return f"It is {meant}: the base URL has one {_API} too many."
    if plain != meant:
        return f"It is {meant}: the base URL has to end in {_API}."
    return f"It is {meant}: the base URL ends in a slash too many."
