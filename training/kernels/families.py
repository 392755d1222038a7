"""The model families that are proven isolated, each with a tiny configuration that the proof runs on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from training.kernels import convolution, recurrence
from training.kernels.contract import KernelError

# Layer class -> its modelling file's globals that mix tokens -> what they compute. `UNFUSED` is the Mamba-2
# short cut from projection to output in one kernel: returning None from it makes the layer go the long way.
UNFUSED = "short cut"
_CONVOLUTION = {"causal_conv1d_fn": convolution.WHAT}
_DELTA_NET = {**_CONVOLUTION, "torch_chunk_gated_delta_rule": recurrence.DELTA_RULE}
_MAMBA_2 = {
    **_CONVOLUTION,
    "mamba2_chunk_scan": recurrence.STATE_SPACE,
    "mamba2_split_conv1d_scan_combined": UNFUSED,
}
MIXERS: Mapping[str, Mapping[str, str]] = {
    "Qwen3_5GatedDeltaNet": _DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": _DELTA_NET,
    "Qwen3NextGatedDeltaNet": _DELTA_NET,
    "OlmoHybridGatedDeltaNet": _DELTA_NET,
    "KimiLinearDeltaAttention": {**_CONVOLUTION, "chunk_kimi_delta_attention": recurrence.KIMI_DELTA},
    "BambaMixer": _MAMBA_2,
    "FalconH1Mixer": _MAMBA_2,
    "GraniteMoeHybridMambaLayer": _MAMBA_2,
    "NemotronHMamba2Mixer": _MAMBA_2,
    "Lfm2ShortConv": _CONVOLUTION,
    "Lfm2MoeShortConv": _CONVOLUTION,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        name: As people say it.
        architecture: The class in transformers.
        model_type: Of its configuration.
        mixes: How its layers mix tokens, for the table.
        experts: Whether it routes tokens to experts.
        tiny: Arguments of a configuration small enough for a CPU.
        heads: Arguments on top of `tiny` with head sizes as published models have them, which is what
            the kernels of CUDA are made for.
    """

    name: str
    architecture: str
    model_type: str
    mixes: str
    experts: bool
    tiny: Mapping[str, Any] = field(repr=False)
    heads: Mapping[str, Any] = field(repr=False)


_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 65536, "initializer_range": 0.2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_TWO = {**_SIZES, "num_hidden_layers": 2}
_HYBRID = {
    **_SIZES, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 8}
