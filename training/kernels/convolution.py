"""The short causal convolution, which mixes each token with the few before it of the same sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

from training.kernels import record
from training.kernels.contract import KernelError, outside_compile, refuse_unknown, segment_lengths
from training.kernels.packages import Machine, probe

WHAT = "convolution"


def by_sequence(reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The modelling file's own convolution, one sequence after the other."""

    @outside_compile
    def convolution(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        *,
        seq_idx: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """[1, D, T] to [1, D, T]; weight [D, width]; seq_idx int32[1, T]."""
        refuse_unknown(f"the {WHAT}", options)
        lengths = segment_lengths(cu_seqlens=None, seq_idx=seq_idx)
        record.note(WHAT, "lengths", lengths)
        parts = [
            reference(part, weight, bias, activation=activation) for part in torch.split(x, lengths, dim=2)
        ]
        return torch.cat(parts, dim=2)

    return convolution


def channel_last(x: torch.Tensor) -> torch.Tensor:
    """[B, D, T] with strides (D * T, 1, D) to the letter; copied only where memory is in another order.

    `contiguous` alone is not enough: where T or B is 1 it leaves that axis whatever stride it has. In one
    row of all elements it copies just what is not dense, as an expanded tensor, whose row has a stride of 0.
    """
    batch, channels, tokens = x.shape
    row = x.transpose(1, 2).reshape(-1).contiguous()
    return row.view(batch, tokens, channels).transpose(1, 2)


class _ChannelLastGradient(torch.autograd.Function):
    """Hands its input on, and the gradient back in the channel-last layout.

    causal-conv1d's backward takes a gradient of stride 1 between channels for channel-last. At T = 1 a
    contiguous gradient [1, D, 1] has that too (a layer that slices the output sends one), and is refused
    for its stride of 1 between tokens.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return channel_last(gradient)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The causal-conv1d package: x [1, D, T], weight [D, width], seq_idx int32[1, T].

    Its kernel reads `seq_idx` in the channel-last layout only, with strides that are multiples of 8. The
    layers hand over a transposed view, which is that layout already, unless it is a slice of a wider
    projection (Mamba-2): then it is copied, D * T elements, instead of computed without boundaries.
    """
    refuse_unknown(f"the {WHAT}", options)
    from causal_conv1d import causal_conv1d_fn

    out = record.launch(
        WHAT,
        "seq_idx",
        "seq_idx",
        causal_conv1d_fn,
        channel_last(x),
        weight,
        bias,
        seq_idx=seq_idx,
        activation=activation,
    )
    laid_out: torch.Tensor = _ChannelLastGradient.apply(out)  # type: ignore[no-untyped-call]
    return laid_out


def fla_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """flash-linear-attention's triton convolution: as above, with int32[N + 1] boundaries, in any layout."""
    refuse_unknown(f"the {WHAT}", options)
    from fla.modules.causal_conv1d import causal_conv1d as kernel

    out: torch.Tensor = record.launch(
        WHAT,
        "cu_seqlens",
        "cu_seqlens",
        kernel,
        x.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        cu_seqlens=cu_seq_lens_q,
    )[0]
    return out.transpose(1, 2)


def _channels(layer: Any) -> tuple[int, int]:
    weight = (layer.conv1d if hasattr(layer, "conv1d") else layer.conv).weight
    return weight.shape[0], weight.shape[2]


def choose(
    layer: torch.nn.Module,
    *,
    name: str,
    where: Machine,
    reference: Callable[..., torch.Tensor],
    passes_cu_seqlens: bool,
    wanted: str | None,
) -> tuple[str, Callable[..., torch.Tensor]]:
    """What computes the convolution of a layer here.

    Args:
        layer: A layer with a depthwise `conv1d` or `conv`.
        name: Its name in the model.
        where: The machine.
        reference: The modelling file's own function.
        passes_cu_seqlens: Whether the layer hands `cu_seq_lens_q` on to the function.
        wanted: "causal-conv1d" or "fla" to have that one; None for the first that serves.

    Raises:
        KernelError: none serves: each with its cause.
    """
    if where.device != "cuda":
        return "segment-walking reference", by_sequence(reference)
    causes = {}
    for choice, function in (("causal-conv1d", causal_conv1d), ("fla", fla_convolution)):
        if wanted not in (None, choice):
            continue
        cause = _unserved(choice, *_channels(layer), passes_cu_seqlens)
        if cause is None:
            return choice, function
        causes[choice] = cause
    raise KernelError(
        f"{name}: no fused convolution: {'; '.join(f'{key}: {cause}' for key, cause in causes.items())}. "
        'Install causal-conv1d>=1.7 or flash-linear-attention>=0.6, or write kernels = "reference"'
    )


def _unserved(choice: str, channels: int, width: int, passes_cu_seqlens: bool) -> str | None:
    package = probe("causal_conv1d" if choice == "causal-conv1d" else "fla")
    if package.cause is not None:
        return package.cause
    if choice == "fla":
        return None if passes_cu_seqlens else "this layer passes seq_idx alone, fla wants cu_seqlens"
    if package.version is not None and Version(package.version) < Version("1.7"):
        return (
            f"{package.version} reads out of bounds at some lengths (causal-conv1d issue 117), 1.7 does not"
        )
    if not 2 <= width <= 4:
        return f"takes widths 2 to 4, not {width}"
    return f"takes multiples of 8 channels, not {channels}" if channels % 8 else None
