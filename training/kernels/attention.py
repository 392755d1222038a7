"""`packed_varlen`: causal attention within each sequence, as an attention implementation of transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from training.kernels import record
from training.kernels.contract import (
    KernelError,
    Unsupported,
    outside_compile,
    refuse_unknown,
    segment_lengths,
)
from training.kernels.packages import Machine

# transformers treats names that contain "flash", "flex_attention" or "sdpa" in its own way. A name that its
# mask interface does not know gets no T x T mask and no sync.
FUSED = "packed_varlen"
REFERENCE = "packed_varlen_reference"

# torch 2.13 wants the flag, 2.11 has no such parameter and takes unequal head counts as they are.
_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_NO_WINDOW = "FlashAttention 4 can't train with a sliding window: choose FA2 or FA3"


def register() -> None:
    """Makes both implementations known to transformers by name; changes no model."""
    AttentionInterface.register(FUSED, packed_varlen)
    AttentionInterface.register(REFERENCE, packed_varlen_reference)


def packed_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by torch's `varlen_attn` on CUDA, sequence by sequence on a CPU.

    Args:
        module: The attention layer.
        query: [1, H, T, d]; key [1, H_kv, T, d] and value [1, H_kv, T, d_v], where H_kv divides H.
        scaling: Factor of the scores; None means d ** -0.5.
        sliding_window: A token sees itself and the `sliding_window - 1` before it; None: all before it.
        softcap: Scores become softcap * tanh(score / softcap). Not on CUDA.
        s_aux: [H], the sinks: one more score a head that takes weight and gives no value. Not on CUDA.
        cu_seq_lens_q: int32[N + 1].
        max_length_q: The longest sequence.

    Returns:
        [1, T, H, d_v], and None for the weights.

    Raises:
        KernelError: no boundaries, a mask, a cache, dropout, or a feature that is not known here.
    """
    _refuse(module, query, key, attention_mask, dropout, cu_seq_lens_q, features)
    if query.is_cuda:
        _refuse_fused(module, query, softcap, s_aux, sliding_window)
        return _varlen(query, key, value, scaling, sliding_window, cu_seq_lens_q, max_length_q), None
    return _by_sequence(
        module, query, key, value, scaling, sliding_window, softcap, s_aux, cu_seq_lens_q
    ), None


def packed_varlen_reference(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """The same, sequence by sequence on every device and in every dtype."""
    _refuse(module, query, key, attention_mask, dropout, cu_seq_lens_q, features)
    return _by_sequence(
        module, query, key, value, scaling, sliding_window, softcap, s_aux, cu_seq_lens_q
    ), None


def _name(module: torch.nn.Module) -> str:
    return str(getattr(module, "packed_name", type(module).__name__))


def _refuse(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    cu_seqlens: torch.Tensor | None,
    features: dict[str, Any],
) -> None:
    name = _name(module)
    if cu_seqlens is None:
        raise KernelError(
            f"{name}: attention was called without cu_seq_lens_q: give the model a batch of `collate`"
        )
    if attention_mask is not None:
        raise KernelError(f"{name}: an attention mask reached packed attention; leave it out of the batch")
    if key.shape[2] != query.shape[2]:
        raise KernelError(f"{name}: {key.shape[2]} keys for {query.shape[2]} queries: pass use_cache=False")
    if dropout:
        raise Unsupported(f"{name}: attention dropout {dropout} is not supported: set attention_dropout to 0")
    if features.pop("is_causal", None) is False:
        raise Unsupported(f"{name}: attention that is not causal is not supported")
    refuse_unknown(f"{name}: attention", features)


def _refuse_fused(
    module: torch.nn.Module,
    query: torch.Tensor,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    window: int | None,
) -> None:
    name, width = _name(module), query.shape[3]
    if s_aux is not None:
        raise Unsupported(f"{name}: torch's varlen attention has no sinks: bind with kernels='reference'")
    if softcap is not None:
        raise Unsupported(f"{name}: torch's varlen attention has no softcap: bind with kernels='reference'")
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"{name}: torch's varlen attention takes bf16 and fp16, not {query.dtype}")
    if window is not None and current_flash_attention_impl() == "FA4":
        raise KernelError(f"{name}: {_NO_WINDOW}")
    if width > 256 or width % 8:
        raise Unsupported(f"{name}: torch's varlen attention takes head dims of 8, 16, … 256, not {width}")


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    cu_seqlens: torch.Tensor | None,
    max_length: int | None,
) -> torch.Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if (narrower := q.shape[2] - v.shape[2]) > 0:  # latent attention: one kernel wants one width
        v = F.pad(v, (0, narrower))
    out: torch.Tensor = record.launch(
        "attention",
        "cu_seqlens",
        "cu_seq_q",
        varlen_attn,
        q,
        k,
        v,
        cu_seq_q=cu_seqlens,
        cu_seq_k=cu_seqlens,
        max_q=max_length,
        max_k=max_length,
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        **_GQA,
    )
    return out[None, :, :, : value.shape[3]]


