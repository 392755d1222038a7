r"""JSON as the standard means it: what other readers let pass in silence is a rejection here.

orjson is fast, but keeps the last of two equal keys and turns whole numbers beyond 64 bits into floats;
the standard library reads NaN. A text on which they could differ is read once more, slowly:

    {"a": 1, "a": 2}      rejected, since one of the two would be lost
    {"a": NaN}            rejected
    {"a": 1e999}          rejected, since it would become infinity
    {"id": 18446744073709551616}   the exact whole number
    {"a": "\ud83d"}        the lone surrogate is kept: what to do with it is the formats' policy
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import orjson

from packing.errors import Reason, RowRejected

BOM = b"\xef\xbb\xbf"

_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')


def loads(text: bytes | str) -> Any:
    """The value of one JSON text. A byte order mark and white space around it do not matter.

    Raises:
        RowRejected: `BAD_ENCODING` where bytes are not UTF-8, else `BAD_JSON`.
    """
    if isinstance(text, str):
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # a lone surrogate from a text around this one
            return _loads_slowly(text)
    else:
        raw = text.removeprefix(BOM)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _loads_slowly(_decode(raw))
    if not _has_keys(raw, _keys(value)):
        return _loads_slowly(_decode(raw))
    return value


def _has_keys(raw: bytes, keys: int) -> bool:
    r"""Whether a valid text has so many keys for certain, none of which is lost: a key ends in `":`.

    An escaped quote (`\":`) ends none. Where an escaped backslash makes that uncertain, or white space, the
    answer is no.
    """
    if _SPACED_COLON.search(raw):
        return False
    ends = raw.count(b'":')
    return ends == keys or (b'\\\\":' not in raw and ends - raw.count(b'\\":') == keys)


def _keys(value: Any) -> int:
    """The number of keys in all objects of a parsed text, or -2 with a float that may be a whole number."""
    count = 0
    items = [value]
    for item in items:  # which grows on the way
        kind = type(item)
        if kind is str:
            continue
        if kind is dict:
            count += len(item)
            items += item.values()
        elif kind is list:
            items += item
        elif kind is float and abs(item) >= 2**63:
            return -2
    return count


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RowRejected(
            Reason.BAD_ENCODING, f"byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8"
        ) from None


def _loads_slowly(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite_float
        )
    except json.JSONDecodeError as error:
        raise RowRejected(Reason.BAD_JSON, f"{error.msg} at character {error.pos}") from None
    except ValueError as error:  # a whole number of more digits than Python converts
        raise RowRejected(Reason.BAD_JSON, str(error)) from None
    except RecursionError:
        raise RowRejected(Reason.BAD_JSON, "nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RowRejected(Reason.BAD_JSON, f"the key {key[:40]!r} occurs twice in one object")
        result[key] = value
    return result


def _constant(name: str) -> NoReturn:
    raise RowRejected(Reason.BAD_JSON, f"{name} is no JSON")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RowRejected(Reason.BAD_JSON, f"the number {digits[:40]} is too large")
    return value
