"""Others' packed data: read by their own rules, so what they would train is what our shards train."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packing import shards
from packing.buffer import unpack
from packing.errors import InputError, OptionError
from packing.formats import MASKS
from packing.importers import import_packed
from packing.report import stats

IGNORED = -100
EXAMPLES = [
    ([5, 6, 7, 8], [IGNORED, IGNORED, 7, 8]),
    ([9, 10, 11], [IGNORED, 10, 11]),
    ([12, 13], [IGNORED, 13]),
]
"""Ids and labels, in a row of nine tokens."""
IDS = [token for ids, _ in EXAMPLES for token in ids]
LABELS = [label for _, labels in EXAMPLES for label in labels]
TRL = {"input_ids": IDS, "labels": LABELS, "seq_lengths": [4, 3, 2]}
TORCHTUNE = {
    "tokens": [*IDS, 0, 0, 0],
    "labels": [*LABELS, IGNORED, IGNORED, IGNORED],
    "seq_lens": [4, 3, 2, 3],
    "input_pos": [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4],
}
MEGATRON = {"input_ids": IDS, "loss_mask": [0, 1, 1, 0, 1, 1, 0, 1, 0], "seq_start_id": [0, 4, 7]}


def save(path: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def examples(out: Path) -> list[tuple[list[int], list[int]]]:
    shards.verify(out)
    return [
        (example.input_ids.tolist(), example.labels.tolist())
        for buffer in shards.open_shards(out)
        for example in unpack(buffer)
    ]


@pytest.mark.parametrize("row", [TRL, TORCHTUNE, MEGATRON], ids=["trl", "torchtune", "megatron"])
def test_each_layout_gives_the_same_examples(row: dict[str, Any], tmp_path: Path) -> None:
    """The same three examples, packed by TRL, torchtune or Megatron-Bridge, come out as the same shards."""
    report = import_packed([save(tmp_path / "a.parquet", row)], out=tmp_path / "out")
    assert examples(tmp_path / "out") == EXAMPLES
    assert report.accounting["rows"] == {"in": 3, "packed": 3, "rejected": {}}
    assert report.accounting["tokens"]["packed"] == len(IDS)
    assert report.accounting["padding_tokens"] == (3 if row is TORCHTUNE else 0)


def test_trl_s_own_packing_comes_back_example_by_example(tmp_path: Path) -> None:
    """What TRL's `pack_dataset` packs is taken apart again into exactly what it was given."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": [ids for ids, _ in EXAMPLES], "labels": [labels for _, labels in EXAMPLES]}
    packed = trl.pack_dataset(datasets.Dataset.from_dict(columns), seq_length=6, strategy="bfd")
    packed.save_to_disk(tmp_path / "trl")
    report = import_packed([str(tmp_path / "trl")], out=tmp_path / "out", capacity=6)
    assert report.layouts == {"trl": len(packed)}
    assert len(shards.open_shards(tmp_path / "out")) == len(packed)
    assert sorted(examples(tmp_path / "out")) == sorted(EXAMPLES)


def test_trl_without_labels_is_trained_where_its_masks_say(tmp_path: Path) -> None:
    """Without labels TRL trains every token that no mask leaves out; positions serve as boundaries."""
    masks = {"completion_mask": [0, 0, 1, 1, 0, 1, 1, 0, 1], "assistant_masks": [1, 1, 1, 1, 1, 1, 1, 1, 1]}
    bare = {"input_ids": IDS, "position_ids": [0, 1, 2, 3, 0, 1, 2, 0, 1]}
    import_packed([save(tmp_path / "a.parquet", {**bare, **masks})], out=tmp_path / "masked")
    assert examples(tmp_path / "masked") == EXAMPLES
    report = import_packed([save(tmp_path / "b.parquet", bare)], out=tmp_path / "all")
    assert [labels[1:] for _, labels in examples(tmp_path / "all")] == [ids[1:] for ids, _ in EXAMPLES]
    assert report.accounting["normalised_rows"] == {"first_label_ignored": 3}


def test_an_import_counts_as_pack_does(tmp_path: Path) -> None:
    """Notes on lines of the input, and changed examples, stand in the accounts under the names of `pack`."""
    trained_first = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": [3]}
    untrained = {"input_ids": [5, 6], "labels": [5, IGNORED], "seq_lengths": [2]}
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + "\r\n".join(map(json.dumps, (trained_first, untrained))).encode())
    accounting = import_packed([str(path)], out=tmp_path / "out").accounting
    assert accounting["input_notes"] == {"blank_lines": 1, "byte_order_mark": 1, "crlf_lines": 1}
    assert accounting["normalised_rows"] == {"first_label_ignored": 1}  # the other example is not packed
    row = save(tmp_path / "b.parquet", TORCHTUNE)
    accounting = import_packed([row], out=tmp_path / "tuned").accounting
    assert accounting["normalised_rows"] == {"padding_left_out": 1}
    assert accounting["input_notes"] == {}


