"""Shard sets: what is written comes back, the same bytes each time, and no flipped bit goes unseen."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_sets import bins_of, buffers, example, fill, make_set

from packing.buffer import PackedBuffer
from packing.errors import OptionError, OutputError, ShardError
from packing.shards import ShardWriter, manifest, open_shards, reader, verify, writer

BINS = [[5, 3], [64], [1], [20, 20, 20], [1, 1, 1, 1]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for what was verified before."""
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A set of five buffers in three files, with an eval part."""
    with ShardWriter(tmp_path / "set", capacity=64, fingerprint={"a": "é"}, buffers_per_shard=2) as writer:
        fill(writer.part("eval"), [[7, 7]])
        fill(writer, BINS)
    return tmp_path / "set"


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def same(one: PackedBuffer, other: PackedBuffer) -> bool:
    names = ("input_ids", "labels", "seq_lengths", "example_ids")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


# Round trip


@settings(max_examples=40)
@given(bins=bins_of(64), per_shard=st.integers(1, 5), batch_tokens=st.sampled_from([1, 50, 2**20]))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, bins: Any, per_shard: int, batch_tokens: int
) -> None:
    """Buffers, lengths, ids and examples, however they fall into files and record batches; verify passes."""
    out = tmp_path_factory.mktemp("round") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_BATCH_TOKENS", batch_tokens)
        make_set(out, bins, buffers_per_shard=per_shard)
    verify(out)
    shards, written = open_shards(out), buffers(bins)
    assert len(shards) == len(written) == shards.manifest["contents"]["buffers"]
    assert len(list(out.glob("data-*.arrow"))) == -(-len(written) // per_shard)
    assert all(same(one, other) for one, other in zip(shards, written, strict=True))
    assert same(shards[-1], written[-1])
    with pytest.raises(IndexError):
        shards[len(written)]
    lengths = [length for one in bins for length in one]
    assert shards.seq_lengths.tolist() == lengths
    assert shards.example_ids.tolist() == list(range(len(lengths)))
    assert shards.examples_per_buffer.tolist() == [len(one) for one in bins]
    assert all(shards.example(i) == example(i, length) for i, length in enumerate(lengths))
    gathered = shards.gather(np.arange(len(lengths))[::-1])
    assert gathered.input_ids.tolist() == [
        token for i in reversed(range(len(lengths))) for token in example(i, lengths[i]).input_ids.tolist()
    ]


def test_buffers_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer gathers a record batch of tokens and no more: 60 or more here, in whole buffers."""
    monkeypatch.setattr(writer, "_BATCH_TOKENS", 60)
    out = make_set(tmp_path / "set", BINS)
    with pa.ipc.open_stream((out / "data-00000.arrow").read_bytes()) as stream:
        tokens = [batch.column("seq_lengths").flatten().to_pylist() for batch in stream]
    assert tokens == [[5, 3, 64], [1, 20, 20, 20], [1, 1, 1, 1]]


def test_a_batch_is_written_while_the_next_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`write` returns with a batch still on its way to the disk; the next batch waits for that one."""
    monkeypatch.setattr(writer, "_BATCH_TOKENS", 60)
    may_write, plain = threading.Event(), writer._DigestFile.write
    before = threading.active_count()

    def slow(self: Any, data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert may_write.wait(20), "nobody gathers meanwhile"
        return plain(self, data)

    monkeypatch.setattr(writer._DigestFile, "write", slow)
    with ShardWriter(tmp_path / "set", capacity=64, fingerprint={}) as set_:
        first, *others = buffers([[60], [1], [64], [3]])
        set_.write(first)
        set_.write(others[0])
        assert list(map(len, set_._pending)) == [1]
        may_write.set()
        for buffer in others[1:]:
            set_.write(buffer)
        set_.finish({})
        assert threading.active_count() == before
    assert [len(buffer) for buffer in open_shards(tmp_path / "set")] == [60, 1, 64, 3]


def test_reading_copies_nothing(directory: Path) -> None:
    """A buffer is a view of the mapped file: read-only, and the same memory each time."""
    shards = open_shards(directory)
    first, second = shards[3].input_ids, shards[3].input_ids
    assert first.ctypes.data == second.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how a file is mapped")
def test_opening_reads_single_pages(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While record batches are looked for, nothing is read around a page; afterwards it is again."""

    def random(data: pa.Buffer) -> bool:
        """Whether the map at this address is marked for random reading."""
        _, found, rest = Path("/proc/self/smaps").read_text().partition(f"\n{data.address:x}-")
        assert found
        return " rr " in rest.partition("VmFlags:")[2].partition("\n")[0] + " "

    seen: list[tuple[pa.Buffer, bool]] = []
    views = reader._views

    def looking(path: Path, data: pa.Buffer) -> Any:
        seen.append((data, random(data)))
        return views(path, data)

    monkeypatch.setattr(reader, "_views", looking)
    shards = open_shards(directory)
    assert len(shards[0])
    ((data, while_opening),) = seen
    assert (while_opening, random(data)) == (True, False)


