"""The story of `padfree pack`, from sources to a shard set, to be read from top to bottom."""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from packing.chat import ChatEncoder, ChatOptions, EncodersDiffer, load_tokenizer
from packing.errors import InputError, OptionError, RowRejected, TooManyRejects
from packing.example import Conversation, Example
from packing.formats import FormatOptions
from packing.pipeline.accounting import Accounting
from packing.pipeline.clock import Clock
from packing.pipeline.options import PackOptions, check_workers
from packing.pipeline.pool import few_collections, map_in_order
from packing.pipeline.rows import KeptRows, Reject, RowEncoder, conversation_of
from packing.pipeline.store import EXAMPLE, ExampleStore, StoredPart, from_stored
from packing.plan import Plan, lower_bound, plan_bins
from packing.shards import PartWriter, ShardWriter
from packing.sources import Source, SourceOptions, open_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ROWS_PER_CHUNK = 256
"""Enough for one `encode_batch` to pay, and few enough for the workers to end together."""

EVAL = "eval"
"""The part of the shard set that holds the conversations kept from training."""

FAST_ENCODER_BYTES = 4 << 20
"""Of inputs from which on the fast encoder is worth the half second that it takes to build."""

BUFFERS_PER_REPORT = 64
"""Buffers written between two calls of `on_progress`."""


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """What one shard set holds.

    Attributes:
        lower_bound: The fewest buffers that any plan could need.
        fill_rate: Real tokens over buffers times capacity.
    """

    buffers: int
    examples: int
    tokens: int
    supervised_tokens: int
    lower_bound: int
    fill_rate: float


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What a run did.

    Attributes:
        out: The shard set.
        main: What it holds.
        eval: What its eval part holds, if one was asked for.
        accounting: Every row and token, as in the manifest.
        encoder: What made the ids, why, and how many examples each encoder saw; the ids do not depend on it.
        seconds: Wall time of each step, and in `total`; `read` is a part of `rows`, and what precedes
            `finish` stands in run.json.
        worker_seconds: What the step `rows` was spent on in the workers, summed over them.
    """

    out: str
    capacity: int
    workers: int
    main: PartReport
    eval: PartReport | None
    accounting: Mapping[str, Any]
    encoder: Mapping[str, Any]
    seconds: Mapping[str, float]
    worker_seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a run over the first rows of each input would do.

    Attributes:
        rows: How many were read of each input, at most.
        main: Planned and not written.
        eval: What would be held out, if that was asked for.
        rejects: The rejected rows, as they would stand in rejects.jsonl.
        refusal: Why these rows would not be packed: too many rejects, no rows, or, where the inputs have no
            others, one of two parts without any; "" if they would.
        example: The first example that would be packed, or None.
    """

    rows: int
    capacity: int
    main: PartReport
    eval: PartReport | None
    accounting: Mapping[str, Any]
    rejects: Sequence[Mapping[str, Any]]
    refusal: str
    example: Example | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    stage: Literal["reading", "writing"]
    done: int  # rows read, or buffers written
    total: int | None = None  # None while nobody knows
    rejected: int = 0  # rows so far


OnProgress = Callable[[Progress], object]


Inputs = str | Path | Sequence[str | Path]
"""One input or several."""


