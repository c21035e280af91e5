"""The engine's own scheduler in a process without daemon: plain, drafted for, or as another engine did it.

plain       no speculation
auto        as shipped
prefill     no answer: what a prompt takes until its first token
taps        no answer: what reading a prompt takes if hidden states of some layers are noted, or of none
published   a remote n-gram drafter as it was published to lose (reference below): blocks of 4 padded with
            token 0, n-grams from 1 token on, two forward passes per round, always on
played      as shipped, and a source that knows the answer and says each token wrongly with a given chance
idle        no answer: what drafts cost beside an answer that uses none of them

The published figures: 31.13 tok/s without, 15.76 tok/s with it, 23 of 181 drafts accepted in 48 tokens
(Kakeya inference engine, issue 157).
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.child import serve
from bench.harness.loaded_model import load_as_worker
from fleetd.engine.speculation.sources import Context

# Tokens of a prompt that are read at once.
CHUNK = 256
# Of the published settings.
BLOCK, PADDING, LONGEST_GRAM = 4, 0, 4


def main(model_path: Path) -> None:
    serve(_Runs(load_as_worker(model_path)).answer)


class _Runs:
    def __init__(self, loaded: Any) -> None:
        from fleetd.engine.speculation.speculation import WorkerSpeculation

        self._loaded = loaded
        self._speculation = WorkerSpeculation(
            loaded.verdict,
            loaded.facts.vocab_size,
            computes_ahead=loaded.facts.device != "cpu",
            head=loaded.head,
        )
        self._speculation.costs = self._passes = _noted_costs(loaded.verdict.seconds)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        match question["mode"]:
            case "verdict":
                return self._verdict()
            case "published":
                return published(self._loaded.model, question["prompts"][0], question["max_tokens"])
            case "head":
                return {"text": self._loaded.facts.draft_head}
            case "prefill":
                return self._prefill(question["prompts"][0], question["sources"])
            case "taps":
                return self._taps(question["prompts"][0], question["layers"])
            case "idle":
                return self._idle(question["tokens"], question["answer"])
            case mode:
                return self._decode(question, None if mode == "plain" else self._speculation)

    def _verdict(self) -> dict[str, Any]:
        from fleetd.engine.speculation.exactness_probe import ProbePlan, probe

        facts = self._loaded.facts
        begun = time.perf_counter()
        verdict = probe(
            self._loaded.model,
            vocab_size=facts.vocab_size,
            context_tokens=facts.shape.context_tokens,
            plan=ProbePlan.of(facts.device, 1 / facts.speed.decode_tok_s),
        )
        return {
            "probe_s": time.perf_counter() - begun,
            "text": verdict.text,
            "curve": {str(n): ratio for n, ratio in self._speculation.costs.curve.items()},
            "step_s": self._speculation.costs.step_s,
            "row_bytes": facts.shape.sizes.token_bytes + 2 * 4 * facts.vocab_size,
            "width": verdict.width,
        }

    def _decode(self, question: dict[str, Any], speculation: Any) -> dict[str, Any]:
        """All prompts at the same time; the rate is that of all their tokens, from the first of any."""
        from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
        from fleetd.engine.protocol import Generate, Sampling, Speculate, TokenPrompt

        events: list[Any] = []
        self._passes.widths.clear()
        scheduler = self._scheduler(events, speculation)
        prompts: list[list[int]] = question.get("prompts") or self._asked(question["asked"])
        sources = question.get("sources")
        speculate = None if sources is None else Speculate(sources=sources)
        sampling = Sampling(temperature=question.get("temperature", 0.0), seed=1)
        for i, tokens in enumerate(prompts):
            request = Generate(
                str(i),
                TokenPrompt(tokens),
                sampling,
                max_tokens=question["max_tokens"],
                top_logprobs=0,
                speculate=speculate,
            )
            scheduler.inbox.put(PreparedPrompt(request, tokens))
            if question["mode"] == "played":
                scheduler.decoding.attach(str(i), _Played(question["truth"], question["acceptance"], i))

        def came(i: int) -> int:
            if (done := _finished(events, str(i))) is not None:
                return int(done.usage.completion_tokens)
            running = scheduler.decoding.find(str(i))
            return running.generated if running is not None else 0

        # A pass may give several tokens at once: what the first one gave came before the clock started.
        marks: list[tuple[float, int]] = []
        seen: list[int] = []
        while not marks or marks[-1][1] < question["max_tokens"] * len(prompts):
            scheduler.turn()
            if alone := next(iter([*scheduler.decoding.batch.values(), *scheduler.decoding.apart]), None):
                seen = list(alone.tokens)
            counts = [came(i) for i in range(len(prompts))]
            if sum(counts) > (marks[-1][1] if marks else 0):
                marks.append((time.perf_counter(), sum(counts)))
            if all(_finished(events, str(i)) for i in range(len(prompts))):
                break
        return {
            "rate": (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0]),
            "priced": self._priced(marks[-1][1]),
            # Of a lone answer; what its last turn gave is missing.
            "seen": seen,
            "answers": [_answer(events, str(i)) for i in range(len(prompts))],
        }

    def _scheduler(self, events: list[Any], speculation: Any) -> Any:
        from fleetd.engine.loop.scheduler import Scheduler
        from fleetd.engine.measure.chunk_size import FixedChunks
        from fleetd.engine.measure.memory import KvBudget
        from fleetd.engine.prefixes.prefix_cache import PrefixCache

        return Scheduler(
            model=self._loaded.model,
            tokenizer=self._loaded.tokenizer,
            context_tokens=8192,
            chunks=FixedChunks(CHUNK, 64),
            max_streams=4,
            budget=KvBudget.of(4 << 30, self._loaded.facts.shape.sizes.token_bytes),
            prefix=PrefixCache(0),
            emit=events.append,
            speculation=speculation,
        )

    def _asked(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of users' messages."""
        messages = [[{"role": "user", "content": each}] for each in words]
        template = self._loaded.tokenizer.apply_chat_template
        return [list(template(each, add_generation_prompt=True)) for each in messages]

    def _prefill(self, tokens: list[int], sources: list[str]) -> dict[str, Any]:
        """Seconds until the first token, with drafts of these sources to follow it."""
        from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
        from fleetd.engine.protocol import Delta, Generate, Speculate, TokenPrompt

        events: list[Any] = []
        scheduler = self._scheduler(events, self._speculation)
        request = Generate("r", TokenPrompt(tokens), max_tokens=2, speculate=Speculate(sources=sources))
        scheduler.inbox.put(PreparedPrompt(request, tokens))
        begun = time.perf_counter()
        while not any(isinstance(event, Delta) for event in events):
            scheduler.turn()
        return {"first_s": time.perf_counter() - begun}

    def _taps(self, tokens: list[int], layers: list[int]) -> dict[str, Any]:
        """Seconds of a prefill; ``layers``, some of which may be counted from the last one, are noted."""
        from mlx_lm.models.cache import make_prompt_cache

        from fleetd.engine.layers.prefill import Prefiller

        model, total = self._loaded.model, len(self._loaded.model.layers)
        noted = tuple(layer % total for layer in layers)
        prefiller = Prefiller(model, tokens, make_prompt_cache(model), hidden_layers=noted)
        begun = time.perf_counter()
        while prefiller.step(CHUNK):
            pass
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "noted": sum(len(rows) for _, rows in prefiller.hidden)}

    def _priced(self, tokens: int) -> float:
        """Times plain, where each pass takes what the probe measured of its width: no clock, no noise of one.
        0 if no pass was noted."""
        from fleetd.engine.speculation.pass_costs import Costs

        price = Costs(self._loaded.verdict.seconds)
        steps = sum(price.ratio(width) for width in self._passes.widths)
        return tokens / steps if steps else 0.0

    def _idle(self, prompt: list[int], answer: list[int]) -> dict[str, Any]:
        """Seconds per token of looking for drafts that are not used; bytes that the looking holds."""
        from fleetd.engine.protocol import Generate, TokenPrompt

        tracemalloc.start()
        drafting = self._speculation.new_drafts(Generate("r", TokenPrompt([0])))
        assert drafting is not None
        text = list(prompt)
        drafting.next_draft(text, lambda: 0)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        # The prompt is taken up once, some of it in each of the first passes.
        while any(not _ready(source, text) for source in drafting.sources):
            drafting.next_draft(text, lambda: 0)
        step_s = self._speculation.costs.step_s
        begun = time.perf_counter()
        for token in answer:
            drafting.verified(drafting.next_draft(text, lambda: 0), [token], step_s)
            text.append(token)
        took_s = time.perf_counter() - begun
        return {"each_s": took_s / len(answer), "held_bytes": held}


