"""Which activations a layer keeps, and which it computes again in the backward pass.

    layer      0 … h-1               h … n-k-j-1      n-k-j … n-j-1             n-j … n-1
    keeps      products, on the host its input        and its matrix products   all
    computes   the rest again        all again        the rest again            nothing again

Gradients, freed by the last step, are none at the end of the forward pass, so activations may fill what
gradients will need: the last layers are freed first, while gradients grow. At a hidden size of 5,120, a
gigabyte of kept products saves 5.1 TFLOP, a gigabyte of everything about half of that. The first layers'
products are needed last: they have the whole step to go to the host and to come back, 53 GB/s each way on
an H200, by the copy engines, which take nothing from the products.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from training.errors import OptionError

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


Again = Literal["all", "all but products", "all but products on the host", "nothing"]


def layout(layers: int, *, every: int, keep_layers: int, whole_layers: int, host_layers: int) -> list[Again]:
    """What each of so many layers computes again in the backward pass; the options are `recompute`'s."""
    middle = range(host_layers, layers - keep_layers - whole_layers)
    host: list[Again] = ["all but products on the host"] * host_layers
    before: list[Again] = ["all" if every and not number % every else "nothing" for number in middle]
    products: list[Again] = ["all but products"] * keep_layers
    whole: list[Again] = ["nothing"] * whole_layers
    return host + before + products + whole


def recompute(
    layers: Sequence[nn.Module],
    *,
    every: int = 1,
    keep_layers: int = 0,
    whole_layers: int = 0,
    host_layers: int = 0,
) -> None:
    """Makes layers forget activations: changes how each is called, not what it computes.

    Args:
        layers: Decoder layers in their order.
        every: Of the layers that no other option names, every n-th forgets all but its input; 0: none does.
        keep_layers: So many before the last `whole_layers` keep their matrix products' outputs as well.
        whole_layers: So many at the end keep everything.
        host_layers: So many at the beginning keep their products' outputs in the host's memory.

    Raises:
        OptionError: more than there are layers, or a layer that transformers can't checkpoint.
    """
    if host_layers + keep_layers + whole_layers > len(layers):
        raise OptionError(
            f"{keep_layers} layers that keep products, {host_layers} on the host and {whole_layers} that "
            f"keep all are more than {len(layers)} layers"
        )
    again = layout(
        len(layers),
        every=every,
        keep_layers=keep_layers,
        whole_layers=whole_layers,
        host_layers=host_layers,
    )
    kinds = {"all but products": Kept, "all but products on the host": OnHost}
    kept = [kinds[what]() if what in kinds else None for what in again]
    for layer, what, own, before in zip(layers, again, kept, [None, *kept], strict=False):
        if what != "nothing":
            _checkpoint(layer, partial(_contexts, own, before))


def _checkpoint(layer: nn.Module, context_fn: Any) -> None:
    if not hasattr(layer, "gradient_checkpointing"):
        raise OptionError(
            f"{type(layer).__name__} can't recompute its activations; set model.checkpointing=0"
        )
    layer.gradient_checkpointing = True  # type: ignore[assignment]
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=context_fn)  # type: ignore[assignment]


def _contexts(
    own: Kept | None, before: Kept | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of a layer's forward, and of its second one within the backward; `before` is the layer's before it."""
    if own is None:
        return nullcontext(), nullcontext() if before is None else _ahead(before)
    return _Keeping(own), _Recalling(own, before)


@contextmanager
def _ahead(before: Kept) -> Iterator[None]:
    before.fetch()
    yield


class Kept:
    """The outputs of one layer's matrix products, from its forward to its backward pass."""

    def __init__(self) -> None:
        self._products: list[Tensor] = []

    def clear(self) -> None:
        """Forgets them: a forward pass begins, or the backward pass has what it needs."""
        self._products = []

    def put(self, product: Tensor) -> None:
        """The next product of the forward pass."""
        self._products.append(product)

    def fetch(self) -> None:
        """The backward pass will be here soon."""

    def wait(self) -> None:
        """The backward pass is here."""

    def take(self) -> Tensor:
        """The next product, in the order of `put`, on its device."""
        return self._products.pop(0)


class OnHost(Kept):
    """Those that wait in pinned host memory, which stays theirs from step to step.

    Copies run on a stream of their own, beside the computation. What was put is freed on the device when
    its copy is done; `fetch`, called one layer ahead, begins the copy back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: list[Tensor] = []
        self._waiting = 0
        self._device = torch.device("cpu")
        self._arrived: torch.cuda.Event | None = None

    def clear(self) -> None:
        super().clear()
        self._waiting = 0

    def put(self, product: Tensor) -> None:
        self._device = product.device
        if self._waiting == len(self._host):
            self._host.append(_host_memory(product))
        host = self._host[self._waiting]
        self._waiting += 1
        if product.device.type == "cuda":
            stream = _copies(product.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                host.copy_(product, non_blocking=True)
            product.record_stream(stream)
        else:
            host.copy_(product)

    def fetch(self) -> None:
        if self._products:
            return
        waiting = self._host[: self._waiting]
        self._products = [torch.empty_like(host, device=self._device) for host in waiting]
        if self._device.type == "cuda":
            stream = _copies(self._device)
            stream.wait_stream(torch.cuda.current_stream())  # whose memory it was
            with torch.cuda.stream(stream):
                for here, host in zip(self._products, waiting, strict=True):
                    here.copy_(host, non_blocking=True)
            self._arrived = stream.record_event()
        else:
            for here, host in zip(self._products, waiting, strict=True):
                here.copy_(host)

    def wait(self) -> None:
        self.fetch()
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies to the host and back."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _host_memory(product: Tensor) -> Tensor:
    """Memory for a product, pinned if it comes from a GPU.

    Whole pages of exactly that size: torch's own pinned memory takes the next power of two, here 1.7 times
    as much.

    Raises:
        OptionError: the host does not give it.
    """
    if product.device.type != "cuda":
        return torch.empty_like(product)
    try:
        pages = mmap.mmap(-1, product.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(pages, dtype=product.dtype).view(product.shape)
        error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))  # type: ignore[no-untyped-call]
    except OSError as problem:
        error = problem.errno or 1
    if error:
        raise OptionError(
            f"the host does not give {product.nbytes / 2**30:.2f} GiB of pinned memory for a layer's product "
            f"(error {error}): lower model.host_layers"
        )
    return host


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a layer's forward: keeps its products."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __enter__(self) -> Any:
        self._kept.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _worth_keeping(func, args):
            self._kept.put(out.detach())  # autograd will hang the layer's graph on `out`
        return out


class _Recalling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a layer's second forward, within the backward: kept products stand in for computed ones.

    The copies back of the layer before it, which comes next, begin here.
    """

    def __init__(self, kept: Kept, before: Kept | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._before = before

    def __enter__(self) -> Any:
        self._kept.wait()
        if self._before:
            self._before.fetch()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> Any:
        self._kept.clear()
        return super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _worth_keeping(func, args):
            return self._kept.take()
        return func(*args, **(kwargs or {}))


def _worth_keeping(operation: Any, args: Sequence[Any]) -> bool:
    return operation in _PRODUCTS and worth_keeping(*args[-1].shape)


def worth_keeping(inner: int, outer: int) -> bool:
    """Whether the output of a product is kept, by its weight's widths: but for the way back from an MLP.

    Nothing in the layer's backward reads that one, and recomputation stops before it (checkpoint's early
    stop), so keeping it would cost 2 bytes a token and channel for nothing.
    """
    return not (inner > 2 * outer and outer >= 64)  # narrower outputs are a head's scalars: a few bytes
