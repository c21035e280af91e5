"""What a model is, and how fast one machine runs it: figures are declared here, and elsewhere passed on.

A worker tells both of the model that it has loaded (``engine.protocol.Ready``). The daemon shows them
(``EngineStatus``), tells them to other machines (``ModelCard``), and plans by them (``Candidate``,
``PrefillSize``). On the wire and in JSON, figures that are 0 or empty are left out.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fleetd import limits
from fleetd.text.bounded import Rate

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=limits.CARD_TEXT_CHARS)]
Layers = Annotated[int, Meta(ge=0, le=limits.LAYERS)]
# What a model gives: text, a vector of a text, or how well a text answers a query.
ModelPurpose = Literal["chat", "embedding", "rerank"]
# Bits of a number of keys and values that are held quantised; 0 if they are held as they are computed.
KvBits = Literal[0, 4, 8]
# Bits of a number of the keys and values that helpers send, where they send fewer than they hold; 0: as held.
WireBits = Literal[0, 8]
WIRE_BITS: Final = 8


class StateSizes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes of what a model keeps of one sequence, by its tokens: known before anything is allocated."""

    # Bytes of each token, however many there are.
    token_bytes: Count = 0
    # Bytes whatever the number of tokens.
    state_bytes: Count = 0
    # Bytes of each of the last ``window`` tokens besides.
    window_bytes: Count = 0
    # Tokens; where layers have different windows, the largest one's.
    window: Count = 0

    def __add__(self, other: StateSizes) -> StateSizes:
        return StateSizes(
            self.token_bytes + other.token_bytes,
            self.state_bytes + other.state_bytes,
            self.window_bytes + other.window_bytes,
            max(self.window, other.window),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token more, while no window is full."""
        return self.token_bytes + self.window_bytes

    def of(self, tokens: int) -> int:
        """Bytes of a sequence of ``tokens``, without the room to grow that caches may have."""
        return tokens * self.token_bytes + self.whole(tokens)

    def whole(self, tokens: int) -> int:
        """The part of them that has no row for every token: it is sent, and kept at earlier tokens, whole."""
        return self.state_bytes + min(tokens, self.window) * self.window_bytes

    def fitting(self, n_bytes: int) -> int:
        """The most tokens of a sequence that takes at most ``n_bytes``; 0 if not even its states fit."""
        left = max(0, n_bytes - self.state_bytes)
        within = left // max(1, self.token_bytes + self.window_bytes)
        if within < self.window:
            return within
        return (left - self.window * self.window_bytes) // max(1, self.token_bytes)


class ModelShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model is: the same on every machine that runs the same files in the same precision.

    The first three figures, its purpose, its vectors' width and whether it reads images are in its files. A
    load finds out the others, which are 0 or empty before. Bytes are over the layers that are held: all of
    them, but in a worker that only helps.
    """

    # The ``model_type`` of its config.
    architecture: Text = ""
    # Bytes of the weights.
    weights_bytes: Count = 0
    # Tokens of the longest sequence that it takes.
    context_tokens: Count = 0
    # The type of numbers that it computes with: "bfloat16".
    dtype: Text = ""
    # How many layers a prefill runs, also where only some of them are held.
    layers: Layers = 0
    # Bytes of a sequence's keys, values and states.
    sizes: StateSizes = StateSizes()
    # Bytes that one token has between two layers.
    hidden_bytes: Count = 0
    # Numbers in one hidden state of a token.
    hidden_width: Count = 0
    # Bytes of the weights that belong to no layer. With some layers come some of them, or none.
    outside_bytes: Count = 0
    # Bytes of the layer with the most weights.
    layer_bytes: Count = 0
    # Whether a prompt may be cut into chunks anywhere without a change of any byte. Where this is False, two
    # machines compute the same bytes from the same chunks only.
    any_chunks: bool = False
    # Why no other machine can help with its prefill, as a sentence; "" if they can.
    unshareable: Text = ""
    # Tokens at a prompt's end that sparse prefill computes whatever is left out; 0 if it can leave out none.
    sparse_tail: Count = 0
    # How a CPU multiplies by its weights, "float32" or "int8", or before a load how it would; "" on a GPU.
    cpu_arithmetic: Text = ""
    # What it gives; its ``context_tokens`` are the longest text, or query and document together.
    purpose: ModelPurpose = "chat"
    # Numbers in a vector of a text; 0 if its purpose is another.
    vector_width: Count = 0
    # Whether prompts may have images in them.
    images: bool = False
    # Bits of a number of the keys and values that are held; 0 if they are held as they are computed.
    kv_bits: KvBits = 0
    # The same for people, with what is left out; "" if nothing else was asked for.
    kv_held: Text = ""
    # Bytes of a token's keys and values if helpers send them in ``WIRE_BITS``; 0 from a machine that cannot.
    wire_token_bytes: Count = 0
    # In how many bits its helpers may send them, by the settings of the machine that answers.
    wire_bits: WireBits = 0

    @property
    def narrows(self) -> bool:
        """True if helpers may send fewer bytes than this machine holds, and if they are fewer."""
        return bool(self.wire_bits) and 0 < self.wire_token_bytes < self.sizes.token_bytes

    @property
    def most_weights_bytes(self) -> int:
        """Bytes of the weights as if all layers were like the largest: room for whichever a helper gets."""
        return max(self.weights_bytes, self.outside_bytes + self.layers * self.layer_bytes)


class MeasuredSpeed(msgspec.Struct, frozen=True, omit_defaults=True):
    """How fast one machine runs a model: one request alone on a short context. 0 until measured.

    Of a machine that has only some layers, prefill's figures are what the whole model would take at the pace
    of these.
    """

    # Tokens of prompt per second, in chunks of ``plan.costs.MEASURED_TOKENS``.
    prefill_tok_s: Rate = 0.0
    # Tokens of an answer per second.
    decode_tok_s: Rate = 0.0
    # Seconds that each token of context adds to each token's prefill.
    prefill_context_s: Rate = 0.0
    # Seconds that each chunk takes however short it is.
    prefill_fixed_s: Rate = 0.0
    # Why these figures may be wrong, as a part of a sentence; "" if they can be believed. Something else ran
    # while they were measured, or there was little time, and too few requests have corrected them since.
    doubt: Text = ""

    @property
    def doubtful(self) -> bool:
        return bool(self.doubt)

    def slower_prefill(self, factor: float) -> MeasuredSpeed:
        """The same with a prefill that takes ``factor`` times as long."""
        return replace(
            self,
            prefill_tok_s=self.prefill_tok_s / factor,
            prefill_context_s=self.prefill_context_s * factor,
            prefill_fixed_s=self.prefill_fixed_s * factor,
        )

    def completed(self, other: MeasuredSpeed) -> MeasuredSpeed:
        """These figures, and the ``other`` machine's in place of those that are not measured."""
        prefill = self if self.prefill_tok_s else other
        return replace(prefill, decode_tok_s=self.decode_tok_s or other.decode_tok_s, doubt=self.doubt)

    def rounded(self) -> MeasuredSpeed:
        """Each figure to two digits."""
        figures = msgspec.structs.asdict(self)
        return replace(self, **{k: two_digits(v) for k, v in figures.items() if isinstance(v, float)})


def two_digits(figure: float) -> float:
    """Rounded: each answer moves an average a little, and small changes are not worth telling."""
    return float(f"{figure:.2g}")
