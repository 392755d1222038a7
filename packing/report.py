"""What a person sees of a shard set: counts, lengths, and the text with its trained tokens marked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packing.boundaries import starts
from packing.buffer import unpack
from packing.errors import InputError, OptionError
from packing.example import IGNORE_INDEX, Example
from packing.pipeline import EVAL, PackReport, Preview
from packing.plan import lower_bound
from packing.shards import RUN, ShardSet, open_shards

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

TRAINED = "bold green"
"""The style of trained text."""

OPEN, CLOSE = "⟦", "⟧"
"""Around trained text where there is no colour: brackets that hardly any text contains."""

REJECTS_SHOWN = 10
"""Rejected rows that a preview lists; `rejects.jsonl` has them all."""

# Text from outside must not steer the terminal: control characters become their pictures, and marks
# that turn the direction of writing U+FFFD.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


# Counts


def stats(directory: str | Path) -> dict[str, Any]:
    """Counts and lengths of a shard set, ready for JSON.

    Raises:
        ShardError: missing or damaged.
    """
    shards = open_shards(directory)
    return {
        "out": str(directory),
        "capacity": shards.capacity,
        "fingerprint": shards.fingerprint,
        "main": _part_stats(shards),
        "eval": _part_stats(shards.part(EVAL)) if EVAL in shards.manifest["parts"] else None,
        "accounting": shards.manifest["accounting"],
    }


def _part_stats(shards: ShardSet) -> dict[str, Any]:
    contents, lengths = shards.manifest["contents"], shards.seq_lengths
    room = contents["buffers"] * shards.capacity
    return {
        **{name: contents[name] for name in ("buffers", "examples", "tokens", "supervised_tokens")},
        "lower_bound": lower_bound(lengths, capacity=shards.capacity),
        "fill_rate": contents["tokens"] / room if room else 0.0,
        "example_tokens": _spread(lengths),
        "examples_per_buffer": _spread(shards.examples_per_buffer),
    }


def _spread(values: NDArray[Any]) -> dict[str, float]:
    if not values.size:
        return {}
    quantiles = dict(
        zip(("median", "p90", "p99"), np.quantile(values, (0.5, 0.9, 0.99)).tolist(), strict=True)
    )
    return {"min": int(values.min()), "mean": float(values.mean()), **quantiles, "max": int(values.max())}


def summary(report: Mapping[str, Any]) -> RenderableType:
    """The tables at the end of `pack` and of `stats`.

    Args:
        report: `stats`, or a `PackReport` or `Preview` as JSON.
    """
    from rich.console import Group

    if "rows" not in report["accounting"]:  # written with ShardWriter, by somebody with other accounts
        return _shape(report)
    return Group(_fates(report["accounting"]), "", _shape(report))


def _fates(accounting: Mapping[str, Any]) -> Table:
    """What became of each row and token; each column adds up to its first line."""
    from rich.table import Table

    rows, tokens, supervised = accounting["rows"], accounting["tokens"], accounting["supervised_tokens"]
    table = Table("", box=None, pad_edge=False, header_style="bold")
    for unit in ("rows", "tokens", "supervised"):
        table.add_column(unit, justify="right", min_width=10)
    table.add_row("in", f"{rows['in']:,}", f"{tokens['in']:,}")
    for fate in ("packed", "eval"):
        if rows.get(fate):
            table.add_row(fate, f"{rows[fate]:,}", f"{tokens[fate]:,}", f"{supervised[fate]:,}")
    if tokens.get("truncated"):
        table.add_row("cut off", "", f"{tokens['truncated']:,}")
    turns = accounting.get("turns_rejected", {})
    for reason in dict.fromkeys([*rows["rejected"], *turns]):
        count = f"{rows['rejected'].get(reason, 0):,}"
        if reason in turns:
            count = f"{count} + {turns[reason]:,} turns"
        table.add_row(f"rejected: {reason}", count, f"{tokens['rejected'].get(reason, 0):,}")
    return table


def _shape(report: Mapping[str, Any]) -> Table:
    """Buffers, fill and time, a line each."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name in ("main", "eval"):
        part = report.get(name)
        if not part:
            continue
        of = " of eval" if name == "eval" else ""
        best = part["tokens"] / (part["lower_bound"] * report["capacity"]) if part["lower_bound"] else 0.0
        table.add_row(
            f"buffers{of}",
            f"{part['buffers']:,} of {report['capacity']:,} tokens, {part['lower_bound']:,} at best",
        )
        table.add_row(f"fill rate{of}", f"{part['fill_rate']:.2%}, at best {best:.2%}")
        a_buffer = part["examples"] / part["buffers"] if part["buffers"] else 0.0
        table.add_row(f"examples{of}", f"{part['examples']:,}, {a_buffer:.1f} a buffer")
        if "example_tokens" in part:
            table.add_row(f"tokens an example{of}", _line(part["example_tokens"]))
            table.add_row(f"examples a buffer{of}", _line(part["examples_per_buffer"]))
    for note, count in report["accounting"].get("normalised_rows", {}).items():
        table.add_row("normalised", f"{note}: {_many(count, 'row')}")
    for note, count in report["accounting"].get("input_notes", {}).items():
        table.add_row("passed over", f"{note}: {_many(count, 'line')}")
    if "seconds" in report:
        total = report["seconds"]["total"]
        speed = report["accounting"]["tokens"]["in"] / total
        time = f"{total:.1f} s without loading libraries and tokenizer"
        table.add_row("time", f"{time}, {speed:,.0f} tokens/s, {_many(report['workers'], 'worker')}")
    if "encoder" in report:
        table.add_row("encoder", _encoder_line(report["encoder"]))
    return table