def test_where_an_example_came_from(directory: Path) -> None:
    """examples.parquet has a row for each example, and its turn is given back with it."""
    shards = open_shards(directory)
    assert shards.examples().num_rows == sum(map(len, BINS))
    assert shards.origin(4) == {"example": 4, "input": "chats.jsonl", "line": 5, "turn": -1}
    assert shards.origin(99) == {}
    assert shards.rejects() == [{"input": "chats.jsonl", "line": 12, "reason": "bad_json"}]
    with pytest.raises(OptionError, match="no example 99"):
        shards.example(99)


def test_a_turn_is_kept(tmp_path: Path) -> None:
    """An example that trains one turn of a conversation comes back with the turn's number."""
    with ShardWriter(tmp_path / "set", capacity=64, fingerprint={}) as writer:
        writer.write(buffers([[5, 3]])[0])
        writer.add_examples(pa.table({"example": [0, 1], "turn": [2, 0]}))
        writer.finish({})
    shards = open_shards(tmp_path / "set")
    assert [shards.example(number).turn for number in (0, 1)] == [2, 0]


def test_a_part_is_a_set_of_its_own(directory: Path) -> None:
    """DIR/eval opens by itself and through its set, and is another set to a loader's state."""
    shards = open_shards(directory)
    part = shards.part("eval")
    assert part.seq_lengths.tolist() == [7, 7]
    assert open_shards(directory / "eval").fingerprint == part.fingerprint != shards.fingerprint
    with pytest.raises(ShardError, match="no part 'test'; it has"):
        shards.part("test")


def test_a_worker_opens_its_own(directory: Path) -> None:
    """A set survives pickling, as for worker processes, without the mapped files."""
    shards = open_shards(directory)
    before = shards[3]
    data = pickle.dumps(shards)
    assert len(data) < 1000
    assert same(pickle.loads(data)[3], before)


@pytest.mark.parametrize("bins", [BINS, []])
def test_hugging_face_opens_it(tmp_path: Path, bins: Any) -> None:
    """`datasets.load_from_disk` gives the same columns and rows; of a set without buffers none."""
    datasets = pytest.importorskip("datasets")
    out = make_set(tmp_path / "set", bins, buffers_per_shard=2)
    rows = datasets.load_from_disk(str(out))
    assert {name: str(feature.feature.dtype) for name, feature in rows.features.items()} == manifest.COLUMNS
    assert len(rows) == len(bins)
    for row, buffer in zip(rows, buffers(bins), strict=True):
        assert row == {name: getattr(buffer, name).tolist() for name in manifest.COLUMNS}


def test_an_empty_set(tmp_path: Path) -> None:
    """Nothing packed is a whole set as well: it opens, verifies and has no buffers."""
    out = make_set(tmp_path / "set", [])
    verify(out)
    shards = open_shards(out)
    assert len(shards) == shards.seq_lengths.size == shards.examples_per_buffer.size == 0
    assert list(shards) == []


# Bytes


def grouped(rows: int, sizes: Sequence[int]) -> Iterator[pa.Table]:
    table = pa.table({"example": np.arange(rows), "input": [f"file {i % 3}" for i in range(rows)]})
    start = 0
    for size in sizes:
        yield table.slice(start, size)
        start += size
    yield table.slice(start)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 9), max_size=6))
