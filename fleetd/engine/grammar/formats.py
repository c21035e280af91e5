"""Values of ``format`` that are enforced, each as a pattern. Pure.

Every string that a pattern allows has the format, by the standard and by the common validators; not every
string of the format is allowed. The library has patterns of its own, which also allow 29 February in any year
and leap seconds at any minute: these here do not.
"""

from __future__ import annotations

_LEAP = (
    r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # 0000 is no year here
)
_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d\d\d)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_DAYS = r"\d{1,6}Y(?:\d{1,6}M(?:\d{1,6}D)?)?|\d{1,6}M(?:\d{1,6}D)?|\d{1,6}D"
_HOURS = r"T(?:\d{1,6}H(?:\d{1,6}M(?:\d{1,6}S)?)?|\d{1,6}M(?:\d{1,6}S)?|\d{1,6}S)"
# At most 62 characters, and no two hyphens in a row: those mark names in other alphabets.
_LABEL = r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_LAST_LABEL = r"[A-Za-z](?:[A-Za-z0-9]{0,19}(?:-[A-Za-z0-9]{1,20}){0,2})"
_HOST = rf"(?:{_LABEL}\.){{0,2}}{_LAST_LABEL}"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_HEX = r"[0-9A-Fa-f]{1,4}"
_URI_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI_END = rf"(?:\?(?:{_URI_CHARACTER}|[/?])*)?(?:#(?:{_URI_CHARACTER}|[/?])*)?"


def _groups(count: int) -> str:
    """Up to so many groups of an address in hexadecimal."""
    return rf"(?:{_HEX}(?::{_HEX}){{0,{count - 1}}})?" if count else ""


def _ipv6() -> str:
    whole = rf"{_HEX}(?::{_HEX}){{7}}"
    short = [rf"{_HEX}(?::{_HEX}){{{left - 1}}}::{_groups(7 - left)}" for left in range(1, 8)]
    return "|".join([whole, f"::{_groups(7)}", *short])


#: Pattern of each format that is enforced, as a schema would write it.
PATTERNS: dict[str, str] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": rf"P(?:(?:{_DAYS})(?:{_HOURS})?|{_HOURS}|\d{{1,6}}W)",
        "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
        "hostname": _HOST,
        "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
        "ipv6": _ipv6(),
        "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[1-9]\d{{0,3}})?(?:/{_URI_CHARACTER}*)*|{_URI_CHARACTER}+(?:/{_URI_CHARACTER}*)*){_URI_END}",
    }.items()
}