class _Played:
    """A source at a given acceptance: ``truth`` is prompt and answer."""

    name = "played"
    hidden_layers = ()

    def __init__(self, truth: Sequence[int], acceptance: float, seed: int) -> None:
        self._truth, self._acceptance, self._chance = truth, acceptance, random.Random(seed)

    def propose(self, context: Context) -> list[int]:
        begin = len(context.tokens)
        rest = self._truth[begin : begin + context.width]
        return [token if self._chance.random() < self._acceptance else (token + 1) % 1000 for token in rest]

    def committed(self, tokens: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


def _noted_costs(seconds: dict[int, float]) -> Any:
    """``Costs`` that also keeps ``widths``: of each pass, how many tokens were in it."""
    from fleetd.engine.speculation.pass_costs import Costs

    class NotedCosts(Costs):
        def __init__(self) -> None:
            super().__init__(seconds)
            self.widths: list[int] = []

        def add_pass(self, width: int, seconds: float) -> None:
            self.widths.append(width)
            super().add_pass(width, seconds)

    return NotedCosts()


def _finished(events: Sequence[Any], request_id: str) -> Any:
    """How an answer ended; None while it has not."""
    from fleetd.engine.protocol import Finished

    return next((e for e in events if isinstance(e, Finished) and e.id == request_id), None)


def _answer(events: Sequence[Any], request_id: str) -> dict[str, Any]:
    from fleetd.engine.protocol import Delta

    finished = _finished(events, request_id)
    deltas = [event for event in events if isinstance(event, Delta) and event.id == request_id]
    found = finished.speculation
    return {
        "tokens": finished.usage.completion_tokens,
        "text": "".join(delta.text for delta in deltas),
        "logprobs": [p.logprob for delta in deltas for p in delta.logprobs or []],
        "passes": found.passes if found else finished.usage.completion_tokens,
        "drafted": found.drafted if found else 0,
        "accepted": found.accepted if found else 0,
    }


def _ready(source: Any, text: Sequence[int]) -> bool:
    read = getattr(source, "_read", None) or getattr(source, "_index", None)
    return read is None or bool(read(text))


def published(model: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy, with the drafter's published settings; correct, and slow."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

    cache = make_prompt_cache(model)
    text = list(prompt)
    logits = model(mx.array([text]), cache=cache)[0, -1]
    mx.eval(logits)
    drafted = accepted = rounds = 0
    begun = time.perf_counter()
    while len(text) < len(prompt) + max_tokens:
        found = _grams(text)
        drafted += len(found)
        block = (found + [PADDING] * BLOCK)[:BLOCK]
        rows = model(mx.array([block]), cache=cache)[0]
        expected: list[Any] = mx.argmax(mx.concatenate([logits[None], rows]), axis=-1).tolist()  # type: ignore[assignment]
        right = 0
        while right < BLOCK and block[right] == expected[right]:
            right += 1
        accepted += min(right, len(found))
        trim_prompt_cache(cache, BLOCK - right)
        text += expected[: right + 1]
        logits = model(mx.array([text[-1:]]), cache=cache)[0, -1]
        mx.eval(logits)
        rounds += 1
    took_s = time.perf_counter() - begun
    return {
        "rate": (len(text) - len(prompt)) / took_s,
        "tokens": len(text) - len(prompt),
        "passes": 2 * rounds,
        "drafted": drafted,
        "accepted": accepted,
    }


def _grams(text: list[int]) -> list[int]:
    """What followed the last tokens the last time, from one equal token on."""
    for n in range(LONGEST_GRAM, 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end : end + BLOCK]
    return []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
