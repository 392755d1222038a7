"""The hand-shake of the first step: every layer really computed with this batch's boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from training.kernels import compilation, record
from training.kernels.binding import binding_of, find_attentions, find_mixers, parts
from training.kernels.contract import KernelError, disagreement, segment_lengths


@contextmanager
def handshake(model: Any, batch: Mapping[str, Any]) -> Iterator[None]:
    """Listens to one step, then compares what each computing function received with the batch.

        with handshake(model, batch):
            model(**batch).loss.backward()

    What is compared was noted inside the function that computes, from its own argument, at the last call
    before the kernel; positions were noted where the rotary embedding gets them. Inside the block, compiled
    code runs uncompiled so that the notes are taken. Comparing costs a few device syncs, once.

    Raises:
        KernelError: on leaving the block: a layer computed with other boundaries, or did not report; or
            on entering it: the batch contradicts itself.
    """
    binding_of(model)
    lengths = check_boundaries(batch)
    due = _due(model.get_decoder())
    tape = record.Tape()
    with ExitStack() as stack:
        for name, (layer, reports) in due.items():
            for handle in _hooks(tape, name, layer, positions="positions" in reports):
                stack.callback(handle.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(compilation.in_parallel())  # a first step is where kernels are compiled
        record.listen(tape)
        stack.callback(record.hang_up, tape)
        yield
    _compare(tape, {(name, part) for name, (_, reports) in due.items() for part in reports}, lengths)


def _due(decoder: Any) -> dict[str, tuple[Any, set[str]]]:
    """Name -> (layer, what it has to report)."""
    due = {name: (layer, {"attention"}) for name, layer in find_attentions(decoder).items()}
    due |= {name: (layer, parts(layer)) for name, layer in find_mixers(decoder).items()}
    for name, module in decoder.named_modules():
        if any(cls.__name__.endswith("RotaryEmbedding") for cls in type(module).__mro__):
            due[name] = (module, {"positions"})
    return due


def _hooks(tape: record.Tape, name: str, layer: Any, *, positions: bool) -> list[Any]:
    hooks = []
    if positions:
        hooks.append(layer.register_forward_pre_hook(_note_positions, with_kwargs=True))
    hooks.append(layer.register_forward_pre_hook(lambda *_: tape.layers.append(name), prepend=True))
    hooks.append(layer.register_forward_hook(lambda *_: _leave(tape), always_call=True))
    return hooks


def _leave(tape: record.Tape) -> None:
    tape.layers.pop()


def _note_positions(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    record.note("positions", "position_ids", positions)


def _compare(tape: record.Tape, due: set[tuple[str, str]], lengths: list[int]) -> None:
    for name, what, form, received in tape.notes:
        difference = disagreement(form, received, lengths)
        if difference is not None:
            raise KernelError(f"{name}: its {what} ran with {difference}: examples see each other")
        due.discard((name, what))
    if due:
        name, what = min(due)
        more = f" ({len(due)} in all)" if len(due) > 1 else ""
        raise KernelError(
            f"{name}: its {what} did not report{more}: something else computed it; bind the model again "
            "after whatever replaced it"
        )


def check_boundaries(batch: Mapping[str, Any]) -> list[int]:
    """The lengths of a batch, after checking that all of its boundaries say the same. Syncs on CUDA.

    Raises:
        KernelError: one of them says otherwise; names it.
    """
    lengths = segment_lengths(cu_seqlens=batch["cu_seq_lens_q"])
    for key, form in (
        ("cu_seq_lens_k", "cu_seqlens"),
        ("position_ids", "position_ids"),
        ("seq_idx", "seq_idx"),
    ):
        if (difference := disagreement(form, batch[key], lengths)) is not None:
            raise KernelError(f"the batch contradicts itself: {key} is {difference} in cu_seq_lens_q")
    for key in ("max_length_q", "max_length_k"):
        if batch[key] != max(lengths):
            raise KernelError(
                f"the batch contradicts itself: {key} is {batch[key]}, the longest is {max(lengths)}"
            )
    return lengths
