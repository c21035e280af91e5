"""The report of `fleetctl doctor --prove` for the person who ran it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleetctl.render.text import brief, count, size, table
from fleetd.control.hardware_proof import HardwareProof, WidthProof

_Row = Sequence[str]


def page(proof: HardwareProof) -> str:
    """A table per kind of measurement; those without a result are left out."""
    machine, model, shape = proof.machine, proof.model, proof.model.shape
    parts = [
        f"fleetd {proof.fleetd} on {machine.product or machine.cpu}, "
        f"{machine.accelerator or machine.device}, {machine.platform}",
        f"a {shape.architecture} of {shape.layers} layers, {size(shape.weights_bytes)} as {shape.dtype}; "
        f"drafts: {model.speculation}",
    ]
    if machine.others_share is not None and machine.others_share > 0.1:
        parts.append(
            f"Other programs had {machine.others_share:.0%} of the processor: repeat it without them."
        )
    memory = proof.memory
    parts.append(
        table(
            ["memory", "free", "GPU may hold", "set by its owner", "models may take", "taken at most"],
            [
                [
                    size(value or None)
                    for value in (
                        memory.total_bytes,
                        memory.available_bytes,
                        memory.device_limit_bytes,
                        memory.wired_limit_bytes,
                        memory.usable_bytes,
                        memory.peak_bytes,
                    )
                ]
            ],
        )
    )
    parts += _tables(proof)
    held = {True: "yes", False: "NO", None: "not known"}
    parts.append(
        f"sleep assertion: taken {held[proof.awake_held]}, released again {held[proof.awake_released]}"
    )
    parts.append(
        table(
            ["step", "took", ""],
            [[s.name, brief(s.seconds), f"FAILED: {s.error}" if s.error else s.skipped] for s in proof.steps],
        )
    )
    return "\n\n".join(parts)


def _tables(proof: HardwareProof) -> Iterable[str]:
    if proof.widths:
        yield table(["context", "blocks with the bytes of single steps"], _widths(proof.widths))
    if proof.chunks:
        yield table(
            ["chunk", "tokens/s", "memory"],
            [[count(c.tokens), f"{c.tok_s:.1f}", size(c.peak_bytes)] for c in proof.chunks],
            right=(0, 1),
        )
    if proof.speeds:
        yield table(
            ["mode", "tokens", "runs", "fleetd tok/s", "mlx-lm tok/s", "ratio"],
            [
                [
                    speed.mode,
                    count(speed.tokens),
                    str(speed.runs),
                    f"{speed.fleetd_tok_s:.1f}",
                    f"{speed.mlx_lm_tok_s:.1f}",
                    f"{speed.ratio:.2f}",
                ]
                for speed in proof.speeds
            ],
            right=(1, 2, 3, 4, 5),
        )
    if proof.shared:
        same = {True: "the same bytes", False: "OTHER BYTES", None: "not compared"}
        yield table(
            ["shared by", "tokens", "keys and values"],
            [[shared.kind, count(shared.tokens), same[shared.same]] for shared in proof.shared],
        )
    if proof.links:
        yield table(
            ["link to", "state", "kind", "round trip", "per second"],
            [
                [
                    link.chip or "a machine",
                    link.state,
                    link.kind or "-",
                    brief(link.rtt_ms / 1000 if link.rtt_ms is not None else None),
                    size(link.bytes_per_s),
                ]
                for link in proof.links
            ],
        )
    answers = {True: "the same answer", False: "ANOTHER ANSWER", None: "not compared"}
    for both in proof.together:
        gain = both.alone_s / both.together_s if both.together_s else 0.0
        yield (
            f"{count(both.tokens)} tokens with the fleet ({both.plan}, {both.exactness}): first token after "
            f"{brief(both.together_s)}, alone after {brief(both.alone_s)}, {gain:.2f} times as soon; "
            f"{answers[both.same]}"
        )


def _widths(found: Sequence[WidthProof]) -> Iterable[_Row]:
    """A row per context: the widths that are exact, and those that are not."""
    for context in dict.fromkeys(width.context for width in found):
        here = [width for width in found if width.context == context]
        groups = {
            "": [w for w in here if w.same and w.rows == 1],
            "with steps two rows wide ": [w for w in here if w.same and w.rows > 1],
            "NOT ": [w for w in here if not w.same],
        }
        shown = [name + " ".join(str(w.width) for w in group) for name, group in groups.items() if group]
        yield [count(context), "; ".join(shown)]
