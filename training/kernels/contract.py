"""What a bound model is given, checked without a device sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from training.errors import PadfreeError
from training.packed import boundaries

Batch = dict[str, Any]

# What a model hands down to its layers that does not change what they compute.
WITHOUT_EFFECT = frozenset({
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "chunk_indices",
    "position_ids", "use_cache", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict",
})  # fmt: skip
_F = TypeVar("_F", bound=Callable[..., Any])


class KernelError(PadfreeError):
    """A layer that can't be isolated here: its text names the layer, the cause and what to do."""


class Unsupported(KernelError):
    """A layer that these kernels do not compute, whatever is installed."""


def check_model(model: Any) -> None:
    """Refuses what does not act as a model of transformers: its name, its class, its configuration.

    Something of one's own around a model may be proven too, so the class is not asked for.

    Raises:
        KernelError: says what was given.
    """
    if isinstance(model, type) or not (callable(model) and hasattr(model, "get_input_embeddings")):
        raise KernelError(
            f"a model is needed, as AutoModelForCausalLM.from_pretrained(…) returns it, not the "
            f"{type(model).__name__} {' '.join(repr(model).split())[:60]}"
        )


def make_batch(
    input_ids: torch.Tensor,
    seq_lengths: Sequence[int],
    *,
    labels: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """A batch for `model(**batch)` from one packed buffer, as the loader's `collate` makes it.

    Args:
        input_ids: int64[T].
        seq_lengths: Their sum is T.
        labels: int64[T]; None leaves them out.
        device: Where the tensors go. The lengths are read on the host, so nothing syncs.

    Raises:
        ValueError: the lengths do not sum to T.
    """
    lengths = boundaries.check_lengths(seq_lengths)
    if int(lengths.sum()) != input_ids.numel():
        raise ValueError(f"seq_lengths sum to {int(lengths.sum())}, but there are {input_ids.numel()} ids")
    longest = boundaries.max_seqlen(lengths)
    ends = torch.from_numpy(boundaries.cu_seqlens(lengths)).to(device)
    batch: Batch = {
        "input_ids": input_ids.reshape(1, -1).to(device),
        "position_ids": torch.from_numpy(boundaries.position_ids(lengths))[None].to(device),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": torch.from_numpy(boundaries.seq_idx(lengths))[None].to(device),
        "use_cache": False,
    }
    if labels is not None:
        batch["labels"] = labels.reshape(1, -1).to(device)
    return batch


def with_chunk_indices(batch: Mapping[str, Any]) -> Batch:
    """The batch with `chunk_indices`, int32[NT, 2], which saves flash-linear-attention a device sync a batch.

    Call it where the batch is still on the host, before it moves to the device.
    """
    lengths = segment_lengths(cu_seqlens=batch["cu_seq_lens_q"])
    return {**batch, "chunk_indices": torch.from_numpy(boundaries.chunk_indices(lengths))}


def outside_compile(function: _F) -> _F:
    """For functions that walk the segments: lengths differ from batch to batch, so nothing compiles once."""
    outside: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return outside


def refuse_unknown(what: str, options: Mapping[str, Any]) -> None:
    """Refuses by name what a function does not know and would drop: it may change what is computed.

    Raises:
        Unsupported: there is one that is not None.
    """
    unknown = [key for key, value in options.items() if value is not None and key not in WITHOUT_EFFECT]
    if unknown:
        raise Unsupported(f"{what} has features that are not known here: {', '.join(sorted(unknown))}")


def segment_lengths(*, cu_seqlens: torch.Tensor | None, seq_idx: torch.Tensor | None = None) -> list[int]:
    """The lengths that a function was given, as Python ints: one device sync on CUDA, none on a CPU.

    Raises:
        KernelError: neither is given, or they break the laws of `packing.boundaries`.
    """
    try:
        if cu_seqlens is not None:
            lengths = boundaries.lengths_from_cu_seqlens(_numpy(cu_seqlens))
        elif seq_idx is not None:
            lengths = boundaries.lengths_from_seq_idx(_numpy(seq_idx).reshape(-1))
        else:
            raise KernelError("a layer was called without boundaries: give the model a batch of `collate`")
    except ValueError as error:
        raise KernelError(f"boundaries that can't be: {error}") from error
    result: list[int] = lengths.tolist()
    return result


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().numpy()
    return array


def check_call(batch: Mapping[str, Any]) -> None:
    """Checks the arguments of `model(**batch)` by shape, dtype and type alone: no device sync.

    Raises:
        KernelError: an argument that turns isolation off, or one that is missing; says which.
    """
    ids = batch.get("input_ids") if batch.get("inputs_embeds") is None else batch["inputs_embeds"]
    if ids is None or ids.shape[0] != 1:
        shape = None if ids is None else tuple(ids.shape)
        raise KernelError(f"a packed batch is one row, int64[1, T]; got {shape}: use the loader's collate")
    tokens = ids.shape[1]
    if batch.get("attention_mask") is not None:
        raise KernelError(
            "attention_mask was given: a packed batch has none, and a mask, even of ones, turns packed "
            "detection off elsewhere; stop the trainer or collator from adding it"
        )
    if batch.get("use_cache") or batch.get("past_key_values") is not None or batch.get("cache") is not None:
        raise KernelError(
            "use_cache is on: pass use_cache=False, since a cache carries state across examples"
        )
    positions = batch.get("position_ids")
    if positions is None or tuple(positions.shape) != (1, tokens):
        shape = None if positions is None else tuple(positions.shape)
        raise KernelError(
            f"position_ids must be int64[1, {tokens}] and restart at 0; got {shape}: a 3-D tensor (M-RoPE) "
            "or none would be counted through the whole buffer"
        )
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        ends = batch.get(name)
        if ends is None or ends.dim() != 1 or ends.dtype != torch.int32:
            raise KernelError(f"{name} must be int32[N + 1]; got {_describe(ends)}")
    for name in ("max_length_q", "max_length_k"):
        if not isinstance(batch.get(name), int):
            raise KernelError(
                f"{name} must be a Python int, as a tensor costs a sync; got {_describe(batch.get(name))}"
            )
    index = batch.get("seq_idx")
    if index is None or tuple(index.shape) != (1, tokens) or index.dtype != torch.int32:
        raise KernelError(f"seq_idx must be int32[1, {tokens}]; got {_describe(index)}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return "nothing" if value is None else type(value).__name__


def disagreement(form: str, received: Any, seq_lengths: Sequence[int]) -> str | None:
    """How boundaries that a function received differ from the batch's; None where they agree.

    Args:
        form: "lengths", "cu_seqlens", "seq_idx" or "position_ids".
        received: A list of lengths, or a tensor in that form; positions may have leading dimensions.
        seq_lengths: The batch's.
    """
    if form == "lengths":
        expected, array = np.asarray(seq_lengths), np.asarray(received)
    else:
        expected, array = getattr(boundaries, form)(seq_lengths), _numpy(received)
    rows = array.reshape(-1, array.shape[-1])
    if all(np.array_equal(row, expected) for row in rows):
        return None
    return f"{form} {_short(rows[0])} where the batch has {_short(expected)}"


def _short(array: np.ndarray[Any, Any]) -> str:
    items = [str(item) for item in array[:6].tolist()]
    return f"[{', '.join(items)}{', …' if array.size > 6 else ''}]"
