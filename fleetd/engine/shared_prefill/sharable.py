"""What a worker has of a model that can be shared between machines, and what sharing has to know of it."""

from __future__ import annotations

import os
import platform

import mlx.core as mx
import msgspec

from fleetd.control.model_facts import WIRE_BITS, ModelShape
from fleetd.engine.layers.stage import Stage
from fleetd.engine.protocol import Arithmetic
from fleetd.engine.shared_prefill.fingerprint import arithmetic
from fleetd.engine.shared_prefill.kv_layout import KvLayout

# Once at the end, as they were before the last chunk, and at a split's places.
_STATES = 2


class Sharable(msgspec.Struct, frozen=True):
    stage: Stage
    layout: KvLayout
    arithmetic: Arithmetic

    @classmethod
    def of(
        cls, stage: Stage, device: str, versions: dict[str, str], known: Arithmetic | None = None
    ) -> Sharable:
        """Costs about a short chunk of prefill: a fingerprint of every layer is computed.

        ``known``: what a load of the same files found on this device; then nothing is computed.
        """
        layout = KvLayout.of(stage)
        states = _STATES if layout.keeps_states(range(stage.first, stage.prefilling.last)) else 0
        found = known or arithmetic(
            # However a prompt's rows are held.
            stage.as_computed,
            layout,
            device=device,
            accelerator=accelerator_name(device),
            versions=versions,
        )
        return cls(stage, layout, msgspec.structs.replace(found, states=states))

    def with_kv_bits(self, bits: int) -> Sharable:
        """The same layers, whose rows are held in ``bits`` bits where they can be; 0 is as computed."""
        layout = self.layout.with_kv_bits(bits)
        return msgspec.structs.replace(self, stage=self.stage.with_packings(layout.packings), layout=layout)

    @property
    def any_chunks(self) -> bool:
        """True if the bytes are the same wherever a prompt is cut into chunks."""
        return self.arithmetic.chunks == "any"

    def described(self, shape: ModelShape) -> ModelShape:
        """The shape with what other machines need to know to help with prompts."""
        stage = self.stage
        return msgspec.structs.replace(
            shape,
            layers=stage.prefilled,
            hidden_bytes=self.layout.hidden_bytes(1),
            hidden_width=stage.hidden_width,
            outside_bytes=stage.outside_bytes,
            layer_bytes=stage.layer_bytes,
            any_chunks=self.any_chunks,
            wire_token_bytes=self.layout.with_kv_bits(WIRE_BITS).token_bytes,
        )


def accelerator_name(device: str) -> str:
    """Its make ("Apple M4 Pro"); of a CPU what decides how it rounds: architecture and instruction set."""
    if device != "cpu":
        return str(mx.device_info().get("device_name", device))
    instructions = os.environ.get("MKL_CBWR", "").partition(",")[0]
    return f"{platform.machine()} {instructions}".strip()