@pytest.mark.parametrize("name", MASKS)
def test_every_spelling_of_a_mask_is_read(name: str, tmp_path: Path) -> None:
    """Without labels each known mask says what is trained; beside labels that agree it changes nothing."""
    mask = [int(label != IGNORED) for label in LABELS]
    bare = {"input_ids": IDS, "seq_lengths": [4, 3, 2], name: mask, "attention_mask": [1] * len(IDS)}
    import_packed([save(tmp_path / "a.parquet", bare)], out=tmp_path / "mask")
    assert examples(tmp_path / "mask") == EXAMPLES
    import_packed([save(tmp_path / "b.parquet", {**bare, "labels": LABELS})], out=tmp_path / "both")
    assert examples(tmp_path / "both") == EXAMPLES


def test_what_a_mask_hides_may_be_the_padding(tmp_path: Path) -> None:
    """An attention mask of zeros where torchtune filled up is what the layout says already."""
    row = {**TORCHTUNE, "attention_mask": [1] * 9 + [0] * 3}
    import_packed([save(tmp_path / "a.parquet", row)], out=tmp_path / "out")
    assert examples(tmp_path / "out") == EXAMPLES


def test_a_megatron_mask_belongs_to_the_next_token_and_not_beyond_its_sequence(tmp_path: Path) -> None:
    """A loss mask at an example's last token, which Megatron's collator cuts off, trains nothing here."""
    row = {**MEGATRON, "loss_mask": [0, 1, 1, 1, 1, 1, 1, 1, 1]}
    report = import_packed([save(tmp_path / "a.idx.parquet", row)], out=tmp_path / "out")
    assert examples(tmp_path / "out") == EXAMPLES
    assert report.accounting["normalised_rows"] == {}  # what Megatron itself cuts off is no loss to report


def test_torchtune_s_split_example_is_kept_without_its_headless_rest(tmp_path: Path) -> None:
    """Where torchtune cut an example in two, the prefix stays and the rest is rejected."""
    first = {"tokens": [5, 6, 7], "labels": [IGNORED, 6, 7], "seq_lens": [3], "input_pos": [0, 1, 2]}
    second = {
        "tokens": [8, 9, 12, 13, 0, 0],
        "labels": [8, 9, IGNORED, 13, IGNORED, IGNORED],
        "seq_lens": [2, 2, 2],
        "input_pos": [3, 4, 0, 1, 2, 3],
    }
    report = import_packed([save(tmp_path / "a.parquet", first, second)], out=tmp_path / "out")
    assert examples(tmp_path / "out") == [([5, 6, 7], [IGNORED, 6, 7]), ([12, 13], [IGNORED, 13])]
    assert report.accounting["rows"]["rejected"] == {"bad_tokens": 1}
    (reject,) = shards.open_shards(tmp_path / "out").rejects()
    assert (reject["line"], reject["tokens"]) == (2, 2)
    assert "middle of an example" in reject["detail"]


def test_untrained_examples_are_rejected_and_every_token_is_accounted_for(tmp_path: Path) -> None:
    """An example without a trained token is not packed; tokens in are tokens packed and rejected."""
    row = {**TRL, "labels": [*LABELS[:4], IGNORED, IGNORED, IGNORED, *LABELS[7:]]}
    report = import_packed([save(tmp_path / "a.parquet", row, TRL)], out=tmp_path / "out")
    tokens = report.accounting["tokens"]
    assert report.accounting["rows"]["rejected"] == {"nothing_to_train": 1}
    assert tokens["in"] == tokens["packed"] + sum(tokens["rejected"].values()) == 2 * len(IDS)
    assert stats(tmp_path / "out")["accounting"] == json.loads(json.dumps(report.accounting))