def test_grouping_changes_no_byte(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    """Rows given one by one, all at once or in any groups make the same files."""
    written = []
    for groups in (sizes, []):
        out = tmp_path_factory.mktemp("bytes") / "set"
        with pytest.MonkeyPatch.context() as patch, ShardWriter(out, capacity=64, fingerprint={}) as set_:
            patch.setattr(writer, "_EXAMPLES_ROWS", 4)
            for buffer in buffers(BINS):
                set_.write(buffer)
            for table in grouped(11, groups):
                set_.add_examples(table)
            set_.finish({})
        written.append(files_in(out))
    assert written[0] == written[1]


def test_only_run_json_may_differ(tmp_path: Path) -> None:
    """Written again, under another name and with other times, all files but run.json are the same bytes."""
    written = []
    for name in ("a", "b"):
        with ShardWriter(tmp_path / name, capacity=64, fingerprint={"x": [1, 2]}) as set_:
            for buffer in buffers(BINS):
                set_.write(buffer)
            set_.finish({"rows": 11}, run={"out": name})
        written.append(files_in(tmp_path / name))
    differing = {name for name in written[0] if written[0][name] != written[1][name]}
    assert written[0].keys() == written[1].keys()
    assert differing == {"run.json"}


def test_the_manifest_says_all(directory: Path) -> None:
    """Version, capacity, fingerprint, accounts, counts, and a digest of every file but run.json."""
    said = json.loads((directory / "manifest.json").read_bytes())
    assert said["format_version"] == 1
    assert said["capacity"] == 64
    assert said["fingerprint"] == {"a": "é"}
    assert said["accounting"]["rows"] == 12
    assert said["contents"] == {
        "buffers": 5,
        "examples": 11,
        "tokens": 137,
        "supervised_tokens": 65,
        "rejects": 1,
    }
    present = {path.name for path in directory.iterdir() if path.is_file()}
    assert set(said["files"]) == present - {"manifest.json", "run.json"}
    for name, entry in said["files"].items():
        assert entry["sha256"] == hashlib.sha256((directory / name).read_bytes()).hexdigest()
    assert said["parts"] == {"eval": json.loads((directory / "eval/manifest.json").read_bytes())["digest"]}


def test_what_json_can_hold_is_kept(tmp_path: Path) -> None:
    """Tuples, lone surrogates, large numbers and text of any kind in a fingerprint come back and verify."""
    odd = {
        "tuple": (1, 2),
        "surrogate": "\ud800",
        "large": 2**70,
        "text": "é\u2028\x00",
        "nested": {"b": None},
    }
    with ShardWriter(tmp_path / "set", capacity=64, fingerprint=odd) as set_:
        set_.add_rejects([odd])
        set_.finish(odd, run=odd)
    verify(tmp_path / "set")
    shards = open_shards(tmp_path / "set")
    expected = {**odd, "tuple": [1, 2]}
    assert shards.manifest["fingerprint"] == shards.manifest["accounting"] == shards.rejects()[0] == expected


# Damage


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_seen(directory: Path) -> None:
    """Bits flipped all over each file, its first and last byte among them: verify names the file."""
    random = np.random.default_rng(0)
    verify(directory)
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    assert len(paths) == 3 + 6 + 1 + 6
    for path in paths:
        whole = path.read_bytes()
        places = {0, len(whole) - 1, *random.integers(0, len(whole), 12).tolist()}
        for place in places:
            flip(path, place, int(random.integers(8)))
            with pytest.raises(ShardError, match=path.name.replace(".", r"\.")):
                verify(directory)
            path.write_bytes(whole)
    verify(directory)


def test_every_bit_of_a_manifest(directory: Path) -> None:
    """No bit of manifest.json can be flipped unseen, be it white space, an escape or a digest."""
    path = directory / "manifest.json"
    whole = path.read_bytes()
    assert b"\\u00e9" in whole
    for place in range(8 * len(whole)):
        flip(path, place // 8, place % 8)
        with pytest.raises(ShardError):
            manifest.unseal(path)
        path.write_bytes(whole)
    manifest.unseal(path)


@pytest.mark.parametrize("keep_times", [False, True])
def test_reading_sees_damage_after_a_first_read(directory: Path, keep_times: bool) -> None:
    """A file that was read whole before and then damaged is not taken for verified, times set back or not."""
    path = directory / "data-00001.arrow"
    assert len(list(open_shards(directory))) == len(BINS)
    before = path.stat()
    flip(path, 300)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    shards = open_shards(directory)
    assert len(shards[0]) == 8
    with pytest.raises(ShardError, match=r"data-00001\.arrow is damaged"):
        shards[2]


@pytest.mark.parametrize("name", ["data-00001.arrow", "examples.parquet", "rejects.jsonl", "state.json"])
@pytest.mark.parametrize("change", ["missing", "cut", "longer", "empty"])
def test_a_missing_or_cut_file_is_seen_at_once(directory: Path, name: str, change: str) -> None:
    """Opening looks at every file's size: what is missing, cut off or grown is named before any is read."""
    path = directory / name
    whole = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[:-1], "longer": whole + b"\n", "empty": b""}[change])
    with pytest.raises(ShardError, match=name.replace(".", r"\.")):
        open_shards(directory)


