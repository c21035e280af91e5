"""The document describes the daemon: generated requests find no crash, no undocumented status, no odd shape.

Streams that answer them are in order as well, by the account of each dialect.

Some sixty cases run every time; ``FLEETD_API_CASES=2000 pytest -m long`` runs more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import message_order
import pytest
import response_order
import schemathesis
from api_fakes import Site, serve, serve_in_thread, services
from chat_order import read_chunks
from hypothesis import HealthCheck, Phase, given, seed, settings
from ollama_order import read_lines
from openai._streaming import ServerSentEvent, SSEDecoder
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks as openapi_checks

from fleetd.api.http.openapi import document
from fleetd.api.routes import ALL_ROUTES

load_all_checks()
CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.missing_required_header,
    openapi_checks.ignored_auth,
]
SCHEMA = schemathesis.openapi.from_dict(document(ALL_ROUTES, "0.1.0"))
# Else it leaves a stream after a few events, and the end is never seen.
SCHEMA.config.max_stream_events = 1_000_000
OPERATIONS: dict[str, Any] = {
    operation.label: operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())  # type: ignore[union-attr]
}
# Those that generate have almost all the ways to go wrong.
WEIGHTS = {
    "POST /v1/chat/completions": 0.4,
    "POST /v1/completions": 0.3,
    "POST /v1/messages": 0.05,
    "POST /v1/responses": 0.05,
    "POST /api/chat": 0.03,
    "POST /api/generate": 0.02,
}
STREAMS = ("text/event-stream", "application/x-ndjson")


def events(data: bytes) -> list[ServerSentEvent]:
    return list(SSEDecoder().iter_bytes(iter([data])))


def named(data: bytes) -> Iterator[tuple[str, Any]]:
    return ((event.event or "", event.json()) for event in events(data))


# What reads the stream of a route and raises AssertionError for one that is out of order.
ORDERS: dict[str, Callable[[bytes], Any]] = {
    "POST /v1/chat/completions": lambda data: read_chunks(event.data for event in events(data)),
    "POST /v1/messages": lambda data: message_order.checked(named(data)),
    "POST /v1/responses": lambda data: response_order.checked(named(data)),
    "POST /api/chat": lambda data: read_lines([data]),
    "POST /api/generate": lambda data: read_lines([data]),
}
PROMPTS: dict[str, dict[str, Any]] = {
    "POST /api/chat": {"messages": [{"role": "user", "content": "x"}]},
    "POST /api/generate": {"prompt": "x"},
}
LONG_CASES = int(os.environ.get("FLEETD_API_CASES", "2000"))


@pytest.fixture(scope="module")
def live() -> Iterator[Site]:
    with serve_in_thread(services) as site:
        yield site


def try_cases(site: Site, label: str, cases: int) -> tuple[int, int]:
    """Send ``cases`` generated requests, half of them against the schema; returns how many went out, and how
    many streams came back."""
    sent = streams = 0
    modes = [GenerationMode.POSITIVE]
    if label in WEIGHTS:  # the others take nothing that could be wrong
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:

        @seed(20261121)
        @settings(
            max_examples=cases // len(modes),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            nonlocal sent, streams
            sent += 1
            if label in ORDERS and sent % 2 and isinstance(case.body, dict):
                # Drawn, they would rarely be there, and Ollama's routes only load a model without a prompt.
                case.body |= {"stream": True} | PROMPTS.get(label, {})
            answer = case.call_and_validate(base_url=site.url, headers=site.auth, checks=CHECKS, timeout=60)
            (kind,) = answer.headers.get("content-type", [""])
            if kind.startswith(STREAMS) and label in ORDERS:
                streams += 1
                ORDERS[label](answer.content)

        check()
    return sent, streams


def share(label: str, total: int) -> int:
    rest = (1 - sum(WEIGHTS.values())) / (len(OPERATIONS) - len(WEIGHTS))
    return max(8 if label in WEIGHTS else 4, int(total * WEIGHTS.get(label, rest)))


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_generated_requests_conform(live: Site, label: str) -> None:
    sent, _ = try_cases(live, label, share(label, 60))
    assert sent > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_many_generated_requests_conform(live: Site, label: str) -> None:
    sent, streams = try_cases(live, label, share(label, LONG_CASES))
    assert sent > 0
    assert streams > 0 or label not in ORDERS


async def test_the_document_is_served_and_whole() -> None:
    async with serve(services()) as site, site.client() as session:
        async with session.get("/openapi.json") as response:
            assert response.status == 200
            served = await response.json()
    assert served == document(ALL_ROUTES, "0.1.0")
    names = set(served["components"]["schemas"])
    text = str(served)
    for name in names:
        assert f"#/components/schemas/{name}'" in text
    assert text.count("'$ref': '#/components/schemas/") == sum(
        text.count(f"'$ref': '#/components/schemas/{name}'") for name in names
    )
