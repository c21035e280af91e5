"""What answers cost that other arithmetic took part in (`equivalent`): every task again with a stand-in for
another machine, which rounds otherwise.

    alone       every layer here, of every token
    routed      every layer there: it answers
    by layers   the first half of the layers there, of the prompt; then all is decoded here
    by tokens   the first half of the prompt there, in all layers; then all is decoded here

The stand-in is the same model in this process. After each of its layers the hidden states, and the keys and
values that it leaves for others, are rounded to bfloat16, as a device does that computes in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from eval.runs import GOLDEN
from eval.statistics import Share
from eval.tasks import Task, task

FORMS = ("routed", "by layers", "by tokens")
_CHUNK_TOKENS = 256


class RoundedAnswers(msgspec.Struct):
    """Counts of one kind of task at one length.

    ``right``: answers that are right, by form, "alone" among them, of ``answers``; ``both``: of those that
    are right alone, by form; ``same``: tasks whose answer is the same, token by token, by form.
    """

    kind: str
    tokens: int
    tasks: int = 0
    answers: int = 0
    right: dict[str, int] = {}
    both: dict[str, int] = {}
    same: dict[str, int] = {}

    def add(self, one: Task, said: dict[str, tuple[list[int], str]]) -> None:
        """``said``: tokens and text, by form."""
        self.tasks += 1
        self.answers += len(one.answers)
        alone = {answer for answer in one.answers if one.says(said["alone"][1], answer)}
        for form, (tokens, text) in said.items():
            right = {answer for answer in one.answers if one.says(text, answer)}
            self.right[form] = self.right.get(form, 0) + len(right)
            self.both[form] = self.both.get(form, 0) + len(right & alone)
            self.same[form] = self.same.get(form, 0) + (tokens == said["alone"][0])

    def kept(self, form: str) -> Share:
        """Of the answers that are right alone, those that are right."""
        return Share(self.both.get(form, 0), self.right.get("alone", 0))

    def alike(self, form: str) -> Share:
        return Share(self.same.get(form, 0), self.tasks)


@dataclass(slots=True)
class TwoArithmetics:
    """A model that can be cut, as ``Stage.of`` gives it, and its tokenizer. Greedy, one prompt at a time."""

    stage: Any
    tokenizer: Any
    _layers: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._layers = [self.stage.part(i, i + 1) for i in range(self.stage.total)]

    def answers(self, one: Task) -> dict[str, tuple[list[int], str]]:
        """Tokens and text of a task's answer, by form."""
        prompt = self._encoded(one)
        half, middle = self.stage.total // 2, len(prompt) // 2
        every = self.stage.total
        there = {
            "alone": (0, 0, False),
            "routed": (every, len(prompt), True),
            "by layers": (half, len(prompt), False),
            "by tokens": (every, middle, False),
        }
        found = {}
        for form, (layers, tokens, decodes) in there.items():
            said = self._answer(prompt, one.max_tokens, layers, tokens, decodes=decodes)
            found[form] = said, str(self.tokenizer.decode(said))
        return found

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def _encoded(self, one: Task) -> list[int]:
        if one.text:
            return [int(token) for token in self.tokenizer.encode(one.text)]
        made = self.tokenizer.apply_chat_template(one.messages, add_generation_prompt=True, tokenize=True)
        return [int(token) for token in made]

    def _answer(
        self, prompt: Sequence[int], most: int, layers: int, tokens: int, *, decodes: bool
    ) -> list[int]:
        """The first ``layers`` of the prompt's first ``tokens`` run there; ``decodes``: so does all else."""
        caches = [layer.make_caches() for layer in self._layers]
        end = len(prompt) - 1
        edges = sorted({0, min(tokens, end), end, *range(0, end, _CHUNK_TOKENS)})
        for first, last in itertools.pairwise(edges):
            self._run(prompt[first:last], first, caches, layers if first < tokens else 0)
        said: list[int] = []
        token = prompt[-1]
        ends = {int(each) for each in self.tokenizer.eos_token_ids}
        while len(said) < most:
            at = end + len(said)
            token = self._run([token], at, caches, layers if decodes else 0, chooses=True)
            if token in ends:
                break
            said.append(token)
        return said

    def _run(
        self, tokens: Sequence[int], start: int, caches: list[Any], rounded: int, *, chooses: bool = False
    ) -> int:
        """One pass, the first ``rounded`` layers of it there; the likeliest next token if it ``chooses``."""
        import mlx.core as mx

        ids = mx.array([list(tokens)])
        hidden = self._layers[0].embed(ids)
        for number, (layer, held_by) in enumerate(zip(self._layers, caches, strict=True)):
            hidden = layer.run(hidden, held_by, layer.inputs(ids, start))
            if number < rounded:
                hidden = _rounded(hidden)
                for one in held_by:
                    held = slice(start, start + len(tokens))
                    one.keys[..., held, :] = _rounded(one.keys[..., held, :])
                    one.values[..., held, :] = _rounded(one.values[..., held, :])
        mx.eval(hidden, [(one.keys, one.values) for held_by in caches for one in held_by])
        if not chooses:
            return -1
        likeliest: Any = mx.argmax(self._layers[-1].finish(hidden[:, -1:])[0, -1]).item()
        return int(likeliest)


def _rounded(numbers: Any) -> Any:
    import mlx.core as mx

    return numbers.astype(mx.bfloat16).astype(numbers.dtype)


def of_kind(folder: Path, kind: str, tokens: int, seeds: Sequence[int]) -> RoundedAnswers:
    """A task per seed, each at another depth. Loads the model into this process once."""
    two = _two(folder)
    found = RoundedAnswers(kind, tokens)
    for number, seed in enumerate(seeds):
        one = task(kind, seed, tokens, (0.5 + number * GOLDEN) % 1, two.count)
        found.add(one, two.answers(one))
    return found


@cache
def _two(folder: Path) -> TwoArithmetics:
    from eval.profile import loaded

    model = loaded(folder)
    # Only now: libraries are loaded before MLX is.
    from fleetd.engine.layers.stage import Stage

    return TwoArithmetics(Stage.of(model.model), model.search.tokenizer)