@pytest.mark.parametrize("name", ["data-00009.arrow", "eval/data-00001.arrow", "notes"])
def test_a_file_that_is_not_listed_is_named(directory: Path, name: str) -> None:
    """A file or folder not listed is a fault, in a part too; `datasets`' cache and no run.json are none."""
    (directory / "run.json").unlink()
    (directory / "cache-cafd8c33c11ccd63.arrow").write_bytes(b"what a map left")
    verify(directory)
    if name == "notes":
        (directory / name).mkdir()
    else:
        shutil.copy(directory / "data-00000.arrow", directory / name)
    with pytest.raises(ShardError, match=rf"{name} is not listed in manifest\.json"):
        verify(directory)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_damage_to_what_only_datasets_reads_is_seen_at_once(directory: Path, name: str) -> None:
    """Opening a set checks the files that no read of ours would: a flipped bit names the file."""
    flip(directory / name, 5)
    with pytest.raises(ShardError, match=rf"{name} is damaged"):
        open_shards(directory)
    assert len(open_shards(directory, verify=False)) == len(BINS)


def test_parts_are_checked(directory: Path, tmp_path: Path) -> None:
    """A part that is missing, damaged or another set's is seen by verify."""
    shutil.move(directory / "eval", tmp_path / "kept")
    with pytest.raises(ShardError, match="eval"):
        verify(directory)
    make_set(directory / "eval", [[7, 7]])
    with pytest.raises(ShardError, match="not the one that was written with"):
        verify(directory)


def reseal(directory: Path, **changes: Any) -> None:
    """Writes the manifest anew, with digests that are right, as a faulty writer would."""
    said = json.loads((directory / "manifest.json").read_bytes())
    del said["digest"]
    for name, entry in said["files"].items():
        data = (directory / name).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / "manifest.json").write_bytes(manifest.sealed({**said, **changes}))


def rows(**columns: Any) -> Callable[[Path], None]:
    """Replaces the only buffer's columns."""

    def change(directory: Path) -> None:
        row: dict[str, Any] = {
            "input_ids": [1, 2, 101, 102],
            "labels": [-100, 2, -100, 102],
            "seq_lengths": [2, 2],
            "example_ids": [0, 1],
        }
        row |= columns
        schema = pa.schema([field for field in manifest.buffer_schema() if row[field.name] is not None])
        batch = pa.RecordBatch.from_pylist([{name: row[name] for name in schema.names}], schema)
        with (directory / "data-00000.arrow").open("wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            stream.write_batch(batch)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rows(labels=[1, 2, -100, 102]), "data-00000.arrow, buffer 0: the first label of example 0"),
        (rows(labels=[-100, 2, 101, 102]), "the first label of example 1"),
        (rows(labels=[-100, 3, -100, 102]), "neither its id nor -100"),
        (rows(seq_lengths=[2, 1]), "seq_lengths sum to 3"),
        (rows(seq_lengths=[4, 0]), "must be at least 1"),
        (rows(seq_lengths=[4]), "columns of different lengths"),
        (rows(labels=[-100, 2, -100]), "columns of different lengths"),
        (rows(example_ids=[1, 1]), "holds example 1 more than once"),
        (rows(example_ids=[0, 2]), "examples.parquet does not list"),
        (rows(labels=None), "not the columns of a shard"),
        (rows(labels=[-100, 2, -100, -100]), "holds 1 supervised_tokens, manifest.json says 2"),
        (lambda directory: reseal(directory, capacity=3), "4 tokens exceed the capacity of 3"),
        (lambda directory: (directory / "data-00000.arrow").write_bytes(b"no arrow"), "is damaged"),
    ],
)
def test_verify_checks_what_digests_cannot(tmp_path: Path, change: Any, words: str) -> None:
    """A set whose digests are right but whose buffers break a law, or not the counts, is refused."""
    out = make_set(tmp_path / "set", [[2, 2]])
    rows()(out)
    reseal(out)
    verify(out)  # the rows that are replaced are right as they stand
    change(out)
    reseal(out, **({"capacity": 3} if words.startswith("4 tokens") else {}))
    with pytest.raises(ShardError, match=words.replace(".", r"\.")):
        verify(out)


