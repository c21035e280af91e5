"""What to say of an address where nothing is served: mostly a base URL is wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set

_API = "/v1"
# Parts of the longest address that is served.
_MOST_PARTS = 4
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
        if (found := _ending(plain, known)) is not None:
            return found
        shown = [each for each in _SHOWN if each in known]
        return f"Served are {', '.join(shown)}; /openapi.json lists all."
    if path.startswith(f"{_API}{_API}"):
        return f"It is {meant}: the base URL has one {_API} too many."
    if plain != meant:
        return f"It is {meant}: the base URL has to end in {_API}."
    return f"It is {meant}: the base URL ends in a slash too many."


def _ending(plain: str, known: Set[str]) -> str | None:
    """A hint for an address that only ends as a served one: another server's base, or a whole address in the
    place of one."""
    parts = plain.split("/")
    for at in range(max(2, len(parts) - _MOST_PARTS), len(parts)):
        before, ending = "/".join(parts[:at]), "/" + "/".join(parts[at:])
        if ending in known:
            return f"It is {ending}: the base URL has to be without {before[:80]}."
        if _API + ending in known:
            return f"It is {_API}{ending}: the base URL has to have {_API} in place of {before[:80]}."
    return None
