"""Types with a range, for what another process or machine sends.

A bound also keeps out NaN, which no later comparison would find, and numbers that a sum, a table or a
database cannot hold. Text and lists without a bound of their own are bounded by the message that holds them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from fleetd import limits

#: Tokens, places in a list, and whatever else is counted.
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: Bytes, and counts that only grow: what a double holds exactly.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
#: Below 0 where time was lost.
SignedSeconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
#: A natural logarithm, with room for rounding.
Logprob = Annotated[float, Meta(ge=-1e9, le=1)]
#: A sentence or a name for people.
Text = Annotated[str, Meta(max_length=limits.ERROR_TEXT_CHARS)]
