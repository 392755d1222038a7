"""What a step costs, counted beforehand: operations of a batch, and bytes on a GPU."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from training.config import Config, Precision
from training.errors import OptionError
from training.kernels import convolution, recurrence
from training.kernels.binding import find_attentions, find_mixers, parts
from training.launch import shutdown_s
from training.model import blocks, ends, skeleton
from training.parallel import World
from training.recompute import LEAVING, ON_HOST, Again, layout, worth_keeping

PEAK = {"H200": 989.4e12, "H100": 989.4e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""FLOP/s of dense bf16 matrix products, by a part of the device's name. Source: the makers' data sheets."""

WRITTEN_PER_S = 10**9
"""Bytes of a checkpoint that a machine writes in a second to a disk that machines share: an assumption."""

MEMINFO, CGROUP, MOUNTS = (Path(f"/proc/{name}") for name in ("meminfo", "self/cgroup", "self/mountinfo"))
"""Where Linux says how much memory is available, which control groups we are in, and where those are."""

RECURRENCES: Mapping[str, Callable[[Any], int]] = {
    recurrence.DELTA_RULE: lambda layer: 6 * layer.num_v_heads * layer.head_k_dim * layer.head_v_dim,
    recurrence.KIMI_DELTA: lambda layer: 6 * layer.num_heads * layer.head_dim**2,
    recurrence.STATE_SPACE: lambda layer: 4 * layer.num_heads * layer.head_dim * layer.ssm_state_size,
}
"""Recurrence -> FLOPs of a token in such a layer: a delta rule reads, writes and queries each element of its
state, Mamba-2 writes and queries it, at two operations each."""

Lengths = Sequence[int] | NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations of a model, by what they grow with.

    Attributes:
        layer_products: Weights in the layers' matrix products; of a mixture, those that a token meets.
        head_products: Weights of the head.
        frozen_products: Those of both that are not trained: their own gradients are not computed.
        attention: For each attention layer query heads × (key width + value width), and its window or 0.
        recurrence: FLOPs of a token in the recurrences, see `RECURRENCES`.
    """

    layer_products: int
    head_products: int
    frozen_products: int = 0
    attention: tuple[tuple[int, int], ...]
    recurrence: int

    def forward(self, lengths: Lengths) -> tuple[float, float, float]:
        """FLOPs of a forward pass: the layers' products, the head's, and what mixes tokens.

        Attention counts pairs that may see each other, Σ Lᵢ(Lᵢ + 1)/2 or fewer in a window, never T²;
        a recurrence counts its state once a token. Short convolutions, like norms, count nothing.
        """
        sizes = np.asarray(lengths, np.float64)
        tokens = float(sizes.sum())
        mixing = float(self.recurrence) * tokens
        for width, window in self.attention:
            seen = np.minimum(sizes, window) if window else sizes
            mixing += 2.0 * width * float((sizes * seen - seen * (seen - 1) / 2).sum())
        return 2.0 * self.layer_products * tokens, 2.0 * self.head_products * tokens, mixing

    def step(self, lengths: Lengths) -> float:
        """FLOPs of forward and backward, which is twice the forward, without any recomputation: MFU's."""
        tokens = float(np.asarray(lengths, np.float64).sum())
        return 3 * sum(self.forward(lengths)) - 2.0 * self.frozen_products * tokens

    def hardware(self, lengths: Lengths, *, recomputed: float, mixing_again: float) -> float:
        """FLOPs that run: HFU's.

        Args:
            lengths: Of the examples.
            recomputed: Share of the layers that compute all again in the backward pass.
            mixing_again: Share that computes all again but the matrix products.
        """
        products, _, mixing = self.forward(lengths)
        return self.step(lengths) + recomputed * (products + mixing) + mixing_again * mixing


