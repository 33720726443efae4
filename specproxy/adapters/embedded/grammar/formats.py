"""String formats of JSON Schema that a grammar enforces, as patterns; other formats are annotations."""

from __future__ import annotations

__all__ = ["FORMATS"]

_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_H16 = r"[0-9A-Fa-f]{1,4}"
# all eight groups, or :: for the groups that are missing in one place
_IPV6 = "|".join(
    [rf"(?:{_H16}:){{7}}{_H16}", r"::"]
    + [
        rf"{'' if before == 0 else rf'{_H16}(?::{_H16}){{{before - 1}}}'}::{_H16}(?::{_H16}){{0,{6 - before}}}"
        for before in range(7)
    ]
    + [rf"{_H16}(?::{_H16}){{0,6}}::"]
)
_URI_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": r"P(?:\d{1,6}W|(?:\d{1,6}Y(?:\d{1,6}M)?(?:\d{1,6}D)?|\d{1,6}M(?:\d{1,6}D)?|\d{1,6}D)"
    r"(?:T(?:\d{1,6}H(?:\d{1,6}M)?(?:\d{1,6}S)?|\d{1,6}M(?:\d{1,6}S)?|\d{1,6}S))?"
    r"|T(?:\d{1,6}H(?:\d{1,6}M)?(?:\d{1,6}S)?|\d{1,6}M(?:\d{1,6}S)?|\d{1,6}S))",
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_URI_CHAR}+)?{_URI_CHAR}+(?:\?{_URI_CHAR}*)?(?:#{_URI_CHAR}*)?",
}
