"""Checkpoints: torch's distributed ones, written beside and renamed when whole."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from training.data import OutputError, ResumeError
from training.metrics import FILE as METRICS
from training.parallel import World

FOLDER = "checkpoints"
TRAINER = "trainer.json"
FORMAT = 1
_INCIDENTAL = ("transformers_version", "_name_or_path", "dtype", "use_cache")  # no part of the mathematics
_MODEL = "model."
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # names that fit any number of ranks


def newest(directory: Path) -> Path | None:
    """The checkpoint of the most steps, or None. A partial one has another name and is never it."""
    return max(_all(directory), default=None)


def save(
    directory: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: Mapping[str, Any],
    world: World,
    keep: int,
) -> Path:
    """Writes `directory/step-N`, each rank its own shards, and removes all but the `keep` newest.

    A kill at any moment leaves the last whole checkpoint: the files lie under another name until the
    last rank is done.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial"
    if world.chief:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    save_tensors(_tensors(model, optimizer), checkpoint_id=str(partial))
    if world.chief:
        text = json.dumps({"format": FORMAT, "step": step, **trainer}, indent=1)
        (partial / TRAINER).write_text(text + "\n", "utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in sorted(_all(directory))[:-keep] if keep else []:
            shutil.rmtree(old)
    world.barrier()
    return final


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """What rank 0 wrote beside the tensors: `step`, `loader`, `model` and `config`.

    Raises:
        ResumeError: missing, damaged or of another format.
    """
    try:
        trainer: dict[str, Any] = json.loads((checkpoint / TRAINER).read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ResumeError(f"{checkpoint / TRAINER}: can't be read: {error}") from error
    if trainer.get("format") != FORMAT:
        raise ResumeError(f"{checkpoint}: format {trainer.get('format')}, this version reads {FORMAT}")
    return trainer


def check_run_directory(directory: Path, *, resume: bool) -> None:
    """Refuses to write into a run that is there already, unless it is to go on.

    Raises:
        OutputError: it holds checkpoints or metrics.
    """
    if not resume and any((directory / name).exists() for name in (FOLDER, METRICS)):
        raise OutputError(f"{directory} holds a run already: go on with --resume, or choose another run.dir")


def check_resume(trainer: Mapping[str, Any], *, model: Mapping[str, Any], steps: int) -> None:
    """Refuses a checkpoint of another model, or of a run that is at its end.

    Raises:
        ResumeError: names the first difference, or the steps.
    """
    saved, model = trainer["model"], json.loads(json.dumps(model))  # keys as text on both sides
    for key in sorted(saved.keys() | model.keys()):
        if key not in _INCIDENTAL and saved.get(key) != model.get(key):
            raise ResumeError(
                f"the checkpoint is of another model: its {key} is {saved.get(key)!r}, "
                f"here {model.get(key)!r}"
            )
    if trainer["step"] >= steps:
        raise ResumeError(
            f"the run has taken {trainer['step']} of {steps} steps: raise schedule.steps or run.steps"
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
        raise ResumeError(f"{checkpoint}: can't be loaded: {_first_line(error)}") from error
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
        raise ResumeError(f"{checkpoint}: can't be loaded: {_first_line(error)}") from error
    return {key.removeprefix(_MODEL): value for key, value in wanted.items()}


def _model_metadata(checkpoint: Path) -> dict[str, Any]:
    stored = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {key.removeprefix(_MODEL): meta for key, meta in stored.items() if key.startswith(_MODEL)}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT),
    }


def _all(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step-*") if (path / TRAINER).exists()]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
