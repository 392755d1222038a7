"""From a configuration or a Hugging Face directory to a model: on meta first, values block by block."""

from __future__ import annotations

import fnmatch
import itertools
import re
import zlib
from collections.abc import Container, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from training.config import Model, Precision
from training.errors import InputError, OptionError, one_line
from training.lora import initialise, is_adapter, own_name
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

_PLAIN = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the types whose numbers are the weights themselves."""
_ROWS = 4096  # of a matrix that are read at once
_QUANTIZED = "the weights are quantized, and training takes plain ones: give the model's bf16 weights"


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
    # Much of what transformers computes from a bad value it does not check first.
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, StrictDataclassError) as error:
        raise InputError(
            f"{place} has no configuration that transformers reads ({one_line(error)}): give a model's "
            "folder, its config.json or its name on the Hub"
        ) from error


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
        islands = whole(model)
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


def whole(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that stay fp32 beside bf16 ones: norms, and the delta rule's A_log and dt_bias.

    A rounded A_log is exponentiated and then multiplied up along the sequence; all of them together
    are less than a ten-thousandth of a model.
    """
    return {
        parameter
        for child in module.modules()
        for name, parameter in child.named_parameters(recurse=False)
        if _is_norm(child) or name in ("A_log", "dt_bias")
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


def _equal(places: Mapping[str, Path], one: str, other: str) -> bool:
    """Whether two stored matrices are the same numbers; read in parts."""
    with (
        safe_open(places[one], framework="pt") as first,
        safe_open(places[other], framework="pt") as second,
    ):
        rows, others = first.get_slice(one), second.get_slice(other)
        if rows.get_shape() != others.get_shape():
            return False
        return all(
            torch.equal(rows[start : start + _ROWS], others[start : start + _ROWS])
            for start in range(0, rows.get_shape()[0], _ROWS)
        )


def load_weights(model: PreTrainedModel, directory: str, *, stored: Mapping[str, str]) -> None:
    """Reads safetensors straight into the shards: each rank reads its own slices alone.

    Args:
        model: Sharded.
        directory: Of the safetensors.
        stored: From `match_weights`.
    """
    state = model.state_dict()
    wanted = {key: state[name] for name, key in stored.items()}
    load_tensors(wanted, storage_reader=HuggingFaceStorageReader(directory))


def match_weights(model: PreTrainedModel, directory: str) -> dict[str, str]:
    """The name under which each of the model's tensors is stored: from headers, so the model may be on meta.

    What is tied and stored twice is compared, so read whole.

    Raises:
        InputError: no safetensors, damaged ones, a name in two of them, tied parameters that differ, a
            parameter that they do not hold in that shape, or one whose numbers are not the weight itself:
            quantized, scaled or with a bias that the model has not.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise InputError(f"{directory}: no *.safetensors files to load weights from")
    types: dict[str, str] = {}
    places: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:  # reads the header, and the length against it
                here = {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(f"{file}: damaged or cut off: {error}; download it again") from error
        if twice := sorted(types.keys() & here):
            raise InputError(
                f"{directory}: {twice[0]} is in {places[twice[0]].name} and in {file.name}: take away the "
                "file that does not belong to the model"
            )
        types |= here
        places |= dict.fromkeys(here, file)
    # Types that torch's reader has no name for, as F4 and F8_E8M0, would end it with a KeyError.
    if odd := [key for key, kind in types.items() if kind.startswith("F") and kind not in _PLAIN]:
        raise InputError(f"{directory}: {odd[0]} is stored as {types[odd[0]]}: {_QUANTIZED}")
    reader = HuggingFaceStorageReader(directory)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: own_name(first[parameter]) for name, parameter in every if first[parameter] != name}
    wanted: dict[str, str] = {}
    missing = []
    for full_name, tensor in model.state_dict().items():
        if is_adapter(full_name):
            continue
        name = own_name(full_name)
        # Conditional-generation checkpoints keep the text model under another prefix.
        names = [name, name.replace("model.", "model.language_model.", 1)]
        found = next((key for key in names if key in stored), None)
        if full_name in tied and found is not None:
            one = tied[full_name]
            names = [one, one.replace("model.", "model.language_model.", 1)]
            other = next((key for key in names if key in stored), None)
            if other is not None and not _equal(places, found, other):
                raise InputError(
                    f"{directory}: {found} and {other} are tied by config.json, and differ in the "
                    "safetensors: set tie_word_embeddings to false there, or take one of them out"
                )
        if found is not None:
            if stored[found].size != tensor.size():
                raise InputError(
                    f"{directory}: {found} is of {list(stored[found].size)} in the safetensors, of "
                    f"{list(tensor.size())} by config.json: one of them belongs to another model"
                )
            if tensor.is_floating_point() and types[found] not in _PLAIN:
                raise InputError(f"{directory}: {found} is stored as {types[found]}: {_QUANTIZED}")
            wanted[full_name] = found
        elif full_name not in tied:
            missing.append(name)
    if missing:
        raise InputError(
            f"{directory}: {len(missing)} of {len(wanted) + len(missing)} parameters of "
            f"{type(model).__name__} are not in the safetensors under that name, among them {missing[0]}"
        )
    taken = set(wanted.values())
    _check_all_taken(types.keys() - taken, taken=taken, model=model, directory=directory)
    return wanted


def _check_all_taken(left: Set[str], *, taken: Set[str], model: PreTrainedModel, directory: str) -> None:
    """Nothing is left that lies beside a parameter that was taken: a scale, or a bias that changes it.

    What is left elsewhere, such as a vision tower or heads of several tokens, changes no weight that trains.

    Raises:
        InputError: names the first.
    """
    beside = {name.rpartition(".")[0] for name in taken} | taken
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    for key in sorted(left):
        if key.rpartition(".")[0] in beside and not any(re.search(pattern, key) for pattern in ignored):
            raise InputError(
                f"{directory}: {key} is in the safetensors, and {type(model).__name__} by config.json has no "
                f"place for it: either it belongs to another model, or {_QUANTIZED}"
            )


def ends(model: PreTrainedModel) -> list[nn.Module]:
    """The embedding and the head; none where they share their weight."""
    found = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [] if found[0].weight is found[1].weight else found
