"""One model in one worker, asked as the daemon asks it: answers, scores, sparse prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from bench.harness.cores import worker_on
from bench.harness.daemon import MODEL
from fleetd import limits
from fleetd.compression.document import Document
from fleetd.compression.token_scores import SegmentScores, TokenScores, merge
from fleetd.compression.words import Range
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Keep,
    Profile,
    Sampling,
    Score,
    Scored,
    TextPrompt,
)


@dataclass(frozen=True, slots=True)
class Said:
    """``tokens``: of the prompt that were computed; ``seconds``: until they were."""

    text: str
    tokens: int
    seconds: float


class Engine:
    """Use as an async context manager. Greedy, one request at a time, nothing cached between prompts.

    ``threads`` that compute; 0 for a thread per core. No answer depends on it. ``settings``: more of the
    worker's.
    """

    def __init__(self, model: Path = MODEL, threads: int = 0, **settings: Any) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._starting = worker_on(None, model, threads=threads, **settings)
        self._ids = itertools.count()
        #: Which heads find what; every score after the first uses it.
        self.profile: Profile | None = None

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    async def answer(
        self, asked: str | Sequence[dict[str, Any]], max_tokens: int, keep: Keep | None = None
    ) -> Said:
        """To a text or to messages.

        Raises RuntimeError where ``keep`` was not followed, FleetError where the request failed.
        """
        request = Generate(
            id=f"eval-{next(self._ids)}",
            prompt=TextPrompt(asked) if isinstance(asked, str) else ChatPrompt(list(asked)),
            sampling=Sampling(temperature=0.0),
            max_tokens=max_tokens,
            keep=keep,
        )
        said, tokens, seconds = "", 0, 0.0
        async with aclosing(self._worker.stream(request)) as events:
            async for event in events:
                match event:
                    case Accepted():
                        tokens = event.kept or event.prompt_tokens
                        if keep is not None and event.dense_reason:
                            raise RuntimeError(event.dense_reason)
                    case Delta():
                        said += event.text
                    case Finished():
                        seconds = event.timings.prefill_s
        return Said(said, tokens, seconds)

    async def next_token(self, text: str) -> dict[str, float]:
        """Natural-log probabilities of the likeliest tokens after ``text``."""
        request = Generate(
            id=f"eval-{next(self._ids)}",
            prompt=TextPrompt(text),
            sampling=Sampling(temperature=0.0),
            max_tokens=1,
            top_logprobs=limits.TOP_LOGPROBS,
        )
        async with aclosing(self._worker.stream(request)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.logprobs:
                    return {top.token: top.logprob for top in event.logprobs[0].top}
        raise RuntimeError("the worker gave no token")

    async def scores(
        self, document: Document, segments: int = 1, exit_layer: int = 0
    ) -> tuple[TokenScores, float]:
        """Scores of a document's tokens and the seconds they took; in parts of about the same length."""
        size = len(document.text)
        edges = [round(i * size / segments) for i in range(segments + 1)]
        parts = [(0, 0)] if segments == 1 else list(itertools.pairwise(edges))
        scored = [await self._scored(document, part, exit_layer) for part in parts]
        return merge([SegmentScores.unpack(each.scores) for each in scored]), sum(s.seconds for s in scored)

    async def _scored(self, document: Document, segment: Range, exit_layer: int) -> Scored:
        score = Score(
            id=f"eval-{next(self._ids)}",
            text=document.text,
            questions=list(document.questions),
            segment=segment,
            exit_layer=exit_layer,
            profile=self.profile,
        )
        scored = await self._worker.ask(score)
        self.profile = self.profile or scored.profile
        return scored

    async def __aenter__(self) -> Self:
        self._worker = await self._starting.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._starting.__aexit__(None, None, None)
