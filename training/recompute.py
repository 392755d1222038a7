"""Which activations a layer keeps, and which it computes again in the backward pass.

    layer      0 … n-k-j-1          n-k-j … n-j-1             n-j … n-1
    keeps      its input            and its matrix products    all
    computes   all again            the rest again             nothing again

Gradients, freed by the last step, are none at the end of the forward pass, so activations may fill what
gradients will need: the last layers are freed first, while gradients grow. At a hidden size of 5,120, a
gigabyte of kept products saves 5.1 TFLOP, a gigabyte of everything about half of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training.data import OptionError

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


Again = Literal["all", "all but products", "nothing"]


def layout(layers: int, *, every: int, keep_layers: int, whole_layers: int) -> list[Again]:
    """What each of so many layers computes again in the backward pass; the options are `recompute`'s."""
    first = layers - keep_layers - whole_layers
    before: list[Again] = ["all" if every and not number % every else "nothing" for number in range(first)]
    products: list[Again] = ["all but products"] * keep_layers
    whole: list[Again] = ["nothing"] * whole_layers
    return before + products + whole


def recompute(
    layers: Sequence[nn.Module], *, every: int = 1, keep_layers: int = 0, whole_layers: int = 0
) -> None:
    """Makes layers forget activations: changes how each is called, not what it computes.

    Args:
        layers: Decoder layers in their order.
        every: Of the layers before those below, every n-th forgets all but its input; 0: none does.
        keep_layers: So many before the last `whole_layers` keep their matrix products' outputs as well.
        whole_layers: So many at the end keep everything.

    Raises:
        OptionError: more than there are layers, or a layer that transformers can't checkpoint.
    """
    if keep_layers + whole_layers > len(layers):
        raise OptionError(
            f"{keep_layers} layers that keep products and {whole_layers} that keep all are more than "
            f"{len(layers)} layers"
        )
    keep_products = partial(create_selective_checkpoint_contexts, _keep_products)
    again = layout(len(layers), every=every, keep_layers=keep_layers, whole_layers=whole_layers)
    for layer, what in zip(layers, again, strict=True):
        if what == "all":
            _checkpoint(layer, partial(checkpoint, use_reentrant=False))
        elif what == "all but products":
            _checkpoint(layer, partial(checkpoint, use_reentrant=False, context_fn=keep_products))


def _checkpoint(layer: nn.Module, function: Any) -> None:
    if not hasattr(layer, "gradient_checkpointing"):
        raise OptionError(
            f"{type(layer).__name__} can't recompute its activations; set model.checkpointing=0"
        )
    layer.gradient_checkpointing = True  # type: ignore[assignment]
    layer._gradient_checkpointing_func = function


def _keep_products(_: Any, operation: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """Keeps a product's output, but for the narrow one of a wide input: the way back from an MLP.

    Nothing in the layer's backward reads that one, and recomputation stops before it (checkpoint's early
    stop), so keeping it would cost 2 bytes a token and channel for nothing.
    """
    if operation not in _PRODUCTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    inner, outer = args[-1].shape
    way_back = inner > 2 * outer and outer >= 64  # narrower outputs are a head's scalars: a few bytes a token
    return CheckpointPolicy.PREFER_RECOMPUTE if way_back else CheckpointPolicy.MUST_SAVE
