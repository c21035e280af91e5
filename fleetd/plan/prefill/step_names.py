"""Names of the steps of a prefill, as the planner predicts them and the machines report them."""

from __future__ import annotations

from typing import Final

# All of a request, and its phases, one after the other; each other step is part of a phase.
REQUEST: Final = "request"
WAITING: Final = "waiting"
LOADING: Final = "loading"
READING: Final = "reading"
WRITING: Final = "writing"
PHASES: Final = (WAITING, LOADING, READING, WRITING)
# Predicted and measured, on the machine that answers; helpers report WAITED and COMPUTED too.
PREFIX_SENT: Final = "prefix sent"
WAITED: Final = "waited"
COMPUTED: Final = "computed"
EXPOSED: Final = "exposed hand-off"
# Predicted only: another machine sleeps, and is woken.
WOKEN: Final = "woken"
# Predicted of another machine, measured of every answer: it waits for a turn.
QUEUED: Final = "queued"
# Predicted only: the machine that answers pulls the model from the hub.
PULLED: Final = "pulled"
# A model had to be loaded first: predicted of helpers, measured of what answers, drafts or scores.
LOADED: Final = "loaded"
# Predicted only: all machines agree, and the last token is decoded after the prefill.
AGREED: Final = "agreed"
DECODED: Final = "first token"
# Measured only: the machine that answers computes some of a helper's rows to compare them.
SPOT_CHECK: Final = "spot check"
LATER_CHECK: Final = "check of later tokens"
# Predicted and measured: keys and values of the prompt's beginning are read from this machine's disk.
RESTORED: Final = "restored from disk"
# Predicted and measured: another machine sends them.
FETCHED: Final = "fetched"
# Predicted and measured: what answers is loaded once what scored has given way to it.
RELOADED: Final = "loaded after scoring"
# Smart prefill: a compressor scores the prompt, then what is kept is prefilled.
SCORED: Final = "scored"
PREFILLED: Final = "prefilled"
# Measured only, of every answer: all but its first token were decoded.
ANSWERED: Final = "decoded"
# Measured only, of requests for vectors: machines were left to their chats.
LEFT_TO_CHATS: Final = "left to chats"
# Measured only: a drafter drafted.
DRAFTED: Final = "drafted"
# Predicted and measured: what is left of the time that this machine waits for another one.
NETWORK: Final = "network and rest"
