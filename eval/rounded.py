"""What answers cost that other arithmetic took part in: every task again with a stand-in for another machine,
which rounds otherwise (`equivalent`), and with keys and values in fewer bits (`models.kv_bits`).

    alone       every layer here, of every token
    routed      every layer there: it answers
    by layers   the first half of the layers there, of the prompt; then all is decoded here
    by tokens   the first half of the prompt there, in all layers; then all is decoded here
    8 bits      every layer here, of every token; keys and values are held in 8 bits
    4 bits      the same in 4

The stand-in is the same model in this process. After each of its layers the hidden states, and the keys and
values that it leaves for others, are rounded to bfloat16, as a device does that computes in it.

Most answers are the same in all forms. So what is said alone is the draft of the others: one pass checks it.
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

FORMS = ("routed", "by layers", "by tokens", "8 bits", "4 bits")
_CHUNK_TOKENS = 512


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


@dataclass(frozen=True, slots=True)
class _Form:
    """The first ``layers`` of a prompt's first ``tokens`` run there; ``decodes``: so does all else. ``bits``:
    of what is kept; 0: as it is computed."""

    layers: int = 0
    tokens: int = 0
    decodes: bool = False
    bits: int = 0


@dataclass(slots=True)
class TwoArithmetics:
    """A model that can be cut, as ``Stage.of`` gives it, and its tokenizer. Greedy, one prompt at a time."""

    stage: Any
    tokenizer: Any
    _layers: list[Any] = field(init=False)
    # The same layers by the bits of what they keep; 0: as it is computed.
    _keeping: dict[int, list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._layers = [self.stage.part(i, i + 1) for i in range(self.stage.total)]
        self._keeping = {0: self._layers} | {bits: self._in_bits(bits) for bits in (8, 4)}

    def answers(self, one: Task) -> dict[str, tuple[list[int], str]]:
        """Tokens and text of a task's answer, by form."""
        prompt = self._encoded(one)
        half, middle = self.stage.total // 2, len(prompt) // 2
        every = self.stage.total
        there = {
            "alone": _Form(),
            "routed": _Form(every, len(prompt), decodes=True),
            "by layers": _Form(half, len(prompt)),
            "by tokens": _Form(every, middle),
            "8 bits": _Form(bits=8),
            "4 bits": _Form(bits=4),
        }
        found: dict[str, tuple[list[int], str]] = {}
        for name, form in there.items():
            draft = found["alone"][0] if found else []
            said = self._answer(prompt, one.max_tokens, form, draft)
            found[name] = said, str(self.tokenizer.decode(said))
        return found

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def _encoded(self, one: Task) -> list[int]:
        if one.text:
            return [int(token) for token in self.tokenizer.encode(one.text)]
        made = self.tokenizer.apply_chat_template(one.messages, add_generation_prompt=True, tokenize=True)
        return [int(token) for token in made]

    def _in_bits(self, bits: int) -> list[Any]:
        """The layers, whose caches hold rows in so many bits."""
        import mlx.core as mx

        from fleetd.engine.load.quantised_rows import packings

        tokens = mx.array([[1]])
        hidden, found = self._layers[0].embed(tokens), []
        for layer in self._layers:
            # Of quantised rows it could not be seen how wide they were.
            (used,) = layer.as_computed.make_caches()
            hidden = layer.run(hidden, [used], layer.inputs(tokens, 0))
            mx.eval(hidden, used.keys, used.values)
            found.append(layer.with_packings([packings(used, bits)]))
        return found

    def _answer(self, prompt: Sequence[int], most: int, form: _Form, draft: Sequence[int] = ()) -> list[int]:
        """At most ``most`` tokens. As long as they are those of ``draft``, they are checked together."""
        from mlx_lm.models.cache import trim_prompt_cache

        layers = self._keeping[form.bits]
        caches = [layer.make_caches() for layer in layers]
        end = len(prompt) - 1
        edges = sorted({0, min(form.tokens, end), end, *range(0, end, _CHUNK_TOKENS)})
        for first, last in itertools.pairwise(edges):
            self._run(layers, prompt[first:last], first, caches, form.layers if first < form.tokens else 0)
        ends = {int(each) for each in self.tokenizer.eos_token_ids}
        there = form.layers if form.decodes else 0
        said: list[int] = []
        while len(said) < most:
            drafted = list(draft[len(said) : most - 1]) if said == list(draft[: len(said)]) else []
            last = said[-1] if said else prompt[-1]
            start = end + len(said)
            chosen = self._run(layers, [last, *drafted], start, caches, there, chooses=True)
            agreed = 0
            while agreed < len(drafted) and chosen[agreed] == drafted[agreed]:
                agreed += 1
            trim_prompt_cache([cache for held in caches for cache in held], len(drafted) - agreed)
            for token in chosen[: agreed + 1]:
                if token in ends:
                    return said
                said.append(token)
        return said

    def _run(
        self,
        layers: Sequence[Any],
        tokens: Sequence[int],
        start: int,
        caches: list[Any],
        rounded: int,
        *,
        chooses: bool = False,
    ) -> list[int]:
        """One pass, the first ``rounded`` layers of it there. The likeliest next tokens if it ``chooses``."""
        import mlx.core as mx

        ids = mx.array([list(tokens)])
        hidden = layers[0].embed(ids)
        for number, (layer, held_by) in enumerate(zip(layers, caches, strict=True)):
            hidden = layer.run(hidden, held_by, layer.inputs(ids, start))
            if number < rounded:
                hidden = _rounded(hidden)
                for one in held_by:
                    held = slice(start, start + len(tokens))
                    one.keys[..., held, :] = _rounded(one.keys[..., held, :])
                    one.values[..., held, :] = _rounded(one.values[..., held, :])
        mx.eval(hidden, [(one.keys, one.values) for held_by in caches for one in held_by])
        if not chooses:
            return []
        likeliest: Any = mx.argmax(layers[-1].finish(hidden)[0], axis=-1).tolist()
        return [int(token) for token in likeliest]


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
