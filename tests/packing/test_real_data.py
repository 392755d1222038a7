"""The main job on real conversations: every file in ../shared/data with a real tokenizer."""

import json

import numpy as np
import pytest

from packing.chat import ChatEncoder, load_tokenizer
from packing.cli import main
from packing.errors import TooManyRejects
from packing.formats import FormatOptions, normalise
from packing.pipeline import pack_dataset
from packing.shards import open_shards, verify
from packing.sources import SourceOptions, open_sources

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def qwen3(shared):
    return load_tokenizer(str(shared / "tokenizers" / "qwen3"))


@pytest.fixture(scope="module")
def inputs(shared):
    return sorted(str(path) for path in (shared / "data").glob("*.jsonl.gz"))


@pytest.fixture(scope="module")
def records(inputs):
    """(input, record number) -> the row."""
    rows = {}
    for number, source in enumerate(open_sources(inputs, options=SourceOptions())):
        for chunk in source.chunks(rows=1000):
            rows |= {(number, record): row for _, record, row in chunk.records()}
    return rows


@pytest.fixture(scope="module")
def packed(inputs, qwen3, tmp_path_factory):
    """All of them, with two workers."""
    out = tmp_path_factory.mktemp("real") / "out"
    report = pack_dataset(inputs, tokenizer=qwen3, out=out, workers=2)
    return out, report


def test_every_row_and_token_is_accounted_for(packed, records):
    """Rows in the files = packed + one line each in rejects.jsonl; tokens are counted to the last one."""
    out, report = packed
    shards = open_shards(out)
    rows, tokens = report.accounting["rows"], report.accounting["tokens"]
    origins = {(row["source"], row["record"]) for row in shards.examples().to_pylist()}
    assert rows["in"] == len(records) > 5000
    assert rows["in"] == rows["packed"] + sum(rows["rejected"].values())
    assert rows["packed"] == len(origins)
    assert len(shards.rejects()) == sum(rows["rejected"].values())
    assert tokens["in"] == tokens["packed"] + tokens["truncated"] + sum(tokens["rejected"].values())
    assert tokens["packed"] == sum(map(len, shards)) > 1_000_000
    assert rows["packed"] > 0.99 * rows["in"]


def test_ids_are_those_of_apply_chat_template(packed, records, qwen3):
    """For every packed row: transformers' own render and tokenization of the row give the same ids.

    Of the row as it stands in the file where the template takes it so; else of the normalised messages.
    """
    shards = open_shards(packed[0])
    encoder = ChatEncoder(qwen3)
    as_it_stands = 0
    for origin in shards.examples().to_pylist():
        row = records[origin["source"], origin["record"]]
        ids = shards.example(origin["example"]).input_ids.tolist()
        if same_ids(qwen3, row["messages"], row.get("tools"), ids):
            as_it_stands += 1
            continue
        (example,) = encoder.encode(normalise(row, options=FormatOptions()))
        assert same_ids(qwen3, example.messages, example.tools, ids), origin
    assert as_it_stands > 0.95 * len(shards.examples())


def same_ids(tokenizer, messages, tools, ids):
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False) == ids
    except (TypeError, ValueError):  # arguments as text, content null: what normalising is for
        return False


def test_it_passes_verification(packed, capsys):
    """Every digest and every law, in the library and in the command."""
    verify(packed[0])
    assert main(["verify", str(packed[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_datasets_opens_the_same_directory(packed):
    """`datasets.load_from_disk` gives the same buffers, row by row."""
    import datasets

    loaded = datasets.load_from_disk(str(packed[0])).with_format("numpy")
    shards = open_shards(packed[0])
    assert len(loaded) == len(shards)
    for row, buffer in zip(loaded, shards, strict=True):
        for column in ("input_ids", "labels", "seq_lengths", "example_ids"):
            assert np.array_equal(row[column], getattr(buffer, column))


def test_bytes_do_not_depend_on_the_workers(packed, inputs, qwen3, tmp_path):
    """One and three workers give every file but run.json as two did."""
    for workers in (1, 3):
        out = tmp_path / str(workers)
        pack_dataset(inputs, tokenizer=qwen3, out=out, workers=workers)
        for path in packed[0].iterdir():
            if path.name != "run.json":
                assert (out / path.name).read_bytes() == path.read_bytes(), path.name


RAW_REJECTED = {"axolotl/conversation.missingturns.json": "1 of 1 rows .*empty assistant turn"}
"""Files that are refused, and why: this one's only conversation misses an answer in the middle."""


def test_raw_files_need_no_option_but_the_tokenizer(shared, qwen3, tmp_path):
    """Files as people have them are packed, or refused for what is in them, by name."""
    raw = shared / "data" / "raw"
    files = [path for path in sorted(raw.rglob("*")) if path.is_file()]
    assert len(files) >= 15
    for number, path in enumerate(files):
        name = str(path.relative_to(raw))
        if name in RAW_REJECTED:
            with pytest.raises(TooManyRejects, match=RAW_REJECTED[name]):
                pack_dataset([str(path)], tokenizer=qwen3, out=tmp_path / str(number))
        else:
            report = pack_dataset([str(path)], tokenizer=qwen3, out=tmp_path / str(number))
            assert report.accounting["rows"]["packed"] >= 0.95 * report.accounting["rows"]["in"], name