def pack_dataset(
    inputs: Inputs,
    *,
    tokenizer: str | Path | PreTrainedTokenizerBase,
    out: str | Path,
    options: PackOptions | None = None,
    sources: SourceOptions | None = None,
    formats: FormatOptions | None = None,
    chat: ChatOptions | None = None,
    workers: int = 1,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> PackReport:
    """Packs chat data into a shard set: the same bytes for any number of workers, on every run.

    Args:
        inputs: One or several files, folders, globs, `save_to_disk` folders or hub names.
        tokenizer: A folder, a hub name or the tokenizer itself.
        out: The folder to make; it appears when it is whole.
        options: How examples are packed, and how many may be lost; None for the defaults.
        sources: Split, configuration and revision of a data set; None for the defaults.
        formats: How rows become conversations; None for the defaults.
        chat: How conversations become tokens; None for the defaults.
        workers: Processes that parse and encode; 1 means this one.
        force: Replace a shard set that is there.
        on_progress: Called after each chunk of rows and now and then while writing.

    Raises:
        OptionError: an option that can't be, or an example too long with overflow "error".
        InputError: an input or tokenizer that can't be read, or nothing to pack in it.
        TemplateError: training on this tokenizer's template would be wrong.
        TooManyRejects: more than the options' `max_rejects`.
        OutputError: `out` exists, or can't be written.
    """
    check_workers(workers)
    job = _Job(
        inputs=_names(inputs),
        tokenizer=_loaded(tokenizer),
        out=out,
        options=options or PackOptions(),
        sources=sources or SourceOptions(),
        formats=formats or FormatOptions(),
        workers=workers,
        force=force,
        on_progress=on_progress or (lambda _: None),
    )
    chat = chat or ChatOptions()
    with few_collections():
        try:
            return job.run(chat)
        except EncodersDiffer as error:
            if chat.encoder != "auto":
                raise
            log.warning("%s; packing again, with --encoder tokenizers", error)
            return job.run(replace(chat, encoder="tokenizers"), differed=str(error))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The arguments of `pack_dataset`, checked."""

    inputs: Sequence[str]
    tokenizer: Any
    out: str | Path
    options: PackOptions
    sources: SourceOptions
    formats: FormatOptions
    workers: int
    force: bool
    on_progress: OnProgress

    def run(self, chat: ChatOptions, *, differed: str | None = None) -> PackReport:
        """Packs; `differed` says why the run before this one was given up."""
        clock, options = Clock(), self.options
        sources = open_sources(self.inputs, options=self.sources)
        encode = RowEncoder(
            encoder=ChatEncoder(self.tokenizer, options=chat),
            formats=self.formats,
            inputs=[source.name for source in sources],
            options=options,
        )
        if chat.encoder == "auto" and sum(source.size for source in sources) >= FAST_ENCODER_BYTES:
            encode.encoder.prepare()  # before workers are forked, so that they share it
        clock.lap("open")
        fingerprint = functools.cache(lambda: _fingerprint(encode, sources=sources))
        accounting = Accounting()
        with (
            ShardWriter(
                self.out, capacity=options.capacity, fingerprint=fingerprint, force=self.force
            ) as writer,
            ExampleStore(Path(self.out).resolve().parent) as store,
        ):
            chunks = itertools.chain.from_iterable(source.chunks(rows=ROWS_PER_CHUNK) for source in sources)
            keep = KeptRows(encode=encode, file=store.tokens)
            for chunk, start in map_in_order(keep, clock.timed(chunks, stage="read"), workers=self.workers):
                accounting.add(chunk)
                store.append(chunk.examples, start=start)
                writer.add_rejects(_reject_line(reject, inputs=encode.inputs) for reject in chunk.rejects)
                self.on_progress(
                    Progress(stage="reading", done=accounting.rows, rejected=accounting.rejected)
                )
                if self.workers > 1 and accounting.rows == chunk.rows:
                    # The workers are busy now, and the import behind a first plan takes 0.4 s.
                    _planned(np.empty(0, np.int32), options=options)
            clock.lap("rows")
            _check_rows(accounting, max_rejects=options.max_rejects, inputs=encode.inputs)
            fingerprint()
            clock.lap("digest")
            write = functools.partial(self._write, inputs=encode.inputs, clock=clock)
            held_out = part = None
            if options.eval_fraction:
                _check_parts(accounting, eval_fraction=options.eval_fraction)
                part = writer.part(EVAL)
                held_out = write(store.part(held_out=True), writer=part)
            main = write(store.part(held_out=False), writer=writer)
            encoder = {**encode.encoder.encoder_report(), "examples": dict(accounting.encoders)}
            report = PackReport(
                out=str(self.out),
                capacity=options.capacity,
                workers=self.workers,
                main=main,
                eval=held_out,
                accounting=accounting.as_json(),
                encoder=encoder if differed is None else {**encoder, "why": differed},
                seconds={**clock.seconds, "total": clock.total},
                worker_seconds=dict(accounting.seconds),
            )
            run = _run(report, inputs=self.inputs, tokenizer=self.tokenizer.name_or_path)
            if part:
                part.finish(accounting.eval_as_json(), run=run)
            writer.finish(report.accounting, run=run)
        clock.lap("finish")
        return replace(report, seconds={**clock.seconds, "total": clock.total})

    def _write(
        self, part: StoredPart, *, writer: PartWriter, inputs: Sequence[str], clock: Clock
    ) -> PartReport:
        """Plans on the lengths, then moves the tokens, once."""
        plan = _planned(part.examples["length"], options=self.options)
        clock.lap("plan")
        for number in range(len(plan)):
            if number % BUFFERS_PER_REPORT == 0:
                self.on_progress(Progress(stage="writing", done=number, total=len(plan)))
            writer.write(part.buffer(plan.bin(number)))
        writer.add_examples(part.origins(inputs))
        clock.lap("write")
        return _part_report(part.examples, buffers=len(plan), capacity=self.options.capacity)


def preview(
    inputs: Inputs,
    *,
    tokenizer: str | Path | PreTrainedTokenizerBase,
    rows: int,
    options: PackOptions | None = None,
    sources: SourceOptions | None = None,
    formats: FormatOptions | None = None,
    chat: ChatOptions | None = None,
) -> Preview:
    """What `pack_dataset` would do with the first rows of each input.

    Nothing is written, and no number of rejects stops it: `refusal` says what would.

    Args:
        rows: How many of each input.
        inputs, tokenizer, options, sources, formats, chat: As `pack_dataset`.

    Raises:
        OptionError, InputError, TemplateError: As `pack_dataset`.
    """
    options = options or PackOptions()
    if rows < 1:
        raise OptionError(f"a preview of {rows} rows can't be: choose at least 1")
    opened = open_sources(_names(inputs), options=sources or SourceOptions())
    encode = RowEncoder(
        encoder=ChatEncoder(_loaded(tokenizer), options=chat or ChatOptions()),
        formats=formats or FormatOptions(),
        inputs=[source.name for source in opened],
        options=options,
    )
    accounting = Accounting()
    rejects: list[Mapping[str, Any]] = []
    tables = [np.empty(0, EXAMPLE)]
    first, whole = None, True
    for source in opened:
        read = 0
        chunks = source.chunks(rows=rows)
        for raw in chunks:
            chunk = encode(raw, most=rows - read)
            accounting.add(chunk)
            rejects += [_reject_line(reject, inputs=encode.inputs) for reject in chunk.rejects]
            if first is None and chunk.examples.size:
                ids, labels = from_stored(chunk.tokens[: chunk.examples["length"][0]])
                first = Example(input_ids=ids, labels=labels, turn=int(chunk.examples["turn"][0]))
            tables.append(chunk.examples)
            read += chunk.rows
            if read >= rows:
                whole &= len(raw) == chunk.rows and next(chunks, None) is None  # else more would be held out
                break
    refusal = ""
    try:
        _check_rows(accounting, max_rejects=options.max_rejects, inputs=encode.inputs)
        if options.eval_fraction and whole:
            _check_parts(accounting, eval_fraction=options.eval_fraction)
    except (InputError, OptionError) as error:
        refusal = str(error)

    def part(*, held_out: bool) -> PartReport:
        examples = np.concatenate(tables)
        examples = examples[examples["held_out"] == held_out]
        plan = _planned(examples["length"], options=options)
        return _part_report(examples, buffers=len(plan), capacity=options.capacity)

    return Preview(
        rows=rows,
        main=part(held_out=False),
        eval=part(held_out=True) if options.eval_fraction else None,
        capacity=options.capacity,
        accounting=accounting.as_json(),
        rejects=rejects,
        refusal=refusal,
        example=first,
    )


def first_rows(inputs: Sequence[str], *, rows: int) -> list[Conversation | RowRejected]:
    """The conversations in the first rows of each input; for a row that is none, why.

    Raises:
        InputError: an input that can't be read, or no rows at all.
    """
    found: list[Conversation | RowRejected] = []
    for source in open_sources(inputs, options=SourceOptions()):
        records = itertools.chain.from_iterable(
            chunk.records() for chunk in source.chunks(rows=ROWS_PER_CHUNK)
        )
        found += [
            conversation_of(record, options=FormatOptions())
            for _, _, record in itertools.islice(records, rows)
        ]
    if not found:
        raise InputError(f"there are no rows in {', '.join(inputs)}")
    return found


def _names(inputs: Inputs) -> list[str]:
    return [str(name) for name in ([inputs] if isinstance(inputs, str | Path) else inputs)]


def _loaded(tokenizer: str | Path | PreTrainedTokenizerBase) -> Any:
    return load_tokenizer(str(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer


def _planned(lengths: NDArray[np.int32], *, options: PackOptions) -> Plan:
    return plan_bins(lengths, capacity=options.capacity, algorithm=options.algorithm, seed=options.seed)


def _fingerprint(encode: RowEncoder, *, sources: Sequence[Source]) -> dict[str, Any]:
    """What decides the bytes: each option of packing but two."""
    # The capacity stands beside this in the manifest; max_rejects decides whether there are bytes, not which.
    apart = ("capacity", "max_rejects")
    return {
        "inputs": [dict(source.identity()) for source in sources],
        "formats": asdict(encode.formats),
        "chat": dict(encode.encoder.fingerprint()),
        **{name: value for name, value in asdict(encode.options).items() if name not in apart},
    }


def _part_report(examples: NDArray[np.void], *, buffers: int, capacity: int) -> PartReport:
    tokens = int(examples["length"].sum(dtype=np.int64))
    return PartReport(
        buffers=buffers,
        examples=examples.size,
        tokens=tokens,
        supervised_tokens=int(examples["supervised"].sum(dtype=np.int64)),
        lower_bound=lower_bound(examples["length"], capacity=capacity),
        fill_rate=tokens / (buffers * capacity) if buffers else 0.0,
    )


def _run(report: PackReport, *, inputs: Sequence[str], tokenizer: str) -> dict[str, Any]:
    """What differs between equal runs, for run.json; the tokenizer's name is what `inspect` loads."""
    packages = ("padfree", "datasets", "numpy", "pyarrow", "tiktoken", "tokenizers", "transformers")
    return {
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "folder": os.getcwd(),
        "inputs": inputs,
        "tokenizer": os.path.abspath(tokenizer) if os.path.isdir(tokenizer) else tokenizer,
        "workers": report.workers,
        "encoder": report.encoder,
        "seconds": report.seconds,
        "worker_seconds": report.worker_seconds,
        "versions": {package: version(package) for package in packages},
    }


def _reject_line(reject: Reject, *, inputs: Sequence[str]) -> dict[str, Any]:
    """A line of rejects.jsonl."""
    line: dict[str, Any] = {
        "input": inputs[reject.place.input],
        "line": reject.place.line,
        "record": reject.place.record,
        "reason": reject.reason,
        "detail": reject.detail,
    }
    if reject.turn >= 0:
        line["turn"] = reject.turn  # its row is packed without it
    if reject.tokens:
        line["tokens"] = reject.tokens
    return line


def _check_rows(accounting: Accounting, *, max_rejects: float, inputs: Sequence[str]) -> None:
    """Stops a run that lost too much, before anything is kept."""
    if not accounting.rows:
        raise InputError(f"there are no rows in {', '.join(inputs)}")
    if not accounting.rejected:
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in accounting.rows_rejected.most_common())
    first = "; ".join(
        f"{inputs[reject.place.input]}:{reject.place.line} {reject.reason}: {reject.detail}"
        for reject in accounting.first_rejects
    )
    counts = f"{accounting.rejected:,} of {accounting.rows:,} rows were rejected ({reasons})"
    # The fraction as it was written: 0.29 * 100 rows is less than 29 in floating point.
    if accounting.rejected > Fraction(str(max_rejects)) * accounting.rows:
        raise TooManyRejects(
            f"{counts}, more than --max-rejects {max_rejects} allows; nothing was written. "
            f"The first: {first}. Mend the rows, or raise --max-rejects",
            rows=accounting.rows,
        )
    if accounting.rejected == accounting.rows:
        raise TooManyRejects(
            f"{counts}, so there is nothing to pack. The first: {first}", rows=accounting.rows
        )


def _check_parts(accounting: Accounting, *, eval_fraction: float) -> None:
    """Both parts of a split need something in them."""
    for part, name in (("packed", "training"), ("eval", "evaluation")):
        if not accounting.examples[part]:
            raise OptionError(
                f"an eval fraction of {eval_fraction} leaves none of the {accounting.rows:,} rows "
                f"for {name}: choose another fraction or seed"
            )
