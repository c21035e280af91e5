"""What each frame means in each state: of a session, and of a stream in it.

Everything that decides whether a frame is allowed is in these two tables, which name every pair. They do not
know which side dialled: both sides run the same machine. docs/protocol.md shows them.
"""

from __future__ import annotations

from enum import Enum
from typing import get_args

from fleetd.p2p.session.frames import (
    Bye,
    CancelFrame,
    DataFrame,
    End,
    Frame,
    Hello,
    NotifyFrame,
    Open,
    Ping,
    Pong,
    WindowFrame,
)


class SessionState(Enum):
    NEW = "not open yet"  # our Hello is under way, the other side's has not come
    OPEN = "open"
    CLOSING = "closing"  # our Bye waits to be sent
    CLOSED = "closed"


class StreamState(Enum):
    """As this side sees it; ``local`` is the direction that this side sends in."""

    IDLE = "not open yet"
    OPEN = "open"
    LOCAL_ENDED = "local ended"
    REMOTE_ENDED = "remote ended"
    CLOSED = "closed"  # both ended, or cancelled


class Act(Enum):
    """What is done with a frame. ``refuse`` ends the session with a protocol_error."""

    IGNORE = "ignore"
    REFUSE = "refuse"
    GREET = "agree on a version"
    LEAVE = "close the session"
    ANSWER = "answer with Pong"
    MEASURE = "measure the round trip"
    STREAM = "look at the stream"
    DELIVER = "deliver"
    ACCEPT = "open the stream"
    TAKE = "take in"
    END = "end the remote direction"
    CANCEL = "close the stream"
    CREDIT = "send on"


SESSION_TABLE: dict[SessionState, dict[type[Frame], Act]] = {
    SessionState.NEW: {
        Hello: Act.GREET,
        Ping: Act.REFUSE,
        Pong: Act.REFUSE,
        Open: Act.REFUSE,
        DataFrame: Act.REFUSE,
        End: Act.REFUSE,
        CancelFrame: Act.REFUSE,
        WindowFrame: Act.REFUSE,
        NotifyFrame: Act.REFUSE,
        Bye: Act.LEAVE,
    },
    SessionState.OPEN: {
        Hello: Act.REFUSE,
        Ping: Act.ANSWER,
        Pong: Act.MEASURE,
        Open: Act.STREAM,
        DataFrame: Act.STREAM,
        End: Act.STREAM,
        CancelFrame: Act.STREAM,
        WindowFrame: Act.STREAM,
        NotifyFrame: Act.DELIVER,
        Bye: Act.LEAVE,
    },
    # Nothing that comes now can matter any more, so it is not even decoded.
    SessionState.CLOSING: dict.fromkeys(get_args(Frame), Act.IGNORE),
    SessionState.CLOSED: dict.fromkeys(get_args(Frame), Act.IGNORE),
}

STREAM_TABLE: dict[StreamState, dict[type[Frame], Act]] = {
    StreamState.IDLE: {
        Open: Act.ACCEPT,
        DataFrame: Act.REFUSE,
        End: Act.REFUSE,
        CancelFrame: Act.REFUSE,
        WindowFrame: Act.REFUSE,
    },
    StreamState.OPEN: {
        Open: Act.REFUSE,
        DataFrame: Act.TAKE,
        End: Act.END,
        CancelFrame: Act.CANCEL,
        WindowFrame: Act.CREDIT,
    },
    # Credit for what was sent before the end still comes in.
    StreamState.LOCAL_ENDED: {
        Open: Act.REFUSE,
        DataFrame: Act.TAKE,
        End: Act.END,
        CancelFrame: Act.CANCEL,
        WindowFrame: Act.CREDIT,
    },
    StreamState.REMOTE_ENDED: {
        Open: Act.REFUSE,
        DataFrame: Act.REFUSE,
        End: Act.REFUSE,
        CancelFrame: Act.CANCEL,
        WindowFrame: Act.CREDIT,
    },
    # What the other side sent before it heard of the end.
    StreamState.CLOSED: {
        Open: Act.REFUSE,
        DataFrame: Act.IGNORE,
        End: Act.IGNORE,
        CancelFrame: Act.IGNORE,
        WindowFrame: Act.IGNORE,
    },
}
