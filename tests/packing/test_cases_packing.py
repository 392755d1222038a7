"""Inputs that broke packing elsewhere, each under its name in ../shared/cases/cases.jsonl."""

import json

import numpy as np
import pytest

from packing.chat import ChatOptions, load_tokenizer
from packing.errors import InputError
from packing.pipeline import PackOptions, pack_dataset
from packing.sample import TOKENIZER
from packing.shards import open_shards


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TOKENIZER))


@pytest.fixture
def pack(tmp_path, tokenizer):
    """Packs rows into a new folder: (report, shards)."""

    def run(rows, *, name="out", **more):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        report = pack_dataset([str(file)], tokenizer=tokenizer, out=tmp_path / name, **more)
        return report, open_shards(tmp_path / name)

    return run


def tokens(length, *, start=10):
    """A tokenized row of a given length, all trained but the first token."""
    ids = [start + n % 200 for n in range(length)]
    return {"input_ids": ids, "labels": [-100, *ids[1:]]}


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_no_trainable_token_after_cut(pack):
    """A prompt that fills the buffer leaves nothing to train: dropped and counted, and each buffer trains."""
    report, shards = pack(
        [chat("ctx " * 400, "yes"), chat("a", "b")],
        options=PackOptions(capacity=60, overflow="truncate", max_rejects=0.5),
    )
    assert report.accounting["rows"]["rejected"] == {"nothing_to_train": 1}
    assert all((buffer.labels >= 0).any() for buffer in shards)


@pytest.mark.parametrize(
    ("overflow", "lengths", "lost"),
    [("drop", [4000, 4000], {"rejected": {"too_long": 12000}, "truncated": 0}),
     ("truncate", [4000, 4000, 8192], {"rejected": {}, "truncated": 12000 - 8192})],
)  # fmt: skip
def test_longer_than_buffer(pack, overflow, lengths, lost):
    """12,000 tokens and a buffer of 8,192: dropped or a prefix, counted, never a headless fragment."""
    report, shards = pack(
        [tokens(12000, start=1), tokens(4000), tokens(4000)],
        options=PackOptions(overflow=overflow, max_rejects=0.5),
    )
    assert sorted(shards.seq_lengths.tolist()) == lengths
    assert {name: report.accounting["tokens"][name] for name in lost} == lost
    begins = {1} if overflow == "truncate" else set()
    assert {int(shards.example(n).input_ids[0]) for n in range(len(lengths))} == begins | {10}


def test_packing_loses_mask(pack):
    """Questions stay untrained in the buffer: as many trained tokens after packing as before."""
    report, shards = pack([chat("a", "b"), chat("c", "d")], options=PackOptions(capacity=64))
    (buffer,) = shards
    alone = [int((shards.example(n).labels >= 0).sum()) for n in range(2)]
    assert 0 < int((buffer.labels >= 0).sum()) == sum(alone) < len(buffer) - 2
    assert report.main.supervised_tokens == sum(alone)


def test_first_token_of_next_example_trained(pack):
    """[1, 2, 3] and [4, 5, 6], all trained, give the labels -100, 2, 3, -100, 5, 6."""
    rows = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3], [4, 5, 6])]
    _, shards = pack(rows, options=PackOptions(capacity=8))
    (buffer,) = shards
    by_example = buffer.labels.reshape(2, 3)[np.argsort(buffer.example_ids)]
    assert by_example.tolist() == [[-100, 2, 3], [-100, 5, 6]]


def test_dataset_smaller_than_buffer(pack):
    """Lengths 40 and 30 in a buffer of 8,192: one short buffer."""
    report, shards = pack([tokens(40), tokens(30)])
    assert [len(buffer) for buffer in shards] == [70]
    assert (report.main.buffers, report.main.lower_bound) == (1, 1)


@pytest.mark.parametrize("workers", [1, 4])
def test_tail_dropped(pack, workers):
    """Lengths 8,000, 8,000 and 500 with four workers: nothing lost, no short buffer a worker."""
    _, shards = pack([tokens(8000), tokens(8000), tokens(500)], workers=workers)
    assert sorted(len(buffer) for buffer in shards) == [500, 8000, 8000]


def test_len_is_unpacked(pack):
    """Fifty times 100 tokens in buffers of 1,000: the length is 5 buffers, and the report says all."""
    report, shards = pack([tokens(100)] * 50, options=PackOptions(capacity=1000))
    assert len(shards) == 5
    assert (report.main.buffers, report.main.examples) == (5, 50)
    assert report.accounting["rows"] == {"in": 50, "packed": 50, "eval": 0, "rejected": {}}


def test_stale_cache_after_template_change(pack):
    """Another template gives another fingerprint, even where it gives the same tokens."""
    template = load_tokenizer(str(TOKENIZER)).chat_template
    _, one = pack([chat("a", "b")])
    _, two = pack([chat("a", "b")], name="two", chat=ChatOptions(chat_template=template + "{# T2 #}"))
    assert one[0].input_ids.tolist() == two[0].input_ids.tolist()
    assert one.fingerprint != two.fingerprint


def test_unstable_fingerprint(pack, tokenizer):
    """Using the tokenizer with padding and truncation in between changes no fingerprint and no token."""
    _, one = pack([chat("a", "b")])
    tokenizer(["some text", "more"], padding=True, truncation=True, max_length=3)
    _, two = pack([chat("a", "b")], name="two")
    assert one.fingerprint == two.fingerprint
    assert one[0].input_ids.tolist() == two[0].input_ids.tolist()


def test_mask_all_zero(pack):
    """A set in which nothing would be trained is not written."""
    with pytest.raises(InputError, match="nothing to pack"):
        pack([{"input_ids": [1, 2], "labels": [-100, -100]}], options=PackOptions(max_rejects=1))
