"""The daemon's libraries without what they bring along and a daemon never uses.

structlog imports rich and Pygments, for coloured tracebacks, and greenlet, for contexts that no daemon has,
wherever they are installed. aiohttp reads every certificate authority of the system, for the HTTPS of its
client; a daemon only serves. Its lists that can be frozen come with C++'s library, and save no measurable
time with the few lists that an application has.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def load() -> None:
    """Import structlog and aiohttp, before any other module does."""
    with _absent("rich"), _absent("greenlet"):
        import structlog  # noqa: F401
    os.environ["FROZENLIST_NO_EXTENSIONS"] = "1"
    try:
        with _no_authorities():
            import aiohttp  # noqa: F401
    finally:
        del os.environ["FROZENLIST_NO_EXTENSIONS"]


@contextmanager
def _absent(name: str) -> Iterator[None]:
    """Meanwhile a module that was not imported yet seems not to be installed."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # what an import takes for "not there"
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _no_authorities() -> Iterator[None]:
    """Meanwhile TLS contexts trust no certificate, so that a connection made with one is refused. aiohttp
    also makes one that verifies nothing, and would read the authorities for it all the same."""
    usual = ssl.create_default_context
    ssl.create_default_context = lambda *_args, **_options: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ssl.SSLContext.set_default_verify_paths = lambda *_args: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        ssl.create_default_context = usual
        # The subclass hid its parent's.
        del ssl.SSLContext.set_default_verify_paths
