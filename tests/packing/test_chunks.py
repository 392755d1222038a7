"""Cutting files into raw records, and what becomes of the records in another process."""

import csv
import io
import json
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing import chunks
from packing.chunks import (
    Chunk,
    Damaged,
    arrow_chunks,
    csv_chunks,
    cut_lines,
    cut_values,
    json_chunks,
)
from packing.errors import Reason, RowRejected

OBJECTS = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='[]{},:"\\ab\n é', max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def blocks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def records(cut: Iterable[Chunk]) -> list[tuple[int, int, Any]]:
    """All records of the chunks, each parsed as another process would: from a pickle."""
    return [record for chunk in cut for record in pickle.loads(pickle.dumps(chunk)).records()]


def from_lines(data: bytes, *, rows: int = 3, size: int = 7) -> list[Chunk]:
    return list(json_chunks(cut_lines(blocks(data, size)), source=0, rows=rows, lines=True, notes={}))


def from_values(data: bytes, *, rows: int = 3, size: int = 7) -> list[Chunk]:
    return list(json_chunks(cut_values(blocks(data, size)), source=0, rows=rows, lines=False, notes={}))


def from_csv(data: bytes, *, rows: int = 3, size: int = 7) -> list[Chunk]:
    lines = cut_lines(blocks(data, size))
    return list(csv_chunks(lines, delimiter=",", source=0, rows=rows, notes={}))


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), max_size=9),
    size=st.integers(1, 9),
)
def test_lines_are_cut_at_newlines_alone(lines: list[bytes], size: int) -> None:
    r"""Whatever the blocks, lines come out whole and numbered as an editor does; U+2028 is text."""
    data = b"\n".join(lines)
    expected = [(n, line + b"\n") for n, line in enumerate(lines[:-1], 1)]
    if lines and lines[-1]:
        expected.append((len(lines), lines[-1]))
    assert list(cut_lines(blocks(data, size))) == expected


@given(
    items=st.lists(OBJECTS, max_size=5),
    indent=st.none() | st.integers(0, 2),
    array=st.booleans(),
    size=st.integers(1, 12),
)
def test_values_are_cut_as_they_were_written(
    items: list[dict[str, Any]], indent: int | None, array: bool, size: int
) -> None:
    """Items of an array, or objects one after another, dense or pretty, come out whole with their lines."""
    if array:
        text = json.dumps(items, indent=indent, ensure_ascii=False)
    else:
        text = "\n".join(json.dumps(item, indent=indent, ensure_ascii=False) for item in items)
    pieces = list(cut_values(blocks(text.encode(), size)))
    assert [json.loads(raw) for _, raw in pieces] == items
    lines = text.encode().split(b"\n")
    for line, raw in pieces:
        assert raw.split(b"\n")[0].rstrip(b",]") in lines[line - 1]
    if indent is None and not array:
        assert [line for line, _ in pieces] == list(range(1, len(items) + 1))


def test_a_pretty_printed_item_has_the_line_on_which_it_begins() -> None:
    """The line is the one with the item's first character, not the comma's before it."""
    text = b'[\n  {\n    "a": 1\n  },\n\n  {"a": 2}, {"a": 3}\n]\n'
    assert [line for line, _ in cut_values([text])] == [2, 6, 6]
    assert [(line, index) for line, index, _ in records(from_values(text))] == [(2, 0), (6, 1), (6, 2)]