def _encoder_line(encoder: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count:,} by {name}" for name, count in encoder["examples"].items())
    return f"{encoder['encoder']} ({encoder['why']}); encoded, later rejects included: {counts or 'none'}"


def stages(report: PackReport) -> dict[str, float]:
    """Seconds of each stage of a run with one worker, in order; together they are the whole run."""
    steps, inside = report.seconds, report.worker_seconds
    collect = steps["rows"] - steps["read"] - sum(inside.values())
    return {
        "start": steps["open"] + steps["digest"],  # tokenizer, template, and the digests of both
        "read": steps["read"] + inside["parse"],
        "normalise": inside["normalise"],
        "render": inside["render"],
        "tokenize": inside["tokenize"],
        "mask": inside["mask"] + inside["encode"],
        "checks": inside["checks"] + inside["fit"],
        "plan": steps["plan"],
        "write": collect + steps["write"] + steps["finish"],
    }


def bench(report: PackReport) -> dict[str, Any]:
    """What `padfree bench` says of a run with one worker.

    Returns:
        seconds and share by stage, rows, tokens and tokens_per_s, `limit` (the stage that takes longest),
        `shared` (the part of the time that workers share) and `encoder`.
    """
    seconds, total = stages(report), report.seconds["total"]
    tokens = report.accounting["tokens"]["in"]
    return {
        "seconds": seconds,
        "share": {stage: taken / total for stage, taken in seconds.items()},
        "total": total,
        "rows": report.accounting["rows"]["in"],
        "tokens": tokens,
        "tokens_per_s": tokens / total,
        "limit": max(seconds, key=lambda stage: seconds[stage]),
        "shared": sum(report.worker_seconds.values()) / total,
        "encoder": report.encoder,
    }


def bench_table(result: Mapping[str, Any]) -> RenderableType:
    """`bench`, to be read: the stages, tokens/s, and where the limit lies."""
    from rich.console import Group
    from rich.table import Table

    total, shared = result["total"], result["shared"]
    table = Table("", box=None, pad_edge=False, header_style="bold")
    for column in ("seconds", "share"):
        table.add_column(column, justify="right")
    for stage, taken in result["seconds"].items():
        table.add_row(stage, f"{taken:.2f}", f"{taken / total:.1%}")
    table.add_row("all", f"{total:.2f}", "")
    more = ", ".join(f"{total * (1 - shared + shared / n):.1f} s with {n}" for n in (2, 4, 8))
    return Group(
        table,
        f"\n{result['rows']:,} rows, {result['tokens']:,} tokens, {result['tokens_per_s']:,.0f} tokens/s in "
        "one process",
        f"the limit: {result['limit']}. Workers share {shared:.0%} of the time: at best {more} of them.",
        f"encoder: {_encoder_line(result['encoder'])}",
    )


def _many(count: int, unit: str) -> str:
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"


def _line(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.1f}".removesuffix(".0") for name, value in spread.items())


# Text


