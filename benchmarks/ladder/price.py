"""What a rung should cost, before it runs: bytes on each GPU, seconds of a step, and where they go.

A prediction to be wrong by a known amount. Bytes follow from shapes; times from measured rates and the
bytes that each part must move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ladder.rungs import MOST, Rung
from training.recompute import LEAVING

PRODUCTS = 700e12
"""FLOP/s of bf16 matrix products in runs of seconds on an H200 (788e12 in 20 ms): power is the limit."""
BESIDE = 0.05
"""Share by which products are slower where communication runs beside them and takes multiprocessors."""
BANDWIDTH = 4.0e12
"""Bytes/s of device memory, read and written; 4.3e12 for a plain copy."""
ELEMENTWISE = 1.8e12
"""Bytes/s of elementwise kernels, by the bytes counted here: with copies and the convolution, which are not
counted, they took 1.05 s a step of rung 3 on two H200s, and 0.41 s of rung 4c."""
UPDATE = 1.5e12
"""Bytes/s of torch's fused AdamW, measured there."""
UPDATE_8BIT = 0.4e12
"""Bytes/s of torchao's 8-bit step, measured there: 0.34 s. To find codes takes longer than to move them."""
HOST = 55e9
"""Bytes/s between a GPU and pinned host memory, each way, measured."""
HOST_SHARE = 0.9
"""Share of the forward pass in which products go to the host: all must be there when memory is fullest."""
LINK = 300e9
"""Bytes/s that a GPU receives from the others through NVLink. Not known for the machine: measure it."""
PEAK = 989e12
"""FLOP/s that MFU is counted against."""
CAPACITY = 140.4 * 2**30
"""Bytes of an H200, as its driver says."""
FILLED = 0.95
"""Share of it that is planned for."""
RESERVE = 7e9
"""CUDA context, NCCL's and the kernels' buffers, what the allocator can't use."""
CHUNK = 2048
"""Tokens whose logits exist at a time in the fused loss."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer.

    Attributes:
        count: How many such layers there are.
        parameters: In its matrices.
        last: Parameters of its last matrix, whose product is never recomputed.
        kept: Bytes a token of its products' outputs.
        whole: Bytes a token of all that its backward needs.
        moved: Bytes a token that its elementwise parts move, forward: (plain, fused).
        mixer: Seconds a token of delta rule or attention, forward; the backward takes 2.5 times as long.
    """

    count: int
    parameters: int
    last: int
    kept: int
    whole: int
    moved: tuple[int, int]
    mixer: float


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's sizes as far as costs depend on them."""

    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]

    @property
    def blocks(self) -> int:
        """Parameters of all layers."""
        return sum(layer.count * layer.parameters for layer in self.layers)

    @property
    def head(self) -> int:
        """Parameters of the output matrix."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All of them, norms left out."""
        return self.blocks + self.head * (1 if self.tied else 2)


