"""`open_sources`: what a name stands for, what a file really is, and how damage is named."""

import contextlib
import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packing import sources
from packing.errors import InputError, OptionError, RowRejected
from packing.sources import Source, SourceOptions, open_sources

ROWS: list[dict[str, Any]] = [{"text": f"row {n} é"} for n in range(20)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
BOM = b"\xef\xbb\xbf"


def gz(data: bytes) -> bytes:
    """Gzipped with no time in it: parameters of a test have to be the same in every process."""
    return gzip.compress(data, mtime=0)


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def opened(*inputs: object, **options: Any) -> list[Source]:
    return open_sources([str(given) for given in inputs], options=SourceOptions(**options))


def read(*inputs: object, rows: int = 7, **options: Any) -> list[Any]:
    return [
        record
        for source in opened(*inputs, **options)
        for chunk in source.chunks(rows=rows)
        for _, _, record in chunk.records()
    ]


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=6)
    return path


def arrow_stream(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    return path


def arrow_file(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)
    return path


def saved(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


# What is read


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", LINES.rstrip()),
        ("a.jsonl", BOM + LINES.replace(b"\n", b"\r\n\r\n")),
        ("a.json", BOM + b"\n" * 1000 + LINES),
        ("a.ndjson", LINES),
        ("A.JSONL", LINES),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", BOM + json.dumps(ROWS, indent=2).encode()),
        ("a.json", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()),
        ("a.jsonl", json.dumps(ROWS).encode()),
        ("without_suffix", LINES),
        ("a.jsonl.gz", gz(LINES)),
        ("a.jsonl.gz", gz(LINES[:100]) + gz(b"") + gz(LINES[100:])),
        ("a.json.gz", gz(json.dumps(ROWS).encode())),
        ("a.jsonl", gz(LINES)),
        ("a.jsonl.zst", zstd(LINES)),
        ("a.jsonl.zst", zstd(LINES[:100]) + zstd(LINES[100:])),
        ("a.jsonl.zst", b"P*M\x18\x04\x00\x00\x00size" + zstd(LINES)),
        ("a.csv", b"text\n" + b"".join(row["text"].encode() + b"\n" for row in ROWS)),
        ("a.csv", BOM + b"text\r\n" + b"".join(row["text"].encode() + b"\r\n" for row in ROWS)),
        ("a.csv.gz", gz(b"text\n" + b"".join(row["text"].encode() + b"\n" for row in ROWS))),
        ("a.tsv", b"text\n" + b"".join(row["text"].encode() + b"\n" for row in ROWS)),
    ],
)
def test_a_file_is_read_for_what_it_is(tmp_path: Path, name: str, data: bytes) -> None:
    """Lines, arrays, objects in a row, CSV; plain, gzip of several members or zstd: the same records."""
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("write", [parquet, arrow_stream, arrow_file])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "without_suffix"])
def test_tables_are_known_by_content(tmp_path: Path, write: Any, name: str) -> None:
    """Parquet and both kinds of Arrow are read, under any name that does not claim the other."""
    path = write(tmp_path / name)
    if (name == "a.parquet") is (write is parquet) or name == "without_suffix":
        assert read(path) == ROWS


def test_one_object_of_many_lines_is_one_record(tmp_path: Path) -> None:
    """A .json file with one pretty-printed conversation, as people hand-write it."""
    (tmp_path / "a.json").write_text('{\n  "messages": [\n    {}\n  ]\n}\n')
    assert read(tmp_path / "a.json") == [{"messages": [{}]}]