def marked(example: Example, *, tokenizer: PreTrainedTokenizerBase, colour: bool) -> Text:
    """The example's text with its trained runs in colour, or between marks."""
    from rich.text import Text

    def text(ids: list[int]) -> str:
        return visible(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    return Text().join(_runs(example, text, colour=colour))


def marked_ids(example: Example, *, colour: bool) -> Text:
    """The example's token ids with its trained runs in colour, or between marks."""
    from rich.text import Text

    return Text(" ").join(_runs(example, lambda ids: " ".join(map(str, ids)), colour=colour))


def _runs(example: Example, show: Callable[[list[int]], str], *, colour: bool) -> Iterator[Text]:
    """What `show` makes of each run of ids, trained or not in turn."""
    from rich.text import Text

    trained = example.labels != IGNORE_INDEX
    cuts = np.flatnonzero(np.diff(trained, prepend=~trained[:1], append=~trained[-1:])).tolist()
    for first, last in itertools.pairwise(cuts):
        run = show(example.input_ids[first:last].tolist())
        if not trained[first]:
            yield Text(run)
        elif colour:
            yield Text(run, TRAINED)
        else:
            yield Text(f"{OPEN}{run}{CLOSE}")


def visible(text: str) -> str:
    """The text with control characters as pictures."""
    return text.translate(_VISIBLE)


def legend(*, colour: bool) -> Text:
    """How to read `marked`."""
    from rich.text import Text

    if colour:
        return Text.assemble(("this is trained", TRAINED), ", the rest is context")
    return Text(f"{OPEN}this is trained{CLOSE}, the rest is context")


def headline(number: int, example: Example, *, origin: Mapping[str, Any]) -> str:
    """One line on an example: its number, where it came from, its size."""
    parts = [f"example {number}"]
    if "input" in origin:
        parts.append(f"{origin['input']}:{origin['line']}")
    if origin.get("turn", -1) >= 0:
        parts.append(f"turn {origin['turn']}")
    return " · ".join([*parts, f"{len(example):,} tokens, {example.supervised:,} trained"])


def inspect(
    shards: ShardSet,
    *,
    tokenizer: PreTrainedTokenizerBase,
    buffer: int | None = None,
    example: int | None = None,
    ids: bool = False,
    colour: bool = False,
) -> Iterator[Text | str]:
    """The lines of `padfree inspect`: one example, all of a buffer, or the layout of buffer 0 and its first.

    With `ids` an example's token ids follow its text.

    Raises:
        OptionError: no buffer or example of that number.
    """
    if example is not None:
        yield legend(colour=colour)
        yield from _example_lines(
            shards, example, shards.example(example), tokenizer=tokenizer, ids=ids, colour=colour
        )
        return
    number = buffer or 0
    if not 0 <= number < len(shards):
        raise OptionError(f"{shards.path} has no buffer {number}: it has {len(shards):,}, counted from 0")
    packed = shards[number]
    examples = dict(zip(packed.example_ids.tolist(), unpack(packed), strict=True))
    yield (
        f"buffer {number} of {len(shards):,}: {len(examples):,} examples, "
        f"{len(packed):,} of {shards.capacity:,} tokens"
    )
    for start, (numbered, each) in zip(starts(packed.seq_lengths).tolist(), examples.items(), strict=True):
        yield f"  from token {start:>6,}: {headline(numbered, each, origin=shards.origin(numbered))}"
    yield legend(colour=colour)
    for numbered, each in list(examples.items())[: None if buffer is not None else 1]:
        yield from _example_lines(shards, numbered, each, tokenizer=tokenizer, ids=ids, colour=colour)
    if buffer is None:
        yield "\n--buffer N shows all examples of a buffer, --example N another one"


def _example_lines(
    shards: ShardSet,
    number: int,
    example: Example,
    *,
    tokenizer: PreTrainedTokenizerBase,
    ids: bool,
    colour: bool,
) -> Iterator[Text | str]:
    yield f"\n── {headline(number, example, origin=shards.origin(number))} ──"
    yield marked(example, tokenizer=tokenizer, colour=colour)
    if ids:
        yield marked_ids(example, colour=colour)


def tokenizer_of(shards: ShardSet, *, name: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer that the shards were made with.

    Args:
        name: Where it lies now; None for where it was.

    Raises:
        InputError: it is not there, or another one.
    """
    from packing.chat import load_tokenizer, tokenizer_digest

    path = shards.path / RUN
    told = name is not None
    if name is None:
        try:
            name = str(json.loads(path.read_bytes())["tokenizer"])
        except (OSError, ValueError, KeyError):
            raise InputError(
                f"{path} does not say which tokenizer was used: give it as --tokenizer"
            ) from None
    try:
        tokenizer = load_tokenizer(name)
    except InputError as error:
        if told:
            raise
        raise InputError(f"{error}; {path} names it: give where it lies now with --tokenizer") from error
    digest = shards.manifest["fingerprint"].get("chat", {}).get("tokenizer")
    if digest not in (None, tokenizer_digest(tokenizer)):
        raise InputError(
            f"{name} is not the tokenizer that {shards.path} was packed with: give that as --tokenizer"
        )
    return tokenizer


def unpacked(shards: ShardSet) -> Iterator[bytes]:
    """The examples in input order, a JSON line each, as `pack` reads them again."""
    import orjson

    in_order = np.argsort(shards.example_ids, kind="stable")
    rows = (row for batch in shards.examples().to_batches() for row in batch.to_pylist())
    for place, origin in zip(in_order[:, None], rows, strict=True):
        found = shards.gather(place)
        line = {**origin, "input_ids": found.input_ids, "labels": found.labels}
        yield orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


# Previews


def preview_as_json(found: Preview) -> dict[str, Any]:
    """A preview for `--dry-run --json`."""
    plain = asdict(replace(found, example=None))
    if found.example is not None:
        plain["example"] = {
            "input_ids": found.example.input_ids.tolist(),
            "labels": found.example.labels.tolist(),
        }
    return plain


def reject_lines(rejects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The first rejected rows, a line each."""
    for reject in rejects[:REJECTS_SHOWN]:
        yield visible(f"{reject['input']}:{reject['line']} {reject['reason']}: {reject['detail']}")
    if len(rejects) > REJECTS_SHOWN:
        yield f"and {len(rejects) - REJECTS_SHOWN:,} more"