def test_a_number_of_buffers_that_is_wrong(tmp_path: Path) -> None:
    """A data file with other than the manifest's number of buffers is refused when it is first read."""
    out = make_set(tmp_path / "set", [[2, 2], [3]])
    rows()(out)
    reseal(out)
    with pytest.raises(ShardError, match="holds 1 buffers, the manifest says 2"):
        open_shards(out)[0]


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda directory: shutil.rmtree(directory), "no such directory"),
        (
            lambda directory: (directory / "manifest.json").unlink(),
            "not a shard set, or one that was not fin",
        ),
        (write("manifest.json", "{"), "is damaged: no JSON"),
        (write("manifest.json", "[]"), "is damaged: no JSON object"),
        (write("manifest.json", '{"format_version": 1, "x": NaN}'), "is damaged: its bytes"),
        (write("manifest.json", '{"name": "a web page", "icons": []}'), "is no manifest of a shard set"),
        (
            lambda directory: reseal(directory, format_version=2),
            "is of format version 2, this padfree reads 1",
        ),
    ],
)
def test_what_is_no_shard_set(directory: Path, change: Any, words: str) -> None:
    """A missing, foreign, unfinished or newer directory is one clear line, for reading and for verify."""
    change(directory)
    for open_it in (open_shards, verify):
        with pytest.raises(ShardError, match=words):
            open_it(directory)


# Remembering


