"""Values of ``format`` in JSON Schema, as regular expressions: part of what their standards allow, and nothing else.

Dates are days that exist (RFC 3339, years 1 to 9999), times have no leap seconds; the parts of host names (RFC 1123),
of addresses and of durations (RFC 3339, appendix A) have less characters than the standards allow. URIs (RFC 3986) have
no addresses in brackets. No torch.
"""

_DIGIT_PAIRS = "0[48]|[2468][048]|[13579][26]"  # of years that four divides, without 00
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = f"([0-9]{{2}}({_DIGIT_PAIRS})|({_DIGIT_PAIRS})00)"
_DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"({_YEAR}-({_DAYS})|{_LEAP}-02-29)"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+\\-]{_CLOCK})"
_COUNT = "[0-9]{1,9}"
_DURATION_TIME = f"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DURATION_DATE = f"({_COUNT}Y({_COUNT}M({_COUNT}D)?)?|{_COUNT}M({_COUNT}D)?|{_COUNT}D)"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"({_BYTE}\\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Eight groups, of which the last two may be an IPv4 address, and two or more that are zero may be left out."""
    last = f"({_GROUP}:{_GROUP}|{_IPV4})"
    ways = [f"({_GROUP}:){{6}}{last}", f"::({_GROUP}:){{0,5}}{last}", f"(({_GROUP}(:{_GROUP}){{0,5}})?)::{_GROUP}"]
    ways += [f"(({_GROUP}(:{_GROUP}){{0,6}})?)::"]
    ways += [f"{_GROUP}(:{_GROUP}){{{before - 1}}}::({_GROUP}:){{0,{5 - before}}}{last}" for before in range(1, 6)]
    return "|".join(ways)


_LABEL = "[a-zA-Z0-9]{1,24}(-[a-zA-Z0-9]{1,22})?"
_HOST = f"{_LABEL}(\\.{_LABEL}){{0,4}}"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?\\^_`{|}~\\-]{1,20}"
_EMAIL = f"{_ATOM}(\\.{_ATOM}){{0,2}}@{_HOST}"
_ESCAPED = f"%{_HEX}{{2}}"
_PART = "a-zA-Z0-9._~!$&'()*+,;=\\-"  # characters of a part of a URI
_PATH = f"([{_PART}:@/]|{_ESCAPED})*"  # behind what a path begins with, or of a query with "?"
_AFTER = f"(\\?([{_PART}:@/?]|{_ESCAPED})*)?(#([{_PART}:@/?]|{_ESCAPED})*)?"
_AUTHORITY = f"(([{_PART}:]|{_ESCAPED})*@)?([{_PART}]|{_ESCAPED})*(:[0-9]{{0,5}})?(/{_PATH})?"
_FROM_ROOT = f"/(([{_PART}:@]|{_ESCAPED}){_PATH})?"
_BEGINS = f"([{_PART}:@]|{_ESCAPED}){_PATH}"
_NO_COLON = f"([{_PART}@]|{_ESCAPED})+(/{_PATH})?"
_URI = f"[a-zA-Z][a-zA-Z0-9+.\\-]*:(//{_AUTHORITY}|{_FROM_ROOT}|{_BEGINS})?{_AFTER}"
_RELATIVE = f"(//{_AUTHORITY}|{_FROM_ROOT}|{_NO_COLON})?{_AFTER}"
_VARIABLE = f"([a-zA-Z0-9_]|{_ESCAPED})(\\.?([a-zA-Z0-9_]|{_ESCAPED}))*(:[1-9][0-9]{{0,3}}|\\*)?"
_POINTER = "(/([^/~]|~[01])*)*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DURATION_DATE}({_DURATION_TIME})?|{_DURATION_TIME}|{_COUNT}W)",
    "email": _EMAIL,
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": f"([{_PART}:/?#\\[\\]@]|{_ESCAPED}|\\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]{{0,9}})(#|{_POINTER})",
}
