"""From a configuration to a model: on meta first, then random values block by block."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
import zlib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from training.config import Model, Precision
from training.errors import InputError, OptionError, one_line
from training.lora import initialise, is_adapter
from training.packed import local_only

TINY: dict[str, dict[str, Any]] = {
    # Three gated-delta-net layers and one of attention: each kind of layer that Qwen3.5 has.
    "tiny-qwen3_5": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": True,
    },
}


_INCIDENTAL = frozenset({
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "tokenizer_class", "transformers_version", "use_cache", "_name_or_path",
})  # fmt: skip
"""Of a configuration what is no part of the mathematics."""
_BAD_CONFIG = (
    OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, StrictDataclassError,
)  # fmt: skip
"""What transformers raises: much of what it computes from a bad value it does not check first."""


def read_config(model: Model, *, vocabulary: int) -> PretrainedConfig:
    """The text model's configuration. The built-in tiny ones take the shards' vocabulary.

    Raises:
        InputError: no such file, no configuration of a language model that transformers knows, or one of a
            quantized model.
    """
    place = model.weights or model.config
    if is_built_in(model.config):
        return AutoConfig.for_model(**TINY[model.config], vocab_size=vocabulary)
    if not Path(place).exists():  # transformers would ask the Hub
        hint = "" if model.weights else f"; built in are {', '.join(TINY)}"
        raise InputError(f"{place}: no such file or directory{hint}")
    config = saved_config(place)
    if model.weights and (other := getattr(config, "transformers_weights", None)):
        raise InputError(f"{place}: transformers_weights names {other}: call that file model.safetensors")
    text: PretrainedConfig = config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{place}: transformers has no causal language model for {text.model_type}")
    for key, part in itertools.product(("quantization_config", "compression_config"), (config, text)):
        if found := getattr(part, key, None):
            method = found.get("quant_method") if isinstance(found, dict) else type(found).__name__
            raise InputError(
                f"{place}: its weights are quantized ({key}: {method}), and training takes plain ones: "
                "give the model's bf16 weights, or write such with transformers' dequantize()"
            )
    if config.tie_word_embeddings != text.tie_word_embeddings:
        raise InputError(
            f"{place}: tie_word_embeddings is {config.tie_word_embeddings} for the model and "
            f"{text.tie_word_embeddings} for its text part, so classes disagree on whether it has a head of "
            "its own: make config.json say the same in both places, as the weights are"
        )
    return text


def is_built_in(name: str, *, among: Container[str] = TINY) -> bool:
    """Whether a name means a model that needs no files: a file or folder of that name comes first."""
    return name in among and not Path(name).exists()


def saved_config(place: str) -> PretrainedConfig:
    """The configuration that a model's folder, a config.json or a model on the Hub holds.

    Raises:
        InputError: none that transformers knows and takes.
    """
    local = local_only(place, "config.json")
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=local)
    except _BAD_CONFIG as error:
        raise InputError(
            f"{place} has no configuration that transformers reads ({one_line(error)}): give a model's "
            "folder, its config.json or its name on the Hub"
        ) from error


def known_config(values: Mapping[str, Any], *, holder: str) -> PretrainedConfig:
    """A text model's configuration from what another run, or another version of transformers, wrote.

    Raises:
        InputError: this version does not know or take it.
    """
    try:
        return AutoConfig.for_model(**values)
    except _BAD_CONFIG as error:
        reason = one_line(error).partition(". ")[0][:200]
        raise InputError(
            f"{holder} is of a model that is not known here{_versions(values)}: {reason}"
        ) from error


def _versions(values: Mapping[str, Any]) -> str:
    """Which transformers wrote a configuration, where it was another."""
    wrote, now = values.get("transformers_version"), transformers.__version__
    return "" if wrote == now else f" (saved with transformers {wrote}, now {now})"


def difference(saved: Mapping[str, Any], here: Mapping[str, Any], *, holder: str) -> str:
    """The first setting in which a saved configuration and another are other models; "" where none is.

    Compared as this version of transformers writes them, which may name its defaults otherwise.

    Raises:
        InputError: as `known_config`.
    """
    before, after = (
        json.loads(json.dumps(known_config(values, holder=holder).to_dict())) for values in (saved, here)
    )
    for key in sorted(before.keys() | after.keys(), key=lambda key: (key != "model_type", key)):
        if key not in _INCIDENTAL and before.get(key) != after.get(key):
            return f"its {key} is {before.get(key)!r}, here {after.get(key)!r}{_versions(saved)}"
    return ""


def skeleton(config: PretrainedConfig, *, precision: Precision) -> PreTrainedModel:
    """The model on the meta device: shapes and types, no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    if precision != "fp32":
        for module in model.modules():
            if _is_norm(module):
                module.register_forward_hook(_in_bf16)
    if precision == "bf16":
        islands = whole(model, model=model)
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in islands:
                    setattr(module, name, nn.Parameter(parameter.bfloat16(), parameter.requires_grad))
        model.tie_weights()
    return model


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, by the class names that the model says not to split.

    Raises:
        OptionError: the model names none.
    """
    names = set(model._no_split_modules or ())
    # Along the classes it derives from: binding, compiling and sharding all put a subclass in front.
    found = [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
    if not found:
        raise OptionError(f"{type(model).__name__} names no layers to shard (_no_split_modules)")
    return found


def freeze(model: PreTrainedModel, *, patterns: Sequence[str]) -> None:
    """Leaves parameters out of training whose names match one of the patterns.

    Raises:
        OptionError: a pattern that matches nothing, or nothing left to train.
    """
    for pattern in patterns:
        found = [p for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise OptionError(
                f"model.freeze: {pattern!r} matches no parameter; there are "
                f"{', '.join(name for name, _ in itertools.islice(model.named_parameters(), 3))}, …"
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError("model.freeze leaves nothing to train")


def whole(module: nn.Module, *, model: PreTrainedModel) -> set[nn.Parameter]:
    """The parameters that stay fp32 beside bf16 ones: norms, the delta rule's A_log and dt_bias, routers.

    A rounded A_log is exponentiated and then multiplied up along the sequence; routers are those that
    transformers keeps so under all circumstances. All together are less than a thousandth of a model.

    Args:
        module: The model or a part of it.
        model: Says which names it wants in fp32.
    """
    strict = "|".join(rf"(?:^|\.){name}(?:$|\.)" for name in model._keep_in_fp32_modules_strict or ())
    return {
        parameter
        for place, child in module.named_modules()
        for name, parameter in child.named_parameters(recurse=False)
        if _is_norm(child)
        or name in ("A_log", "dt_bias")
        or (strict and re.search(strict, f"{place}.{name}"))
    }


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def _in_bf16(module: nn.Module, args: Any, output: Any) -> Any:
    """Some norms multiply by their weight last, or are given its type: fp32, before matrices in bf16."""
    return output.bfloat16() if isinstance(output, Tensor) else output


def materialise(module: nn.Module, *, model: PreTrainedModel, device: torch.device, seed: int) -> None:
    """Random values for what is still on meta in a module: the same on any number of ranks.

    Raises:
        OptionError: the model's own initialisation leaves a parameter or buffer without value.
    """
    names = {child: name for name, child in model.named_modules()}
    fresh = {child for child in module.modules() if any(tensor.is_meta for _, tensor in _own(child))}
    for child in fresh:
        child.to_empty(device=device, recurse=False)
        for _, tensor in _own(child):
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
    # As transformers goes about it, a module after all that it holds: some give their children's weights.
    for child in reversed(list(module.modules())):
        name = names.get(child)
        if name is None or fresh.isdisjoint(child.modules()):
            continue
        torch.manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
        with torch.no_grad():
            if child in fresh and is_adapter(f"{name}."):
                initialise(child, name=name)
            else:
                model._init_weights(child)
    ready = [
        (f"{names[child]}.{key}", tensor)
        for child in fresh
        for key, tensor in child.named_parameters(recurse=False)
    ]
    # The whole model comes last: only then has a decoder given its layers the buffers that are for all alike.
    if model in module.modules():
        ready += model.named_buffers()
    for name, tensor in ready:
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise OptionError(f"{type(model).__name__} gives {name} no initial value")
    model.tie_weights()


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers that are a module's own, not its children's."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameters that are another one, by name."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def ends(model: PreTrainedModel) -> list[nn.Module]:
    """The embedding and the head; none where they share their weight."""
    found = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [] if found[0].weight is found[1].weight else found