def test_a_digest_is_checked_once(directory: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is hashed before its first use and not again, in any process; verify always does."""
    hashed: list[int] = []

    class Counting:
        @staticmethod
        def sha256(data: Any) -> Any:
            hashed.append(len(data))
            return hashlib.sha256(data)

    monkeypatch.setattr(reader, "hashlib", Counting)
    shards = open_shards(directory)
    hashed.clear()  # the fingerprint
    shards[0], shards[1], shards[0]
    assert hashed == [(directory / "data-00000.arrow").stat().st_size]
    again = open_shards(directory)
    hashed.clear()
    again[0]
    assert hashed == []
    verify(directory)
    digested = [path for path in directory.rglob("*") if path.name not in ("manifest.json", "run.json")]
    assert not Counter(path.stat().st_size for path in digested if path.is_file()) - Counter(hashed)
    shutil.rmtree(cache)
    forgotten = open_shards(directory)
    hashed.clear()
    forgotten[0]
    assert len(hashed) == 1


def test_a_copy_is_checked_anew(directory: Path, tmp_path: Path) -> None:
    """A copy with the same times is not taken for the files that were verified."""
    list(open_shards(directory))
    shutil.copytree(directory, tmp_path / "copy", copy_function=shutil.copy2)
    path = tmp_path / "copy" / "data-00000.arrow"
    times = path.stat()
    flip(path, 300)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ShardError, match="is damaged"):
        open_shards(tmp_path / "copy")[0]


def test_without_a_cache_folder(directory: Path, cache: Path) -> None:
    """Where nothing can be remembered on disk, reading goes on, and damage is seen as ever."""
    cache.write_text("in the way")
    assert len(open_shards(directory)[0]) == 8
    flip(directory / "data-00000.arrow", 300)
    with pytest.raises(ShardError, match="is damaged"):
        open_shards(directory)[0]


def test_verify_can_be_left_out(directory: Path) -> None:
    """verify=False takes the files as they are: a flipped token is given back."""
    path = directory / "data-00001.arrow"
    place = path.read_bytes().index(np.arange(401, 421, dtype="<i4").tobytes())
    flip(path, place)
    assert open_shards(directory, verify=False)[3].input_ids[0] == 400


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    """A set of more files than a process may hold open can be read at random."""
    out = make_set(tmp_path / "set", [[1]] * 300, buffers_per_shard=1)
    code = (
        "import resource, sys; from packing.shards import open_shards;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "shards = open_shards(sys.argv[1]); kept = list(shards); print(len(kept), len(shards[7]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True)
    assert done.stdout == "300 1\n"


# Refusals while writing


def test_an_output_that_exists(directory: Path, tmp_path: Path) -> None:
    """It is refused at once, before any work; with force it is replaced; both leave nothing else behind."""
    before = files_in(directory)
    with pytest.raises(OutputError, match="exists: choose another name, or replace it with --force"):
        make_set(directory, [[1]])
    assert files_in(directory) == before
    make_set(directory, [[1]], force=True)
    assert len(open_shards(directory)) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["set"]


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "link to a folder"])
def test_force_replaces_shard_sets_alone(tmp_path: Path, kind: str) -> None:
    """A mistyped name does not cost anybody's files: what holds no manifest is not replaced."""
    target = tmp_path / "mine"
    if kind == "file":
        target.write_text("thesis")
    else:
        folder = tmp_path / "elsewhere" if kind == "link to a folder" else target
        folder.mkdir()
        if kind != "empty folder":
            (folder / "thesis.txt").write_text("thesis")
        if folder != target:
            target.symlink_to(folder)
    before = files_in(tmp_path)
    with pytest.raises(OutputError, match="holds no shard set, so --force does not replace it"):
        make_set(target, [[1]], force=True)
    assert files_in(tmp_path) == before


def test_a_link_is_followed(directory: Path, tmp_path: Path) -> None:
    """Replacing through a link replaces the set that it leads to, and the link stays one."""
    (tmp_path / "latest").symlink_to(directory)
    make_set(tmp_path / "latest", [[1]], force=True)
    assert (tmp_path / "latest").is_symlink()
    assert len(open_shards(directory)) == 1


def test_missing_parents_are_made(tmp_path: Path) -> None:
    """The folders above the output need not exist."""
    verify(make_set(tmp_path / "a" / "b" / "set", [[1]]))


@pytest.mark.parametrize(("name", "words"), [("/proc/none/set", "can't write"), ("file/set", "can't write")])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str, words: str) -> None:
    """What the system refuses is one clear line."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=words):
        make_set(tmp_path / name, [[1]])


@pytest.mark.parametrize("batch_tokens", [1, 2**20])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 5, 8, 12, 20])
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, batch_tokens: int
) -> None:
    """Whichever write finds the disk full: one clear line, the old set is kept, the new leaves nothing.

    That of a record batch among others is found by a thread, and raised by the call after it.
    """
    out = make_set(tmp_path / "set", BINS)
    monkeypatch.setattr(writer, "_BATCH_TOKENS", batch_tokens)
    threads = threading.active_count()
    before = files_in(out)
    writes = 0
    plain = writer._DigestFile.write

    def full(self: Any, data: Any) -> int:
        nonlocal writes
        writes += 1
        if writes >= fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(self, data)

    monkeypatch.setattr(writer._DigestFile, "write", full)
    with pytest.raises(OutputError, match="can't write: No space left on device; nothing was kept"):
        make_set(out, [[3, 4]] * 4, force=True, buffers_per_shard=2)
    assert threading.active_count() == threads
    assert files_in(out) == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["set"]


FILE_LIMIT = """
import resource, sys
from packing.errors import OutputError
from packing.shards import ShardWriter
from shard_sets import make_set
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    if sys.argv[3] == "write":
        make_set(sys.argv[1], [[64] * 40] * 8, capacity=4096)
    with ShardWriter(sys.argv[1], capacity=64, fingerprint={}) as writer:
        writer.add_rejects([{"reason": "a line that waits to be written"}])
        raise RuntimeError("of the caller")
