"""Names of the steps of a prefill, as the planner predicts them and the machines report them."""

from __future__ import annotations

from typing import Final

# Predicted and measured, on the machine that answers; helpers report WAITED and COMPUTED too.
PREFIX_SENT: Final = "prefix sent"
WAITED: Final = "waited"
COMPUTED: Final = "computed"
EXPOSED: Final = "exposed hand-off"
# Predicted only: the machine that answers is busy, fetches the model, or loads it, as helpers may have to;
# all agree; the last token is decoded after the prefill; another machine's answer travels here.
QUEUED: Final = "queued"
FETCHED: Final = "fetched"
LOADED: Final = "loaded"
AGREED: Final = "agreed"
DECODED: Final = "first token"
NETWORK: Final = "network"
# Measured only: the machine that answers computes some of a helper's rows to compare them.
SPOT_CHECK: Final = "spot check"
# Smart prefill: a compressor scores the prompt, then what is kept is prefilled.
SCORED: Final = "scored"
PREFILLED: Final = "prefilled"
