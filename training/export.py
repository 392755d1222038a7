"""From a checkpoint to a directory that `AutoModelForCausalLM.from_pretrained` opens."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from training import checkpoint
from training.config import Model
from training.errors import InputError, OptionError, OutputError, writing
from training.files import INDEX, TRAINER, check_digests, tensor_sizes, weights_digest
from training.lora import exported_name, write_config
from training.model import difference, known_config, read_config, saved_config, skeleton, tied_names
from training.weights import default_names, match_weights

T = TypeVar("T")
FILE_BYTES = 4 * 2**30
"""A file of the export holds about so much; one file is what is in memory at a time."""

_TOKENIZER = "tokenizer_config.json"
_NOT_THE_TOKENIZERS = ("config.json", "generation_config.json", "adapter_config.json")
SMALL = (".json", ".jinja", ".txt", ".model", ".md")
"""Endings of what is copied beside the weights: configuration, tokenizer, template, generation settings."""


def export(
    source: str,
    out: str,
    *,
    tokenizer: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
) -> str:
    """Writes the weights of a checkpoint as safetensors, with what belongs to them.

    A model that began from a Hugging Face directory gets that directory's configuration and tokenizer, its
    names for the weights, and the weights that training left alone (a vision tower, multi-token heads).

    Args:
        source: A checkpoint, or a run directory, whose newest is taken.
        out: Directory to make; it appears when it is whole.
        tokenizer: Directory whose tokenizer files are copied; None takes those of the starting weights.
        dtype: Of the weights: "bfloat16", "float16", "float32"; None as the checkpoint has them.
        weights: Where the weights are now that the run began from; None means where they were.

    Returns:
        A line that says what was written, and whether the tokenizer is missing.

    Raises:
        InputError: no checkpoint, or no tokenizer there, or other weights or none where the run began.
        ResumeError: the checkpoint is damaged.
        OutputError: the output is there already, or the system refuses.
        OptionError: no such dtype, or one that can't hold a weight.
    """
    place = _checkpoint(Path(source))
    trainer = checkpoint.read_trainer(place)
    if weights and not trainer["base"]:
        raise InputError(f"{place}: the run began from random weights: leave --weights out")
    began = weights or trainer["config"]["model"]["weights"]
    if began or trainer["base"]:
        _check_start(began, trainer=trainer)
    check_digests(place)
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise OptionError(f"--dtype {dtype} is none of bfloat16, float16, float32")
    if tokenizer is not None and not (Path(tokenizer) / _TOKENIZER).exists():
        raise InputError(f"{tokenizer}: no {_TOKENIZER}; give a directory that holds a tokenizer")
    target = Path(out)
    if target.exists() or not target.name:
        raise OutputError(f"{target} exists: choose another name, or remove it")
    beside = target.with_name(f".{target.name}.partial")
    with writing(target):
        try:
            written = _write(place, beside, began=began, trainer=trainer, dtype=dtype)
            if tokenizer is not None:
                _copy_small(Path(tokenizer), beside, but=_NOT_THE_TOKENIZERS)
            os.replace(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    left_out = "" if (target / _TOKENIZER).exists() else "; no tokenizer copied: add --tokenizer DIR"
    return f"{place} exported to {target}: {written}{left_out}"


def _check_start(began: str, *, trainer: Mapping[str, Any]) -> None:
    """The weights that a run began from are there: names come from them, and what was not trained.

    Raises:
        InputError: others, none, or not their configuration.
    """
    if weights_digest(began) != trainer["base"]:
        here = f" (from {Path.cwd()})" if began and not Path(began).is_absolute() else ""
        raise InputError(
            f"{began or 'model.weights'}{here} does not hold the weights that the run began from, on which "
            "its export builds: add --weights DIR"
        )
    config = read_config(Model(weights=began), vocabulary=0).to_dict()
    if other := difference(trainer["model"], config, holder="the checkpoint"):
        raise InputError(
            f"{began}: config.json is another than when the run began ({other}): put its own there again, or "
            "add --weights DIR"
        )


def _write(place: Path, beside: Path, *, began: str, trainer: Mapping[str, Any], dtype: str | None) -> str:
    """Writes the weights and what lies beside the starting ones; says what that is."""
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)

    cast = getattr(torch, dtype) if dtype else None
    lora = trainer["config"]["lora"]
    if lora["rank"]:
        return _write_adapter(place, beside, lora=lora, weights=began, cast=cast)
    config = known_config(trainer["model"], holder=str(place))
    if began:
        _copy_small(Path(began), beside)
    else:
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(beside)

    model = skeleton(config, precision="fp32")
    names = match_weights(model, began) if began else default_names(model)
    tied = tied_names(model)
    files = _Files(beside, cast=cast)
    sizes = checkpoint.model_sizes(place)
    kept = {name: key for name, key in names.as_they_are.items() if name not in tied}
    for group in _groups({name: sizes[name] for name in kept}):
        files.add({kept[name]: value for name, value in checkpoint.read_model(place, group).items()})
    targets = {made: list(made.targets.values()) for made in names.made}
    for several in _groups({made: sum(sizes[name] for name in targets[made]) for made in names.made}):
        values = checkpoint.read_model(place, [name for made in several for name in targets[made]])
        apart: dict[str, Tensor] = {}
        for made in several:
            apart |= made.revert(model, {name: values.pop(name) for name in targets[made]})
        files.add(apart)
        del apart
    _say_dtype(beside / "config.json", files.dtype)
    left = set(names.left)  # by training: a vision tower, heads of several tokens
    for file in sorted({names.places[name] for name in left}):
        with safe_open(file, framework="pt") as stored:
            others = {name: size for name, size in tensor_sizes(file).items() if name in left}
            for several_left in _groups(others):
                files.add({name: stored.get_tensor(name) for name in several_left})
    return files.finish()


def _write_adapter(
    place: Path, beside: Path, *, lora: Mapping[str, Any], weights: str, cast: torch.dtype | None
) -> str:
    if not weights:
        raise InputError(f"{place} holds adapters of random weights, which no export could be added to")
    write_config(lora, weights=weights, out=beside)
    whole = _opened(weights)
    stored = checkpoint.read_model(place, list(checkpoint.model_sizes(place)))
    tensors = {exported_name(name, model=whole): value for name, value in stored.items()}
    size = sum(value.nbytes for value in _save(tensors, beside / "adapter_model.safetensors", cast=cast))
    return f"{len(tensors)} tensors for {type(whole).__name__}, {size / 2**20:.2f} MiB"


def _opened(weights: str) -> PreTrainedModel:
    """On meta, what users open: AutoModelForCausalLM's class where it knows one, or config.json's."""
    config = saved_config(weights)
    name = (config.architectures or [""])[0]
    cls: Any = getattr(transformers, name, None)
    with torch.device("meta"):
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        elif isinstance(cls, type) and getattr(cls, "config_class", None) is type(config):
            model = cls(config)
        else:
            raise InputError(
                f"{weights}: architectures name no class of transformers for {config.model_type}"
                f"{name and f', but {name}'}, so no adapter would open"
            )
    return model


def _save(tensors: Mapping[str, Tensor], file: Path, *, cast: torch.dtype | None) -> list[Tensor]:
    """Writes one file of the export; its tensors as they are there."""
    ready = {key: _cast(value, cast, name=key).contiguous() for key, value in tensors.items()}
    try:
        save_file(ready, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OutputError(
            f"{file}: the system refuses: {error}; make room, or choose another place"
        ) from error
    return list(ready.values())


def _cast(value: Tensor, dtype: torch.dtype | None, *, name: str) -> Tensor:
    """Plain floating numbers in another type; whole ones and quantized ones are left as they are.

    Raises:
        OptionError: a number is beyond what the type holds.
    """
    if dtype is None or value.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return value
    ready = value.to(dtype)
    if not ready.isfinite().all() and value.isfinite().all():
        most = torch.finfo(dtype).max
        raise OptionError(
            f"--dtype {dtype}: {name} holds {value.abs().max():g}, beyond its {most:g}: take another"
        )
    return ready


def _say_dtype(file: Path, dtype: torch.dtype) -> None:
    """config.json names the type in which transformers opens a model: that of what was trained."""
    config, name = json.loads(file.read_text("utf-8")), str(dtype).removeprefix("torch.")
    parts = [config, config.get("text_config") or {}]
    named = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if key in part]
    if named and all(part[key] == name for part, key in named):
        return  # as it was, to the letter
    for part, key in named or [(config, "dtype")]:
        part[key] = name
    file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


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
        self._number = 0
        self._bytes: Counter[torch.dtype] = Counter()
        self._weight_map: dict[str, str] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the next file. The caller keeps no name for the tensors, which are then freed at the end."""
        self._number += 1
        name = f"model-{self._number:05d}.safetensors"
        for value in _save(tensors, self._folder / name, cast=self._cast):
            self._bytes[value.dtype] += value.nbytes
        self._weight_map |= dict.fromkeys(tensors, name)

    @property
    def dtype(self) -> torch.dtype:
        """That of most of what was written so far."""
        return self._bytes.most_common(1)[0][0]

    def finish(self) -> str:
        """Writes the index; says how many tensors there are, and their bytes."""
        total = self._bytes.total()
        index = {"metadata": {"total_size": total}, "weight_map": self._weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
        return f"{len(self._weight_map)} tensors, {total / 2**30:.2f} GiB"


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
            try:
                content = file.read_bytes()
            except OSError as error:
                raise InputError(f"{file}: can't be read: {error.strerror or error}") from error
            (target / file.name).write_bytes(content)
