"""How many threads MKL multiplies with in this process."""

from __future__ import annotations

import ctypes

from fleetd.engine.cpu import products


def use(threads: int) -> None:
    """From now on, in every thread that has no number of its own. Where there is no MKL, nothing changes."""
    if products._blas is not None:
        products._blas.MKL_Set_Num_Threads(ctypes.c_int(threads))
