"""The meaning of each frame in each state, of a session and of a stream in it.

These two tables alone decide whether a frame is allowed; they name every pair. They do not depend on which
side dialled: both sides run the same machine. docs/protocol.md shows them.
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
    NEW = "not open yet"  # this side has sent Hello, the other side has not
    OPEN = "open"
    CLOSING = "closing"  # our Bye waits to be sent
    CLOSED = "closed"


class StreamState(Enum):
    """The state on this side; ``local`` is the direction in which this side sends."""

    IDLE = "not open yet"
    OPEN = "open"
    LOCAL_ENDED = "local ended"
    REMOTE_ENDED = "remote ended"
    CLOSED = "closed"  # both ended, or cancelled


class Act(Enum):
    """The effect of a frame. ``refuse`` ends the session with a protocol_error."""

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
    # The session is over, so later frames are not even decoded.
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
    # Credit for messages before the end still arrives.
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
    # Frames that the other side sent before it received the end.
    StreamState.CLOSED: {
        Open: Act.REFUSE,
        DataFrame: Act.IGNORE,
        End: Act.IGNORE,
        CancelFrame: Act.IGNORE,
        WindowFrame: Act.IGNORE,
    },
}
