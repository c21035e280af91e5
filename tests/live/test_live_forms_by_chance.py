"""Schemas by chance, answered by the default model in a crowd and alone: what has ended is valid, and drafts
and neighbours change nothing."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from held_answers import drawn_schema, is_valid
from live_daemon import LiveDaemon

from fleetd.engine.grammar.schemas import enforceable
from fleetd.errors import FleetError

pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.one_loop, pytest.mark.timeout(7200)]

# Each is asked for greedily and at temperature 1; every tenth answer is asked for again, alone.
SCHEMAS = int(os.environ.get("FLEETD_TEST_SCHEMAS", "100"))
CROWD, TOKENS = 16, 48
WORDS = [
    "List",
    "describe",
    "invent",
    "three",
    "people",
    "cities",
    "numbers",
    "as",
    "JSON",
    "short",
    "example",
    "of",
    "a",
    "warm",
    "rainy",
    "place",
]


def schemas() -> list[tuple[int, dict[str, Any]]]:
    """Schemas that are promised, by their seeds."""
    found: list[tuple[int, dict[str, Any]]] = []
    seed = 0
    while len(found) < SCHEMAS:
        seed += 1
        schema = drawn_schema(random.Random(seed))
        try:
            enforceable(schema, "schema")
        except FleetError:
            continue
        found.append((seed, schema))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_that_ends_is_valid(
    live: LiveDaemon,
    loaded_smol: str,
    record_property: Callable[[str, object], None],
    temperature: float,
) -> None:
    asked = schemas()
    with openai.OpenAI(base_url=live.base_url, api_key=live.key, max_retries=0, timeout=1800) as client:

        def answer(seed: int, schema: dict[str, Any], *, drafts: bool) -> tuple[str, str]:
            text = " ".join(random.Random(seed).choices(WORDS, k=8))
            form: Any = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema}}
            try:
                said = client.chat.completions.create(
                    model=loaded_smol,
                    messages=[{"role": "user", "content": text}],
                    response_format=form,
                    temperature=temperature,
                    seed=seed,
                    max_tokens=TOKENS,
                    extra_body={"speculate": drafts},
                )
            except openai.BadRequestError as error:  # what only the compiler finds
                return "refused", error.message
            return said.choices[0].finish_reason, said.choices[0].message.content or ""

        with ThreadPoolExecutor(CROWD) as crowd:
            answers = list(crowd.map(lambda each: answer(*each, drafts=True), asked))
        for (seed, schema), (reason, text) in zip(asked, answers, strict=True):
            assert reason in ("stop", "length", "refused")
            if reason == "stop":
                assert is_valid(schema, text), (seed, json.dumps(schema), text)
        whole = [at for at, (reason, _) in enumerate(answers) if reason == "stop"]
        assert len(whole) > SCHEMAS // 3
        for at in range(0, len(asked), 10):
            assert answer(*asked[at], drafts=False) == answers[at], asked[at]
    record_property("ended", f"{len(whole)} of {len(asked)}")
