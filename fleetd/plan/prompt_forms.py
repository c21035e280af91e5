"""In which form a shortened prompt is read: as text, or as kept tokens at their own places (sparse).

Both forms keep about the same tokens. One machine reads a sparse prompt; a text is read in any way there is.
So text is sooner if other machines help with it, or if another one answers. Pure.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from fleetd.control.smart_prefill_result import Form
from fleetd.plan.prefill.choice import percent
from fleetd.plan.route import ADVANTAGE
from fleetd.plan.ways import Way, where


class FormChoice(msgspec.Struct, frozen=True):
    """The ``chosen`` form; "" if none is wanted yet."""

    chosen: Form = ""
    # The best way in the other form, with the reason against it; None unless text is sooner.
    passed: Way | None = None


def sooner_form(sparse: Way | None, text: Way | None) -> FormChoice:
    """The form in which the first token comes sooner.

    Text has to be a tenth sooner, because its price rests on other machines.

    Args:
        sparse: the best way to answer in this form; None if there is none.
        text: the same for a text.
    """
    sparse_s = sparse.first_token_s if sparse is not None else None
    text_s = text.first_token_s if text is not None else None
    if sparse is None or text is None or not sparse_s or not text_s or text_s >= sparse_s:
        return FormChoice("sparse")
    as_text = f"as text in {text_s:.2f} s ({where(text)})"
    if text_s > ADVANTAGE * sparse_s:
        gain, least = percent(1 - text_s / sparse_s), percent(1 - ADVANTAGE)
        reason = (
            f"What is kept is read at its own places in {sparse_s:.2f} s and would be read {as_text}. "
            f"That is {gain} less, too little to have others read it: {least} would do."
        )
        return FormChoice("sparse", replace(text, code="margin", reason=reason))
    reason = (
        f"One machine would read what is kept at its own places in {sparse_s:.2f} s. It is read {as_text}."
    )
    return FormChoice("text", replace(sparse, code="slower", reason=reason))
