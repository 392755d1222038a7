"""Others' packed data into a shard set: their boundaries checked, their masks translated, their bins kept.

    TRL               input_ids, seq_lengths (or position_ids), and labels or completion and assistant masks
    torchtune         tokens, labels, seq_lens, input_pos: filled up with padding
    Megatron-Bridge   input_ids, loss_mask, seq_start_id: its mask belongs to the next token

The layout is known by the columns. A row whose boundaries can't be stops the import, since its neighbours
were made by the same hand. An example that can't be trained goes to rejects.jsonl, and padding is left out.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing.boundaries import (
    Lengths,
    check_lengths,
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    position_ids,
    starts,
)
from packing.buffer import build_buffer
from packing.errors import InputError, OptionError, Reason, RowRejected
from packing.example import IGNORE_INDEX, Example, Note, make_example
from packing.formats import MASKS
from packing.messages import check_controls
from packing.shards import ShardWriter, most_first
from packing.sources import Source, SourceOptions, open_sources

ROWS_PER_CHUNK = 64
"""Rows read at once: half a million tokens at the usual capacity."""


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import did.

    Attributes:
        out: The shard set.
        capacity: Most tokens in a buffer.
        layouts: How many rows were of which layout.
        accounting: As in the manifest; its rows are examples, since that is what a packed row is made of.
        seconds: Wall time.
    """

    out: str
    capacity: int
    layouts: Mapping[str, int]
    accounting: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A packed row in our terms, before the law of the first label.

    Attributes:
        ids: int32[T].
        trained: bool[T], whether a token is to be predicted.
        lengths: int64[N], their sum is T.
        padding: Whether the last sequence is padding.
        headless: Whether the first sequence begins in the middle of an example.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    padding: bool = False
    headless: bool = False


def import_packed(
    inputs: Sequence[str],
    *,
    out: str | Path,
    capacity: int | None = None,
    sources: SourceOptions | None = None,
    force: bool = False,
) -> ImportReport:
    """Makes a shard set of data that was packed by TRL, torchtune or Megatron-Bridge.

    Args:
        inputs: Files, folders, globs, `save_to_disk` folders or hub names.
        out: The folder to make; it appears when it is whole.
        capacity: Most tokens in a buffer; None takes the longest row's, which reads the inputs twice.
        sources: Split, configuration and revision of a data set; None for the defaults.
        force: Replace a shard set that is there.

    Raises:
        InputError: an input that can't be read, is of no known layout, or whose boundaries or labels can't
            be: names file and row.
        OptionError: a row longer than the capacity.
        OutputError: `out` exists, or can't be written.
    """
    began = time.perf_counter()
    opened = open_sources(inputs, options=sources or SourceOptions())
    if capacity is None:
        capacity = max((row.ids.size for _, _, _, row in _rows(opened, notes=Counter())), default=1)

    def fingerprint() -> dict[str, Any]:
        return {"imported": [dict(source.identity()) for source in opened]}

    with ShardWriter(out, capacity=capacity, fingerprint=fingerprint, force=force) as writer:
        books = _Books(writer=writer, capacity=capacity)
        for place, layout, (line, record), row in _rows(opened, notes=books.input_notes):
            books.add(row, source=place, line=line, record=record)
            books.layouts[layout] += 1
        if not books.examples:
            raise InputError(f"{', '.join(inputs)}: no example that can be trained in {books.rows:,} rows")
        books.flush()
        seconds = time.perf_counter() - began
        run = {"inputs": list(inputs), "seconds": seconds, "layouts": books.layouts}
        writer.finish(books.as_json(), run=run)
    return ImportReport(
        out=str(out),
        capacity=capacity,
        layouts=dict(books.layouts),
        accounting=books.as_json(),
        seconds=seconds,
    )


def _rows(
    sources: Sequence[Source], *, notes: Counter[Note]
) -> Iterator[tuple[Source, str, tuple[int, int], _Row]]:
    """Source, layout, (line, record) and row of every record; counts what was passed over in `notes`."""
    for source in sources:
        for chunk in source.chunks(rows=ROWS_PER_CHUNK):
            notes.update(chunk.notes)
            for line, index, record in chunk.records():
                try:
                    if isinstance(record, RowRejected):
                        raise ValueError(record.detail)
                    layout, read = _layout(record)
                    row = read(record)
                    _check_rest(record, row, layout=layout)
                except (ValueError, RowRejected) as error:
                    detail = error.detail if isinstance(error, RowRejected) else error
                    raise InputError(f"{source.place}, row {line}: {detail}") from None
                yield source, layout, (line, index), row


