"""What a run says of itself: a JSON line a step, loggers by name, and a live line on the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training.errors import InputError, writing
from training.files import replace_text, replacing
from training.loggers import Logger

FILE = "metrics.jsonl"


class Metrics:
    """Rank 0's metrics file and display; on the other ranks nothing is written or shown.

    Each line of the file is an object with `kind` ("bound", "train", "spike", "eval", "checkpoint") and
    `step`, the number of optimizer steps taken so far. Tokens a second count all ranks, `_per_rank` one of
    them. `data_s`, in which the device had nothing left to do and waited for the next batch, is a part of
    `forward_backward_s`. `held_s` is how long training waited at a checkpoint until it went on.
    """

    def __init__(
        self, directory: Path, *, steps: int, done: int, active: bool, loggers: Sequence[Logger] = ()
    ) -> None:
        """Opens the file.

        Args:
            directory: The run directory; its file is cut back to the lines up to step `done`.
            steps: The run's last step.
            done: Steps taken already.
            active: Whether this rank writes and shows.
            loggers: Get each line's values too.

        Raises:
            OutputError: the system refuses to write, here or later.
        """
        self._active = active
        self._loggers = loggers
        self._steps = steps
        self._done = done
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = active and self._console.is_terminal
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, line="")
        if active:
            path = directory / FILE
            kept = [line for line in read(path) if line["step"] <= done] if done and path.exists() else []
            replace_text(path, "".join(_row(line) for line in kept))
            with writing(path):
                self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Metrics:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._active:
            self._file.close()
        for logger in self._loggers:
            logger.close()

    def say(self, text: str) -> None:
        """One line to the person who watches."""
        if self._active:
            self._console.print(text, markup=False)

    def train(self, values: Mapping[str, Any]) -> None:
        """A step's values, to the file and the display."""
        if not self._active:
            return
        self._write({"kind": "train", **values})
        self._log("train", values)
        real, supervised = values["real_tokens_per_s"], values["supervised_tokens_per_s"]
        each = values["real_tokens_per_s_per_rank"], values["supervised_tokens_per_s_per_rank"]
        line = (
            f"loss {values['loss']:.4f}  grad {values['grad_norm']:.3g}  lr {values['lr']:.3g}  "
            f"{real:,.0f} real and {supervised:,.0f} supervised tokens/s"
            + (f" ({each[0]:,.0f} and {each[1]:,.0f} a rank)" if each[0] < real else "")
            + (f"  MFU {values['mfu']:.1%}" if "mfu" in values else "")
            + f"  fill {values['fill']:.3f}  {values['step_s']:.2f} s  {values['memory_gib']:.1f} GiB"
        )
        if self._live:
            self._progress.update(self._task, completed=values["step"], line=line)
        else:
            self.say(f"step {values['step']}/{self._steps}  {line}")

    def bound(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What computes each kind of layer, to the file."""
        if self._active:
            self._write({"kind": "bound", "step": self._done, "rows": rows})

    def spike(self, values: Mapping[str, Any]) -> None:
        """A loss that stands out and the examples it is of, to the file and the display."""
        if self._active:
            self._write({"kind": "spike", **values})
            worst = values["ranks"][0]
            self.say(
                f"step {values['step']}/{self._steps}  loss spike: {values['loss']:.4f}, expected below "
                f"{values['limit']:.4f}; highest on rank {worst['rank']}, {worst['loss']:.4f}: examples "
                f"{', '.join(map(str, worst['example_ids']))}; all are in {FILE}"
            )

    def eval(self, values: Mapping[str, Any]) -> None:
        """An evaluation's values, to the file and the display."""
        if self._active:
            self._write({"kind": "eval", **values})
            self._log("eval", values)
            self.say(
                f"step {values['step']}/{self._steps}  evaluation loss {values['loss']:.4f} over "
                f"{values['supervised_tokens']:,} supervised tokens  {values['eval_s']:.2f} s"
            )

    def checkpoint(self, values: Mapping[str, Any], *, path: Path) -> None:
        """A checkpoint's values, to the file and the display."""
        if self._active:
            self._write({"kind": "checkpoint", **values})
            self._log("checkpoint", values)
            self.say(f"step {values['step']}/{self._steps}  saved {path}  {values['held_s']:.2f} s")

    def _log(self, kind: str, values: Mapping[str, Any]) -> None:
        named = {f"{kind}/{key}": value for key, value in values.items() if key != "step"}
        for logger in self._loggers:
            logger.log(named, step=values["step"])

    def _write(self, line: Mapping[str, Any]) -> None:
        with writing(Path(self._file.name)):
            self._file.write(_row(line))
            self._file.flush()


def _row(line: Mapping[str, Any]) -> str:
    return json.dumps(line) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line cut off by a kill is left out.

    Raises:
        InputError: no such file, or a line that is not JSON.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path}: can't read metrics: {error.strerror}") from error
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise InputError(f"{path}:{number}: not a JSON line: {error}") from error
    return lines


def compare_evals(directory: str, *, limit: float) -> tuple[str, bool]:
    """Compares the mean evaluation loss of the last tenth of the steps with that of the first tenth.

    Returns:
        A sentence with both and their ratio, and whether that is at most the limit.

    Raises:
        InputError: no metrics, or no evaluations in one of the two tenths.
    """
    lines = read(Path(directory) / FILE)
    evals = [line for line in lines if line["kind"] == "eval"]
    last_step = max((line["step"] for line in lines), default=0)
    first = [line["loss"] for line in evals if line["step"] <= last_step / 10]
    last = [line["loss"] for line in evals if line["step"] >= last_step * 9 / 10]
    if not first or not last:
        raise InputError(
            f"{directory}: no evaluation in the first or the last tenth of {last_step} steps; set eval.every"
        )
    before, after = sum(first) / len(first), sum(last) / len(last)
    return (
        f"evaluation loss {before:.3f} in the first tenth of {last_step} steps, {after:.3f} in the last: "
        f"{after / before:.2f} times, at most {limit:g} wanted",
        after <= limit * before,
    )


def plot(directory: str, *, out: str | None = None) -> str:
    """Draws loss, gradient norm, learning rate and speed over the steps.

    Returns:
        Where the picture is.

    Raises:
        InputError: no metrics, or matplotlib is missing.
        OutputError: the system refuses to write it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("a plot needs matplotlib: pip install matplotlib") from error
    lines = read(Path(directory) / FILE)
    train, evals = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    if not train:
        raise InputError(f"{directory}: no step in {FILE} yet")
    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, (key, title) in zip(
        panels,
        {
            "loss": "loss",
            "grad_norm": "gradient norm",
            "lr": "learning rate",
            "real_tokens_per_s": "real tokens/s, all ranks",
        }.items(),
        strict=True,
    ):
        axes.plot([line["step"] for line in train], [line[key] for line in train], label="train")
        if key == "loss" and evals:
            axes.plot([e["step"] for e in evals], [e["loss"] for e in evals], "o-", label="held out")
            axes.legend()
        axes.set_title(title)
        axes.grid(alpha=0.3)
    target = Path(out or Path(directory) / "metrics.svg")
    with replacing(target) as beside:
        figure.savefig(beside)
    return str(target)
