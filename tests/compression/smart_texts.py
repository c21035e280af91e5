"""Prompts for the tests of selection: made of pieces whose place is known, and scores that point at some."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np

from fleetd.compression.document import Document
from fleetd.compression.policy import SmartPrefillBody, SmartPrefillPolicy, resolve
from fleetd.compression.token_scores import TokenScores
from fleetd.compression.words import Range

_WORDS = (
    "river", "market", "engine", "window", "letter", "copper", "garden", "signal", "winter", "ledger",
    "bridge", "orchard", "lantern",
)  # fmt: skip


def prose(seed: int, sentences: int = 6) -> str:
    chance = random.Random(seed)
    said = [" ".join(chance.choices(_WORDS, k=chance.randint(6, 12))).capitalize() for _ in range(sentences)]
    return ". ".join(said) + "."


def haystack(seed: int, paragraphs: int = 40) -> str:
    return "\n\n".join(prose(seed * 1000 + i) for i in range(paragraphs))


def python_code(functions: int = 12) -> str:
    return "\n\n".join(
        f"def handler_{i}(request, retries={i}):\n"
        f"    total = request.size * {i}\n"
        "    for attempt in range(retries):\n"
        "        if attempt > 3:\n"
        f'            raise ValueError("too many attempts in handler {i}")\n'
        f"        total += attempt * {i}\n"
        f"    return total + {i * 17}\n"
        for i in range(functions)
    )


def brace_code(functions: int = 12) -> str:
    return "\n".join(
        f"int compute_{i}(int a) {{\n    int r = a;\n    if (a > {i}) {{\n        r += {i};\n"
        f"        r *= 2; /* a remark about step {i} of the work */\n"
        "        log_to_the_console(r, a, __FILE__, __LINE__);\n"
        "        count_what_was_done(&steps, r);\n"
        f"    }} else {{\n        r -= {i};\n    }}\n    return r;\n}}"
        for i in range(functions)
    )


def allman_code(functions: int = 12) -> str:
    """Braces on lines of their own, labels and directives left of the code, remarks above and within."""
    return "\n\n".join(
        f"/// Does step {i} of the work,\n/// and says so.\nint step_{i}(int a)\n{{\n    int r = a;\n"
        f"#ifdef TRACE\n    log_to_the_console(r, a, __FILE__, {i});\n#endif\n"
        "    switch (a)\n    {\n    case 1:\n        count_what_was_done(&steps, r);\n        break;\n"
        f"    default:\n        r += {i};\n    }}\n// not deeper, but part of it\n    return r * {i};\n}}"
        for i in range(functions)
    )


def records(count: int = 40, **more: object) -> str:
    rows = [
        {"id": i, "name": f"user{i}", "mail": f"user{i}@example.org", "tags": ["a", "b"]}
        for i in range(count)
    ]
    return json.dumps({"rows": rows, **more}, indent=1)


def table(rows: int = 40) -> str:
    return "| town | code |\n|------|-----:|\n" + "".join(f"| Town{i} | {1000 + i} |\n" for i in range(rows))


def policy(ratio: float = 0.25, **fields: object) -> SmartPrefillPolicy:
    found = resolve(SmartPrefillBody(target_ratio=ratio, **fields), SmartPrefillPolicy())  # type: ignore[arg-type]
    assert found is not None
    return found


def scores(document: Document, peaks: Sequence[Range] = (), *, floor: float = 0.01) -> TokenScores:
    """A token per four characters of what does not ask; those in ``peaks`` (of the text) matter."""
    starts = [
        at for at in range(0, len(document.text), 4) if not any(a <= at < b for a, b in document.questions)
    ]
    values = [1.0 if any(a <= at < b for a, b in peaks) else floor for at in starts]
    return TokenScores(
        np.array(starts, np.int32),
        np.array([min(at + 4, len(document.text)) for at in starts], np.int32),
        np.array(values, np.float32),
    )


def kept_text(document: Document, kept: Sequence[Sequence[Range]]) -> str:
    return "".join(
        block.text[start:end]
        for block, ranges in zip(document.blocks, kept, strict=True)
        for start, end in ranges
    )
