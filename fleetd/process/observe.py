"""Logging: one event name and key=value facts per line, for people on a terminal and as JSON for machines.

What is never logged: prompts, answers, tokens, the API token. Callers log counts, sizes, times, names and
codes. Loggers of libraries pass through the same formatter, so that one stream has one format.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, TextIO

from fleetd import limits
from fleetd.process.log_file import RotatingOutput
from fleetd.process.without_rich import without_rich
from fleetd.text.terminal_text import printable

with without_rich():
    import structlog
    from structlog.stdlib import BoundLogger
    from structlog.typing import Processor

LogFormat = Literal["auto", "json", "console"]

# A line longer than this is an accident (a repr of something big) and would hurt every reader downstream.
LINE_CHARS = 8 * 1024
_FIELD_CHARS = 2 * 1024


def get_logger(name: str) -> BoundLogger:
    logger: BoundLogger = structlog.stdlib.get_logger(name)
    return logger


class LineBudget:
    """Lets ``lines`` log lines of a kind through within ``limits.REPEAT_LOG_S``: how many would be written
    otherwise is up to clients."""

    def __init__(self, lines: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._monotonic = monotonic
        self._began_s = float("-inf")
        self._spent = self._left_out = 0

    def spend(self) -> int | None:
        """None if the line is to be left out, or else how many were left out before it."""
        now_s = self._monotonic()
        if now_s - self._began_s >= limits.REPEAT_LOG_S:
            self._began_s, self._spent = now_s, 0
        if self._spent >= self._lines:
            self._left_out += 1
            return None
        self._spent += 1
        left_out, self._left_out = self._left_out, 0
        return left_out


def configure(
    level: str = "info",
    log_format: LogFormat = "auto",
    *,
    stream: TextIO | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Set up logging for the whole process; may be called again (the last call wins).

    ``file``: begun anew when it is long, if it is what standard error goes to.
    """
    out = stream or sys.stderr
    json = log_format == "json" or (log_format == "auto" and not _for_people(out, environ))
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _shorten,
    ]
    renderer: Processor
    if json:
        shared += [
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
        ]
        renderer = structlog.processors.JSONRenderer()
    else:
        # Most lines fit a terminal: the event names its part of the program by its first word.
        shared += [structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False), _escape]
        # Plain tracebacks: the default would show local variables, and a local variable may be a prompt.
        renderer = structlog.dev.ConsoleRenderer(
            pad_event_to=0,
            pad_level=False,
            colors=out.isatty(),
            exception_formatter=structlog.dev.plain_traceback,
        )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out) if file is None else RotatingOutput(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # An access line per scrape and health check buries everything else, and carries query strings.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # At debug level this one logs every select() call.
    logging.getLogger("asyncio").setLevel(max(logging.INFO, root.level))


def on_terminal(log_format: LogFormat) -> bool:
    """Whether lines of the log go to a person at a terminal."""
    return log_format != "json" and _for_people(sys.stderr, os.environ)


def _for_people(out: TextIO, environ: Mapping[str, str]) -> bool:
    """A terminal, and no service manager that would store the lines."""
    return out.isatty() and "INVOCATION_ID" not in environ and "JOURNAL_STREAM" not in environ


def _escape(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Names and reasons may come from other machines."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value)
    return event


def _shorten(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    room = LINE_CHARS
    for key, value in event.items():
        if isinstance(value, str):
            keep = min(_FIELD_CHARS, max(room, 64))
            if len(value) > keep:
                event[key] = f"{value[:keep]}… ({len(value)} characters)"
            room -= len(event[key])
    return event