def shape(config: Mapping[str, Any]) -> Shape | None:
    """Sizes of a Qwen3.5 text configuration, as in its config.json; None for other models."""
    if config["model_type"] != "qwen3_5_text":
        return None
    h, i, count = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    full_ones = sum(number % 4 == 3 for number in range(count))
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    heads = config["num_attention_heads"] * config["head_dim"]
    grouped = config["num_key_value_heads"] * config["head_dim"]
    mlp = 3 * h * i
    # norm, residual and SwiGLU: (reads + writes) in bf16, plain ones in several passes of fp32
    around = (2 * 36 * h + 10 * i, 2 * 8 * h + 6 * i)
    delta = Layer(
        count=count - full_ones,
        parameters=h * (2 * keys + 2 * values) + values * h + mlp,
        last=h * i,
        kept=2 * (2 * keys + 2 * values + h + 2 * i),
        whole=2 * (4 * h + 2 * keys + 6 * values + 3 * i),  # 8 more layers that keep all: +12.2 GiB, one H200
        moved=(
            around[0] + 4 * (2 * keys + values) + 26 * values,
            around[1] + 4 * (2 * keys + values) + 12 * values,
        ),
        mixer=0.55e-3 / 8192 * config["linear_num_value_heads"] / 48,
    )
    full = Layer(
        count=full_ones,
        parameters=h * (2 * heads + 2 * grouped) + heads * h + mlp,
        last=h * i,
        kept=2 * (2 * heads + 2 * grouped + h + 2 * i),
        whole=2 * (4 * h + 7 * heads + 5 * grouped + 3 * i),
        moved=(around[0] + 60 * heads, around[1] + 30 * heads),
        mixer=0.4e-3 / 8192 * config["num_attention_heads"] / 24,
    )
    return Shape(
        hidden=h,
        vocabulary=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        layers=tuple(layer for layer in (delta, full) if layer.count),
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What of a rung its cost depends on.

    Attributes:
        gpus: Over which the model is sharded.
        tokens: In a micro-batch of one GPU.
        states: Bytes a parameter of weights, gradients and optimizer states: (weights, gradients, states).
        fused_loss: Logits exist a chunk at a time.
        fused_layers: Norms and SwiGLU in one pass.
        kept: Share of the layers that keep their products' outputs.
        whole: Share of the layers that keep everything.
        host: Share of the layers that keep their products' outputs in the host's memory.
    """

    gpus: int
    tokens: int
    states: tuple[float, float, float] = (2, 2, 4)
    fused_loss: bool = True
    fused_layers: bool = True
    kept: float = 0.0
    whole: float = 0.0
    host: float = 0.0


STATES = {"bf16": (2, 2, 4), "8bit": (2, 2, 2.06), "fp32": (4, 4, 8)}


@dataclass(frozen=True, kw_only=True)
class Price:
    """Bytes on one GPU and seconds of a step, each by what they are for."""

    bytes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    recomputed: float = 0.0
    """FLOPs of recomputation as a share of `flops`."""
    forward: float = 0.0
    """Seconds of the forward pass, the loss left out."""

    @property
    def forward_end(self) -> float:
        """Bytes where activations are most and gradients, freed by the last step, are none."""
        backward = sum(
            self.bytes[name] for name in ("one layer's backward", "head's gradient", "being reduced")
        )
        # A stream's memory serves no other stream: what the last reduction took is not there for activations.
        held = self.bytes["reduction's stream"]
        return self._always + held + self.bytes["activations"] + max(self.bytes["loss"], backward)

    @property
    def backward_end(self) -> float:
        """Bytes where gradients are most and activations none; the outer group is reduced last."""
        return self._always + self.bytes["gradients"] + self.bytes["outer group's reduction"]

    @property
    def _always(self) -> float:
        return sum(self.bytes[name] for name in ("weights", "states", "gathered", "reserve"))

    @property
    def peak(self) -> float:
        """The larger of the two."""
        return max(self.forward_end, self.backward_end)

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the chip could do meanwhile; attention's own few are left out."""
        return self.flops / self.step / PEAK


def price(model: Shape, setting: Setting) -> Price:
    """Predicts bytes and seconds of one step of one micro-batch."""
    t, n = setting.tokens, setting.gpus
    weights, gradients, states = (each * model.parameters / n for each in setting.states)
    largest = max(layer.parameters for layer in model.layers)
    count = sum(layer.count for layer in model.layers)
    outer = model.parameters - model.blocks  # embedding and head, gathered for the whole step
    sharded = n > 1
    activations = sum(
        layer.count
        * t
        * (setting.whole * layer.whole + (1 - setting.whole) * 2 * model.hidden + setting.kept * layer.kept)
        for layer in model.layers
    )
    if setting.host:
        activations += LEAVING * t * max(layer.kept for layer in model.layers)
    logits = t * model.vocabulary
    bytes_ = {
        "weights": weights,
        "states": states,
        "gradients": gradients,
        "gathered": sharded * (2 * outer + 2 * 2 * largest),
        "activations": activations,
        "loss": 6 * model.head + 2 * min(t, CHUNK) * model.vocabulary if setting.fused_loss else 14 * logits,
        "head's gradient": 2 * model.head,
        "one layer's backward": 1.5 * t * max(layer.whole for layer in model.layers),
        "being reduced": sharded * (2 + 2 * 4) * largest,
        "outer group's reduction": sharded * (2 + 4) * outer,
        "reduction's stream": sharded * (4 + 4 / n) * model.head,
        "reserve": RESERVE,
    }
    products = 2 * t * (model.blocks + model.head)
    again = sum(
        layer.count
        * 2
        * t
        * (layer.parameters - layer.last)
        * (1 - setting.kept - setting.whole - setting.host)
        for layer in model.layers
    )
    passes = 1 + 2.5 + (1 - setting.whole)  # a backward moves more than twice what a forward does
    moved = sum(layer.count * t * layer.moved[setting.fused_layers] * passes for layer in model.layers)
    mixers = sum(layer.count * t * layer.mixer * (1 + 2.5 + 1 - setting.whole) for layer in model.layers)
    copied = (
        sharded * model.parameters * (2 * 2 * 2 + 2 + 4 + (4 + 2) / n)
    )  # gather out twice, reduce in and out
    update = model.parameters / n * (2 * setting.states[0] + setting.states[1] + 2 * setting.states[2])
    clipping = 3 * gradients
    rate = PRODUCTS * (1 - BESIDE * sharded)
    traffic = sharded * (2 * 2 + 4) * model.parameters * (n - 1) / n / LINK
    seconds = {
        "matrix products": 3 * products / rate,
        "recomputed products": again / rate,
        "elementwise and norms": moved / ELEMENTWISE,
        "delta rule and attention": mixers,
        # Each chunk reads and writes the head's gradient in fp32; logits pass by four times, whole ones 11.
        "loss beside its products": (
            (8 * model.head * -(-t // CHUNK) + 8 * logits if setting.fused_loss else 44 * logits) / BANDWIDTH
        ),
        "FSDP's copies": copied / BANDWIDTH,
        "optimizer and clipping": (
            update / (UPDATE_8BIT if setting.states == STATES["8bit"] else UPDATE) + clipping / BANDWIDTH
        ),
        # Hidden but for the first and the last group; NCCL takes a tenth of the chip meanwhile.
        "communication": 0.1 * traffic + sharded * 2 * outer * 4 / LINK / 2,
        "host": 0.02 + 0.0002 * count,
    }
    forward = products / rate + moved / passes / ELEMENTWISE + mixers / passes
    return Price(
        bytes=bytes_,
        seconds=seconds,
        flops=3 * products,
        recomputed=again / (3 * products),
        forward=forward,
    )


def most_kept(
    model: Shape, setting: Setting, *, host: bool = False, capacity: float = FILLED * CAPACITY
) -> tuple[int, int, int]:
    """How many layers can keep their products' outputs, and how many everything, before memory is full.

    Products first: at a hidden size of 5,120 they save 5.1 TFLOP a GB, what is left about half of that.

    Args:
        model: Sizes.
        setting: Of the rung.
        host: Layers that find no room keep their products on the host, as many as can go there in
            `HOST_SHARE` of the forward pass.
        capacity: Bytes.

    Returns:
        (layers that keep products, layers that keep all, layers that keep products on the host).
    """
    count = sum(layer.count for layer in model.layers)

    def fits(kept: int, whole: int) -> bool:
        trial = dataclasses.replace(setting, kept=kept / count, whole=whole / count, host=host / count)
        return price(model, trial).peak <= capacity

    whole = next((k for k in range(count, -1, -1) if fits(count - k, k)), None)
    if whole is not None:
        return count - whole, whole, 0
    kept = next((k for k in range(count, -1, -1) if fits(k, 0)), 0)
    if not host:
        return kept, 0, 0
    each = max(layer.kept for layer in model.layers) * setting.tokens
    room = HOST_SHARE * price(model, setting).forward * HOST
    return kept, 0, min(count - kept, int(room / each))


def foresee(
    settings: dict[str, Any], *, rung: Rung, model: Mapping[str, Any], gpus: int, capacity: int
) -> dict[str, Any] | None:
    """Predicted bytes and seconds of a rung; `model.keep_layers` = MOST becomes a number in `settings`.

    None for a model whose sizes are not known here; its layers then keep nothing.
    """
    sizes = shape(model)
    if sizes is None:
        for key in ("model.keep_layers", "model.host_layers"):
            if settings.get(key) == MOST:
                settings[key] = 0
        return None
    count = sum(layer.count for layer in sizes.layers)
    setting = Setting(
        gpus=gpus,
        tokens=capacity * settings.get("data.buffers", 1),
        states=STATES[_states(settings)],
        fused_loss=settings.get("model.loss") == "liger",
        fused_layers=settings.get("model.fused") == "yes",
    )
    if settings.get("model.keep_layers") == MOST:
        on_host = settings.get("model.host_layers") == MOST
        kept, whole, host = most_kept(sizes, setting, host=on_host)
        settings |= {"model.keep_layers": kept, "model.whole_layers": whole, "model.host_layers": host}
    kept, whole, host = (settings.get(f"model.{name}_layers", 0) for name in ("keep", "whole", "host"))
    setting = dataclasses.replace(setting, kept=kept / count, whole=whole / count, host=host / count)
    found = price(sizes, setting)
    slower = {"padded": 1.05 if rung.kernels else 2.2, "trainer": 1.0, "peer": 1.3}[rung.kind]
    return {
        "step": found.step * slower,
        "mfu": found.mfu / slower,
        "seconds": found.seconds,
        "peak_gib": found.peak / 2**30,
        "bytes": found.bytes,
        "hardware_flops": 1 + found.recomputed,
        "host_bytes": sum(layer.count * layer.kept for layer in sizes.layers) * setting.host * setting.tokens,
    }


def _states(settings: Mapping[str, Any]) -> str:
    if settings.get("optim.states") == "8bit":
        return "8bit"
    return "fp32" if settings["model.precision"] == "mixed" else "bf16"


def table(model: Mapping[str, Any], *, capacity: int) -> str:
    """Predicted bytes a GPU at 2, 4 and 8 GPUs, for each kind of states, as Markdown."""
    sizes = shape(model)
    if sizes is None:
        return f"no price is known for {model['model_type']}"
    count = sum(layer.count for layer in sizes.layers)
    rows = [
        "| GPUs | states | weights | gradients | states | left for activations "
        "| layers that keep products / all | peak GiB | MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for gpus in (1, 2, 4, 8):
        for name, states in STATES.items():
            setting = Setting(gpus=gpus, tokens=capacity, states=states)
            found = price(sizes, setting)
            if found.peak > CAPACITY:
                rows.append(f"| {gpus} | {name} | does not fit: {found.peak / 2**30:.0f} GiB |")
                continue
            kept, whole, _ = most_kept(sizes, setting)
            full = price(sizes, dataclasses.replace(setting, kept=kept / count, whole=whole / count))
            gib = [f"{found.bytes[part] / 2**30:.1f}" for part in ("weights", "gradients", "states")]
            left = (FILLED * CAPACITY - found.forward_end + found.bytes["activations"]) / 2**30
            rows.append(
                f"| {gpus} | {name} | {' | '.join(gib)} | {left:.1f} | {kept} / {whole} of {count} "
                f"| {full.peak / 2**30:.1f} | {full.mfu:.2f} |"
            )
    return "\n".join(rows)


def judge(row: dict[str, Any], *, lengths: Mapping[str, Any], machine: str) -> None:
    """Adds to a measured row what follows from it: `mfu`, `hfu`, and `hours` for the whole data set.

    MFU counts what the model needs, attention by Σ L². HFU counts what was computed: padded slots and
    recomputed products too.
    """
    if "step_s" not in row:
        return
    from training.cost import PEAK as PEAKS

    speed = row["real_tokens_per_s_per_gpu"]
    row["hours"] = lengths["conversations"] * lengths["mean"] / (speed * row["gpus"]) / 3600
    peak = next((peak for name, peak in PEAKS.items() if name in machine), None)
    if peak is None:
        return
    row["mfu"] = speed * lengths["flops_per_token"] / peak
    if row["price"]:
        row["hfu"] = (
            row["mfu"] * row["price"]["hardware_flops"] / (row["fill"] if row["kind"] == "padded" else 1)
        )


def describe(planned: Mapping[str, Any]) -> str:
    """A rung's plan in a line."""
    text = f"{planned['rung']:>5}  {planned['steps']} steps, about {planned['seconds']:.0f} s"
    if planned["price"] is None:
        return text
    foreseen = planned["price"]
    kept = {k: v for k, v in planned["settings"].items() if k.endswith("_layers") and v}
    return (
        f"{text}: {foreseen['step']:.2f} s a step, MFU {foreseen['mfu']:.2f}, "
        f"peak {foreseen['peak_gib']:.0f} GiB{f', {kept}' if kept else ''}  ({planned['title']})"
    )
