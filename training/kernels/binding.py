"""Binds a model's layers to functions that honour the boundaries."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from transformers import AttentionInterface

from training.kernels import attention
from training.kernels.contract import KernelError, check_call, segment_lengths

Kernels = Literal["auto", "fused", "reference"]
M = TypeVar("M", bound=torch.nn.Module)


def walk_conv(reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def convolution(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        *,
        seq_idx: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        lengths = segment_lengths(cu_seqlens=None, seq_idx=seq_idx)
        parts = [
            reference(part, weight, bias, activation=activation) for part in torch.split(x, lengths, dim=2)
        ]
        return torch.cat(parts, dim=2)

    return convolution


def walk_rule(reference: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        lengths = segment_lengths(cu_seqlens=cu_seqlens)
        parts = zip(
            *(torch.split(tensor, lengths, dim=1) for tensor in (query, key, value, g, beta)), strict=True
        )
        outputs = [
            reference(q, k, v, g=decay, beta=b, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
            for q, k, v, decay, b in parts
        ]
        return torch.cat(outputs, dim=1), None

    return rule


WALKERS = {"causal_conv1d_fn": walk_conv, "torch_chunk_gated_delta_rule": walk_rule}


def bound_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of a layer's class whose forward finds our functions where it looks for its module's.

    The forward's code is used as it is, with a copy of its module's globals in which the mixing functions
    are replaced. So no other model of the module is touched, and nothing has to be put back.
    """
    forward = inspect.unwrap(cls.forward)
    module = sys.modules[cls.__module__]
    replaced = {name: make(inspect.unwrap(getattr(module, name))) for name, make in WALKERS.items()}
    scope = {**forward.__globals__, **replaced}
    del scope["__name__"]
    copy = types.FunctionType(
        forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Bound{cls.__name__}", (cls,), {"forward": copy, "__module__": __name__, "bound_from": cls})


def bind(model: M, *, kernels: Kernels = "auto") -> M:
    AttentionInterface.register(attention.FUSED, attention.packed_varlen)
    decoder = model.get_decoder()  # type: ignore[operator]
    decoder.set_attn_implementation(attention.FUSED)
    classes: dict[type, type] = {}
    for layer in decoder.modules():
        if type(layer).__name__ == "Qwen3_5GatedDeltaNet":
            layer.__class__ = classes.setdefault(type(layer), bound_class(type(layer)))
    model.register_forward_pre_hook(lambda _, args, kwargs: check_call(kwargs), with_kwargs=True)
    return model


__all__ = ["KernelError", "bind"]
