"""The command `padfree`: one function a verb, each with its own parser; heavy imports are inside.

Exit status: 0 ok; 1 a check failed (verify, template, doctor); 2 an error that the user can mend, one
line of it on stderr; 130 after Ctrl-C; 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect as introspection
import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from packing.errors import InputError, OptionError, PadfreeError, ShardError, TooManyRejects

if TYPE_CHECKING:
    from rich.console import Console

    from packing import pipeline

Options = TypeVar("Options")

FAILED, USER_ERROR, INTERRUPTED, TERMINATED, BROKEN_PIPE = 1, 2, 130, 143, 141

VERBS = {
    "pack": "chat files to a shard set",
    "stats": "counts and lengths of a shard set",
    "inspect": "the text of a buffer or an example, its trained tokens marked",
    "verify": "checks every digest and every law of a shard set",
    "unpack": "a shard set's examples as JSON lines",
    "import": "what TRL, torchtune or Megatron-Bridge packed, to a shard set, boundaries checked",
    "bench": "where the time goes: one's own files through every stage, in one process",
    "template": "whether training on a tokenizer's chat template is right, and what is trained",
    "doctor": "which kernels a model gets on this machine, and the proof that examples stay apart",
}

MODULES = {"doctor": "training.doctor"}
"""Verbs of the training side: its module is imported by name when it is asked for, and has a `main`.
So `packing` does not import `training`, and works without it."""

TEXT_FILES = {"chat_template"}
"""Options whose value is the text of a file; the flag takes the file's name."""

NUMBERS = {int: "N", float: "FRACTION"}
"""Types of options that are numbers, and what stands for one in the help."""

PYTHON_WORDS = {"True": True, "TRUE": True, "False": False, "FALSE": False, "None": None}
"""Values of --template-arg that are no JSON, and as texts would mean the opposite: "False" is true."""

JSON_VALUES = "VALUE is read as JSON (false, 3) or as True, False or None; all else is text"
"""Behind the help of options whose values are more than text."""

AUDITED_ROWS = 1000
"""Rows of each file that `template --data` tries."""

MOST_WORKERS = 8
"""By default; more pay on large inputs only."""

PIPE_WIDTH = 160
"""Columns where the output is no terminal: wide enough to break no line that a script might read."""


_own_process = False  # whether it ends with the command, so that nobody makes a model in it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit status; without `argv` it is the command, in a process of its own."""
    global _own_process
    _own_process = argv is None
    words = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that can't show a character gets its number
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read us has seen enough. The interpreter flushes once more at its end: give it a place.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except _Terminated:
        return _say("asked to stop (SIGTERM)", status=TERMINATED)
    except KeyboardInterrupt:
        return _say("interrupted", status=INTERRUPTED)
    except PadfreeError as error:
        return _say(str(error), status=USER_ERROR)
    except OSError as error:
        return _say(f"{error.filename or 'input or output'}: {error.strerror or error}", status=USER_ERROR)
    return status


def _say(message: str, *, status: int) -> int:
    print(f"padfree: {' '.join(message.split())}", file=sys.stderr)
    return status


