"""What a daemon tells of shared prefills: a plan of every kind, and a trace of every outcome."""

from __future__ import annotations

from typing import Any

LAYERS: dict[str, Any] = {
    "kind": "layers",
    "nodes": ["studio", "this"],
    "predicted_s": 1.06,
    "steps": [
        {"name": "agreed", "seconds": 0.004},
        {"name": "prefix sent", "seconds": 0.0},
        {"name": "waited", "seconds": 0.12},
        {"name": "computed", "seconds": 0.9},
        {"name": "exposed hand-off", "seconds": 0.036},
    ],
    "chosen": True,
    "cuts": [0, 15, 30],
    "chunk": 256,
}
TOKENS: dict[str, Any] = {
    "kind": "tokens",
    "nodes": ["studio", "this"],
    "predicted_s": 1.12,
    "code": "slower",
    "reason": "6 % slower than layers with studio.",
    "cuts": [0, 2048, 4000],
    "chunk": 256,
}
LOCAL: dict[str, Any] = {
    "kind": "local",
    "nodes": ["this"],
    "predicted_s": 1.92,
    "code": "slower",
    "reason": "81 % slower than layers with studio.",
}
NOBODY: dict[str, Any] = {
    "kind": "any",
    "nodes": ["air"],
    "predicted_s": None,
    "code": "other_files",
    "reason": "air has no model with these files.",
}
PLAN: dict[str, Any] = {
    "model": "smollm2-135m",
    "prompt_tokens": 4000,
    "cached_tokens": 0,
    "options": [LAYERS, TOKENS, LOCAL, NOBODY],
}


def _step(name: str, machine: str, begin_s: float, end_s: float, parent: int, **more: Any) -> dict[str, Any]:
    seconds = more.pop("seconds", end_s - begin_s)
    known = {"name": name, "machine": machine, "begin_s": begin_s, "end_s": end_s, "seconds": seconds}
    return {**known, "parent": parent, **more}


STEPS: list[dict[str, Any]] = [
    {"name": "request", "machine": "vm", "begin_s": 0.0, "end_s": 3.25, "seconds": 3.25},
    _step("waiting", "vm", 0.0, 0.03, 0),
    _step("reading", "vm", 0.03, 1.15, 0, planned_s=1.06),
    _step("waited", "vm", 0.04, 0.98, 2, seconds=0.12, planned_s=0.12, n_bytes=92_100_000),
    _step("computed", "studio", 0.05, 1.0, 2, n_bytes=92_100_000),
    _step("spot check", "vm", 0.06, 0.09, 2),
    _step("computed", "vm", 0.06, 1.14, 2, seconds=0.93, planned_s=0.60),
    _step("exposed hand-off", "vm", 1.14, 1.15, 2, planned_s=0.036),
    _step("writing", "vm", 1.15, 3.25, 0),
]
_MARGIN = "6 % faster than staying here, too little to ask another machine: 10 % would do."
_CHOSEN_LOCAL = {**LOCAL, "chosen": True, "code": "", "reason": ""}
TRACES: dict[str, Any] = {
    "traces": [
        {
            "id": "chatcmpl-00000000000000000000aaaa1111",
            "at_s": 1_780_000_003.0,
            "model": "smollm2-135m",
            "prompt_tokens": 4000,
            "cached_tokens": 0,
            "chosen": LAYERS,
            "losers": [TOKENS, LOCAL, NOBODY],
            "steps": STEPS,
            "outcome": "shared",
            "exactness": "exact",
            "prefill_s": 1.12,
            "ttft_s": 1.15,
            "took_s": 3.25,
            "machine": "vm",
            "planned_ttft_s": 1.08,
            "alone_s": 1.94,
            "summary": "1.1 s: 1.1 s reading together. Alone: about 1.9 s. Then 2.1 s writing 84 tokens.",
        },
        {
            "id": "chatcmpl-00000000000000000000bbbb2222",
            "at_s": 1_780_000_002.0,
            "model": "mlx-community/Qwen3-32B-4bit",
            "prompt_tokens": 16_384,
            "cached_tokens": 1024,
            "chosen": {
                **LAYERS,
                "nodes": ["studio", "the big one upstairs", "this"],
                "cuts": [0, 30, 50, 64],
            },
            "losers": [],
            "steps": [],
            "outcome": "fallback",
            "exactness": "exact",
            "prefill_s": 3.2,
            "ttft_s": 3.3,
            "planned_ttft_s": 1.06,
            "late": True,
            "code": "peer_lost",
            "reason": "studio went away in the middle of the prompt.",
            "verified_tokens": 2048,
        },
        {
            "id": "chatcmpl-00000000000000000000cccc3333",
            "at_s": 1_780_000_001.0,
            "model": "smollm2-135m",
            "prompt_tokens": 300,
            "cached_tokens": 0,
            "chosen": _CHOSEN_LOCAL,
            "losers": [{**LAYERS, "chosen": False, "code": "margin", "reason": _MARGIN}],
            "steps": [],
            "outcome": "cancelled",
            "planned_ttft_s": 1.92,
        },
    ]
}