except (OutputError, RuntimeError) as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "case", "words"),
    [
        (5000, "write", "File too large; nothing was kept"),
        (10, "write", "File too large; nothing was kept"),
        (10, "leave", "of the caller"),
    ],
)
def test_a_file_limit(tmp_path: Path, limit: int, case: str, words: str) -> None:
    """The same with a limit of the system's own; what can't be written any more hides no other error."""
    done = subprocess.run(
        [sys.executable, "-c", FILE_LIMIT, str(tmp_path / "set"), str(limit), case],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    assert words in done.stdout
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_a_thread_that_can_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear line; a caller who goes on gets the line again, and no set with a batch twice."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer, "_BATCH_TOKENS", 1)
    with ShardWriter(tmp_path / "set", capacity=64, fingerprint={}) as set_:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OutputError, match="the thread that writes does not start"):
                set_.write(next(iter(buffers(BINS))))
        with pytest.raises(OutputError, match="the thread that writes does not start"):
            set_.finish({})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_thread_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one, which comes while the first waits for the thread, leaves nothing and no lock either."""

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "set"
    set_ = ShardWriter(out, capacity=64, fingerprint={})
    set_.write(next(iter(buffers(BINS))))
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_abandon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            set_.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []
    make_set(out, BINS)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, None])
def test_what_is_not_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    """An error, an interrupt or a block left without `finish`: no file at the name or beside, no thread."""
    monkeypatch.setattr(writer, "_BATCH_TOKENS", 60)
    threads = threading.active_count()

    def run() -> None:
        with ShardWriter(tmp_path / "set", capacity=64, fingerprint={}) as set_:
            fill(set_.part("eval"), BINS)
            for buffer in buffers(BINS):
                set_.write(buffer)
            if error:
                raise error

    if error:
        with pytest.raises(error):
            run()
    else:
        run()
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads


def test_what_a_writer_refuses(tmp_path: Path) -> None:
    """Options that can't be, buffers that break a law, and a set whose part is not finished."""
    refused: list[dict[str, Any]] = [{"capacity": 0}, {"capacity": 64, "buffers_per_shard": 0}]
    for options in refused:
        with pytest.raises(OptionError, match="0 can't be"):
            ShardWriter(tmp_path / "set", fingerprint={}, **options)
    assert list(tmp_path.iterdir()) == []
    with ShardWriter(tmp_path / "set", capacity=4, fingerprint={}) as set_:
        good = buffers([[5]])[0]
        with pytest.raises(ValueError, match="5 tokens exceed the capacity of 4"):
            set_.write(good)
        none, ids = good.input_ids[:0], good.example_ids[:0]
        empty = PackedBuffer(input_ids=none, labels=none, seq_lengths=none, example_ids=ids)
        with pytest.raises(ValueError, match="at least one token"):
            set_.write(empty)
        set_.part("eval")
        with pytest.raises(RuntimeError, match="finish the part 'eval' first"):
            set_.finish({})


def test_nothing_is_added_to_a_set_that_is_over(tmp_path: Path) -> None:
    """After `finish`, or left without: adding is refused in every way, and the finished set stays whole."""
    buffer = buffers([[3]])[0]
    table = pa.table({"example": pa.array([99], pa.int64())})
    for end in ("finished", "left"):
        with ShardWriter(tmp_path / end, capacity=64, fingerprint={}) as set_:
            part = set_.part("eval")
            fill(part, [[5]])
            if end == "finished":
                fill(set_, BINS)
        for add in (
            lambda writer: writer.write(buffer),
            lambda writer: writer.add_examples(table),
            lambda writer: writer.add_rejects([{"line": 1}]),
            lambda writer: writer.part("more"),
            lambda writer: writer.finish({}),
        ):
            with pytest.raises(RuntimeError, match=f"this shard set was {end}, so nothing"):
                add(set_)
            with pytest.raises(RuntimeError, match="this shard set was finished, so nothing"):
                add(part)
    verify(tmp_path / "finished")
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["finished"]
    with ShardWriter(tmp_path / "failed", capacity=64, fingerprint={}) as set_:
        set_.write(buffer)
        with pytest.raises(TypeError):
            set_.finish({"rows": object()})
        with pytest.raises(RuntimeError, match="this shard set failed to finish, so nothing"):
            set_.finish({})
