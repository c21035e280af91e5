"""Large pages for what a worker computes in: asked for by a variable that glibc reads as a process starts.

MLX's arrays on a CPU come from malloc. In pages of 4 KiB each of them costs a fault when it is first written,
and the keys and values of a long prompt have tens of thousands of such pages. Many systems give pages of
2 MiB only to memory whose program asks for them, which is what ``glibc.malloc.hugetlb=1`` does.
"""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with large pages; as it is where its owner has decided on them. Other C libraries than
    glibc ignore it."""
    chosen = environ.get(_VARIABLE, "")
    if _TUNABLE in chosen:
        return dict(environ)
    return {**environ, _VARIABLE: ":".join(filter(None, (chosen, f"{_TUNABLE}=1")))}