def test_rows_of_several_shapes_keep_their_own(tmp_path: Path) -> None:
    """No schema is merged: a field that one row lacks is not null, and types may differ by row."""
    rows = [{"a": 1}, {"a": "1"}, {"b": [1]}, {"b": [{"c": None}]}, {"when": "2024-01-01T00:00:00"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert read(tmp_path / "a.jsonl") == rows
    assert read(tmp_path / "a.json") == rows


def test_a_byte_order_mark_is_counted(tmp_path: Path) -> None:
    """What is passed over at the start of a file shows in the first chunk's notes."""
    (tmp_path / "a.jsonl").write_bytes(BOM + LINES)
    (source,) = opened(tmp_path / "a.jsonl")
    assert [dict(chunk.notes) for chunk in source.chunks(rows=10)] == [{"byte_order_mark": 1}, {}]


@pytest.mark.parametrize("write", [parquet, saved])
def test_table_batches_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    """Long rows are read few at a time, so that a thousand of them never lie in memory at once."""
    path = write(tmp_path / "a", [{"text": str(n) * 1000} for n in range(10)])
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2500)
    (source,) = opened(path)
    assert max(len(chunk) for chunk in source.chunks(rows=1000)) <= 2


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    """Between the moment it is found and the moment it is read."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (source,) = opened(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: .*No such file"):
        source.identity()
    with pytest.raises(InputError, match=r"a\.jsonl: .*No such file"):
        list(source.chunks(rows=1))


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_any_chunk_size_gives_the_same_records(tmp_path: Path, rows: int) -> None:
    """`rows` bounds the chunks and changes nothing else; records are numbered over the whole file."""
    for path in (parquet(tmp_path / "a.parquet"), arrow_stream(tmp_path / "a.arrow"), saved(tmp_path / "d")):
        (source,) = opened(path)
        chunks = list(source.chunks(rows=rows))
        assert max(map(len, chunks)) <= rows
        assert [record for chunk in chunks for record in chunk.records()] == [
            (n + 1, n, row) for n, row in enumerate(ROWS)
        ]


# save_to_disk folders and the hub


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    """A folder of `Dataset.save_to_disk`, shuffled before it was saved, in the order that it shows."""
    data = datasets.Dataset.from_list(ROWS).select(range(19, -1, -1))
    data.save_to_disk(tmp_path / "d")
    assert read(tmp_path / "d") == ROWS[::-1]


def test_a_saved_dataset_dict_needs_its_split(tmp_path: Path) -> None:
    """With one split there is nothing to choose; with several, none is guessed."""
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data).save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([3])).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == ROWS
    assert read(tmp_path / "two", split="test") == [ROWS[3]]
    with pytest.raises(InputError, match="has the splits train, test: choose one with --split"):
        opened(tmp_path / "two")
    with pytest.raises(InputError, match="has the splits train, test"):
        opened(tmp_path / "two", split="tset")
    with pytest.raises(InputError, match="has no splits"):
        opened(saved(tmp_path / "plain"), split="test")
    with pytest.raises(OptionError, match="configuration or revision"):
        opened(tmp_path / "plain", config="default")


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets has no Json")
def test_mixed_values_of_a_saved_dataset_are_what_they_were(tmp_path: Path) -> None:
    """`datasets` stores contents that are text in one row and parts in another as JSON text."""
    features = datasets.Features({"messages": datasets.List({"content": datasets.Json()})})
    rows = [{"messages": [{"content": "hi"}]}, {"messages": [{"content": [{"type": "text", "text": None}]}]}]
    data = datasets.Dataset.from_list(rows, features=features)
    data.save_to_disk(tmp_path / "d")
    data.to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "d") == rows
    assert read(tmp_path / "a.parquet") == rows


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"\xff\xff\xff\xff\x10\x00\x00\x00"])
def test_a_damaged_saved_dataset_is_named(tmp_path: Path, file: str, damage: bytes) -> None:
    """Each file of the folder, emptied or full of nonsense, is an error of one line or does not matter."""
    saved(tmp_path / "d")
    (tmp_path / "d" / file).write_bytes(damage)
    if file == "dataset_info.json" and damage == b"{}":
        assert read(tmp_path / "d") == ROWS
        return
    with pytest.raises(InputError) as caught:
        read(tmp_path / "d")
    assert str(tmp_path / "d") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_saved_dataset_cut_between_batches_is_named(tmp_path: Path) -> None:
    """An Arrow stream that ends after a whole batch reads as a shorter one; its end mark tells."""
    saved(tmp_path / "d")
    (path,) = (tmp_path / "d").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"cut off: the Arrow stream .* has no end mark"):
        opened(tmp_path / "d")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The hub as `datasets` sees it: one data set, "people/chats", that lies in a local folder."""
    local = tmp_path / "hub"
    local.mkdir()
    parquet(local / "train.parquet")
    parquet(local / "test.parquet", ROWS[:2])
    load, names = datasets.load_dataset, datasets.get_dataset_split_names
    calls: list[tuple[Any, ...]] = []

    class Builder:
        hash = "c0ffee" + "0" * 34

    def builder(name: str, config: str | None, *, revision: str | None) -> Builder:
        calls.append((name, config, revision))
        if name != "people/chats":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist\non the Hub")
        return Builder()

    def split_names(name: str, config: str | None, *, revision: str) -> Any:
        calls.append((name, config, revision))
        return names(str(local), config)

    def dataset(name: str, config: str | None, *, split: str, revision: str) -> Any:
        calls.append((name, config, revision))
        return load(str(local), config, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "get_dataset_split_names", split_names)
    monkeypatch.setattr(datasets, "load_dataset", dataset)
    monkeypatch.chdir(tmp_path)
    return calls


def test_a_hub_name_is_read_at_the_commit_that_it_names(hub: list[tuple[Any, ...]]) -> None:
    """What is loaded is the commit that goes into the identity, whatever a branch points to by then."""
    (source,) = opened("people/chats", split="train", config="default", revision="v1")
    assert [r for chunk in source.chunks(rows=9) for _, _, r in chunk.records()] == ROWS
    commit = "c0ffee" + "0" * 34
    assert hub == [("people/chats", "default", "v1"), ("people/chats", "default", commit)]
    assert source.identity() == {
        "kind": "hub",
        "name": "people/chats",
        "config": "default",
        "split": "train",
        "commit": commit,
    }
    assert read("people/chats", split="test[:1]") == ROWS[:1]


def test_a_hub_name_of_several_splits_or_of_nothing_is_an_error(hub: list[tuple[Any, ...]]) -> None:
    """No split is guessed, and what is neither a path nor on the hub is named as both."""
    with pytest.raises(InputError, match=r"people/chats: .*has the splits (train, test|test, train)"):
        opened("people/chats")
    with pytest.raises(InputError, match="people/nothing: no file or folder, nor a data set on the hub"):
        opened("people/nothing")


# Names, folders, globs


def test_names_do_not_say_where_inputs_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same input in another folder has the same name and identity; relative paths stay as given."""
    for folder in ("x/data", "y/elsewhere/data"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "a.jsonl").write_bytes(LINES)
        (tmp_path / folder / "sub" / "b.jsonl").write_bytes(LINES)
        saved(tmp_path / folder / "d")
    first = opened(*((tmp_path / "x" / "data" / name) for name in ("a.jsonl", "sub/b.jsonl", "d")))
    second = opened(
        *((tmp_path / "y" / "elsewhere" / "data" / name) for name in ("a.jsonl", "sub/b.jsonl", "d"))
    )
    assert [source.name for source in first] == ["a.jsonl", os.path.join("sub", "b.jsonl"), "d"]
    assert [dict(source.identity()) for source in first] == [dict(source.identity()) for source in second]
    monkeypatch.chdir(tmp_path / "x")
    assert [source.name for source in opened("./data/a.jsonl")] == [os.path.join("data", "a.jsonl")]
    assert [source.name for source in opened(tmp_path / "x" / "data" / "a.jsonl")] == ["a.jsonl"]


def test_a_name_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    """File systems allow any bytes; a manifest is UTF-8, and so is what others name the file by."""
    with open(os.fsencode(tmp_path) + b"/\xff.jsonl", "wb") as file:
        file.write(LINES)
    with pytest.raises(InputError, match=r"\\udcff.jsonl': a name that is not UTF-8"):
        opened(tmp_path)


def test_identity_is_of_the_content(tmp_path: Path) -> None:
    """One byte more is another input, in a file and in any file of a saved data set."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (file, folder) = opened(tmp_path / "a.jsonl", saved(tmp_path / "d"))
    before = [file.identity(), folder.identity()]
    (tmp_path / "a.jsonl").write_bytes(LINES + b"\n")
    (tmp_path / "d" / "dataset_info.json").write_text("{}")
    after = [source.identity() for source in opened(tmp_path / "a.jsonl", tmp_path / "d")]
    assert before[0]["sha256"] != after[0]["sha256"]
    assert before[1]["sha256"] != after[1]["sha256"]


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_text_is_hashed_as_it_is_read(packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read to its end, a file is not read again for its identity, which is the same as that of the file."""
    data = packed(BOM + LINES * 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    (source,) = opened(path)
    (unread,) = opened(path)
    expected = hashlib.sha256(data).hexdigest()
    assert unread.identity()["sha256"] == expected
    monkeypatch.delattr(sources, "_sha256")
    assert sum(map(len, source.chunks(rows=7))) == len(ROWS) * 100
    assert source.identity()["sha256"] == expected


def test_folders_and_globs_are_expanded_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data files of all folders below, sorted; hidden ones are not meant, others are named in a warning."""
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.json", ".hidden.jsonl", ".git/d.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith(".gz") else LINES)
    saved(tmp_path / "sub" / "saved")
    expected = ["a.jsonl.gz", "b.jsonl", os.path.join("sub", "c.json"), os.path.join("sub", "saved")]
    assert [source.name for source in opened(tmp_path)] == expected
    assert [message for message in caplog.messages if "README.md: passed over" in message]
    assert len(caplog.messages) == 1
    assert [source.name for source in opened(tmp_path / "*.jsonl*")] == ["a.jsonl.gz", "b.jsonl"]
    (found, *_) = opened(tmp_path / "**" / "c.json")
    assert found.name == "c.json"
    assert [source.number for source in opened(tmp_path)] == [0, 1, 2, 3]


def test_brackets_in_a_file_s_name_are_no_glob(tmp_path: Path) -> None:
    """A name that exists is that file."""
    (tmp_path / "a[1].jsonl").write_bytes(LINES)
    assert read(tmp_path / "a[1].jsonl") == ROWS


def test_an_input_given_twice_is_an_error(tmp_path: Path) -> None:
    """By name and by its folder: its rows would count twice."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(InputError, match=r"a\.jsonl is given 2 times"):
        opened(tmp_path / "a.jsonl", tmp_path)


def test_an_option_that_nothing_reads_is_an_error(tmp_path: Path) -> None:
    """A split of a plain file is a misunderstanding, not something to pass over."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(OptionError, match="save_to_disk folder"):
        opened(tmp_path / "a.jsonl", split="train")


# What is refused


@pytest.mark.parametrize(
    ("name", "data", "detail"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        (
            "a.jsonl.zst",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "is a Git LFS pointer",
        ),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        (
            "a.jsonl.gz",
            gz(b"version https://git-lfs.github.com/spec/v1\n"),
            "is a Git LFS pointer",
        ),
        ("a.jsonl", b"/annex/objects/SHA256E-s1--1.jsonl\n", "is a git-annex pointer"),
        ("a.jsonl.gz", LINES, "is named .gz, but is not gzip"),
        ("a.jsonl.zst", gz(LINES), "is named .zst, but is not zstd"),
        ("a.jsonl.bz2", b"BZh91AY&SY", "is compressed by bzip2, which is not read here"),
        ("a.jsonl.xz", b"\xfd7zXZ\x00\x00", "is compressed by xz, which is not read here"),
        ("a.jsonl.gz", gz(b"x" * 257 + b"ustar\x00"), "is a tar archive"),
        ("a.zip", b"PK\x03\x04rest", "is a zip archive"),
        ("a.json", '{"a": 1}'.encode("utf-16"), "is UTF-16, not UTF-8"),
        ("a.json", b"\n <!DOCTYPE html><html>", "is a web page"),
        ("a.json", b"hello", "is no JSON, CSV, Parquet or Arrow: it begins with b'hello'"),
        ("a.json", b"   \n", "is no JSON"),
        ("notes.txt", b"hello", "is no JSON"),
        ("a.parquet", LINES, "is named .parquet, but begins with"),
        ("a.parquet", b"PAR1" + b"x" * 40, "Parquet magic bytes not found in footer"),
        ("a.arrow", LINES, "is named .arrow, but begins with"),
        ("a.csv", b"a,a\n1,2\n", "two columns have the same name in the header (after reading 0 records)"),
        (
            "a.json",
            b'[{"a": 1},\n{"a": 2},\n{"a": ',
            "what begins on line 3 does not end (after reading 2 records)",
        ),
    ],
)
def test_what_can_t_be_read_is_named(tmp_path: Path, name: str, data: bytes, detail: str) -> None:
    """One line with the file's name, what it is, and where there is one, the next step."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert detail in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compress", [gzip.compress, zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("keep", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("members", [1, 2])
def test_a_cut_archive_is_never_a_shorter_one(
    tmp_path: Path, compress: Any, keep: float, members: int
) -> None:
    """Cut anywhere, in the first or the last member: an error that counts the records before the cut."""
    rows = b"".join(b'{"text": "%d"}\n' % (n**5) for n in range(4000))
    name = f"a.jsonl.{'gz' if compress is gzip.compress else 'zst'}"
    whole = compress(rows)
    (tmp_path / name).write_bytes(whole * (members - 1) + whole[: int(len(whole) * keep)])
    with pytest.raises(InputError, match="Truncated compressed stream") as caught:
        read(tmp_path / name)
    if members == 2:
        assert "records)" in str(caught.value)


def test_the_records_before_damage_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is exact, and tells a person where to look."""
    monkeypatch.setattr(sources, "BLOCK", 10)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n\n" * 500) + gzip.compress(b"{}\n")[:-4])
    with pytest.raises(InputError, match=r"Truncated compressed stream \(after reading 500 records\)"):
        read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("at", [0.3, 0.6, 0.95])
def test_a_flipped_bit_in_an_archive_is_found(tmp_path: Path, at: float) -> None:
    """A gzip file carries a checksum; what fails it is not read as if it were whole."""
    data = bytearray(gzip.compress(b"".join(b'{"text": "%d"}\n' % (n**5) for n in range(4000))))
    data[int(len(data) * at)] ^= 4
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(InputError, match="zlib inflate failed"):
        read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_decompression_bomb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """A file that grows a thousandfold past BOMB_BYTES stops the run before it fills memory or disk."""
    monkeypatch.setattr(sources, "BOMB_BYTES", 4 << 20)
    bomb = bytes(16 << 20)
    data = gzip.compress(bomb, 9) if suffix == "gz" else zstd(bomb)
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(data)
    with pytest.raises(InputError, match="a decompression bomb"):
        read(tmp_path / f"a.jsonl.{suffix}")


def test_a_missing_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in a path never asks the network, and an empty folder or glob is no success."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, detail in (
        ("data/train.jsonl", "no such file or folder"),
        ("empty/train", "no such file or folder"),
        ("/nowhere/a", "no such file or folder"),
        ("a b c", "no such file or folder"),
        ("*.jsonl", "matches no file"),
        ("empty", "no data files in it"),
    ):
        with pytest.raises(InputError, match=detail):
            opened(name)