@dataclass(kw_only=True)
class _Books:
    """Writes rows and keeps count of every example and token."""

    writer: ShardWriter
    capacity: int
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    supervised: int = 0
    padding_tokens: int = 0
    layouts: Counter[str] = field(default_factory=Counter)
    notes: Counter[Note] = field(default_factory=Counter)
    input_notes: Counter[Note] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    tokens_rejected: Counter[str] = field(default_factory=Counter)
    origins: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: _Row, *, source: Source, line: int, record: int) -> None:
        self.rows += 1
        if row.ids.size > self.capacity:
            raise OptionError(
                f"{source.place}, row {line}: {row.ids.size} tokens do not fit the capacity of "
                f"{self.capacity}: raise --capacity or leave it out"
            )
        where = {"input": source.name, "line": line, "record": record}
        kept = []
        for number, (start, length) in enumerate(
            zip(starts(row.lengths).tolist(), row.lengths.tolist(), strict=True)
        ):
            if row.padding and number == row.lengths.size - 1:
                self.notes[Note.PADDING_LEFT_OUT] += 1
                self.padding_tokens += length
                continue
            tokens = slice(start, start + length)
            example = make_example(row.ids[tokens], trained=row.trained[tokens])
            if row.headless and number == 0:
                self._reject(example, Reason.BAD_TOKENS, "begins in the middle of an example", **where)
            elif example.supervised == 0:
                detail = f"none of the {length} tokens is trained"
                self._reject(example, Reason.NOTHING_TO_TRAIN, detail, **where)
            else:
                kept.append(example)
                self.notes[Note.FIRST_LABEL_IGNORED] += bool(row.trained[start])
                self.origins.append(
                    {**where, "example": self.examples + len(kept) - 1, "source": source.number, "turn": -1}
                )
        if kept:
            numbers = range(self.examples, self.examples + len(kept))
            self.writer.write(build_buffer(kept, example_ids=numbers, capacity=self.capacity))
        self.examples += len(kept)
        self.tokens += sum(map(len, kept))
        self.supervised += sum(example.supervised for example in kept)
        if len(self.origins) >= 2**16:
            self.flush()

    def flush(self) -> None:
        """Writes the origins of the examples so far."""
        import pyarrow as pa

        columns = {
            "example": pa.int64(),
            "input": pa.dictionary(pa.int32(), pa.string()),
            "source": pa.int32(),
            "line": pa.int64(),
            "record": pa.int64(),
            "turn": pa.int32(),
        }
        if self.origins:
            self.writer.add_examples(pa.Table.from_pylist(self.origins, schema=pa.schema(columns)))
            self.origins = []

    def as_json(self) -> dict[str, Any]:
        """The accounting of the manifest."""
        return {
            "rows": {
                "in": self.examples + self.rejected.total(),
                "packed": self.examples,
                "rejected": most_first(self.rejected),
            },
            "examples": {"packed": self.examples},
            "tokens": {
                "in": self.tokens + self.tokens_rejected.total(),
                "packed": self.tokens,
                "rejected": most_first(self.tokens_rejected),
            },
            "padding_tokens": self.padding_tokens,
            "supervised_tokens": {"packed": self.supervised},
            "normalised_rows": most_first(+self.notes),
            "input_notes": most_first(self.input_notes),
        }

    def _reject(self, example: Example, reason: Reason, detail: str, **where: Any) -> None:
        self.rejected[reason.value] += 1
        self.tokens_rejected[reason.value] += len(example)
        self.writer.add_rejects([{**where, "reason": reason.value, "detail": detail, "tokens": len(example)}])


# Layouts


def _layout(record: Mapping[str, Any]) -> tuple[str, Callable[[Mapping[str, Any]], _Row]]:
    columns = {name for name, value in record.items() if value is not None}
    if {"tokens", "labels", "seq_lens", "input_pos"} <= columns:
        return "torchtune", _read_torchtune
    if {"input_ids", "loss_mask", "seq_start_id"} <= columns:
        return "megatron-bridge", _read_megatron
    if "input_ids" in columns and columns & {"seq_lengths", "position_ids"}:
        return "trl", _read_trl
    raise ValueError(
        f"the columns {sorted(columns)} are of no packed layout known here: seq_lengths (TRL), seq_lens and "
        "input_pos (torchtune) or seq_start_id (Megatron-Bridge) must say where each example begins; data "
        "packed without them, as by TRL's \"wrapped\", can't be taken apart again"
    )


def _read_trl(record: Mapping[str, Any]) -> _Row:
    ids = _ids(record, "input_ids")
    if record.get("seq_lengths") is not None:
        lengths = check_lengths(_whole(record, "seq_lengths"))
    else:
        lengths = lengths_from_position_ids(_whole(record, "position_ids"))
    _check_sum(lengths, ids)
    if record.get("labels") is not None:
        return _Row(ids=ids, trained=_trained(record, ids), lengths=lengths)
    trained = _masked(record, MASKS, ids)  # TRL trains every token where no mask says otherwise
    return _Row(ids=ids, trained=trained, lengths=lengths)


