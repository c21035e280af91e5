"""Whether a helper's bytes can stand where this machine's own would: compared before anything is computed.

Pure. Both ends compare, each with what the other said of itself, so neither depends on the other's care.

    other files, dtype or mlx-lm      →  Incompatible, named
    equal fingerprints of the layers  →  exact: every byte is what this machine would have computed
    else                              →  plan: the same model, rounded in another order
"""

from __future__ import annotations

from fleetd.engine.protocol import Arithmetic
from fleetd.errors import Incompatible, InvalidValue, ProtocolError
from fleetd.plan.prefill.split import Split, checked


def compare(
    home: Arithmetic, helper: Arithmetic, layers: range, *, own_chunks: bool, sparse: bool = False
) -> bool:
    """Whether what the helper makes of ``layers`` is exactly what home would.

    Args:
        layers: those that the helper is to compute.
        own_chunks: the split cuts the prompt into chunks where home alone would.
        sparse: tokens of the prompt are left out.

    Raises Incompatible, naming the field, where the helper's rows would be of no use.
    """
    _same("dtype", home.dtype, helper.dtype)
    # Between its versions a model's very graph may differ, where no fingerprint of one layer shows it.
    _same("mlx-lm", home.versions.get("mlx-lm", ""), helper.versions.get("mlx-lm", ""))
    if sparse and helper.sparse:
        raise Incompatible(f"The helper cannot leave out tokens of a prompt. {helper.sparse}", param="sparse")
    missing = [layer for layer in layers if _of(helper, layer) is None]
    if missing:
        raise Incompatible(f"Layer {missing[0]} is not among those that the helper holds.", param="layers")
    if any(_of(home, layer) != _of(helper, layer) for layer in layers):
        if home.accelerator == helper.accelerator:
            _same("mlx", home.versions.get("mlx", ""), helper.versions.get("mlx", ""))
        return False
    return own_chunks or home.chunks == helper.chunks == "any"


def checked_split(split: Split, *, layers: int, context_tokens: int, place: int | None = None) -> Split:
    """The same, where it divides a prompt that this machine's own model could take.

    Args:
        layers, context_tokens: the model's, as the own engine says.
        place: the helper's in the chain; None for the machine that answers.

    Raises ProtocolError, before anything of the split's size is allocated.
    """
    try:
        checked(split)
    except InvalidValue as error:
        raise ProtocolError(f"A split that makes no sense: {error.message}") from None
    if split.layers != layers:
        raise ProtocolError(f"A split of {split.layers} layers; the model has {layers}.")
    if (longest := max(split.tokens, split.span)) >= context_tokens:
        raise ProtocolError(f"A split of {longest} tokens; the model takes {context_tokens}.")
    if place is not None and not 0 <= place < split.helpers:
        raise ProtocolError(f"Place {place} is none of the {split.helpers} helpers'.")
    return split


def _same(field: str, home: str, helper: str) -> None:
    if home != helper:
        raise Incompatible(
            f"{field} is {helper or 'unknown'} there and {home or 'unknown'} here.", param=field
        )


def _of(arithmetic: Arithmetic, layer: int) -> bytes | None:
    at = layer - arithmetic.first_layer
    return arithmetic.layers[at] if 0 <= at < len(arithmetic.layers) else None
