"""What follows when an attempt fails, as a table of cases."""

from __future__ import annotations

import pytest

from fleetd import limits
from fleetd.errors import (
    BadRequest,
    ContextLengthExceeded,
    EngineDied,
    FleetError,
    Incompatible,
    ModelRefused,
    ModelUnsupported,
    Overloaded,
    PeerLost,
    PeerWrong,
)
from fleetd.plan.refusals import THIS_NODE
from fleetd.requests.attempts import Attempts, Next, RefusedRequest

LOST, BUSY, DIED = PeerLost("gone"), Overloaded("busy"), EngineDied("died")
WRONG, LONG, UNKNOWN, REFUSED = (
    BadRequest("no"),
    ContextLengthExceeded("too long"),
    ModelUnsupported("unknown"),
    ModelRefused("it runs code"),
)
EARLIER = RefusedRequest("studio", "d", WRONG)


@pytest.mark.parametrize(
    ("node_id", "error", "answering", "proven", "refusal", "following"),
    [
        # A machine that is gone, busy or broken says nothing of the request.
        ("mini", LOST, False, False, None, "elsewhere"),
        ("mini", BUSY, False, True, None, "elsewhere"),
        (THIS_NODE, DIED, False, False, None, "elsewhere"),
        ("mini", LOST, False, True, EARLIER, "elsewhere"),
        # What has been passed on cannot be taken back.
        ("mini", LOST, True, True, None, "stop"),
        (THIS_NODE, DIED, True, False, None, "stop"),
        # This machine knows whether a request is wrong; another machine's word is to be confirmed.
        (THIS_NODE, WRONG, False, False, None, "stop"),
        ("mini", WRONG, False, False, None, "confirm"),
        ("mini", LONG, False, False, None, "confirm"),
        ("mini", UNKNOWN, False, False, None, "confirm"),
        ("mini", REFUSED, False, False, None, "confirm"),
        # One that has served requests is believed unless asking again costs nothing.
        ("mini", WRONG, False, True, None, "confirm_loaded"),
        # Two are enough.
        ("mini", WRONG, False, False, EARLIER, "stop"),
        ("mini", LONG, False, True, EARLIER, "stop"),
        ("mini", WRONG, True, False, None, "stop"),
    ],
)
def test_what_follows_from_a_failure(
    node_id: str,
    error: FleetError,
    answering: bool,
    proven: bool,
    refusal: RefusedRequest | None,
    following: Next,
) -> None:
    attempts = Attempts(refusal=refusal)
    assert attempts.after(node_id, error, answering=answering, proven=proven) == following
    assert attempts.tried == {node_id}
    assert attempts.refusal is refusal


def test_no_more_than_so_many_machines_are_tried() -> None:
    attempts = Attempts()
    found = [attempts.after(f"mini{n}", LOST, answering=False, proven=False) for n in range(limits.ATTEMPTS)]
    assert found == ["elsewhere"] * (limits.ATTEMPTS - 1) + ["stop"]
    assert len(attempts.tried) == limits.ATTEMPTS


@pytest.mark.parametrize(
    ("said", "kind"),
    [(WRONG, PeerWrong), (REFUSED, PeerWrong), (LONG, Incompatible), (UNKNOWN, Incompatible)],
)
def test_a_machine_that_refused_what_another_served_is_wrong_unless_the_two_may_differ(
    said: FleetError, kind: type[FleetError]
) -> None:
    untrue = RefusedRequest("mini", "d", said).untrue
    assert type(untrue) is kind
    assert str(said) in untrue.message
