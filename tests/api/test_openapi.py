"""The document describes the daemon: generated requests find no crash, no undocumented status, no odd shape.

A few hundred cases run every time; ``FLEETD_API_CASES=2000 pytest -m long`` runs more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from api_fakes import Site, serve, serve_in_thread, services
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks as openapi_checks

from fleetd.api.openapi import document
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
LONG_CASES = int(os.environ.get("FLEETD_API_CASES", "2000"))


@pytest.fixture(scope="module")
def live() -> Iterator[Site]:
    with serve_in_thread(services) as site:
        yield site


def try_cases(site: Site, label: str, cases: int) -> int:
    """Send ``cases`` generated requests, half of them against the schema; returns how many went out."""
    sent = 0
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
            nonlocal sent
            sent += 1
            case.call_and_validate(base_url=site.url, headers=site.auth, checks=CHECKS, timeout=10)

        check()
    return sent


def share(label: str, total: int) -> int:
    rest = (1 - sum(WEIGHTS.values())) / (len(OPERATIONS) - len(WEIGHTS))
    return max(4, int(total * WEIGHTS.get(label, rest)))


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_generated_requests_conform(live: Site, label: str) -> None:
    assert try_cases(live, label, share(label, 200)) > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_many_generated_requests_conform(live: Site, label: str) -> None:
    assert try_cases(live, label, share(label, LONG_CASES)) > 0


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