_MAMBA = {
    **_TWO, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip
_WINDOW = {**_TWO, "head_dim": 8, "sliding_window": 16}
_ALTERNATING = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_KIMI = {
    **_HYBRID, "num_key_value_heads": 4, "moe_intermediate_size": 16, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_experts_per_tok": 2,
    "num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4,
}  # fmt: skip
_NEMOTRON = {
    **_SIZES, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "head_dim": 8, "ssm_state_size": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


_WIDE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
_GDN_HEADS = {
    **_WIDE, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48,  # others take tilelang minutes
}  # fmt: skip
_OLMO_HEADS = {**_WIDE, "linear_key_head_dim": 96, "linear_value_head_dim": 192, "hidden_size": 512}
_KIMI_HEADS = {
    **_WIDE, "linear_head_dim": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128,
}  # fmt: skip
_MAMBA_HEADS = {
    **_WIDE, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 256,
}  # fmt: skip
_NEMOTRON_HEADS = {**_WIDE, "head_dim": 128, "ssm_state_size": 128, "mamba_head_dim": 64, "chunk_size": 128}
_HEAD_64, _HEAD_128, _HEAD_256 = ({**_WIDE, "head_dim": size} for size in (64, 128, 256))
_WINDOW_1024 = {"sliding_window": 1024}

_GDN = "gated delta net, attention"
_SSD = "Mamba-2, attention"
_SWA = "attention with sliding window"
_MULTIMODAL = {"text_config": {**_HYBRID, "head_dim": 8}, "vision_config": _VISION}
_MULTIMODAL_EXPERTS = {"text_config": {**_HYBRID, **_SHARED}, "vision_config": _VISION}
_GRANITE = {
    **_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 16,
}  # fmt: skip
_LFM2 = {**_TWO, "layer_types": ["conv", "full_attention"]}
_GPT_OSS = {
    **_ALTERNATING,
    "max_position_embeddings": 131072,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_TABLE: tuple[tuple[str, str, str, str, bool, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("Qwen3.5", "Qwen3_5ForCausalLM", "qwen3_5_text", _GDN, False, {**_HYBRID, "head_dim": 8}, _GDN_HEADS),
    (
        "Qwen3.5, multimodal class with text", "Qwen3_5ForConditionalGeneration", "qwen3_5", _GDN, False,
        _MULTIMODAL, {"text_config": {**_MULTIMODAL["text_config"], **_GDN_HEADS}},
    ),
    (
        "Qwen3.5-MoE", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _GDN, True,
        {**_HYBRID, **_SHARED}, _GDN_HEADS,
    ),
    (
        "Qwen3.5-MoE, multimodal class with text", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _GDN,
        True, _MULTIMODAL_EXPERTS, {"text_config": {**_MULTIMODAL_EXPERTS["text_config"], **_GDN_HEADS}},
    ),
    ("Qwen3-Next", "Qwen3NextForCausalLM", "qwen3_next", _GDN, True, {**_HYBRID, **_SHARED}, _GDN_HEADS),
    ("OLMo-hybrid", "OlmoHybridForCausalLM", "olmo_hybrid", _GDN, False, _HYBRID, _OLMO_HEADS),
    (
        "Kimi-linear", "KimiLinearForCausalLM", "kimi_linear", "Kimi delta attention, latent attention", True,
        _KIMI, _KIMI_HEADS,
    ),
    ("Bamba", "BambaForCausalLM", "bamba", _SSD, False, {**_MAMBA, "attn_layer_indices": [1]}, _MAMBA_HEADS),
    (
        "Falcon-H1", "FalconH1ForCausalLM", "falcon_h1", _SSD, False,
        {**_MAMBA, "mamba_d_ssm": 64}, {**_MAMBA_HEADS, "mamba_d_ssm": 512},
    ),
    (
        "Granite-MoE-hybrid", "GraniteMoeHybridForCausalLM", "granitemoehybrid", _SSD, True,
        _GRANITE, _MAMBA_HEADS,
    ),
    ("Nemotron-H", "NemotronHForCausalLM", "nemotron_h", _SSD, True, _NEMOTRON, _NEMOTRON_HEADS),
    ("LFM2", "Lfm2ForCausalLM", "lfm2", "short convolution, attention", False, _LFM2, _WIDE),
    (
        "LFM2-MoE", "Lfm2MoeForCausalLM", "lfm2_moe", "short convolution, attention", True,
        {**_LFM2, **_EXPERTS, "num_dense_layers": 1}, _WIDE,
    ),
    ("Llama", "LlamaForCausalLM", "llama", "attention", False, _TWO, _HEAD_128),
    ("Qwen2", "Qwen2ForCausalLM", "qwen2", "attention", False, _TWO, _WIDE),
    ("Qwen3", "Qwen3ForCausalLM", "qwen3", "attention", False, {**_TWO, "head_dim": 8}, _HEAD_128),
    (
        "Qwen3-MoE", "Qwen3MoeForCausalLM", "qwen3_moe", "attention", True,
        {**_TWO, **_EXPERTS, "head_dim": 8}, _HEAD_128,
    ),
    ("Gemma 3", "Gemma3ForCausalLM", "gemma3_text", _SWA, False, _ALTERNATING, {**_HEAD_256, **_WINDOW_1024}),
    ("Mistral", "MistralForCausalLM", "mistral", _SWA, False, _WINDOW, {**_HEAD_128, **_WINDOW_1024}),
    (
        "gpt-oss", "GptOssForCausalLM", "gpt_oss", "attention with sliding window and sinks", True,
        _GPT_OSS, _HEAD_64,
    ),
    ("Phi", "PhiForCausalLM", "phi", "attention", False, _TWO, {**_WIDE, "hidden_size": 320}),
    ("Phi-3", "Phi3ForCausalLM", "phi3", "attention", False, _TWO, {**_WIDE, "hidden_size": 384}),
)  # fmt: skip
FAMILIES = tuple(
    Family(
        name=name, architecture=architecture, model_type=model_type, mixes=mixes, experts=experts, tiny=tiny,
        heads=heads,
    )
    for name, architecture, model_type, mixes, experts, tiny, heads in _TABLE
)  # fmt: skip
ARCHITECTURES = frozenset(family.architecture for family in FAMILIES)


def build(config: Any, architecture: str, *, device: str = "cpu", seed: int = 0) -> Any:
    """An fp32 model with random weights, the same for the same seed, in evaluation mode.

    It has its own copy of the configuration: binding writes the attention into it.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        return getattr(transformers, architecture)(copy.deepcopy(config)).eval()


def tiny_config(family: Family, *, real_heads: bool = False) -> Any:
    """The family's tiny configuration, its heads tiny or as published."""
    arguments = {**family.tiny, **family.heads} if real_heads else family.tiny
    return transformers.AutoConfig.for_model(family.model_type, **arguments)


def tiny(family: Family, *, seed: int = 0) -> Any:
    """The family's tiny model on the CPU, as from `build`."""
    return build(tiny_config(family), family.architecture, seed=seed)


def few_layers(config: Any) -> Any:
    """A configuration of the same widths with the fewest first layers that hold every kind of layer.

    The vocabulary is cut to 1,024 words and vision to one layer: neither mixes text tokens.
    """
    values = config.to_dict()
    text = values.get("text_config", values)
    text |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    text["vocab_size"] = min(text["vocab_size"], 1024)
    layers = config.get_text_config().num_hidden_layers
    lists = [key for key, value in text.items() if isinstance(value, list) and len(value) == layers]
    kinds = list(zip(*(map(str, text[key]) for key in lists), strict=True)) or [()] * layers
    count = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)))
    if indices := text.get("attn_layer_indices"):
        count = max(count, indices[0] + 1)
        text["attn_layer_indices"] = [index for index in indices if index < count]
    text |= {key: text[key][:count] for key in lists}
    if "num_hidden_layers" in text:  # Nemotron-H counts its list instead
        text["num_hidden_layers"] = count
    if "vision_config" in values:
        values["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": []}
    return type(config).from_dict(values)


def architecture_of(config: Any) -> str:
    """The model class that a configuration asks for, or the family's for its model type.

    Raises:
        KernelError: no class that is proven isolated.
    """
    for name in config.architectures or ():
        if name in ARCHITECTURES:
            return str(name)
    for family in FAMILIES:
        if family.model_type == config.model_type:
            return family.architecture
    known = ", ".join(sorted({family.model_type for family in FAMILIES}))
    raise KernelError(f"model type {config.model_type!r} is not among those proven isolated ({known})")