def work(model: PreTrainedModel) -> Work | None:
    """The operations of a model, which may be on meta; None where a layer's widths have unknown names."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    products, frozen = 0, 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights = module.in_features * module.out_features
            products += weights if module is not head else 0
            frozen += 0 if module.weight.requires_grad else weights
        elif experts := _experts(module):
            chosen = getattr(config, "num_experts_per_tok", experts)
            # Linear layers inside were or will be counted; only stacked weights are the module's own.
            stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
            products += sum(p.numel() for p in stacked) * chosen // experts
            frozen += sum(p.numel() for p in stacked if not p.requires_grad) * chosen // experts
    try:
        attention = tuple(map(_attention, find_attentions(model).values()))
        recurrent = sum(map(_recurrence, find_mixers(model).values()))
    except AttributeError:  # another transformers may name a layer's widths otherwise
        return None
    return Work(
        layer_products=products,
        head_products=head.in_features * head.out_features,
        frozen_products=frozen,
        attention=attention,
        recurrence=recurrent,
    )


def _attention(layer: Any) -> tuple[int, int]:
    """Query heads × (key width + value width), which latent attention tells apart, and the window or 0."""
    key = layer.qk_head_dim if hasattr(layer, "qk_head_dim") else layer.head_dim
    value = layer.v_head_dim if hasattr(layer, "v_head_dim") else layer.head_dim
    # Where windowed and full layers take turns, a layer knows its own; else the configuration's is for all.
    owner = layer if hasattr(layer, "sliding_window") else layer.config
    return layer.config.num_attention_heads * (key + value), getattr(owner, "sliding_window", None) or 0


def _recurrence(layer: Any) -> int:
    return sum(RECURRENCES[part](layer) for part in parts(layer) - {convolution.WHAT})


def _experts(module: nn.Module) -> int:
    """How many experts a module's stacked weights hold; 0 for any other module."""
    stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    return stacked[0].shape[0] if stacked and "Experts" in type(module).__name__ else 0


def flops(config: PretrainedConfig, lengths: Lengths) -> float:
    """FLOPs of forward and backward over examples of these lengths, without recomputation.

    Raises:
        OptionError: they can't be counted.
    """
    operations = work(skeleton(config, precision="fp32"))
    if operations is None:
        raise OptionError(f"the operations of {config.model_type} can't be counted with this transformers")
    return operations.step(lengths)


def most(operations: Work | None, *, capacity: int) -> str:
    """A line for the dry run: what a buffer of so many tokens computes at most."""
    if operations is None:
        return "the operations of this model can't be counted: the metrics will hold no MFU"
    return f"{operations.step([capacity]) / 1e12:9.3g} TFLOP at most a buffer, as one example that fills it"


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of the device's dense bf16 products, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)


def price(
    config: Config, model: PreTrainedModel, *, ranks: int, capacity: int, precision: Precision
) -> dict[str, int]:
    """Bytes on each rank at the fullest moment, by what they are for: an estimate, to 10 % or so.

    Args:
        config: What is chosen.
        model: On meta.
        ranks: GPUs to spread over; need not be this run's.
        capacity: Tokens of a buffer.
        precision: Resolved.
    """
    sharded = _sharded(config, model, ranks=ranks, precision=precision)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    computed = 4 if precision == "fp32" else 2
    layers = blocks(model)
    layer = max(sum(p.numel() for p in one.parameters()) for one in layers)
    outside = sum(p.numel() for one in ends(model) for p in one.parameters()) or (
        model.get_output_embeddings().weight.numel()
    )
    tokens = capacity * config.data.buffers
    hidden = model.config.get_text_config().hidden_size
    outputs = sum(m.out_features for m in layers[0].modules() if isinstance(m, nn.Linear))
    again = Counter(_layout(config, layers=len(layers)))
    whole_step = config.data.accumulation > 1 and config.parallel.reduce == "step" and ranks > 1
    return {
        **(dict.fromkeys(sharded, 0) if config.parallel.offload else sharded),
        "gathered layers, their gradients and sums": (
            0 if ranks == 1 else layer * (computed * (2 + config.parallel.keep_gathered) + computed + 4)
        ),
        "gathered embedding or head, its gradient and sum": (
            4 * outside if ranks == 1 else outside // 2 * (2 * computed + 4)
        ),
        "gradients kept whole over the micro-batches of a step": trained * 4 if whole_step else 0,
        "inputs of layers that recompute": (again["all"] + again[ON_HOST]) * tokens * hidden * computed,
        # Elementwise operations keep about as much as the matrix products do.
        "activations of one layer, and of those that keep them": int(
            tokens
            * outputs
            * computed
            * (2 + 2 * again["nothing"] + again["all but products"] + min(again[ON_HOST], LEAVING))
        ),
        "logits of the loss": tokens * hidden * computed * config.model.loss_chunk
        if precision != "fp32"
        else 3 * 4 * tokens * model.config.get_text_config().vocab_size,
    }


