"""Why smart prefill was asked for and not used: read from a header, a comment or the last chunk. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from fleetctl.render.text import clause

_HEADER = "x-smartprefill-skipped"
_COMMENT = re.compile(r"smart prefill skipped: (.*)")
# A stable code, which is for programs, in front of the sentence.
_CODE = re.compile(r"\w*: ?")


def told_by_headers(headers: Mapping[str, str]) -> str:
    """The reason in the headers of an answer, whose names are in lower case; "" if there is none."""
    return unquote(headers.get(_HEADER, ""))


def told_by_comment(comment: str) -> str:
    """The reason in a comment of a stream; "" if it is about something else."""
    found = _COMMENT.fullmatch(comment)
    return found[1] if found else ""


def told_by_report(report: Mapping[str, Any]) -> str:
    """The reason in ``smart_prefill`` of an answer or of the last chunk; "" if something was left out."""
    return str(report.get("skipped") or "")


def not_used(reason: str) -> str:
    """The one line about it for people; ``reason`` has its code in front or not."""
    because = clause(_CODE.sub("", reason, count=1) if _CODE.match(reason) else reason)
    # The daemon's reasons are sentences; a name in capitals stays one.
    if because[1:2].islower() or because[1:2] == " ":
        because = because[0].lower() + because[1:]
    return f"smart prefill: not used, because {because}"
