"""`packed_varlen`: causal attention within each sequence, as an attention implementation of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from training.kernels.contract import KernelError, segment_lengths

# transformers treats a name that contains "flash", "flex_attention" or "sdpa" in its own way. A name that the
# mask interface does not know gets no T x T mask and no sync.
FUSED = "packed_varlen"
REFERENCE = "packed_varlen_reference"


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
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with torch's `varlen_attn` on CUDA, and sequence by sequence on a CPU.

    Args:
        query: [1, H, T, d]; key and value [1, H_kv, T, d].
        sliding_window: A token sees itself and the `sliding_window - 1` before it; None sees all before.

    Returns:
        [1, T, H, d], and None for the weights.

    Raises:
        KernelError: no boundaries, a mask, or a feature that this kernel does not have.
    """
    return _by_sequence(
        module, query, key, value, scaling=scaling, sliding_window=sliding_window, cu_seqlens=cu_seq_lens_q
    )


def _by_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    outputs = []
    lengths = segment_lengths(cu_seqlens=cu_seqlens)
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    for q, k, v in parts:
        mask = None
        if sliding_window is not None and q.shape[2] > sliding_window:
            ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
            mask = ones.tril() & ones.triu(1 - sliding_window)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


__all__ = ["FUSED", "REFERENCE", "KernelError", "packed_varlen"]