def _run(words: Sequence[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb in ("-h", "--help"):
        print(_help())
        return 0
    if verb == "--version":
        from importlib.metadata import version

        print(f"padfree {version('padfree')}")
        return 0
    if verb not in VERBS:
        raise OptionError(f"there is no {verb!r}; choose one of {', '.join(VERBS)}, or see padfree --help")
    if verb in MODULES:
        return int(importlib.import_module(MODULES[verb]).main(rest))
    function: Any = globals()["import_" if verb == "import" else verb]
    return int(function(rest))


def _help() -> str:
    lines = "\n".join(f"  {verb:10} {summary}" for verb, summary in VERBS.items())
    return f"usage: padfree VERB …\n\n{lines}\n\npadfree VERB --help tells more; padfree --version"


# Verbs


def pack(words: Sequence[str]) -> int:
    """Packs chat files into a shard set, or with --dry-run says what would be packed."""
    parser = _packing_parser("pack")
    parser.add_argument("--out", metavar="DIR", help="the shard set to make")
    parser.add_argument("--force", action="store_true", help="replace a shard set that is there")
    parser.add_argument("--workers", type=int, default=_cores(), metavar="N", help="processes (%(default)s)")
    parser.add_argument(
        "--dry-run",
        type=int,
        metavar="N",
        help="read N rows of each input, write nothing, show what would be packed, or why not",
    )
    arguments = parser.parse_args(words)
    if arguments.dry_run is not None:
        return _dry_run(arguments)
    if arguments.out is None:
        raise OptionError("pack needs --out DIR, or --dry-run N to write nothing")
    from packing.pipeline import pack_dataset

    options = _packing_options(arguments)
    with _unwound_by_signals(), _shown_rejects(words), _progress(sys.stderr.isatty()) as on_progress:
        _leave_out_torch()
        report = pack_dataset(
            arguments.inputs,
            out=arguments.out,
            workers=arguments.workers,
            force=arguments.force,
            on_progress=on_progress,
            **options,
        )
    result = dataclasses.asdict(report)
    if arguments.json:
        return _print_json(result)
    from packing.report import summary

    console = _console()
    console.print(f"packed into {report.out}\n", soft_wrap=True)
    console.print(summary(result))
    if report.accounting["rows"]["rejected"] or report.accounting["turns_rejected"]:
        console.print(f"\nwhat was rejected, and why: {Path(report.out, 'rejects.jsonl')}", soft_wrap=True)
    console.print(f"\nlook at it with: padfree inspect {report.out}", soft_wrap=True)
    return 0


def _dry_run(arguments: argparse.Namespace) -> int:
    from packing import report
    from packing.chat import load_tokenizer
    from packing.pipeline import check_workers, preview
    from packing.shards import check_out

    options = _packing_options(arguments)
    check_workers(arguments.workers)
    if arguments.out is not None:
        check_out(arguments.out, force=arguments.force)
    _leave_out_torch()
    options["tokenizer"] = tokenizer = load_tokenizer(arguments.tokenizer)
    found = preview(arguments.inputs, rows=arguments.dry_run, **options)
    result = report.preview_as_json(found)
    if arguments.json:
        _print_json(result)
    else:
        _show_preview(found, result=result, tokenizer=tokenizer)
    return _say(found.refusal, status=USER_ERROR) if found.refusal else 0


def _show_preview(found: pipeline.Preview, *, result: Mapping[str, Any], tokenizer: Any) -> None:
    from packing import report

    console = _console()
    console.print(f"of the first {found.rows:,} rows of each input, nothing is written:\n")
    console.print(report.summary(result))
    for line in report.reject_lines(found.rejects):
        console.print(line, soft_wrap=True)
    if found.example is not None:
        console.print("\nthe first of them: ", report.legend(colour=_coloured(console)), "\n", sep="")
        text = report.marked(found.example, tokenizer=tokenizer, colour=_coloured(console))
        console.print(text, soft_wrap=True)


@contextlib.contextmanager
def _shown_rejects(words: Sequence[str]) -> Iterator[None]:
    """Where too many rows were rejected, the command that shows more of them, as it can be pasted."""
    try:
        yield
    except TooManyRejects as error:
        again = shlex.join(["padfree", "pack", *words, "--dry-run", str(error.rows)])
        raise TooManyRejects(f"{error}; see more with: {again} (--json has all)", rows=error.rows) from error


def bench(words: Sequence[str]) -> int:
    """Packs into a folder that is thrown away, and prints the seconds of each stage."""
    arguments = _packing_parser("bench").parse_args(words)
    from packing import report as reports
    from packing.pipeline import pack_dataset
    from packing.plan import plan_bins

    options = _packing_options(arguments)
    with (
        _unwound_by_signals(),
        _shown_rejects(words),
        tempfile.TemporaryDirectory() as folder,
        _progress(sys.stderr.isatty()) as on_progress,
    ):
        # Once a process, and compiling once a machine: importing libraries is no stage's time.
        plan_bins([1], capacity=arguments.capacity, algorithm=arguments.algorithm)
        _leave_out_torch()
        report = pack_dataset(
            arguments.inputs,
            out=Path(folder, "bench"),
            on_progress=on_progress,
            **options,
        )
    result = reports.bench(report)
    if arguments.json:
        return _print_json(result)
    _console().print(reports.bench_table(result))
    return 0


def stats(words: Sequence[str]) -> int:
    """Prints counts and lengths of a shard set."""
    parser = _directory_parser("stats")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(words)
    from packing import report

    result = report.stats(arguments.directory)
    if arguments.json:
        return _print_json(result)
    _console().print(report.summary(result))
    return 0


def import_(words: Sequence[str]) -> int:
    """Makes a shard set of what another tool packed."""
    parser = _Parser("import")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, folder, glob or hub data set")
    parser.add_argument("--out", required=True, metavar="DIR", help="the shard set to make")
    parser.add_argument(
        "--capacity", type=int, metavar="N", help="most tokens in a buffer (the longest row's; reads twice)"
    )
    parser.add_argument("--force", action="store_true", help="replace a shard set that is there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(words)
    from packing import report
    from packing.importers import import_packed

    with _unwound_by_signals():
        import_packed(arguments.inputs, out=arguments.out, capacity=arguments.capacity, force=arguments.force)
    result = report.stats(arguments.out)
    if arguments.json:
        return _print_json(result)
    _console().print(report.summary(result))
    return 0


def inspect(words: Sequence[str]) -> int:
    """Prints the text of a buffer or of an example."""
    parser = _directory_parser("inspect")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--buffer", type=int, metavar="N", help="all examples of buffer N, from 0")
    which.add_argument("--example", type=int, metavar="N", help="example N, from 0 in the order of the input")
    parser.add_argument("--ids", action="store_true", help="the token ids too, marked like the text")
    parser.add_argument("--tokenizer", metavar="DIR_OR_ID", help="where the one used for packing lies now")
    arguments = parser.parse_args(words)
    from packing import report
    from packing.shards import open_shards

    shards = open_shards(arguments.directory)
    _leave_out_torch()
    tokenizer = report.tokenizer_of(shards, name=arguments.tokenizer)
    console = _console()
    lines = report.inspect(
        shards,
        tokenizer=tokenizer,
        buffer=arguments.buffer,
        example=arguments.example,
        ids=arguments.ids,
        colour=_coloured(console),
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    return 0


def verify(words: Sequence[str]) -> int:
    """Checks a shard set, and exits with 1 where it is damaged."""
    parser = _directory_parser("verify")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(words)
    from packing import shards

    if not os.path.isdir(arguments.directory):
        raise InputError(f"{arguments.directory}: no such directory")
    fault = None
    try:
        shards.verify(arguments.directory)
    except ShardError as error:
        fault = str(error)
    if arguments.json:
        _print_json({"path": arguments.directory, "ok": fault is None, "fault": fault})
    elif fault is None:
        print(f"{arguments.directory} is whole: every digest and every law holds")
    if fault is not None:
        return _say(fault, status=FAILED)
    return 0


def unpack(words: Sequence[str]) -> int:
    """Writes a shard set's examples as JSON lines that `pack` can read again."""
    parser = _directory_parser("unpack")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, or - for stdout")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    arguments = parser.parse_args(words)
    from packing.atomic import new_file
    from packing.report import unpacked
    from packing.shards import open_shards

    lines = unpacked(open_shards(arguments.directory))
    if arguments.out == "-":
        sys.stdout.buffer.writelines(lines)
        return 0
    with _unwound_by_signals(), new_file(Path(arguments.out), force=arguments.force) as file:
        file.writelines(lines)
    return 0


def template(words: Sequence[str]) -> int:
    """Prints what a chat template does with what is trained; exits with 1 where training would be wrong."""
    from packing.chat import ChatOptions

    parser = _Parser("template")
    parser.add_argument("tokenizer", metavar="TOKENIZER", help="a folder or a hub name")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help=f"own rows to try it on, the first {AUDITED_ROWS:,} of each file",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _add_options(parser.add_argument_group("what is trained"), ChatOptions)
    arguments = parser.parse_args(words)
    from packing import report
    from packing.chat import audit, load_tokenizer
    from packing.pipeline import first_rows

    options = _options(ChatOptions, arguments)
    _leave_out_torch()
    tokenizer = load_tokenizer(arguments.tokenizer)
    found = audit(
        tokenizer,
        options=options,
        conversations=first_rows(arguments.data, rows=AUDITED_ROWS) if arguments.data else (),
    )
    if arguments.json:
        _print_json(found.to_json())
        return found.exit_code
    console = _console()
    console.print(found.table())
    if found.example is not None:
        colour = _coloured(console)
        console.print("\n", report.legend(colour=colour), "\n", sep="")
        console.print(report.marked(found.example, tokenizer=tokenizer, colour=colour), soft_wrap=True)
    return found.exit_code


# Options


class _Parser(argparse.ArgumentParser):
    """Errors in one line, and no guessing of shortened options."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=f"padfree {verb}", description=VERBS[verb], allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")


def _directory_parser(verb: str) -> _Parser:
    parser = _Parser(verb)
    parser.add_argument("directory", metavar="DIR", help="what pack wrote; its eval part is DIR/eval")
    return parser


def _packing_parser(verb: str) -> _Parser:
    """What `pack` and `bench` share; `_packing_options` makes arguments of `pack_dataset` of it."""
    from packing.chat import ChatOptions
    from packing.formats import FormatOptions
    from packing.pipeline import PackOptions
    from packing.sources import SourceOptions

    parser = _Parser(verb)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, folder, glob or hub data set")
    parser.add_argument("--tokenizer", required=True, metavar="DIR_OR_ID", help="a folder or a hub name")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    for title, options in (
        ("packing", PackOptions),
        ("what is trained", ChatOptions),
        ("how rows are read", FormatOptions),
        ("which part of a data set", SourceOptions),
    ):
        _add_options(parser.add_argument_group(title), options)
    return parser


def _packing_options(arguments: argparse.Namespace) -> dict[str, Any]:
    from packing.chat import ChatOptions
    from packing.formats import FormatOptions
    from packing.pipeline import PackOptions
    from packing.sources import SourceOptions

    return {
        "tokenizer": arguments.tokenizer,
        "options": _options(PackOptions, arguments),
        "sources": _options(SourceOptions, arguments),
        "formats": _options(FormatOptions, arguments),
        "chat": _options(ChatOptions, arguments),
    }


def _add_options(group: Any, options: type[Any]) -> None:
    """A flag for each field of an options class, with the field's own values, default and help."""
    hints = get_type_hints(options)
    texts = dict(
        re.findall(r"(?m)^ {4}(\w+): ((?:.+\n?)(?: {8}.+\n?)*)", introspection.getdoc(options) or "")
    )
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        flag = f"--{field.name.replace('_', '-')}"
        text = _typed(" ".join(texts[field.name].split())).replace("%", "%%")
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            group.add_argument(flag, choices=choices, default=field.default, help=f"{text} (%(default)s)")
        elif get_origin(hint) is Mapping:  # --template-arg a=1 --template-arg b=2 for `template_args`
            group.add_argument(
                flag.removesuffix("s"),
                dest=field.name,
                action=_Pairs,
                type=_json_pair if get_args(hint)[1] is Any else _pair,
                metavar="NAME=VALUE",
                default={},
                help=f"{text} {JSON_VALUES}" if get_args(hint)[1] is Any else text,
            )
        elif hint in NUMBERS:
            group.add_argument(
                flag, type=hint, default=field.default, metavar=NUMBERS[hint], help=f"{text} (%(default)s)"
            )
        elif field.name in TEXT_FILES:
            group.add_argument(flag, type=_text_file, metavar="FILE", help=text)
        else:
            group.add_argument(flag, help=text)


def _typed(text: str) -> str:
    """An option's text with mappings as one types them: `{"narrator": "system"}` is narrator=system."""

    def pairs(found: re.Match[str]) -> str:
        shown = ast.literal_eval(found[1]).items()
        words = (f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in shown)
        return " ".join(words)

    return re.sub(r"`(\{.*?\})`", pairs, text)


def _options(kind: type[Options], arguments: argparse.Namespace) -> Options:
    """The options of this kind among the arguments."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names if hasattr(arguments, name)})


class _Pairs(argparse.Action):
    """Collects NAME=VALUE options into one mapping."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        name, value = values
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: value})


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _json_pair(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON where it is JSON (true, 3) or a word of `PYTHON_WORDS`, else as text.

    Raises:
        ArgumentTypeError: no pair, or a list or mapping as Python writes it.
    """
    name, value = _pair(text)
    if value in PYTHON_WORDS:
        return name, PYTHON_WORDS[value]
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        with contextlib.suppress(ValueError, SyntaxError):
            if isinstance(ast.literal_eval(value.strip()), dict | list | tuple | set):
                raise argparse.ArgumentTypeError(f"{text!r} is Python: write the value as JSON") from None
        return name, value


def _text_file(name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"can't read {name}: {error}") from None


def _leave_out_torch() -> None:
    """Imports transformers as if there were no torch, which it imports for models; tokenizers need none.

    That takes 1.3 of 4.4 processor seconds of packing 2,000 rows. A process that goes on is left alone, and
    so are workers that are spawned, not forked: they import it.
    """
    if _own_process and not {"torch", "transformers"} & sys.modules.keys():
        sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            from transformers import AutoTokenizer  # noqa: F401  # now transformers has looked for it
        finally:
            del sys.modules["torch"]


def _cores() -> int:
    """The cores that this process may use, up to `MOST_WORKERS`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST_WORKERS)


# Output


def _print_json(value: Mapping[str, Any]) -> int:
    print(json.dumps(value, indent=1))
    return 0


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _coloured(console: Console) -> bool:
    return console.is_terminal and not console.no_color and console.color_system is not None


@contextlib.contextmanager
def _progress(show: bool) -> Iterator[pipeline.OnProgress | None]:
    """A bar on stderr while `pack` runs, on a terminal only."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading the tokenizer", total=None)

        def on_progress(at: pipeline.Progress) -> None:
            unit = "rows" if at.stage == "reading" else "buffers"
            rejected = f", {at.rejected:,} rejected" if at.rejected else ""
            bar.update(
                task,
                description=f"{at.stage}: {at.done:,} {unit}{rejected}",
                completed=at.done,
                total=at.total,
            )

        yield on_progress


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Ctrl-C and a polite kill unwind the stack, so that what was begun is removed.

    Whatever else is raised after one came is a consequence: workers that got it too have died, and numba's
    compiler makes a RuntimeError of an exception in its midst.
    """
    came: list[KeyboardInterrupt] = []

    def unwind(number: int, _: object) -> NoReturn:
        came.append(_Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise came[0]

    # A shell that starts a command in the background has it ignore Ctrl-C.
    heeded = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, unwind) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise came[0] from None


if __name__ == "__main__":
    sys.exit(main())
