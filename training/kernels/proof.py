"""The proof of isolation, by running it: replace one example, and nothing else moves.

isolation   one example's tokens replaced: what moves elsewhere? exactly 0.0 is expected
alone       each example packed, and by itself: how far apart, relative to the size?
difference  two models with the same weights, fused and reference: how far apart?
typical     of several of these, each with other tokens and another random loss
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic

from training.kernels.contract import Batch, check_model, make_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What moved when one example's tokens were replaced by others of the same number.

    Attributes:
        logits: The most that a logit of another example moved. Isolated: 0.0.
        gradients: The most that the gradient of the others' loss moved, at the others' own embeddings.
            Isolated: 0.0, or near `noise` where a kernel's backward adds up in no fixed order.
        across: The largest gradient of the others' loss at the replaced example's embeddings. Isolated: 0.0.
        replaced: The most that one of its own logits moved: not 0.0, or nothing was proven.
        noise: The most that a gradient moves between two runs of the very same buffer.
    """

    logits: float
    gradients: float
    across: float
    replaced: float
    noise: float

    @property
    def holds(self) -> bool:
        """Whether the replaced example moved and nothing else did."""
        return (
            self.logits == 0.0 and self.gradients <= self.noise and self.across == 0.0 and self.replaced > 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far two computations of the same are apart: |a - b| / |b| in the Euclidean norm.

    Attributes:
        logits: Of all logits.
        gradients: Of each parameter's gradient, by name.
    """

    logits: float
    gradients: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient is furthest apart, and how far."""
        return max(self.gradients.items(), key=lambda item: item[1])


def isolation(model: Any, seq_lengths: Sequence[int], *, replaced: int, seed: int = 0) -> Isolation:
    """Replaces one example of a random packed buffer and measures what moves.

    Experts, where there are any, are given the first run's routing again: which rows an expert's matmul
    gets decides how it rounds, so that without it the replaced example's new routing would show in the
    last bits of the others.

    Args:
        model: A bound model; it is called as `model(**batch)` with `inputs_embeds`.
        seq_lengths: At least two examples.
        replaced: Which one, from 0.
        seed: Of the tokens and of the random loss.

    Raises:
        KernelError: it is no model.
    """
    check_model(model)
    device = next(model.parameters()).device
    start, end = sum(seq_lengths[:replaced]), sum(seq_lengths[: replaced + 1])
    embedding = model.get_input_embeddings()
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(embedding.num_embeddings, (sum(seq_lengths),), generator=draw)
    others = tokens.clone()
    others[start:end] = (tokens[start:end] + 1) % embedding.num_embeddings
    elsewhere = torch.ones(len(tokens), dtype=torch.bool, device=device)
    elsewhere[start:end] = False
    batch = make_batch(tokens, seq_lengths, device=device)
    del batch["input_ids"]

    with torch.no_grad():
        first, second = (embedding(ids.to(device))[None] for ids in (tokens, others))
    routing: list[torch.Tensor] = []
    with _repeatable(model):
        with _recording(model, routing):
            logits, gradient = _run(model, batch, first, elsewhere, seed)
        with _replaying(model, routing):
            again = _run(model, batch, first, elsewhere, seed)
        with _replaying(model, routing):
            logits_2, gradient_2 = _run(model, batch, second, elsewhere, seed)
    return Isolation(
        logits=_most(logits[elsewhere], logits_2[elsewhere]),
        gradients=_most(gradient[elsewhere], gradient_2[elsewhere]),
        across=max(float(g[~elsewhere].abs().max()) for g in (gradient, gradient_2)),
        replaced=_most(logits[~elsewhere], logits_2[~elsewhere]),
        noise=_most(gradient, again[1]),
    )


@contextmanager
def _repeatable(model: Any) -> Iterator[None]:
    """On CUDA has FlashAttention's backward add up in a fixed order, so that 0.0 can be asked for."""
    if next(model.parameters()).device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it in this mode
    fill: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fill.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    fill.fill_uninitialized_memory = False  # as in training, where nobody fills it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fill.fill_uninitialized_memory = before[1]


def _run(
    model: Any, batch: Batch, embeds: torch.Tensor, elsewhere: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [T, V] and the gradient [T, d] of a random linear loss of the tokens `elsewhere`."""
    embeds = embeds.detach().clone().requires_grad_()
    logits = model(inputs_embeds=embeds, **batch).logits[0]
    draw = torch.Generator(device=logits.device).manual_seed(seed)
    weights = torch.randn(logits.shape, generator=draw, device=logits.device)
    weights[~elsewhere] = 0.0
    (gradient,) = torch.autograd.grad((logits.float() * weights).sum(), embeds)
    return logits.detach(), gradient[0]


def _most(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a.double() - b.double()).abs().max()
    return float(difference)


def _routers(model: Any) -> list[Any]:
    return [
        module
        for module in model.modules()
        if any(cls.__name__.lower().endswith("topkrouter") for cls in type(module).__mro__)
    ]


def _picked(output: tuple[torch.Tensor, ...]) -> int:
    """Which of a router's outputs is the experts that it picked: the integers, int64[T, k]."""
    (place,) = (place for place, one in enumerate(output) if one.dtype == torch.int64)
    return place


@contextmanager
def _recording(model: Any, routing: list[torch.Tensor]) -> Iterator[None]:
    """Keeps the experts that each router picks."""
    handles = [
        router.register_forward_hook(lambda _, __, output: routing.append(output[_picked(output)].clone()))
        for router in _routers(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaying(model: Any, routing: Sequence[torch.Tensor]) -> Iterator[None]:
    """Has each router pick the experts that it picked when they were recorded."""
    kept = iter(tuple(routing))

    def replay(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        place = _picked(output)
        return (*output[:place], next(kept), *output[place + 1 :])

    handles = [router.register_forward_hook(replay) for router in _routers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def alone(model: Any, seq_lengths: Sequence[int], *, seed: int = 0) -> Apart:
    """One packed run of all examples against one run of each by itself, logits and gradients.

    Experts are given the packed run's routing: a near tie decided the other way is no leak.

    Raises:
        KernelError: it is no model.
    """
    check_model(model)
    device = next(model.parameters()).device
    tokens = _tokens(model, seq_lengths, seed)
    weights = _weights(model, len(tokens), device, seed)
    routing: list[torch.Tensor] = []
    with _recording(model, routing):
        together = _step(model, make_batch(tokens, seq_lengths, device=device), weights)
    logits: list[torch.Tensor] = []
    gradients: dict[str, torch.Tensor] = {}
    sizes = list(seq_lengths)
    routings = (
        zip(*(torch.split(picked, sizes) for picked in routing), strict=True)
        if routing
        else ((),) * len(sizes)
    )
    for ids, part, own in zip(torch.split(tokens, sizes), torch.split(weights, sizes), routings, strict=True):
        with _replaying(model, own):
            single, single_gradients = _step(model, make_batch(ids, [len(ids)], device=device), part)
        logits.append(single)
        for name, gradient in single_gradients.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return _apart(together, (torch.cat(logits), gradients))


def difference(model: Any, reference: Any, seq_lengths: Sequence[int], *, seed: int = 0) -> Apart:
    """A model against a reference with the same weights in fp32, on the same packed buffer and routing.

    Raises:
        KernelError: one of them is no model.
    """
    check_model(model)
    check_model(reference)
    device = next(model.parameters()).device
    tokens = _tokens(model, seq_lengths, seed)
    weights = _weights(model, len(tokens), device, seed)
    batch = make_batch(tokens, seq_lengths, device=device)
    routing: list[torch.Tensor] = []
    with _recording(reference, routing):
        theirs = _step(reference, batch, weights)
    with _replaying(model, routing):
        return _apart(_step(model, batch, weights), theirs)


def typical(found: Sequence[Apart]) -> Apart:
    """The root mean square over several draws.

    One draw says little of a parameter of few elements: Nemotron-H's `dt_bias` has one a head, and in bf16
    its gradient's distance from fp32 varies by more than twice with the random loss.
    """

    def mean(values: Iterable[float]) -> float:
        return math.sqrt(statistics.fmean(value**2 for value in values))

    names = found[0].gradients
    gradients = {name: mean(one.gradients[name] for one in found) for name in names}
    return Apart(logits=mean(one.logits for one in found), gradients=gradients)


def _tokens(model: Any, seq_lengths: Sequence[int], seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(model.get_input_embeddings().num_embeddings, (sum(seq_lengths),), generator=draw)


def _weights(model: Any, tokens: int, device: torch.device, seed: int) -> torch.Tensor:
    draw = torch.Generator(device=device).manual_seed(seed)
    width = model.get_output_embeddings().out_features
    return torch.randn(tokens, width, generator=draw, device=device) / tokens


def _step(model: Any, batch: Batch, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(**batch).logits[0].float()
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    gradients = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    kept = {name: g.float() for name, g in zip(names, gradients, strict=True) if g is not None}
    return logits.detach(), kept


def _apart(
    ours: tuple[torch.Tensor, Mapping[str, torch.Tensor]],
    theirs: tuple[torch.Tensor, Mapping[str, torch.Tensor]],
) -> Apart:
    gradients = {name: _relative(ours[1][name], gradient) for name, gradient in theirs[1].items()}
    return Apart(logits=_relative(ours[0], theirs[0]), gradients=gradients)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    size = b.norm()
    return float((a - b).norm() / size) if size > 0 else float(a.norm())
