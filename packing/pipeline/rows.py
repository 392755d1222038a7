"""What a worker does: a chunk of raw rows becomes arrays, and every row is accounted for.

    Chunk -> parse -> normalise -> (render, checks, tokenize, mask: encode) -> fit -> EncodedChunk

Nothing here knows of other chunks, so the result is the same in any process and in any order.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing.boundaries import starts
from packing.chat import ChatEncoder
from packing.errors import OptionError, RowRejected
from packing.example import IGNORE_INDEX, Conversation, Example, Note, fit
from packing.formats import FormatOptions, normalise
from packing.pipeline.clock import Clock
from packing.pipeline.options import PackOptions
from packing.pipeline.store import EXAMPLE, TokenFile, to_stored
from packing.sources import Chunk

DETAIL_CHARACTERS = 300
"""A detail is there to act on, not to read the row again."""


class Place(NamedTuple):
    """Where a row comes from."""

    input: int
    line: int
    record: int


class Reject(NamedTuple):
    """A row that can't be used or, with `turn` at least 0, one turn of a row that is packed without it."""

    place: Place
    turn: int
    reason: str
    detail: str
    tokens: int  # 0 where the row had none yet


@dataclass(kw_only=True)
class EncodedChunk:
    """A chunk's examples as two arrays: Python objects for each token would cost 10 times as much.

    Attributes:
        tokens: int32[T], `to_stored` of the examples, one after the other.
        examples: EXAMPLE[n], in input order.
        rejects: In input order.
        rows: Records in the chunk, good and bad.
        rows_held_out: Those with examples in the eval part.
        cut: Tokens cut off by overflow "truncate".
        notes: For each normalisation, the number of packed rows to which it was applied.
        input_notes: The chunk's own notes, which count lines of the input.
        encoders: How many examples each encoder saw.
        seconds: Time spent in each stage.
    """

    tokens: NDArray[np.int32]
    examples: NDArray[np.void]
    rejects: list[Reject]
    rows: int
    rows_held_out: int
    cut: int
    notes: Counter[Note]
    input_notes: Mapping[Note, int]
    encoders: Mapping[str, int]
    seconds: Mapping[str, float]


def conversation_of(
    record: Mapping[str, Any] | RowRejected, *, options: FormatOptions
) -> Conversation | RowRejected:
    """A row as a conversation, or why it is none."""
    if isinstance(record, RowRejected):
        return record
    try:
        return normalise(record, options=options)
    except RowRejected as error:
        return error


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Raw rows to token arrays; handed once to each worker.

    Attributes:
        inputs: The sources' names, for errors.
    """

    encoder: ChatEncoder
    formats: FormatOptions
    inputs: Sequence[str]
    options: PackOptions

    def __call__(self, chunk: Chunk, *, most: int | None = None) -> EncodedChunk:
        """Parses, normalises, encodes and fits each row of the chunk, or the first `most` rows.

        Raises:
            OptionError: an example is too long and overflow is "error".
        """
        clock = Clock()
        records = list(itertools.islice(chunk.records(), most))
        clock.lap("parse")
        conversations = [conversation_of(record, options=self.formats) for _, _, record in records]
        clock.lap("normalise")
        encoded = self._encode(conversations, lap=clock.lap)
        clock.lap("encode")
        rows = _Rows()
        fits = iter(self._fits(encoded))
        for (line, record, _), conversation, outcome in zip(records, conversations, encoded, strict=True):
            place = Place(chunk.source, line, record)
            if isinstance(outcome, RowRejected) or isinstance(conversation, RowRejected):
                assert isinstance(outcome, RowRejected)
                rows.reject(place, outcome, tokens=0)
            else:
                self._fit(place, conversation, outcome, fits=fits, rows=rows)
        clock.lap("fit")
        return rows.finish(
            count=len(records),
            input_notes=chunk.notes,
            encoders=self.encoder.take_counts(),
            seconds=clock.seconds,
        )

    def _encode(
        self, conversations: Sequence[Conversation | RowRejected], *, lap: Callable[[str], None]
    ) -> list[list[Example] | RowRejected]:
        """The conversations' examples in one batch; rejections stay where they are."""
        good = [item for item in conversations if isinstance(item, Conversation)]
        encoded = iter(self.encoder.encode_many(good, lap=lap))
        return [next(encoded) if isinstance(item, Conversation) else item for item in conversations]

    def _fits(self, encoded: Sequence[Sequence[Example] | RowRejected]) -> list[bool]:
        """Whether each example enters a bin as it is: asked of all at once, at a fifth of the time."""
        examples = [example for outcome in encoded if isinstance(outcome, list) for example in outcome]
        lengths, supervised = _counts(examples)
        fits: list[bool] = ((lengths <= self.options.capacity) & (supervised > 0)).tolist()
        return fits

    def _fit(
        self,
        place: Place,
        conversation: Conversation,
        examples: Sequence[Example],
        *,
        fits: Iterator[bool],
        rows: _Rows,
    ) -> None:
        """Adds a row's examples as they enter the bins, and those that can't as rejects."""
        fitting: list[Example] = []
        unfit: list[tuple[Example, RowRejected]] = []
        for example in examples:
            if next(fits):
                fitting.append(example)
                continue
            try:
                prefix = fit(example, capacity=self.options.capacity, overflow=self.options.overflow)
                fitting.append(prefix)
                rows.cut += len(example) - len(prefix)
            except RowRejected as error:
                unfit.append((example, error))
            except OptionError as error:
                raise OptionError(f"{self.inputs[place.input]}:{place.line}: {error}") from None
        if not fitting:
            rows.reject(place, unfit[0][1], tokens=sum(map(len, examples)))
            return
        for example, why in unfit:
            rows.reject(place, why, tokens=len(example), turn=example.turn)
        rows.accept(place, fitting, held_out=self._held_out(examples))
        if notes := set(conversation.notes).union(*[example.notes for example in fitting]):
            rows.notes.update(notes)

    def _held_out(self, examples: Sequence[Example]) -> bool:
        """Whether a conversation is for the eval part: by its tokens, so its duplicates go with it."""
        if not self.options.eval_fraction:
            return False
        digest = hashlib.blake2b(str(self.options.seed).encode(), digest_size=8)
        for example in examples:
            digest.update(example.input_ids.tobytes())
        return int.from_bytes(digest.digest(), "big") < self.options.eval_fraction * 2**64


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """A `RowEncoder` in a run: tokens go to their file here, and not through the parent process."""

    encode: RowEncoder
    file: TokenFile

    def __call__(self, chunk: Chunk) -> tuple[EncodedChunk, int]:
        """The encoded chunk without its tokens, and how many stand in the file before them.

        Raises:
            OptionError: as `RowEncoder`.
            OutputError: the disk is full.
        """
        encoded = self.encode(chunk)
        start = self.file.write(encoded.tokens)
        return replace(encoded, tokens=np.empty(0, np.int32)), start


