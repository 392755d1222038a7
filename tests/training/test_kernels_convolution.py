"""causal-conv1d's layout: what its C++ accepts, forward and backward, on a CPU and (marked) on a GPU."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from training.kernels import convolution, make_batch

CHANNELS, WIDTH = 16, 4


def as_it_comes(y: torch.Tensor) -> torch.Tensor:
    return y


def sliced(y: torch.Tensor) -> torch.Tensor:
    """As OLMo-hybrid slices the output: its backward makes a contiguous [1, D, T]."""
    return y[:, :, -y.shape[2] :]


def expanded(y: torch.Tensor) -> torch.Tensor:
    """A gradient of strides 0."""
    return y.sum(dim=(1, 2), keepdim=True).expand_as(y)


USES = pytest.mark.parametrize("use", [as_it_comes, sliced, expanded], ids=lambda use: use.__name__)


def accept(tensor: torch.Tensor) -> None:
    """The conditions of causal-conv1d 1.7's C++ for a tensor in the channel-last layout."""
    assert tensor.stride(1) == 1, "not channel-last"
    assert tensor.stride(2) > 1, "not channel-last"
    assert tensor.stride(0) % 8 == 0, "requires strides to be multiples of 8"
    assert tensor.stride(2) % 8 == 0, "requires strides to be multiples of 8"


class Strict(torch.autograd.Function):
    """A causal convolution of one sequence as strict about layouts as the package's, which transposes a
    gradient only where its stride between channels is not 1, and whose Python, before that, makes one
    contiguous that has no stride of 1 at all: at T = 1 this gives it one, between the only token and none.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        accept(x)
        ctx.save_for_backward(x, weight)
        return convolve(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if gradient.stride(2) != 1 and gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        if gradient.stride(1) == 1:
            accept(gradient)
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(convolve(x, weight), (x, weight), gradient)


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], groups=len(weight))


def strict_package() -> types.ModuleType:
    package = types.ModuleType("causal_conv1d")

    def causal_conv1d_fn(x: torch.Tensor, weight: torch.Tensor, bias: None, **_: Any) -> torch.Tensor:
        return Strict.apply(x, weight)

    package.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    return package


def gradients(
    function: Callable[..., torch.Tensor], use: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor,
    weight: torch.Tensor, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The output and the gradients of input and weight, of a layer that passes a transposed view."""
    out = use(function(x.transpose(1, 2), weight, None, **options))
    pull = torch.linspace(0.5, 2, out.numel(), device=x.device).view(out.shape).to(x.dtype)
    return [out, *torch.autograd.grad((out * pull).sum(), (x, weight))]


def drawn(tokens: int, channels: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Input [1, T, D] and weight, positive so that no sum cancels and a relative distance says something."""
    draw = torch.Generator().manual_seed(tokens)
    x = torch.rand(1, tokens, channels, generator=draw).to(**options).requires_grad_()
    weight = torch.rand(channels, WIDTH, generator=draw).to(**options).requires_grad_()
    return x, weight


@USES
@pytest.mark.parametrize("tokens", [1, 2, 63, 64])
def test_every_layout_is_accepted(
    tokens: int, use: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of tokens and the gradient's layout, the kernel gets what its C++ accepts."""
    monkeypatch.setitem(sys.modules, "causal_conv1d", strict_package())
    x, weight = drawn(tokens, CHANNELS)
    seq_idx = torch.zeros(1, tokens, dtype=torch.int32)
    ours = gradients(convolution.causal_conv1d, use, x, weight, seq_idx=seq_idx)
    for one, other in zip(ours, gradients(convolve_loosely, use, x, weight), strict=True):
        torch.testing.assert_close(one, other)


def convolve_loosely(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
    return convolve(x, weight)


def test_compiles_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that lays the gradient out breaks no graph of `torch.compile`."""
    x, weight = drawn(63, CHANNELS)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = convolve(convolution.channel_last(x.transpose(1, 2)), weight)
        return convolution._ChannelLastGradient.apply(y)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(x, weight).square().sum(), (x, weight))
    theirs = torch.autograd.grad(step(x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("stride", [1, 3, 48])
def test_channel_last_sets_the_stride_of_an_axis_of_one(stride: int) -> None:
    """One token has the channels' number for its stride, whatever it had, and nothing is copied."""
    x = torch.arange(64.0).as_strided((1, CHANNELS, 1), (stride, 1, stride))
    laid_out = convolution.channel_last(x)
    assert laid_out.stride() == (CHANNELS, 1, CHANNELS)
    assert laid_out.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("tokens", [1, 3])
def test_channel_last_copies_what_is_not_dense(tokens: int) -> None:
    """An expanded tensor, all strides 0, has its values in channel-last memory."""
    x = torch.tensor(7.0).expand(1, CHANNELS, tokens)
    laid_out = convolution.channel_last(x)
    assert laid_out.stride() == (CHANNELS * tokens, 1, CHANNELS)
    assert torch.equal(laid_out, x)


@pytest.mark.gpu
@USES
@pytest.mark.parametrize("lengths", [(1,), (63,), (1, 62), (1, 63, 64, 3971)], ids=sum)
def test_any_number_of_tokens_on_cuda(
    lengths: tuple[int, ...], use: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """1, 63 and 4,099 tokens, forward and backward, as close to the fp64 reference as bf16 allows."""
    x, weight = drawn(sum(lengths), 3072, device="cuda", dtype=torch.bfloat16)
    batch = make_batch(torch.zeros(sum(lengths), dtype=torch.int64), lengths, device="cuda")
    options = {"seq_idx": batch["seq_idx"], "cu_seq_lens_q": batch["cu_seq_lens_q"]}
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]

    def reference(x: torch.Tensor, weight: torch.Tensor, bias: None, **_: Any) -> torch.Tensor:
        return torch.cat([convolve(part, weight) for part in torch.split(x, lengths, dim=2)], dim=2)

    ours = gradients(convolution.causal_conv1d, use, x, weight, **options)
    for one, other in zip(ours, gradients(reference, use, *exact, **options), strict=True):
        assert (one.double() - other).norm() < 0.02 * other.norm()
