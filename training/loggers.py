"""Where a run's metrics go besides its own file: TensorBoard, Weights & Biases, trackio, by name.

A value `loss` of a training step is `train/loss` there, of an evaluation `eval/loss`, over the step's number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from training.config import Config
from training.errors import OptionError, one_line, writing
from training.files import replace_text


class Logger(Protocol):
    """One place that metrics go to."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Values of a step, by name."""

    def close(self) -> None:
        """Writes what is left."""


def check_loggers(names: Sequence[str]) -> None:
    """Refuses a logger that is not installed, before the first step and on every rank.

    Raises:
        OptionError: no such logger, or its package is missing.
    """
    for name in names:
        if name not in OPEN:
            raise OptionError(f"run.loggers: there is no {name!r}; there are {', '.join(OPEN)}")
        if find_spec(name) is None:
            raise OptionError(f"run.loggers: {name} is not installed: pip install {name}")


def open_loggers(config: Config, *, directory: Path, done: int) -> list[Logger]:
    """The loggers of a run; a resumed one goes on in what it began.

    Args:
        config: The names, the project, and what the loggers show as the run's settings.
        directory: The run's; its name is the run's name.
        done: Steps taken already.

    Raises:
        OutputError: the system refuses to write there.
        OptionError: Weights & Biases does not know who asks.
    """
    return [OPEN[name](config, directory=directory, done=done) for name in config.run.loggers]


class TensorBoard:
    """Event files in `tensorboard` in the run directory: `tensorboard --logdir RUN`."""

    def __init__(self, config: Config, *, directory: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with writing(directory):
            # Steps that an earlier life logged and that are taken again are hidden.
            self._writer: Any = SummaryWriter(
                str(directory / "tensorboard"), purge_step=done + 1 if done else None
            )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Values of a step, by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it in the run directory until `wandb sync`."""

    def __init__(self, config: Config, *, directory: Path, done: int) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=config.run.project,
                name=directory.name,
                dir=str(directory),
                config=dataclasses.asdict(config),
                id=_id(directory / "wandb-id", new=not done),
                resume="allow",
            )
        except wandb.Error as error:
            raise OptionError(f"wandb: {one_line(error)} (wandb login, or WANDB_MODE=offline)") from error

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Values of a step, by name; steps that were logged already stay as they are."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


class Trackio:
    """A local run of trackio, in `$TRACKIO_DIR` or its cache: `trackio show`."""

    def __init__(self, config: Config, *, directory: Path, done: int) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._trackio = trackio
        name = f"{directory.name}-{_id(directory / 'trackio-id', new=not done)}"
        # trackio keeps whatever it is told: a step that an earlier life logged would be there twice.
        earlier = SQLiteStorage.get_logs(config.run.project, name) if done else []
        self._there = {(line["step"], key) for line in earlier if line["step"] > done for key in line}
        trackio.init(
            project=config.run.project,
            name=name,
            config=dataclasses.asdict(config),
            resume="allow",
            embed=False,
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Values of a step, by name; those that were logged already stay as they are."""
        if fresh := {key: value for key, value in values.items() if (step, key) not in self._there}:
            self._trackio.log(fresh, step=step)

    def close(self) -> None:
        """Writes what is left."""
        self._trackio.finish()


OPEN: Mapping[str, Callable[..., Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""Logger, which is also the name of its package -> what opens it."""


def _id(file: Path, *, new: bool) -> str:
    """What names this run among all: kept in the run directory, so that a resumed one is the same."""
    with writing(file):
        if new or not file.exists():
            replace_text(file, uuid4().hex[:8])
        return file.read_text("utf-8")
