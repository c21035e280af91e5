"""macOS's kernel, asked directly: figures that have a name (sysctl), and the counts of memory's pages.

psutil asks for the counts that one version of macOS had, and raises on every kernel that has more. This call
asks for the fewest that hold what is read, and where the kernel wants another number, for that number.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

# <mach/host_info.h>: the question, the refusal of an array that is too small, and the words any answer may
# have.
_HOST_VM_INFO64, _ARRAY_TOO_LARGE, _MOST_WORDS = 4, -307, 1024
# <mach/vm_statistics.h>: the first revision of the counts, which every later one begins with.
_FIRST_REVISION_WORDS = 24
_FREE, _INACTIVE = 0, 2


class DarwinKernel:
    """Args:
    library: libSystem as ctypes gives it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._host: int | None = None

    def integer(self, name: str) -> int | None:
        """A sysctl by its name; None if this kernel has none of that name, or does not tell it."""
        value, size = (ctypes.c_uint8 * 8)(), ctypes.c_size_t(8)
        if self._library.sysctlbyname(name.encode(), value, ctypes.byref(size), None, 0):
            return None
        return int.from_bytes(bytes(value[: size.value]), sys.byteorder)

    def free_bytes(self) -> int | None:
        """Free and inactive pages, as psutil counts what is available; None if the kernel tells no counts."""
        words = self._page_counts()
        if words is None:
            return None
        # A program that Rosetta translates is told of pages of another size than the kernel counts.
        return (words[_FREE] + words[_INACTIVE]) * (self.integer("vm.pagesize") or mmap.PAGESIZE)

    def _page_counts(self) -> list[int] | None:
        if self._host is None:
            # A reference is counted at each call, so it is asked for once.
            self._host = self._library.mach_host_self()
        words, count = (ctypes.c_uint32 * _MOST_WORDS)(), ctypes.c_uint32(_FIRST_REVISION_WORDS)
        for _ in range(2):
            asked = count.value
            failure = self._library.host_statistics64(self._host, _HOST_VM_INFO64, words, ctypes.byref(count))
            if failure == 0:
                return list(words[: count.value]) if count.value > _INACTIVE else None
            # The count is now the kernel's own. More than that is refused as well, or corrupts memory.
            if failure != _ARRAY_TOO_LARGE or not asked < count.value <= _MOST_WORDS:
                break
        return None


@cache
def kernel() -> DarwinKernel | None:
    """None on any other system."""
    return DarwinKernel(ctypes.CDLL(None)) if sys.platform == "darwin" else None
