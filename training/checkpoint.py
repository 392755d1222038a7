"""Checkpoints: torch's distributed ones, written beside and renamed when whole."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from training import files
from training.config import SETTINGS, Checkpoint, Config
from training.errors import OptionError, OutputError, ResumeError, one_line, writing
from training.files import TRAINER
from training.lora import saved_part
from training.metrics import FILE as METRICS
from training.model import difference, tied_names
from training.parallel import World

FOLDER = "checkpoints"
_NAME = "step-{:08d}"
FORMAT = 3
_MODEL = "model."
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # names that fit any number of ranks


def newest(directory: Path) -> Path | None:
    """The checkpoint of the most steps, or None. A partial one or a copy has another name and is never it."""
    return max(_all(directory), key=_step, default=None)


def passed_over(directory: Path) -> list[str]:
    """Names of what lies beside the checkpoints and is none of them, as a copy that somebody keeps."""
    return sorted({path.name for path in directory.glob("step-*")} - {path.name for path in _all(directory)})


class Saver:
    """Writes checkpoints, each rank its own shards, and removes old ones.

    A kill at any moment leaves the last whole checkpoint: the files lie under another name until every rank
    has written its own and their digests. All ranks write into one directory, on a file system that they
    share.
    """

    def __init__(self, directory: Path, *, options: Checkpoint, world: World) -> None:
        """Makes no file yet.

        Args:
            directory: Gets a directory `step-N` for each checkpoint.
            options: Which ones stay, and whether training goes on while they are written.
            world: The ranks.
        """
        self._directory, self._options, self._world = directory, options, world
        # A group of its own: the writing thread's messages must not meet the training loop's.
        self._group = dist.new_group(backend="gloo") if options.background else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="padfree-digests")
        self._pending: tuple[Future[Any], Path, Path] | None = None

    def save(
        self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Mapping[str, Any]
    ) -> Path:
        """Writes `step-N`, or begins to: in the background, training waits for the copy to the host alone.

        Raises:
            OutputError: the system refuses, now or while it wrote the one before.
        """
        self.finish()
        final = self._directory / _NAME.format(step)
        partial = self._directory / f".{final.name}.partial"
        if self._world.chief:
            text = json.dumps(
                {"format": FORMAT, "step": step, "ranks": self._world.size, **trainer}, indent=1
            )
            with writing(partial):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                (partial / TRAINER).write_text(text + "\n", "utf-8")
        self._world.barrier()
        tensors = _tensors(model, optimizer)
        if self._options.background:
            tensors_written = async_save(tensors, checkpoint_id=str(partial), process_group=self._group)
            assert isinstance(tensors_written, Future)
            done = self._thread.submit(_digest_when_written, tensors_written, partial, self._world.rank)
            self._pending = (done, partial, final)
        else:
            with _writing_tensors(partial):
                save_tensors(tensors, checkpoint_id=str(partial))
                files.write_part(partial, rank=self._world.rank)
            self._world.barrier()
            self._publish(partial, final)
        return final

    def poll(self) -> None:
        """Publishes what was written in the background meanwhile; waits for nothing.

        Raises:
            OutputError: the system refused.
        """
        if self._pending and self._world.chief:
            future, partial, final = self._pending
            if future.done():
                future.result()
                if files.parts(partial) == self._world.size:
                    self._publish(partial, final)
                    self._pending = None

    def finish(self) -> None:
        """Waits until what is being written is whole and has its name, on every rank.

        No rank may end before: where one has, schedulers and torchrun end the one that gives the name.

        Raises:
            OutputError: the system refused.
        """
        if self._options.background:
            if self._pending:
                self._pending[0].result()
            self._world.barrier()
            self.poll()
            if self._pending and self._world.chief:
                raise OutputError(
                    f"{self._pending[1]}: rank 0 does not see all ranks' files: run.dir has to be on a disk "
                    "that all machines share"
                )
            self._pending = None
        self._world.barrier()

    def _publish(self, partial: Path, final: Path) -> None:
        if not self._world.chief:
            return
        with writing(final):
            files.join_parts(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            keep, every = self._options.keep, self._options.keep_every
            for old in sorted(_all(self._directory), key=_step)[:-keep] if keep else []:
                if not (every and _step(old) % every == 0):
                    shutil.rmtree(old)


@contextmanager
def _writing_tensors(partial: Path) -> Iterator[None]:
    """`writing`, for what torch raises too: a collection of each rank's error."""
    with writing(partial):
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OutputError(
                f"{partial}: rank {rank} can't write: {one_line(cause)}; checkpoints before it are whole"
            ) from error


