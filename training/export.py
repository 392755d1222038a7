"""From a checkpoint to a directory that `AutoModelForCausalLM.from_pretrained` opens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from training import checkpoint
from training.errors import InputError, OptionError, OutputError, writing
from training.files import TRAINER, check_digests, tensor_sizes, weights_digest
from training.lora import exported_name, write_config
from training.model import skeleton
from training.weights import INDEX, default_names, match_weights, weight_files

T = TypeVar("T")
FILE_BYTES = 4 * 2**30
"""A file of the export holds about so much; one file is what is in memory at a time."""

_TOKENIZER = "tokenizer_config.json"
_NOT_THE_TOKENIZERS = ("config.json", "generation_config.json", "adapter_config.json")
SMALL = (".json", ".jinja", ".txt", ".model", ".md")
"""Endings of what is copied beside the weights: configuration, tokenizer, template, generation settings."""


def export(source: str, out: str, *, tokenizer: str | None = None, dtype: str | None = None) -> str:
    """Writes the weights of a checkpoint as safetensors, with what belongs to them.

    A model that began from a Hugging Face directory gets that directory's configuration and tokenizer, its
    names for the weights, and the weights that training left alone (a vision tower, multi-token heads).

    Args:
        source: A checkpoint, or a run directory, whose newest is taken.
        out: Directory to make; it appears when it is whole.
        tokenizer: Directory whose tokenizer files are copied; None takes those of the starting weights.
        dtype: Of the weights: "bfloat16", "float16", "float32"; None as they are stored.

    Returns:
        A line that says what was written, and whether the tokenizer is missing.

    Raises:
        InputError: no checkpoint, or no tokenizer there, or other weights where the run began.
        ResumeError: the checkpoint is damaged.
        OutputError: the output is there already, or the system refuses.
        OptionError: no such dtype.
    """
    place = _checkpoint(Path(source))
    trainer = checkpoint.read_trainer(place)
    began = trainer["config"]["model"]["weights"]
    if (found := weights_digest(began)) and found != trainer["base"]:
        raise InputError(
            f"{began} holds other weights than those that the run began from, on which its export builds: "
            "put them there again"
        )
    check_digests(place)
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise OptionError(f"--dtype {dtype} is none of bfloat16, float16, float32")
    if tokenizer is not None and not (Path(tokenizer) / _TOKENIZER).exists():
        raise InputError(f"{tokenizer}: no {_TOKENIZER}; give a directory that holds a tokenizer")
    target, beside = Path(out), Path(out).with_name(f".{Path(out).name}.partial")
    if target.exists():
        raise OutputError(f"{target} exists: choose another name, or remove it")
    with writing(target):
        tensors, size = _write(place, beside, trainer=trainer, dtype=dtype)
        if tokenizer is not None:
            _copy_small(Path(tokenizer), beside, but=_NOT_THE_TOKENIZERS)
        os.replace(beside, target)
    left_out = "" if (target / _TOKENIZER).exists() else "; no tokenizer copied: add --tokenizer DIR"
    return f"{place} exported to {target}: {tensors} tensors, {size / 2**30:.2f} GiB{left_out}"


def _write(place: Path, beside: Path, *, trainer: Mapping[str, Any], dtype: str | None) -> tuple[int, int]:
    """Writes the weights and what lies beside the starting ones; how many tensors, and their bytes."""
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)

    cast = getattr(torch, dtype) if dtype else None
    lora = trainer["config"]["lora"]
    if lora["rank"]:
        weights = trainer["config"]["model"]["weights"]
        return _write_adapter(place, beside, lora=lora, weights=weights, cast=cast)
    began = Path(trainer["config"]["model"]["weights"] or os.devnull)
    config = AutoConfig.for_model(**trainer["model"])
    if (began / "config.json").exists():
        _copy_small(began, beside)
    else:
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(beside)

    model = skeleton(config, precision="fp32")
    original = {file: tensor_sizes(file) for file in weight_files(began)}
    names = match_weights(model, str(began)) if original else default_names(model)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    files = _Files(beside, cast=cast)
    sizes = checkpoint.model_sizes(place)
    kept = {name: key for name, key in names.as_they_are.items() if name not in tied}
    for group in _groups({name: sizes[name] for name in kept}):
        files.add({kept[name]: value for name, value in checkpoint.read_model(place, group).items()})
    targets = {made: list(made.targets.values()) for made in names.made}
    for several in _groups({made: sum(sizes[name] for name in targets[made]) for made in names.made}):
        values = checkpoint.read_model(place, [name for made in several for name in targets[made]])
        files.add({key: value for made in several for key, value in made.revert(model, values).items()})
    taken = tied | names.stored()
    for file, others in original.items():  # what training left alone
        with safe_open(file, framework="pt") as stored:
            for left in _groups({name: size for name, size in others.items() if name not in taken}):
                files.add({name: stored.get_tensor(name) for name in left})
    return files.finish()


def _write_adapter(
    place: Path, beside: Path, *, lora: Mapping[str, Any], weights: str, cast: torch.dtype | None
) -> tuple[int, int]:
    if not weights:
        raise InputError(f"{place} holds adapters of random weights, which no export could be added to")
    write_config(lora, weights=weights, out=beside)
    stored = checkpoint.read_model(place, list(checkpoint.model_sizes(place)))
    tensors = {exported_name(name): value for name, value in stored.items()}
    return len(tensors), _save(tensors, beside / "adapter_model.safetensors", cast=cast)


def _save(tensors: Mapping[str, Tensor], file: Path, *, cast: torch.dtype | None) -> int:
    """Writes one file of the export; how many bytes its tensors have."""
    ready = {key: (value.to(cast) if cast else value).contiguous() for key, value in tensors.items()}
    try:
        save_file(ready, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OutputError(f"{file}: the system refuses: {error}") from error
    return sum(value.nbytes for value in ready.values())


def _checkpoint(source: Path) -> Path:
    if (source / TRAINER).exists():
        return source
    newest = checkpoint.newest(source / checkpoint.FOLDER)
    if newest is None:
        raise InputError(f"{source}: neither a checkpoint nor a run directory with one")
    return newest


class _Files:
    """The weights' files of an export, one in memory at a time, and the index that says what lies where."""

    def __init__(self, folder: Path, *, cast: torch.dtype | None) -> None:
        self._folder, self._cast = folder, cast
        self._number = self._total = 0
        self._weight_map: dict[str, str] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the next file. The caller keeps no name for the tensors, which are then freed at the end."""
        self._number += 1
        name = f"model-{self._number:05d}.safetensors"
        self._total += _save(tensors, self._folder / name, cast=self._cast)
        self._weight_map |= dict.fromkeys(tensors, name)

    def finish(self) -> tuple[int, int]:
        """Writes the index; how many tensors, and their bytes."""
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
        return len(self._weight_map), self._total


def _groups(sizes: Mapping[T, int]) -> Iterator[list[T]]:
    """What has these sizes, in its order, `FILE_BYTES` together or less; what is larger is alone."""
    group: list[T] = []
    size = 0
    for name, more in sizes.items():
        if group and size + more > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    if group:
        yield group


def _copy_small(source: Path, target: Path, *, but: tuple[str, ...] = ()) -> None:
    for file in sorted(source.iterdir()):
        if file.suffix in SMALL and file.name not in (INDEX, *but):
            shutil.copy(file, target / file.name)