def _read_torchtune(record: Mapping[str, Any]) -> _Row:
    """Positions restart with each example and go on into the padding: so the padding is found."""
    ids = _ids(record, "tokens")
    lengths = check_lengths(_whole(record, "seq_lens"))
    _check_sum(lengths, ids)
    trained = _trained(record, ids)
    positions = _whole(record, "input_pos")
    if positions.size != ids.size:
        raise ValueError(f"{positions.size} in input_pos, but {ids.size} tokens")
    first = positions[starts(lengths)]
    padding = bool(lengths.size > 1 and first[-1] != 0)
    for number, (start, length) in enumerate(zip(starts(lengths), lengths, strict=True)):
        if padding and number == lengths.size - 1:
            if trained[start:].any():
                raise ValueError("input_pos does not restart at the last sequence, which is no padding")
        elif (number and first[number]) or not _counts_up(positions[start : start + length]):
            raise ValueError(f"input_pos does not restart at sequence {number} of seq_lens, or has a gap")
    return _Row(ids=ids, trained=trained, lengths=lengths, padding=padding, headless=bool(first[0]))


def _read_megatron(record: Mapping[str, Any]) -> _Row:
    """The mask at a token says whether the next one is trained; the last one's is cut off in its collator."""
    ids = _ids(record, "input_ids")
    lengths = lengths_from_cu_seqlens([*_whole(record, "seq_start_id").tolist(), ids.size])
    mask = _mask(record, "loss_mask", ids)
    trained = np.concatenate([np.zeros(1, np.bool_), mask[:-1]])
    trained[starts(lengths)] = False
    return _Row(ids=ids, trained=trained, lengths=lengths)


def _check_rest(record: Mapping[str, Any], row: _Row, *, layout: str) -> None:
    """Columns beside those that the layout is read from must say the same, padding and first labels apart.

    Raises:
        ValueError: they tell of other boundaries, other trained tokens or padding within an example.
        RowRejected: a weight, or what else says that something is not trained as usual.
    """
    check_controls(record, where="the row", but=MASKS)
    boundaries = {
        "position_ids": position_ids(row.lengths),
        "seq_lengths": row.lengths,
        "seq_lens": row.lengths,
        "seq_start_id": starts(row.lengths),
    }
    for name, expected in boundaries.items():
        if record.get(name) is not None and not np.array_equal(_whole(record, name), expected):
            raise ValueError(
                f"{name} belies the sequences' lengths, {row.lengths.tolist()[:8]} …: which hold?"
            )
    inside = np.ones(row.ids.size, np.bool_)
    if row.padding:
        inside[starts(row.lengths)[-1] :] = False
    if record.get("attention_mask") is not None:
        padded = np.flatnonzero(inside & ~_mask(record, "attention_mask", row.ids))
        if padded.size:
            raise ValueError(f"attention_mask is 0 at token {padded[0]}: take the padding off")
    inside[starts(row.lengths)] = False
    names = [name for name in MASKS if layout != "megatron-bridge" or name != "loss_mask"]
    names = [name for name in names if record.get(name) is not None]
    said = {" and ".join(names): _masked(record, names, row.ids)} if names else {}
    if record.get("labels") is not None:
        said["labels"] = _trained(record, row.ids)
    for name, trained in said.items():
        if (wrong := np.flatnonzero(inside & (trained != row.trained))).size:
            rest = "labels" if name != "labels" and "labels" in said else "loss_mask"
            raise ValueError(f"{name} and {rest} train different tokens, first token {wrong[0]}")


def _whole(record: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    array = np.asarray(record[name])
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iub":
        raise ValueError(f"{name} must be a list of whole numbers, not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _ids(record: Mapping[str, Any], name: str) -> NDArray[np.int32]:
    ids = _whole(record, name)
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name} has {ids.min()} … {ids.max()}, which are no token numbers")
    return ids.astype(np.int32)


def _mask(record: Mapping[str, Any], name: str, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    mask = _whole(record, name)
    if mask.size != ids.size or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{name} must have a 0 or 1 for each of the {ids.size} tokens")
    return mask.astype(np.bool_)


def _masked(record: Mapping[str, Any], names: Sequence[str], ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool[T]: what all the masks there are leave to train."""
    trained = np.ones(ids.size, np.bool_)
    for name in names:
        if record.get(name) is not None:
            trained &= _mask(record, name, ids)
    return trained


def _trained(record: Mapping[str, Any], ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool[T] from labels that stand at their own token."""
    labels = _whole(record, "labels")
    if labels.size != ids.size:
        raise ValueError(f"{labels.size} labels, but {ids.size} tokens")
    trained: NDArray[np.bool_] = labels != IGNORE_INDEX
    if (wrong := np.flatnonzero(trained & (labels != ids))).size:
        at = int(wrong[0])
        shifted = bool(np.array_equal(labels[:-1][trained[:-1]], ids[1:][trained[:-1]]))
        hint = ": the labels are shifted already; shift them back by one" if shifted else ""
        raise ValueError(f"label {labels[at]} at token {at} is neither its id {ids[at]} nor -100{hint}")
    return trained


def _check_sum(lengths: Lengths, ids: NDArray[np.int32]) -> None:
    if (total := int(np.sum(lengths))) != ids.size:
        raise ValueError(f"its sequences' lengths sum to {total}, but there are {ids.size} tokens")


def _counts_up(positions: NDArray[np.int64]) -> bool:
    return all(after == before + 1 for before, after in itertools.pairwise(positions.tolist()))