def _counts(examples: Sequence[Example]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64[n], int64[n]: tokens and trained tokens of each example."""
    lengths = np.array([example.input_ids.size for example in examples], np.int64)
    if not examples:
        return lengths, lengths
    trained = np.concatenate([example.labels for example in examples]) != IGNORE_INDEX
    return lengths, np.add.reduceat(trained, starts(lengths), dtype=np.int64)


@dataclass
class _Rows:
    """The rows of a chunk, as they are accepted and rejected."""

    examples: list[Example] = field(default_factory=list)
    places: list[tuple[int, ...]] = field(default_factory=list)  # (*Place, held out) of each example
    rejects: list[Reject] = field(default_factory=list)
    held_out: int = 0
    cut: int = 0
    notes: Counter[Note] = field(default_factory=Counter)

    def accept(self, place: Place, examples: Sequence[Example], *, held_out: bool) -> None:
        self.held_out += held_out
        self.examples += examples
        self.places += [(*place, held_out)] * len(examples)

    def reject(self, place: Place, error: RowRejected, *, tokens: int, turn: int = -1) -> None:
        # A detail can quote the row: keep it to one line of valid UTF-8.
        detail = " ".join(error.detail.encode("utf-8", "replace").decode().split())[:DETAIL_CHARACTERS]
        self.rejects.append(Reject(place, turn, error.reason.value, detail, tokens))

    def finish(
        self,
        *,
        count: int,
        input_notes: Mapping[Note, int],
        encoders: Mapping[str, int],
        seconds: Mapping[str, float],
    ) -> EncodedChunk:
        nothing = np.empty(0, np.int32)
        return EncodedChunk(
            tokens=to_stored(
                np.concatenate([nothing, *(example.input_ids for example in self.examples)]),
                np.concatenate([nothing, *(example.labels for example in self.examples)]),
            ),
            examples=self._table(),
            rejects=self.rejects,
            rows=count,
            rows_held_out=self.held_out,
            cut=self.cut,
            notes=self.notes,
            input_notes=input_notes,
            encoders=encoders,
            seconds=seconds,
        )

    def _table(self) -> NDArray[np.void]:
        table = np.empty(len(self.examples), EXAMPLE)
        places = np.array(self.places, np.int64).reshape(-1, len(Place._fields) + 1)
        for name, column in zip((*Place._fields, "held_out"), places.T, strict=True):
            table[name] = column
        table["turn"] = [example.turn for example in self.examples]
        table["length"], table["supervised"] = _counts(self.examples)
        return table