@outside_compile
def _by_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    try:
        lengths = segment_lengths(cu_seqlens=cu_seqlens)
    except KernelError as error:
        raise KernelError(f"{_name(module)}: {error}") from error
    record.note("attention", "lengths", lengths)
    outputs = []
    for q, k, v in zip(*(torch.split(t, lengths, dim=2) for t in (query, key, value)), strict=True):
        tokens = q.shape[2]
        seen = None
        if softcap is not None or sinks is not None or (window is not None and tokens > window):
            ones = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
            seen = ones.tril() if window is None else ones.tril() & ones.triu(1 - window)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True
            )
        else:
            out = _written_out(q, k, v, scaling, seen, softcap, sinks)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    seen: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence with what sdpa does not have; T x T scores, so for references alone."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    weights = torch.softmax(scores, dim=3, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : k.shape[2]].to(v.dtype) @ v


def choose(layer: torch.nn.Module, *, name: str, where: Machine, wanted: str | None) -> str:
    """Checks that an attention layer can be computed here; returns what computes it. Changes nothing.

    Args:
        layer: The attention layer.
        name: Its name in the model.
        where: The machine.
        wanted: "FA2", "FA3" or "FA4" on CUDA, see `activate`; None for the one that is active.

    Raises:
        KernelError: attention that is not causal, has dropout, or that the wanted kernel can't compute.
    """
    if not getattr(layer, "is_causal", True):
        raise Unsupported(f"{name}: attention in both directions is not supported")
    if dropout := getattr(layer, "attention_dropout", 0.0):
        raise Unsupported(f"{name}: attention dropout {dropout} is not supported: set attention_dropout to 0")
    if where.device != "cuda":
        return "sdpa, sequence by sequence"
    if where.capability < (8, 0):
        raise KernelError(
            f"{name}: torch's varlen attention needs compute capability 8.0, not {where.capability}"
        )
    if getattr(layer, "sinks", None) is not None:
        raise Unsupported(f"{name}: torch's varlen attention has no sinks: bind with kernels='reference'")
    kernel = wanted or current_flash_attention_impl() or "FA2"
    # Most layers know their window, Mistral's asks the configuration at each call.
    config = getattr(layer, "config", None)
    if kernel == "FA4" and getattr(layer, "sliding_window", getattr(config, "sliding_window", None)):
        raise KernelError(f"{name}: {_NO_WINDOW}")
    return f"torch varlen_attn ({kernel})"


def activate(wanted: str) -> None:
    """Switches torch's flash attention for the whole process: torch has one switch only.

    Args:
        wanted: "FA3" or "FA4", or "FA2", which torch brings along, to switch back.

    Raises:
        KernelError: it is not installed, or not for this GPU.
    """
    if wanted == "FA2":
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        return
    try:
        activate_flash_attention_impl(wanted)
    except (ImportError, ValueError, RuntimeError) as error:
        raise KernelError(f"attention: {wanted} can't be used: {error}") from error
