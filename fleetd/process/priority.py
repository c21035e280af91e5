"""How much this process yields its cores to others."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Linux shares its cores among sessions first, if it is set up so (``CONFIG_SCHED_AUTOGROUP``), and among the
# processes of a session after that. A process's nice value counts in its own session only, and a worker is
# the leader of one: 19 beside a worker of another session takes half of a core that both want.
_SESSION = Path("/proc/self/autogroup")
# Without privileges, one such value may be set in a tenth of a second on the whole machine.
_TRIES, _PAUSE_S = 20, 0.1


def yield_cores(nice: int) -> None:
    """Yield to other processes on the same cores by ``nice`` more than now, in this session and among all.

    The session's value is set only by its leader, as all of the session have it. It stays as it was if the
    system does not let it be set.
    """
    value = os.nice(nice)
    if not nice or os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        try:
            _SESSION.write_text(str(value))
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except OSError:
            return
        else:
            return