def _sharded(config: Config, model: PreTrainedModel, *, ranks: int, precision: Precision) -> dict[str, int]:
    """Bytes of a rank's part of what lasts from step to step, wherever it lies."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    stored = 2 if precision == "bf16" else 4
    moving = 4 if config.lora.rank else stored  # adapters are fp32 beside any weights
    return {
        "weights": ((weights - trained) * stored + trained * moving) // ranks,
        "gradients": trained * moving // ranks,
        "optimizer states": trained * 2 * (1 if config.optim.states == "8bit" else moving) // ranks,
    }


def price_on_host(
    config: Config, model: PreTrainedModel, *, ranks: int, capacity: int, precision: Precision
) -> dict[str, int]:
    """Bytes in the host's memory for each rank, by what they are for; the arguments are `price`'s."""
    sharded = _sharded(config, model, ranks=ranks, precision=precision)
    layers = blocks(model)
    kept = sum(
        product.out_features
        for layer, what in zip(layers, _layout(config, layers=len(layers)), strict=True)
        for product in layer.modules()
        if what == ON_HOST
        and isinstance(product, nn.Linear)
        and worth_keeping(product.in_features, product.out_features)
    )
    return {
        "weights, gradients and optimizer states": sum(sharded.values()) if config.parallel.offload else 0,
        "kept products, pinned": (kept * capacity * config.data.buffers * (4 if precision == "fp32" else 2)),
        "copy of what a checkpoint holds, while it is written": (
            checkpoint_part(config, model, ranks=ranks, precision=precision)
            if config.checkpoint.background
            else 0
        ),
    }


def checkpoint_part(config: Config, model: PreTrainedModel, *, ranks: int, precision: Precision) -> int:
    """Bytes of a rank's part of a checkpoint: with adapters theirs, and their gradients have their size."""
    sharded = _sharded(config, model, ranks=ranks, precision=precision)
    return sharded["optimizer states"] + sharded["gradients" if config.lora.rank else "weights"]


def itemised(
    config: Config, model: PreTrainedModel, *, world: World, capacity: int, precision: Precision
) -> list[str]:
    """The estimate for this run line by line, and what is there; the arguments are `price`'s."""
    holders = world.size // config.parallel.replicas  # ranks that share one copy of the model
    items = price(config, model, ranks=holders, capacity=capacity, precision=precision)
    lines = [f"{_size(size)}  {name}" for name, size in items.items() if size]
    there = ""
    if world.device.type == "cuda":
        there = f", the GPU has {_size(torch.cuda.get_device_properties(world.device).total_memory).strip()}"
    total = _size(sum(items.values()))
    lines.append(f"{total}  on each of {world.size} ranks, estimated{there}")
    on_host = price_on_host(config, model, ranks=holders, capacity=capacity, precision=precision)
    lines += [
        f"{_size(size)}  in the host's memory for each rank: {name}" for name, size in on_host.items() if size
    ]
    if total_on_host := sum(on_host.values()) * world.local_size:
        free = free_memory()
        here = "" if free is None else f", at most {_size(free).strip()} are free"
        lines.append(
            f"{_size(total_on_host)}  in the host's memory for its {world.local_size} ranks, estimated{here}"
        )
    return lines