def test_origins_name_file_and_row(tmp_path: Path) -> None:
    """examples.parquet says for each example which row of which file it came from."""
    paths = [save(tmp_path / "a.parquet", TRL), save(tmp_path / "b.parquet", MEGATRON, MEGATRON)]
    import_packed(paths, out=tmp_path / "out")
    rows = shards.open_shards(tmp_path / "out").examples().to_pylist()
    found = [(row["example"], row["input"], row["line"]) for row in rows]
    places = [("a.parquet", 1)] * 3 + [("b.parquet", 1)] * 3 + [("b.parquet", 2)] * 3
    assert found == [(number, *place) for number, place in enumerate(places)]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two imports of the same file have the same manifest, so the same bytes."""
    path = save(tmp_path / "a.parquet", TORCHTUNE)
    manifests = []
    for name in ("one", "two"):
        import_packed([path], out=tmp_path / name)
        manifests.append((tmp_path / name / "manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


BROKEN = {
    "sum": ({**TRL, "seq_lengths": [4, 3, 3]}, "sum to 10, but there are 9 tokens"),
    "empty sequence": ({**TRL, "seq_lengths": [4, 3, 2, 0]}, r"seq_lengths\[3\] is 0"),
    "no boundaries": ({"input_ids": IDS, "labels": LABELS}, "no packed layout"),
    "shifted labels": ({**TRL, "labels": [*LABELS[1:], IGNORED]}, "shifted already"),
    "strange label": ({**TRL, "labels": [IGNORED, 99, *LABELS[2:]]}, "label 99 at token 1 is neither"),
    "too few labels": ({**TRL, "labels": LABELS[1:]}, "8 labels, but 9 tokens"),
    "negative id": ({**TRL, "input_ids": [-1, *IDS[1:]]}, "no token numbers"),
    "fractions": ({**TRL, "input_ids": [0.5, *map(float, IDS[1:])]}, "list of whole numbers"),
    "positions": ({"input_ids": IDS, "position_ids": [0, 1, 3, 4, 0, 1, 2, 0, 1]}, "must run 0, 1, 2"),
    "start not 0": ({**MEGATRON, "seq_start_id": [1, 4, 7]}, "begin with 0"),
    "start past the end": ({**MEGATRON, "seq_start_id": [0, 4, 11]}, "must be at least 1"),
    "mask of 2": ({**MEGATRON, "loss_mask": [2, *MEGATRON["loss_mask"][1:]]}, "0 or 1 for each"),
    "one long example": ({**TORCHTUNE, "input_pos": list(range(12))}, "does not restart at sequence 1"),
    "padding": ({**TRL, "attention_mask": [1] * 8 + [0]}, "attention_mask is 0 at token 8: take the"),
    "padding in an example": (
        {**TORCHTUNE, "attention_mask": [1] * 8 + [0] * 4},
        "attention_mask is 0 at token 8",
    ),
    **{
        f"labels and {name}": (
            {**TRL, name: [0, 0, 1, 0, 0, 1, 1, 0, 1]},
            f"{name} and labels train different tokens, first token 3",
        )
        for name in MASKS
    },
    "labels and loss_mask of Megatron": (
        {**MEGATRON, "labels": IDS},
        "labels and loss_mask train different tokens, first token 1",
    ),
    "lengths and positions": (
        {**TRL, "position_ids": [0, 1, 2, 3, 4, 5, 6, 0, 1]},
        r"position_ids belies the sequences' lengths, \[4, 3, 2\]",
    ),
    "lengths and starts": ({**MEGATRON, "seq_lengths": [3, 4, 2]}, "seq_lengths belies"),
    "weights": ({**TRL, "loss_weights": [0.5] * 9}, "the row has loss_weights"),
    "not to train": ({**TRL, "train": False}, "the row has train False"),
    "trained padding": ({**TORCHTUNE, "labels": [*LABELS, 0, 0, 0]}, "which is no padding"),
}


@pytest.mark.parametrize(("row", "message"), BROKEN.values(), ids=BROKEN)
def test_boundaries_and_labels_that_can_t_be_stop_the_import(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A row with boundaries or labels that can't be is an error with file and row; nothing is left."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (TRL, row)))
    with pytest.raises(InputError, match=rf"a\.jsonl, row 2: .*{message}"):
        import_packed([str(path)], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_long_for_the_capacity_is_said(tmp_path: Path) -> None:
    """A row longer than the capacity asked for is an error with both numbers."""
    with pytest.raises(OptionError, match="9 tokens do not fit the capacity of 8"):
        import_packed([save(tmp_path / "a.parquet", TRL)], out=tmp_path / "out", capacity=8)


def test_nothing_to_train_at_all_is_said(tmp_path: Path) -> None:
    """Data in which no example is trained makes no shard set."""
    row = {**TRL, "labels": [IGNORED] * len(IDS)}
    with pytest.raises(InputError, match="no example that can be trained in 1 rows"):
        import_packed([save(tmp_path / "a.parquet", row)], out=tmp_path / "out")


def test_dtypes_are_ours(tmp_path: Path) -> None:
    """Whatever integers the input has, a buffer has int32 ids and labels."""
    import_packed([save(tmp_path / "a.parquet", TRL)], out=tmp_path / "out")
    buffer = shards.open_shards(tmp_path / "out")[0]
    assert buffer.input_ids.dtype == buffer.labels.dtype == np.int32
