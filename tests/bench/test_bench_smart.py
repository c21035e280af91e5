"""What smart prefill costs where nobody asks for it: with its wrappers in the model, and with none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_architectures import tiny

from bench.children.mlx_lm import wrap
from bench.harness.samples import Samples
from bench.scenarios import smart_prefill
from fleetd.engine.sparse_prefill.rope import PosRoPE


def wrapped(model: Any) -> list[bool]:
    return [isinstance(layer.self_attn.rope, PosRoPE) for layer in model.layers]


def test_a_model_has_wrappers_only_while_they_are_asked_for() -> None:
    model = tiny("llama")
    ropes = [layer.self_attn.rope for layer in model.layers]
    wrap(model, wanted=True)
    assert all(wrapped(model))
    wrap(model, wanted=False)
    assert not any(wrapped(model))
    assert all(layer.self_attn.rope is rope for layer, rope in zip(model.layers, ropes, strict=True))


class PlayedChild:
    """A first token after 1 s and each further one after 10 ms; a wrapper adds 1 % and 2 %."""

    def ask(self, *, tokens: list[int], max_tokens: int, wrapped: bool) -> dict[str, Any]:
        first_s, each_s = (1.01, 0.0102) if wrapped else (1.0, 0.01)
        return {"times": [first_s + n * each_s for n in range(max_tokens)]}


def test_smart_off_is_held_against_a_model_without_any_wrapper(monkeypatch: Any) -> None:
    monkeypatch.setattr(smart_prefill.prompts, "tokens", lambda *_: [1])
    seen = Samples()
    smart_prefill._not_installed(PlayedChild(), seen, 0)  # type: ignore[arg-type]
    first, each = smart_prefill._added(seen, "first"), smart_prefill._added(seen, "each")
    assert len(first) == smart_prefill._OFF_TRIES
    assert [round(value, 6) for value in (first[0], each[0])] == [0.01, 0.02]


class TracedDaemon:
    """Tells one trace."""

    def __init__(self, **trace: Any) -> None:
        self.told = json.dumps({"traces": [trace]}).encode()

    def control(self, *_: str) -> bytes:
        return self.told


@pytest.mark.parametrize(
    ("trace", "passed"),
    [
        ({"chosen": {"kind": "smart", "predicted_s": 9.0}, "ttft_s": 12.0, "prefill_s": 10.0}, [True, True]),
        ({"chosen": {"kind": "smart", "predicted_s": 5.0}, "ttft_s": 12.0, "prefill_s": 10.0}, [True, False]),
        ({"chosen": {"kind": "local"}, "code": "slower", "reason": "It would not pay."}, [False]),
    ],
)
def test_a_first_prompt_that_is_not_scored_falls_short_and_loses_no_other_figure(
    trace: dict[str, Any], passed: list[bool]
) -> None:
    seen = Samples()
    why_not = smart_prefill._missed(TracedDaemon(**trace), seen)  # type: ignore[arg-type]
    figures = smart_prefill._first(seen["first"], why_not)
    assert [figure.passes for figure in figures] == passed
    assert ("It would not pay." in figures[0].note) == (passed == [False])