def _digest_when_written(tensors_written: Future[Any], partial: Path, rank: int) -> None:
    with _writing_tensors(partial):
        tensors_written.result()
        files.write_part(partial, rank=rank)


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """What rank 0 wrote beside the tensors: `step`, `ranks`, `loader`, `model`, `base` and `config`.

    Raises:
        ResumeError: missing, damaged, of another format, or of another step than the folder's name says.
    """
    try:
        trainer: dict[str, Any] = json.loads((checkpoint / TRAINER).read_text("utf-8"))
        written = trainer["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise files.damaged(checkpoint / TRAINER) from error
    if written != FORMAT:
        raise ResumeError(
            f"{checkpoint}: format {written}, this version reads {FORMAT}: go on with the padfree of then"
        )
    files.check_trainer(checkpoint)
    if (step := _step(checkpoint)) not in (0, trainer["step"]):
        raise ResumeError(
            f"{checkpoint} is of step {trainer['step']}, not {step}: give it the name "
            f"{_NAME.format(trainer['step'])} again"
        )
    return trainer


def choose(directory: Path, *, resume: bool, restarted: bool, world: World) -> Path | None:
    """The checkpoint to go on from, or None to begin at step 0: what rank 0 sees, for all ranks.

    Args:
        directory: The run directory.
        resume: Go on with the run that is there.
        restarted: This launch's own run, which torchrun started again: go on if there is a checkpoint.
        world: The ranks.

    Raises:
        OutputError: it holds a run and is not to go on.
        ResumeError: it holds none and is to go on, or this rank does not see what rank 0 sees.
    """
    found = newest(directory / FOLDER)
    held = any((directory / name).exists() for name in (FOLDER, METRICS))
    newest_step = _step(found) if found and world.chief else 0
    seen, step, again = world.sum(world.chief and held, newest_step, restarted)
    if resume and not seen:
        raise ResumeError(f"{directory} holds no run to go on with: check run.dir, or start without --resume")
    if seen and not (resume or again):
        raise OutputError(f"{directory} holds a run already: go on with --resume, or choose another run.dir")
    if not step and (resume or again) and world.chief:
        print(
            f"{directory} holds no checkpoint: beginning at step 0 (checkpoint.every saves more often)",
            flush=True,
        )
    if not step or not (resume or again):
        return None
    chosen = directory / FOLDER / _NAME.format(int(step))
    if not chosen.exists():
        raise ResumeError(
            f"rank {world.rank} does not see {chosen}, rank 0 does: run.dir must be on a shared disk"
        )
    return chosen


def check_resume(
    trainer: Mapping[str, Any],
    *,
    model: Mapping[str, Any],
    base: str,
    steps: int,
    config: Config,
    ranks: int,
    accept: Sequence[str] = (),
) -> str:
    """Refuses a checkpoint of another model, of other settings, beside other weights, or of a later step.

    Args:
        trainer: What is saved.
        model: This run's model configuration.
        base: Digest of the weights that this run would begin from.
        steps: This run's last step.
        config: This run's configuration.
        ranks: Number of ranks.
        accept: Settings that may differ although losses then do.

    Returns:
        The settings that differ, as "data.prefetch 2 → 4"; "" where none does.

    Raises:
        ResumeError: names the first difference of the model, all differing settings, or what else differs.
        InputError: the model is not known here.
        OptionError: `accept` names no setting.
    """
    if other := difference(trainer["model"], model, holder="the checkpoint"):
        raise ResumeError(f"the checkpoint is of another model: {other}")
    before, here = (_settings(table) for table in (trainer["config"], dataclasses.asdict(config)))
    if unknown := [key for key in accept if key not in here]:
        raise OptionError(f"--accept {unknown[0]}: no setting has that name")
    changed = {key: (before[key], here[key]) for key in here if key in before and before[key] != here[key]}
    refused = [key for key in changed if not SETTINGS[key].metadata["free"] and key not in accept]
    if refused:
        was = ", ".join(f"{key} = {changed[key][0]!r} (here {changed[key][1]!r})" for key in refused)
        flags = " ".join(f"--accept {key}" for key in refused)
        raise ResumeError(f"the checkpoint was saved with {was}: set it so again, or add {flags}")
    # Beside adapters the model's own weights are in no checkpoint: other ones would be another model. Without
    # them nothing is read from there but by the export: what was not trained, and all names.
    moved = config.model.weights != trainer["config"]["model"]["weights"]
    if base and moved and not config.lora.rank and trainer["base"] != base and "model.weights" not in accept:
        raise ResumeError(
            f"the run did not begin from the weights in {config.model.weights}, on which its export would "
            "build: give those that it did, if any, or add --accept model.weights"
        )
    if config.lora.rank and trainer["base"] != base and "model.weights" not in accept:
        raise ResumeError(
            f"the checkpoint's adapters were trained beside other weights than "
            f"{config.model.weights or 'random ones'}: give those, or add --accept model.weights"
        )
    split = set(accept) & {"data.buffers", "data.accumulation"}
    was_step, step = _buffers(before, trainer["ranks"]), _buffers(here, ranks)
    if was_step != step and not split:
        raise ResumeError(
            f"the checkpoint's steps were of {was_step} buffers on {trainer['ranks']} ranks, here of {step} "
            f"on {ranks}: change data.accumulation or data.buffers, or add --accept data.accumulation"
        )
    same = trainer["ranks"] == ranks and not changed.keys() & {"data.buffers", "data.accumulation"}
    if not (same or split) and (dropout := _dropout(here, model)):
        raise ResumeError(
            f"{dropout} leaves out other values where a step is split otherwise: go on with "
            f"{trainer['ranks']} ranks, data.buffers and data.accumulation as they were, or add "
            "--accept data.accumulation"
        )
    was_parts = trainer["ranks"] // before["parallel.replicas"]
    parts = ranks // here["parallel.replicas"]
    if here["optim.rounding"] == "stochastic" and was_parts != parts and not split:
        raise ResumeError(
            f"optim.rounding = stochastic rounds otherwise where the weights are in {parts} parts instead of "
            f"{was_parts}: go on with as many ranks as before, or add --accept data.accumulation"
        )
    if trainer["step"] > steps:
        raise ResumeError(
            f"the run has taken {trainer['step']} of {steps} steps: raise schedule.steps or run.steps"
        )
    return ", ".join(f"{key} {_shown(key, old)} → {_shown(key, new)}" for key, (old, new) in changed.items())


def _shown(key: str, value: object) -> str:
    return "to the end" if (key, value) == ("run.steps", 0) else repr(value)


def _settings(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A configuration as one level of keys, its values as JSON gives them back."""
    flat = {f"{section}.{key}": value for section, part in table.items() for key, value in part.items()}
    found: dict[str, Any] = json.loads(json.dumps(flat))
    return found


def _buffers(settings: Mapping[str, Any], ranks: int) -> int:
    """Buffers of a step over all ranks."""
    return int(settings["data.buffers"]) * int(settings["data.accumulation"]) * ranks


def _dropout(settings: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """A setting, of the run or the model's configuration, by which values are left out at random; or ""."""
    found = {"lora.dropout": settings["lora.dropout"]} if settings["lora.rank"] else {}
    found |= {key: value for key, value in model.items() if "drop" in key}
    return next(
        (f"{key} = {value}" for key, value in found.items() if isinstance(value, float) and value), ""
    )


def load(checkpoint: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reads a checkpoint into a sharded model and its optimizer, on any number of ranks.

    Raises:
        ResumeError: it does not hold what the model has, or is damaged.
    """
    tensors = _tensors(model, optimizer)
    try:
        load_tensors(tensors, checkpoint_id=str(checkpoint))
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ResumeError(f"{checkpoint}: can't be loaded: {one_line(error)}") from error
    # The model's tensors were filled in place; the optimizer's are handed over.
    set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=_FLAT)


def model_sizes(checkpoint: Path) -> dict[str, int]:
    """The model's tensors by name, and how many bytes each has."""
    return {
        name: meta.size.numel() * meta.properties.dtype.itemsize
        for name, meta in _model_metadata(checkpoint).items()
    }


def read_model(checkpoint: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Some of the model's tensors, whole, in one process.

    Raises:
        ResumeError: damaged.
    """
    metadata = _model_metadata(checkpoint)
    wanted = {
        f"{_MODEL}{name}": torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        for name in names
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is meant to be, here
            load_tensors(wanted, checkpoint_id=str(checkpoint), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ResumeError(f"{checkpoint}: can't be loaded: {one_line(error)}") from error
    return {key.removeprefix(_MODEL): value for key, value in wanted.items()}


def _model_metadata(checkpoint: Path) -> dict[str, Any]:
    stored = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {key.removeprefix(_MODEL): meta for key, meta in stored.items() if key.startswith(_MODEL)}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tied = tied_names(model)
    once = {name: value for name, value in model.state_dict().items() if name not in tied}
    return {
        "model": saved_part(once),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT),
    }


def _all(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step-*") if _step(path)]


def _step(checkpoint: Path) -> int:
    """The step that the name says; 0 where it is not a checkpoint's own, as a copy's."""
    found = re.fullmatch("step-([0-9]{8}|[1-9][0-9]{8,})", checkpoint.name)
    return int(found[1]) if found else 0
