"""One worker's state and figures, as the daemon knows them."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetd.engine.protocol import Heartbeat, Loading, Ready
from fleetd.engine.settings import WorkerSettings
from fleetd.errors import FleetError

State = Literal["loading", "ready", "failed", "stopping"]


class EngineStatus(msgspec.Struct, frozen=True):
    """What ``fleetctl status`` shows of one worker. Ages in seconds, sizes in bytes.

    One that has layers [``first_layer``, ``last_layer``) only names the model that it is ``part_of``.
    """

    model: str
    state: State
    stage: str
    done: int
    total: int
    device: str | None
    dtype: str | None
    weights_bytes: int
    memory_bytes: int
    kv_bytes: int
    kv_budget_bytes: int
    prefix_bytes: int
    prefix_entries: int
    prefix_queries: int
    prefix_hits: int
    context_tokens: int
    prefill_tok_s: float
    decode_tok_s: float
    prefill_context_s: float
    prefill_fixed_s: float
    arithmetic: str
    shares_sparse: bool
    speculation: str
    part_of: str
    first_layer: int
    last_layer: int
    prefilling: int
    decoding: int
    waiting: int
    assisting: int
    steps: int
    progress_age_s: float
    idle_s: float
    restarts: int
    pid: int | None
    error: str | None

    @classmethod
    def of(
        cls,
        settings: WorkerSettings,
        facts: Ready | None,
        heartbeat: Heartbeat,
        loading: Loading,
        *,
        state: State,
        preparing: int,
        progress_age_s: float,
        idle_s: float,
        restarts: int,
        pid: int | None,
        error: FleetError | None,
    ) -> EngineStatus:
        """``facts`` is None before the model is loaded; ``preparing`` counts requests not yet accepted."""
        return cls(
            model=settings.name,
            state=state,
            stage=loading.stage if state == "loading" else "",
            done=loading.done,
            total=loading.total,
            device=facts.device if facts else None,
            dtype=facts.dtype if facts else None,
            weights_bytes=facts.weights_bytes if facts else 0,
            memory_bytes=heartbeat.memory_bytes,
            kv_bytes=heartbeat.kv_bytes,
            kv_budget_bytes=facts.kv_budget_bytes if facts else 0,
            prefix_bytes=heartbeat.prefix_bytes,
            prefix_entries=heartbeat.prefix_entries,
            prefix_queries=heartbeat.prefix_queries,
            prefix_hits=heartbeat.prefix_hits,
            context_tokens=facts.context_tokens if facts else 0,
            prefill_tok_s=round(facts.prefill_tok_s, 1) if facts else 0.0,
            decode_tok_s=round(facts.decode_tok_s, 1) if facts else 0.0,
            prefill_context_s=facts.prefill_context_s if facts else 0.0,
            prefill_fixed_s=facts.prefill_fixed_s if facts else 0.0,
            arithmetic=facts.arithmetic.text if facts and facts.arithmetic else "",
            shares_sparse=bool(facts and facts.arithmetic and not facts.arithmetic.sparse),
            speculation=facts.speculation if facts else "",
            part_of=settings.part_of,
            first_layer=settings.first_layer,
            last_layer=settings.last_layer,
            prefilling=heartbeat.prefilling,
            decoding=heartbeat.decoding,
            waiting=heartbeat.waiting + preparing,
            assisting=heartbeat.assisting,
            steps=heartbeat.steps,
            progress_age_s=round(progress_age_s, 3),
            idle_s=round(idle_s, 3),
            restarts=restarts,
            pid=pid,
            error=str(error) if error else None,
        )