def test_a_packed_folder_is_no_input(tmp_path: Path) -> None:
    """Its rows are whole buffers; read as examples, they would let examples see each other."""
    saved(tmp_path / "d")
    (tmp_path / "d" / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="is packed already"):
        opened(tmp_path / "d")


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    """An input is read twice, for its digest and for its rows."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        opened(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    """The system's own words, in one line."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        opened(tmp_path / "a.jsonl")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One small file of each kind."""
    folder = tmp_path_factory.mktemp("originals")
    return {
        "a.jsonl": LINES,
        "a.json": json.dumps(ROWS, indent=1).encode(),
        "a.csv": b'text,other\n"a\nb",c\n' * 5,
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": zstd(LINES),
        "a.parquet": parquet(folder / "a.parquet").read_bytes(),
        "a.arrow": arrow_stream(folder / "a.arrow").read_bytes(),
        "b.arrow": arrow_file(folder / "b.arrow").read_bytes(),
    }


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_error_or_a_rejection(
    tmp_path: Path, originals: dict[str, bytes], data: st.DataObject
) -> None:
    """Bytes flipped, cut out, put in or left out at the end: never another exception, never a crash."""
    name = data.draw(st.sampled_from(sorted(originals)))
    damaged = bytearray(originals[name])
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, len(damaged)))
    damaged[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    (tmp_path / name).write_bytes(damaged)
    with contextlib.suppress(InputError):
        assert all(isinstance(record, dict | RowRejected) for record in read(tmp_path / name))


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_under_any_name_are_read_or_named(tmp_path: Path, content: bytes) -> None:
    """No kind of reader lets a stranger's bytes raise anything of its own."""
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.parquet", "a.arrow", "a"):
        (tmp_path / name).write_bytes(content)
        with contextlib.suppress(InputError):
            assert all(isinstance(record, dict | RowRejected) for record in read(tmp_path / name))
