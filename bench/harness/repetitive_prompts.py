"""Work in which much is said again, as people give it to a model, and work in which nothing is."""

from __future__ import annotations

from bench.harness import prompts

_CODE = '''def load_settings(path, defaults):
    """Read settings from a file and fill in the defaults."""
    settings = dict(defaults)
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, _, value = line.partition("=")
            settings[key.strip()] = value.strip()
    return settings


def save_settings(path, settings):
    """Write settings to a file, one per line."""
    with open(path, "w") as file:
        for key in sorted(settings):
            file.write(f"{key} = {settings[key]}\\n")
'''

# A small model has to be shown that all of the code is to come again: by itself it makes up a shorter one.
_EXAMPLE = """def total(prices):
    sum = 0
    for price in prices:
        sum += price
    return sum
"""
_SHOWN = (
    f"Here is a Python function:\n\n```python\n{_EXAMPLE}```\n\nHere is the same function again, with `sum` "
    f"renamed to `amount`:\n\n```python\n{_EXAMPLE.replace('sum', 'amount')}```\n\n"
)

_LOG = "\n".join(
    f"2025-03-04 12:{minute:02d}:{second:02d} INFO worker[{worker}] request finished status=200 "
    f"path=/api/v1/items duration_ms={40 + worker}"
    for minute, second, worker in ((i // 4, 15 * (i % 4), i % 3) for i in range(14))
)

_PASSAGE = (
    "The lighthouse on the northern cape was built in 1842 by a crew of eleven men who lived in tents "
    "through two winters. Its lamp burned whale oil until 1871, when the keeper's son fitted a burner for "
    "paraffin that he had made himself. The light could be seen for nineteen miles on a clear night. In 1903 "
    "a storm took the gallery and half of the lantern room, and for six weeks the keeper hung ship's "
    "lanterns from the broken rail so that no vessel would be lost."
)

# What is asked, and the words that the answer follows.
REPETITIVE: dict[str, str] = {
    "rewrite this code with one change": (
        f"{_SHOWN}Here is a Python module:\n\n```python\n{_CODE}```\n\nHere is the same module again, with "
        f"`settings` renamed to `options` in the first function only:\n\n```python\n"
    ),
    "continue this log": f"{_LOG}\n",
    "answer by quoting": (
        f"Passage:\n{_PASSAGE}\n\nQuestion: What does the passage say, word for word?\n\n"
        f'Answer: The passage says: "'
    ),
}

FREE = prompts.OPENINGS

# Answers that run at the same time.
TOGETHER: dict[str, tuple[str, ...]] = {
    "the three of them at once": tuple(REPETITIVE.values()),
    "a log and free text at once": (REPETITIVE["continue this log"], FREE[0]),
}
