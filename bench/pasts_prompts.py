"""A coding session on two machines, and questions that two machines ask about the same functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """``edits``: names and what each becomes; the first two are the other machine's, the last two this one's.

    ``questions``: two ways to ask for the code without having it.
    """

    code: str
    edits: tuple[tuple[str, str], tuple[str, str], tuple[str, str], tuple[str, str]]
    questions: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """Prompts of one exchange: first the other machine asks ``there``, then this one asks ``here``."""

    there: str
    here: str


# A small model has to be shown that all of the code is to come again: by itself it makes up a shorter one.
_EXAMPLES = (
    (
        '''def read_prices(filename, currency):
    """Read prices from a file, those of one currency only."""
    sum = 0.0
    found = []
    with open(filename) as file:
        for line in file:
            name, price, unit = line.split(",")
            if unit.strip() == currency:
                found.append((name, float(price)))
                sum += float(price)
    return found, sum
''',
        ("sum", "amount"),
    ),
    (
        '''class Counter:
    """A counter with a step."""

    def __init__(self, step):
        self.step = step
        self.value = 0

    def advance(self):
        if self.step == 0:
            raise ValueError("the step is zero")
        self.value += self.step
        return self.value
''',
        ("step", "stride"),
    ),
)


def session() -> list[Turn]:
    """Each machine has a copy of its own, renames something in it, and goes on from the result."""
    turns = []
    for file in FILES:
        there = here = file.code
        for step in range(2):
            turns.append(Turn(_edit(there, file.edits[step]), _edit(here, file.edits[2 + step])))
            there = there.replace(*file.edits[step])
            here = here.replace(*file.edits[2 + step])
    return turns


def other_words() -> list[Turn]:
    """Both machines want the same function, and neither prompt has its text."""
    return [Turn(_question(file.questions[0]), _question(file.questions[1])) for file in FILES]


def same_words() -> list[Turn]:
    """The same with one wording: the answer of the other machine is this one's, token by token."""
    return [Turn(_question(file.questions[0]), _question(file.questions[0])) for file in FILES]


def _edit(code: str, change: tuple[str, str]) -> str:
    shown = "".join(f"{_asked(one, renamed)}{one.replace(*renamed)}```\n\n" for one, renamed in _EXAMPLES)
    return shown + _asked(code, change)


def _asked(code: str, change: tuple[str, str]) -> str:
    old, new = change
    return (
        f"Here is a Python module:\n\n```python\n{code}```\n\nHere is the whole module again, with "
        f"`{old}` renamed to `{new}`:\n\n```python\n"
    )


def _question(words: str) -> str:
    return f"Question: {words}\n\nAnswer:\n\n```python\n"


FILES = (
    File(
        '''def load_settings(path, defaults):
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
''',
        (("settings", "options"), ("path", "filename"), ("defaults", "fallback"), ("value", "text")),
        (
            "Write a Python function load_settings(path) that reads key = value lines from a file.",
            "Please write load_settings(path) in Python. It returns a dictionary of the lines of a file.",
        ),
    ),
    File(
        '''def moving_average(values, window):
    """The mean of each window of values."""
    result = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            result.append(total / window)
    return result
''',
        (("result", "means"), ("index", "position"), ("total", "running"), ("window", "width")),
        (
            "Write a Python function moving_average(values, window).",
            "I need the moving average of a list in Python. Write moving_average(values, window).",
        ),
    ),
    File(
        '''class Stack:
    """A stack with a bound."""

    def __init__(self, limit):
        self.items = []
        self.limit = limit

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError("the stack is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()
''',
        (("limit", "bound"), ("Stack", "BoundedStack"), ("items", "entries"), ("push", "add")),
        (
            "Write a Python class Stack with push, pop and a limit.",
            "How would a class Stack look in Python? It needs push and pop and should be bounded.",
        ),
    ),
    File(
        '''def count_words(text):
    """How often each word is there, the most frequent first."""
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda pair: pair[1], reverse=True)
''',
        (("counts", "seen"), ("word", "token"), ("text", "document"), ("pair", "entry")),
        (
            "Write a Python function count_words(text) that returns how often each word occurs.",
            "Write count_words(text) in Python, which counts the words of a text.",
        ),
    ),
    File(
        '''def binary_search(numbers, target):
    """The index of the target, or -1."""
    low = 0
    high = len(numbers) - 1
    while low <= high:
        middle = (low + high) // 2
        if numbers[middle] == target:
            return middle
        if numbers[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
''',
        (("middle", "centre"), ("target", "wanted"), ("numbers", "values"), ("low", "first")),
        (
            "Write a Python function binary_search(numbers, target).",
            "Search a sorted list in Python: write binary_search(numbers, target) that returns the index.",
        ),
    ),
    File(
        '''def retry(action, attempts, delay):
    """Call the action until it works, at most so many times."""
    for attempt in range(attempts):
        try:
            return action()
        except OSError as error:
            print(f"attempt {attempt} failed: {error}")
            last = error
            time.sleep(delay)
            delay = 2 * delay
    raise last
''',
        (("action", "call"), ("delay", "pause_s"), ("error", "problem"), ("last", "latest")),
        (
            "Write a Python function retry(action, attempts) that calls an action until it works.",
            "In Python, an action sometimes fails. Write retry(action, attempts) that tries it again.",
        ),
    ),
)