def test_several_arrays_and_objects_follow_each_other() -> None:
    """`cat a.json b.json` loses nothing."""
    assert [r for _, _, r in records(from_values(b'[{"a": 1}]\n{"a": 2}\n[] [{"a": 3}]'))] == [
        {"a": 1},
        {"a": 2},
        {"a": 3},
    ]


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        (b'[\n{"a": 1},\n{"b": "x', "what begins on line 3 does not end"),
        (b'[\n{"a": 1},\n{"b": 2}\n', "what begins on line 3 does not end"),
        (b'[{"a": 1},', "what begins on line 1 does not end"),
        (b'{"a":\n1', "what begins on line 1 does not end"),
        (b'[{"a": 1}]\n]', "line 2: ] closes nothing"),
        (b'[{"a": 1}}\n, {"b": 2}]', "line 1: } closes nothing"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_values_that_do_not_end_are_damage(text: bytes, detail: str, size: int) -> None:
    """A cut array is no shorter array: the items before the cut come out, and then it says where it broke."""
    pieces = cut_values(blocks(text, size))
    with pytest.raises(Damaged, match=detail):
        list(pieces)


@pytest.mark.parametrize("text", [b'[{"a": 1}, nonsense, {"a": 2}]', b'[{"a": 1}, {"a": NaN}, {"a": 2}]'])
def test_a_bad_item_of_an_array_is_one_rejection(text: bytes) -> None:
    """What is no JSON within one item does not reach the others."""
    (_, _, first), (_, _, bad), (_, _, last) = records(from_values(text))
    assert (first, last) == ({"a": 1}, {"a": 2})
    assert isinstance(bad, RowRejected)
    assert bad.reason is Reason.BAD_JSON


def test_text_after_the_values_is_a_rejection() -> None:
    """Nothing of a file is passed over in silence."""
    (_, _, first), (line, _, bad) = records(from_values(b'{"a": 1}\nand more'))
    assert first == {"a": 1}
    assert (line, bad.reason) == (2, Reason.BAD_JSON)


def test_line_and_record_numbers_are_those_that_people_count() -> None:
    """Blank lines count as lines and not as records; index and `first` run on from chunk to chunk."""
    data = b'\n{"a": 0}\r\n   \n{"a": 1}\n\n{"a": 2}\n{"a": 3}'
    cut = from_lines(data, rows=2)
    assert records(cut) == [(2, 0, {"a": 0}), (4, 1, {"a": 1}), (6, 2, {"a": 2}), (7, 3, {"a": 3})]
    assert [(chunk.first, len(chunk)) for chunk in cut] == [(1, 2), (3, 2)]
    assert [dict(chunk.notes) for chunk in cut] == [{"blank_lines": 2, "crlf_lines": 1}, {"blank_lines": 1}]


def test_blank_lines_at_the_end_are_counted() -> None:
    """A chunk without records carries what was passed over after the last of them."""
    cut = from_lines(b'{"a": 0}\n\n\n', rows=1)
    assert [len(chunk) for chunk in cut] == [1, 0]
    assert dict(cut[1].notes) == {"blank_lines": 2}
    assert records(cut) == [(1, 0, {"a": 0})]


def test_a_cut_last_line_is_named() -> None:
    """A last line without its newline that is no JSON was cut; one that is JSON is whole."""
    _, (line, _, bad) = records(from_lines(b'{"a": 0}\n{"a": '))
    assert line == 2
    assert bad.reason is Reason.BAD_JSON
    assert bad.detail.startswith("the file ends within this line")
    assert records(from_lines(b'{"a": 0}')) == [(1, 0, {"a": 0})]


def test_what_is_no_object_is_no_record() -> None:
    """Lists, numbers and null are JSON, but no record."""
    for _, _, rejected in records(from_lines(b"[1]\n3\nnull\n")):
        assert rejected.reason is Reason.BAD_RECORD


@given(st.lists(st.sampled_from([b"", b'{"a": 1}', b"{", b"\xff", b"[]", b'{"a": NaN}']), max_size=12))
def test_each_filled_line_is_one_record_or_one_rejection(lines: list[bytes]) -> None:
    """Records in = records out + rejections, whatever the lines."""
    out = records(from_lines(b"\n".join(lines)))
    assert [line for line, _, _ in out] == [n for n, line in enumerate(lines, 1) if line]
    assert [index for _, index, _ in out] == list(range(len(out)))
    assert [record for _, _, record in out if not isinstance(record, RowRejected)] == [
        {"a": 1} for line in lines if line == b'{"a": 1}'
    ]


@given(sizes=st.tuples(st.integers(1, 50), st.integers(1, 50)), rows=st.integers(1, 5))
def test_chunks_do_not_depend_on_the_blocks(sizes: tuple[int, int], rows: int) -> None:
    """The cuts are a function of the file and of `rows`: what is read at a time does not show."""
    data = b"".join(b'{"a": "%d"}\n' % (n * n) for n in range(20))
    assert from_lines(data, rows=rows, size=sizes[0]) == from_lines(data, rows=rows, size=sizes[1])


def test_a_chunk_ends_at_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long records do not add up: a chunk ends with the record that passes CHUNK_BYTES."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 20)
    assert [len(chunk) for chunk in from_lines(b'{"a": "123"}\n' * 5, rows=100)] == [2, 2, 1]
    table = pa.table({"a": ["x" * 100] * 5})
    assert [len(chunk) for chunk in arrow_chunks(table.to_batches(), source=0, rows=100)] == [1] * 5


def test_a_line_of_ten_megabytes_is_read() -> None:
    """Length alone is no fault."""
    data = json.dumps({"a": "x" * 10_000_000}).encode() + b'\n{"a": 1}\n'
    (_, _, long), (_, _, short) = records(from_lines(data, size=1 << 20))
    assert (len(long["a"]), short) == (10_000_000, {"a": 1})


def test_a_line_without_end_is_one_rejection_in_flat_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past MAX_RECORD the rest of the line is passed over, and the next line is read."""
    monkeypatch.setattr(chunks, "MAX_RECORD", 100)
    longest = 0

    def watched() -> Iterator[tuple[int, bytes]]:
        nonlocal longest
        for line, raw in cut_lines(blocks(b"[" * 5000 + b'\n{"a": 1}\n', 10)):
            longest = max(longest, len(raw))
            yield line, raw

    (_, _, bad), (line, _, good) = records(json_chunks(watched(), source=0, rows=9, lines=True, notes={}))
    assert (bad.reason, line, good) == (Reason.BAD_JSON, 2, {"a": 1})
    assert longest <= 130
    with pytest.raises(Damaged, match="the value that begins on line 1 is longer than"):
        list(cut_values(blocks(b'["' + b"x" * 5000, 10)))


def test_csv_cells_stay_text() -> None:
    """No number, date, null or truth value is guessed, and a quoted cell keeps its newlines."""
    data = b'id,when,text\n007,2024-01-01,"a ""b"",\r\nc"\n1e5,,true\n'
    assert records(from_csv(data)) == [
        (2, 0, {"id": "007", "when": "2024-01-01", "text": 'a "b",\r\nc'}),
        (4, 1, {"id": "1e5", "when": "", "text": "true"}),
    ]


@given(
    rows=st.lists(
        st.lists(st.text(alphabet='ab,"\n\r é\u2028', max_size=6), min_size=2, max_size=2),
        min_size=1,
        max_size=6,
    ),
    size=st.integers(1, 20),
)
def test_csv_gives_back_what_a_writer_wrote(rows: list[list[str]], size: int) -> None:
    """Whatever the csv module writes with quotes comes back cell by cell."""
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([["p", "q"], *rows])
    read = records(from_csv(out.getvalue().encode(), size=size))
    assert [list(record.values()) for _, _, record in read] == rows


def test_a_csv_row_of_other_length_or_encoding_is_rejected() -> None:
    """Cells are never shifted into another column, and bytes that are not UTF-8 are named."""
    out = records(from_csv(b"a,b\n1,2\n3\n4,5,6\n\xff,7\n\n8,9\n"))
    assert [record for _, _, record in out if isinstance(record, dict)] == [
        {"a": "1", "b": "2"},
        {"a": "8", "b": "9"},
    ]
    assert [(line, r.reason, r.detail) for line, _, r in out if isinstance(r, RowRejected)] == [
        (3, Reason.BAD_RECORD, "1 cells where the header has 2"),
        (4, Reason.BAD_RECORD, "3 cells where the header has 2"),
        (5, Reason.BAD_ENCODING, "not UTF-8"),
    ]


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"", "there is no header line"),
        (b"a,a\n1,2\n", "two columns have the same name"),
        (b'a,b\n1,2\n"3,4\n', "line 3: unexpected end of data"),
        (b'a,b\n"x"y,2\n', "line 2: ',' expected after"),
    ],
)
def test_csv_that_is_none_is_damage(data: bytes, detail: str) -> None:
    """A quote that is not closed swallows rows, so the file is named instead."""
    with pytest.raises(Damaged, match=detail):
        from_csv(data)


def test_a_csv_cell_above_the_csv_module_s_limit_is_read() -> None:
    """The csv module stops at 128 KiB a cell by default; conversations do not."""
    ((_, _, record),) = records(from_csv(b"text\n" + b"x" * 200_000 + b"\n", size=1 << 20))
    assert len(record["text"]) == 200_000


def test_arrow_rows_come_back_as_they_were_written() -> None:
    """A null within a row's objects is another row's field; lists and columns keep theirs."""
    rows = [
        {
            "messages": [{"role": "user", "content": "007"}],
            "n": None,
            "calls": [{"arguments": {"x": 1}}, None],
        },
        {
            "messages": [{"role": "user", "content": None, "name": "b"}],
            "n": 2,
            "calls": [{"arguments": {"y": "1"}}],
        },
    ]
    assert [
        r for _, _, r in records(arrow_chunks(pa.Table.from_pylist(rows).to_batches(), source=0, rows=1))
    ] == [
        {
            "messages": [{"role": "user", "content": "007"}],
            "n": None,
            "calls": [{"arguments": {"x": 1}}, None],
        },
        {"messages": [{"role": "user", "name": "b"}], "n": 2, "calls": [{"arguments": {"y": "1"}}]},
    ]


def test_arrow_numbers_records_over_batches_and_chunks() -> None:
    """Tables have no lines: records count from 1 over the whole file."""
    table = pa.table({"a": list(range(7))})
    cut = list(arrow_chunks(table.to_batches(max_chunksize=4), source=3, rows=3))
    assert [(chunk.source, chunk.first, len(chunk)) for chunk in cut] == [(3, 1, 3), (3, 4, 1), (3, 5, 3)]
    assert records(cut) == [(n + 1, n, {"a": n}) for n in range(7)]


def test_arrow_json_and_maps_are_values_again() -> None:
    """The JSON type, which `datasets` uses for mixed values, and maps are what they stand for."""
    table = pa.table(
        {
            "content": pa.array(['"text"', '[{"type": "text"}]', "{bad"], pa.json_()),
            "map": pa.array(
                [[("role", "user"), ("name", None)], None, []], pa.map_(pa.string(), pa.string())
            ),
        }
    )
    (_, _, first), (_, _, second), (_, _, third) = records(arrow_chunks(table.to_batches(), source=0, rows=9))
    assert first == {"content": "text", "map": {"role": "user", "name": None}}
    assert second == {"content": [{"type": "text"}], "map": None}
    assert third.reason is Reason.BAD_JSON


def test_an_arrow_map_with_a_key_twice_is_one_rejection() -> None:
    """Neither value is lost: the row is rejected, wherever the map lies, and its neighbour comes."""
    maps = [[("content", "a"), ("content", "b")], [("content", None), ("role", "user")]]
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    table = pa.table({"messages": pa.array([[pairs] for pairs in maps], kind)})
    (_, _, twice), (_, _, once) = records(arrow_chunks(table.to_batches(), source=0, rows=9))
    assert (twice.reason, twice.detail) == (Reason.BAD_RECORD, "a map has a key twice")
    assert once == {"messages": [{"content": None, "role": "user"}]}


def test_an_arrow_value_that_python_can_t_hold_is_one_rejection() -> None:
    """A date of no calendar in one row does not stop the others."""
    table = pa.table({"a": ["x", "y"], "day": pa.array([0, 2**40], pa.timestamp("s"))})
    (_, _, good), (_, _, bad) = records(arrow_chunks(table.to_batches(), source=0, rows=9))
    assert good["a"] == "x"
    assert bad.reason is Reason.BAD_RECORD


def test_broken_arrow_values_are_found_before_they_are_read() -> None:
    """Offsets that point outside, text that is not UTF-8, two columns of one name: named, no crash."""
    bad_text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    bad_offset = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x7f\1\0\0\0"), pa.py_buffer(b"x")]
    )
    for array in (bad_text, bad_offset):
        with pytest.raises(pa.ArrowInvalid):
            list(arrow_chunks([pa.record_batch([array], names=["a"])], source=0, rows=1))
    with pytest.raises(Damaged, match="two columns have the same name"):
        list(arrow_chunks([pa.record_batch([pa.array([1])] * 2, names=["a", "a"])], source=0, rows=1))
