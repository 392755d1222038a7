"""`strict_json.loads`: equal to the standard library on what is JSON, a named rejection on all else."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing.errors import Reason, RowRejected
from packing.strict_json import loads

Pairs = list[tuple[str, Any]]

TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ['":', '\\":', ": ", "\\", '"']
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
# An object is a tuple of pairs here, so that it can have one key twice.
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(TEXT, inner), max_size=4).map(tuple),
    max_leaves=12,
)


def write(tree: Any, *, space: str, ascii_only: bool) -> str:
    """JSON text of a tree, with `space` wherever JSON allows some."""
    if isinstance(tree, tuple):
        keys = (json.dumps(key, ensure_ascii=ascii_only) for key, _ in tree)
        values = (write(value, space=space, ascii_only=ascii_only) for _, value in tree)
        items = (f"{key}{space}:{space}{value}" for key, value in zip(keys, values, strict=True))
        return "{" + space + f"{space},{space}".join(items) + space + "}"
    if isinstance(tree, list):
        return "[" + ",".join(write(item, space=space, ascii_only=ascii_only) for item in tree) + "]"
    return json.dumps(tree, ensure_ascii=ascii_only)


def has_twins(tree: Any) -> bool:
    if isinstance(tree, tuple):
        keys = [key for key, _ in tree]
        return len(set(keys)) < len(keys) or any(has_twins(value) for _, value in tree)
    return isinstance(tree, list) and any(map(has_twins, tree))


@given(
    tree=TREES,
    space=st.sampled_from(["", " ", "\n\t", "\r\n"]),
    ascii_only=st.booleans(),
    as_bytes=st.booleans(),
)
def test_equals_the_standard_library_or_names_the_key_that_occurs_twice(
    tree: Any, space: str, ascii_only: bool, as_bytes: bool
) -> None:
    """Any JSON text gives what `json.loads` gives; a key twice in one object is rejected."""
    text = write(tree, space=space, ascii_only=ascii_only)
    given_text = text.encode() if as_bytes else text
    if has_twins(tree):
        with pytest.raises(RowRejected, match="occurs twice") as caught:
            loads(given_text)
        assert caught.value.reason is Reason.BAD_JSON
    else:
        value = loads(given_text)
        assert value == json.loads(text)
        assert json.dumps(value) == json.dumps(json.loads(text))  # tells 1 from 1.0 and from True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"id": 18446744073709551616}', {"id": 2**64}),
        (b'{"id": -9223372036854775809}', {"id": -(2**63) - 1}),
        (b'{"id": 123456789012345678901234567890}', {"id": 123456789012345678901234567890}),
        (b'{"x": 1e300}', {"x": 1e300}),
        (b'\xef\xbb\xbf{"a": 1}\r\n', {"a": 1}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": "\\ud83d"}', {"a": "\ud83d"}),
        ('{"a": "\ud83d"}', {"a": "\ud83d"}),
        (b'{"a": "\\u0000"}', {"a": "\x00"}),
        ('{"a": "\u2028\x85"}'.encode(), {"a": "\u2028\x85"}),
    ],
)
def test_reads_exactly(text: bytes | str, value: Any) -> None:
    """Whole numbers of any size stay exact, and a lone surrogate is left to the formats' policy."""
    assert loads(text) == value
    assert type(next(iter(loads(text).values()))) is type(next(iter(value.values())))


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        (b'{"a": 1, "a": 1}', Reason.BAD_JSON, "the key 'a' occurs twice in one object"),
        (
            b'{"a": [{"b": 1, "c": {"b": 2}, "b" : 3}]}',
            Reason.BAD_JSON,
            "the key 'b' occurs twice in one object",
        ),
        (b'{"a\\\\": 1, "a\\\\": 2}', Reason.BAD_JSON, "the key 'a\\\\' occurs twice in one object"),
        (b'{"a\\\\": 1, "b": 1, "b": 2}', Reason.BAD_JSON, "the key 'b' occurs twice in one object"),
        (b'{"\\u0061": 1, "a": 2}', Reason.BAD_JSON, "the key 'a' occurs twice in one object"),
        (b'{"a": 1, "a": 2, "b": "\\u003a"}', Reason.BAD_JSON, "the key 'a' occurs twice in one object"),
        (b'{"a": NaN}', Reason.BAD_JSON, "NaN is no JSON"),
        (b'{"a": -Infinity}', Reason.BAD_JSON, "-Infinity is no JSON"),
        (b'{"a": 1e999}', Reason.BAD_JSON, "the number 1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", Reason.BAD_JSON, "4300 digits"),
        (b'{"a": "\xff"}', Reason.BAD_ENCODING, "byte 7 (0xff) is not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', Reason.BAD_ENCODING, "byte 7 (0xed) is not UTF-8"),
        (b'{"a": "\x01"}', Reason.BAD_JSON, "control character"),
        (b'{"a": 1} {"b": 2}', Reason.BAD_JSON, "Extra data at character 9"),
        (b'{"a": [1, 2', Reason.BAD_JSON, "at character 11"),
        (b"{'a': 1}", Reason.BAD_JSON, "at character 1"),
        (b'{"a": 1,}', Reason.BAD_JSON, "at character 8"),
        (b"[" * 100_000 + b"]" * 100_000, Reason.BAD_JSON, "nested too deeply"),
        (b"", Reason.BAD_JSON, "at character 0"),
    ],
)
def test_rejects_by_name(text: bytes, reason: Reason, detail: str) -> None:
    """What other readers repair in silence, or die of, has a reason and says where."""
    with pytest.raises(RowRejected) as caught:
        loads(text)
    assert caught.value.reason is reason
    assert detail in caught.value.detail
    assert len(caught.value.detail) < 200


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_any_bytes_give_a_value_or_a_rejection(text: bytes | str) -> None:
    """No input raises anything but `RowRejected`."""
    with contextlib.suppress(RowRejected):
        loads(text)
