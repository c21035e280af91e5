"""Write docs/errors.md from the error tree in fleetd/errors.py: `python docs/generate_errors.py`."""

from __future__ import annotations

import re
from pathlib import Path

from fleetd import errors
from fleetd.errors import FleetError

PAGE = Path(__file__).with_name("errors.md")

_INTRO = """\
Whatever goes wrong has a code that does not change between versions, a sentence with the figures, and mostly
a hint on what to do, which ends the sentence. Over HTTP it has the status below and the form of the client's
API: `{"error": {"message", "type", "param", "code", "hint"}}` (OpenAI's),
`{"type": "error", "error": {"type", "message", "code"}}` (Anthropic's, where "busy" is a 529) or
`{"error", "code"}` (Ollama's). In the middle of a stream the same object comes last. `fleetctl` prints the
sentence and the hint, and exits with one of the codes in [fleetctl.md](fleetctl.md)."""

_LINE = re.compile(r"^[\s│├└─]*(?P<names>[A-Z]\w+(?: / [A-Z]\w+)*)  +(?P<meaning>\S.*)$", re.MULTILINE)


def meanings() -> dict[str, str]:
    """Class name → what it means, from the tree drawn in the module's docstring."""
    found = {}
    for line in _LINE.finditer(errors.__doc__ or ""):
        names, texts = line["names"].split(" / "), line["meaning"].split(" / ")
        found.update(zip(names, texts, strict=True))
    return found


def tree(root: type[FleetError] = FleetError) -> list[type[FleetError]]:
    """All error classes of the daemon, each before those derived from it."""
    ours = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return [root, *(kind for child in ours for kind in tree(child))]


def page() -> str:
    """The whole page."""
    said = meanings() | {"FleetError": "a fault of fleetd itself; its log says more"}
    rows = "\n".join(f"| `{kind.code}` | {kind.status} | {said[kind.__name__]} |" for kind in tree())
    parts = [
        "<!-- Written by docs/generate_errors.py; a test fails when it is out of date. -->",
        "# Errors",
        _INTRO,
        f"| code | HTTP status | meaning |\n|---|---|---|\n{rows}",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
