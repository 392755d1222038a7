"""What a computing function really received, noted inside it while a hand-shake listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from training.kernels.contract import KernelError

Form = Literal["lengths", "cu_seqlens", "seq_idx", "position_ids"]


@dataclass(slots=True)
class Tape:
    """The notes of one step.

    Attributes:
        layers: The names of the layers being computed, innermost last.
        notes: (layer, what computed, form of the boundaries, the boundaries) in order.
    """

    layers: list[str] = field(default_factory=list)
    notes: list[tuple[str, str, Form, Any]] = field(default_factory=list)


_listening: list[Tape] = []


def listen(tape: Tape) -> None:
    """Notes go to `tape` from now on."""
    _listening.append(tape)


def hang_up(tape: Tape) -> None:
    """No more notes go to `tape`."""
    _listening.remove(tape)


def note(what: str, form: Form, boundaries: Any) -> None:
    """Notes what a function computes with; costs a look at an empty list when nobody listens."""
    for tape in _listening:
        kept = boundaries.detach().clone() if isinstance(boundaries, torch.Tensor) else boundaries
        tape.notes.append((tape.layers[-1] if tape.layers else "unknown layer", what, form, kept))


def launch(
    what: str, form: Form, argument: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The last call before a package's kernel: notes the very argument that the kernel gets.

    Args:
        what: What is computed: "attention", "convolution", …
        form: The form of the boundaries.
        argument: The name of the kernel's parameter that carries them.
        kernel: The package's function.

    Raises:
        KernelError: the argument is missing, so the kernel would run through every boundary.
    """
    if kwargs.get(argument) is None:
        raise KernelError(f"the {what} was called without {argument}: give the model a batch of `collate`")
    note(what, form, kwargs[argument])
    return kernel(*args, **kwargs)
