"""LoRA through PEFT: low-rank adapters beside frozen weights; they alone are trained, saved and exported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from training.config import Lora
from training.errors import InputError, OptionError, one_line

_BASE = ".base_layer"
_ADAPTER = ".default"
TEXT_PARTS = (("model.", "model.language_model."), ("", "language_model."))
"""Prefixes of a text model's names, and what those are in a model of several modalities: Qwen3.5, Gemma 3."""


def add_adapters(model: PreTrainedModel, *, lora: Lora) -> None:
    """Puts adapters beside linear layers of a model on meta and freezes all else.

    The model stays of its class. Adapters are fp32 beside weights of any type: a step of theirs is smaller
    than bf16 resolves.

    Raises:
        OptionError: PEFT is missing, or a target that names no linear layer, or the head.
    """
    config = _peft_config(lora)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in lora.targets:
        found = [name for name in names if name == target or name.endswith(f".{target}")]
        if not found:
            endings = sorted({name.rpartition(".")[2] for name in names} - {"lm_head"})
            raise OptionError(
                f"lora.targets: no linear layer is named {target}; there are {', '.join(endings)}"
            )
        if any(model.get_submodule(name) is model.get_output_embeddings() for name in found):
            raise OptionError(f"lora.targets: {target} is the head, whose loss is fused: leave it out")
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER[1:], low_cpu_mem_usage=True)
    except ValueError as error:  # PEFT knows of layers whose kernels take their weights past the adapter
        raise OptionError(f"lora.targets: PEFT refuses ({one_line(error)}): name other layers") from error
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, nn.Parameter(parameter.detach().float()))


def _peft_config(lora: Lora) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise OptionError("lora.rank needs PEFT: pip install peft") from error
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def initialise(half: nn.Module, *, name: str) -> None:
    """Gives the half of an adapter of that name its first values, as PEFT does: both's product is nothing."""
    assert isinstance(half, nn.Linear)
    if ".lora_A." in f"{name}.":
        nn.init.kaiming_uniform_(half.weight, a=math.sqrt(5))
    else:
        nn.init.zeros_(half.weight)


def own_name(name: str) -> str:
    """The name that a model's own parameter has without adapters."""
    return name.replace(_BASE, "")


def saved_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a model's state what a checkpoint holds: with adapters these alone."""
    adapters = {name: value for name, value in state.items() if is_adapter(name)}
    return adapters or dict(state)


def write_config(lora: Mapping[str, Any], *, weights: str, out: Path) -> None:
    """Writes the `adapter_config.json` that `PeftModel.from_pretrained` reads."""
    config = _peft_config(Lora(**{**lora, "targets": tuple(lora["targets"])}))
    config.base_model_name_or_path = weights
    config.inference_mode = True
    config.save_pretrained(out)


def exported_name(name: str, *, model: PreTrainedModel) -> str:
    """An adapter parameter's name in PEFT's files for a model that may hold the trained one as its text part.

    Raises:
        InputError: it has no such layer.
    """
    layer, half = re.split(r"(?=\.lora_[AB]\.)", name, maxsplit=1)
    layers = {found for found, _ in model.named_modules()}
    for own, there in (("", ""), *TEXT_PARTS):
        place = there + layer.removeprefix(own)
        if layer.startswith(own) and place in layers:
            return f"base_model.model.{place}{half.replace(_ADAPTER, '')}"
    raise InputError(f"{type(model).__name__} has no {layer}, so no adapter of that name would be taken")
