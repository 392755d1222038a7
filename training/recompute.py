"""Which activations a layer keeps, and which it computes again in the backward pass.

    layer      … n-k-j-1       n-k-j … n-j-1             n-j … n-1
    keeps      its input       and its matrix products   all
    computes   all again       the rest again            nothing again

    h of the first n-j, spread evenly among them, keep their products in the host's memory

Gradients, freed by the last step, are none at the end of the forward pass, so activations may fill what
gradients will need: the last layers are freed first, while gradients grow. At a hidden size of 5,120, a
gigabyte of kept products saves 5.1 TFLOP, a gigabyte of everything about half of that. Products go to the
host and come back by the copy engines, 55 GB/s each way on an H200, which take nothing from the computation.
There a layer's products take longer to go than the layer takes: spread among others, they do not pile up.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain, repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from training.errors import OptionError

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
LEAVING = 2
"""Layers whose products may be on their way to the host at a time, and still on the device."""


Again = Literal["all", "all but products", "all but products on the host", "nothing"]
ON_HOST: Again = "all but products on the host"


def layout(layers: int, *, every: int, keep_layers: int, whole_layers: int, host_layers: int) -> list[Again]:
    """What each of so many layers computes again in the backward pass; the options are `recompute`'s."""
    early = layers - whole_layers
    on_host = [(early - 1 - i) * host_layers % early >= early - host_layers for i in range(early)]
    middle = early - host_layers - keep_layers
    others: Iterator[Again] = chain(
        ("all" if every and not i % every else "nothing" for i in range(middle)),
        repeat("all but products", keep_layers),
    )
    return [ON_HOST if there else next(others) for there in on_host] + ["nothing"] * whole_layers


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
        host_layers: So many of those before keep their products' outputs in the host's memory.

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
    kinds = {"all but products": Kept, ON_HOST: OnHost}
    kept = [kinds[what]() if what in kinds else None for what in again]
    leaving: Leaving = deque()
    for layer, what, own, before in zip(layers, again, kept, [None, *kept], strict=False):
        if what != "nothing":
            _checkpoint(layer, partial(_contexts, own, before, leaving))


def _checkpoint(layer: nn.Module, context_fn: Any) -> None:
    if not hasattr(layer, "gradient_checkpointing"):
        raise OptionError(
            f"{type(layer).__name__} can't recompute its activations; set model.checkpointing=0"
        )
    layer.gradient_checkpointing = True  # type: ignore[assignment]
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=context_fn)  # type: ignore[assignment]


def _contexts(
    own: Kept | None, before: Kept | None, leaving: Leaving
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of a layer's forward, and of its second one within the backward.

    Args:
        own: What the layer keeps.
        before: What the layer before it keeps.
        leaving: What the last few layers keep, in the order of their forward passes; of the whole model.
    """
    if own is None:
        return nullcontext(), nullcontext() if before is None else _ahead(before)
    return _Keeping(own, leaving), _Recalling(own, before)


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

    def gone(self) -> None:
        """The forward pass is `LEAVING` layers that keep products further."""

    def fetch(self) -> None:
        """The backward pass will be here soon."""

    def wait(self) -> None:
        """The backward pass is here."""

    def take(self) -> Tensor:
        """The next product, in the order of `put`, on its device."""
        return self._products.pop(0)


Leaving = deque[Kept]


class OnHost(Kept):
    """Those that wait in pinned host memory, which stays theirs from step to step.

    Copies run on a stream of their own, beside the computation. What was put stays on the device until the
    forward pass is `LEAVING` layers that keep products further, and the computation then waits for its copy:
    so the memory is free at a point of the computation, wherever the host is by then. (With
    `record_stream` it is free when the host happens to look after the copy is done. A host that ran ahead
    took new memory instead: at 27B on two GPUs 138 GiB for 107, and most of a second a step to free it.)
    `fetch`, called one layer ahead, begins the copy back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: list[Tensor] = []
        self._waiting = 0
        self._device = torch.device("cpu")
        self._copied: torch.cuda.Event | None = None

    def clear(self) -> None:
        self.gone()
        self._waiting = 0

    def put(self, product: Tensor) -> None:
        self._device = product.device
        if self._waiting == len(self._host):
            self._host.append(_host_memory(product))
        host = self._host[self._waiting]
        self._waiting += 1
        self._products.append(product)
        if product.device.type == "cuda":
            stream = _copies(product.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                host.copy_(product, non_blocking=True)
            self._copied = stream.record_event()
        else:
            host.copy_(product)

    def gone(self) -> None:
        self._settle()
        self._products = []

    def fetch(self) -> None:
        if self._products:
            return  # of the last layers, which had no time to leave
        waiting = self._host[: self._waiting]
        self._products = [torch.empty_like(host, device=self._device) for host in waiting]
        if self._device.type == "cuda":
            stream = _copies(self._device)
            stream.wait_stream(torch.cuda.current_stream())  # whose memory it was
            with torch.cuda.stream(stream):
                for here, host in zip(self._products, waiting, strict=True):
                    here.copy_(host, non_blocking=True)
            self._copied = stream.record_event()
        else:
            for here, host in zip(self._products, waiting, strict=True):
                here.copy_(host)

    def wait(self) -> None:
        self.fetch()
        self._settle()

    def _settle(self) -> None:
        """The computation waits until no copy reads or writes what is here."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None


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
    """Around a layer's forward: keeps its products, and lets those of earlier layers go."""

    def __init__(self, kept: Kept, leaving: Leaving) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._leaving = leaving

    def __enter__(self) -> Any:
        self._kept.clear()
        self._leaving.append(self._kept)
        while len(self._leaving) > LEAVING:
            self._leaving.popleft().gone()
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