def risks(
    config: Config, model: PreTrainedModel, *, world: World, capacity: int, precision: Precision
) -> Iterator[str]:
    """What may end this run without a word of its own, as far as it can be foreseen, a line each.

    The system kills a process for its memory, and torchrun one that saves for too long; a GPU's allocator
    says itself what it lacked. The arguments are `price`'s.
    """
    ranks = world.size // config.parallel.replicas
    items = price_on_host(config, model, ranks=ranks, capacity=capacity, precision=precision)
    if world.device.type == "cpu":
        items |= price(config, model, ranks=ranks, capacity=capacity, precision=precision)
    needed, free = sum(items.values()) * world.local_size, free_memory()
    if free is not None and needed > free:
        yield (
            f"{_size(needed).strip()} of memory for this machine's {world.local_size} ranks, estimated, most "
            f"for {max(items, key=lambda name: items[name])}, and at most {_size(free).strip()} are free: "
            "the system may kill them without a word; --dry-run lists what takes memory, data.buffers=1, "
            "shards of a smaller capacity or fewer ranks take less"
        )
    size = world.local_size * checkpoint_part(config, model, ranks=ranks, precision=precision)
    patience = shutdown_s()
    if patience is not None and size > patience * WRITTEN_PER_S:
        yield (
            f"torchrun kills its ranks {patience:g} s after SIGTERM, and this machine's part of a "
            f"checkpoint, {_size(size).strip()}, takes {size / WRITTEN_PER_S:.0f} s at 1 GB/s: what comes "
            "after the last of checkpoint.every may be lost; from torch 2.12 on, "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT gives more (so does torchrun's --shutdown-timeout, which can't "
            "be seen from here)"
        )


def free_memory() -> int | None:
    """Bytes available on this machine, at most what we may hold in all; None where nobody says."""
    try:
        free = 1024 * int(MEMINFO.read_text().partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError):  # no Linux, or one of before 2014
        return None
    return min([free, *_limits()])


def _limits() -> Iterator[int]:
    """Bytes that the control groups around this process may hold: a container's, a Slurm job's.

    Source: cgroups(7), a line is "0::/PATH" for version 2, "NUMBER:cpu,memory:/PATH" for version 1; and
    proc_pid_mountinfo(5), a line is "… ROOT PLACE … - cgroup SOURCE rw,cpu,memory".
    """
    with suppress(OSError, ValueError):  # a system without groups, or with a file that says something else
        mounts = [line.partition(" - ") for line in MOUNTS.read_text().splitlines()]
        for line in CGROUP.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            wanted, name = ("cgroup", "memory.limit_in_bytes") if kinds else ("cgroup2", "memory.max")
            for where, _, what in mounts:
                root, place = map(_unescaped, where.split(" ")[3:5])
                system, _, options = what.split(" ", 2)
                below = Path(os.path.relpath(path, root))
                others = below.parts[:1] == ("..",)  # another group's folder
                if others or system != wanted or (kinds and "memory" not in options.split(",")):
                    continue
                group = place / below
                for outer in (group, *group.parents):  # in a container the path may be the host's, not here
                    with suppress(OSError, ValueError):  # of the whole machine, or "max"
                        yield int((outer / name).read_text())


def _unescaped(name: str) -> str:
    """A path of mountinfo, where a space is a backslash and 040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)


def _size(count: int) -> str:
    """Bytes in GiB, or in MiB where they are fewer than one."""
    return f"{count / 2**30:9.2f} GiB" if count >= 2**30 else f"{count / 2**20:9.2f} MiB"


def recomputed(config: Config, *, layers: int) -> tuple[float, float]:
    """Shares of the layers that compute all again in the backward pass, and all but matrix products."""
    again = _layout(config, layers=layers)
    products = again.count("all but products") + again.count(ON_HOST)
    return again.count("all") / layers, products / layers


def _layout(config: Config, *, layers: int) -> list[Again]:
    model = config.model
    return layout(
        layers,
        every=model.checkpointing,
        keep_layers=model.keep_layers,
        whole_layers=model.whole_layers,
        host_layers=model.host_layers,
    )
