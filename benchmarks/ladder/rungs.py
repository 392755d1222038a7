"""The rungs: each is another one with something changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One rung.

    Attributes:
        name: As `--rungs` takes it.
        title: What it is, for the table.
        kind: "padded": 2-D batches; "trainer": the product; "peer": another trainer.
        after: The rung whose settings it starts from, and that its gain is counted against.
        settings: `section.key` of the trainer's configuration -> value.
        cuda: More of them, for what a CPU does not have.
        environment: Environment variables of its processes.
        kernels: Whether kernel packages may be found.
        sorted: Padded batches hold examples of like length.
        recompute: The peer recomputes activations, as is its default.
    """

    name: str
    title: str
    kind: Literal["padded", "trainer", "peer"]
    after: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    cuda: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    kernels: bool = True
    sorted: bool = False
    recompute: bool = True


COMMON: dict[str, Any] = {
    "run.seed": 0,
    "data.buffers": 1,
    "optim.lr": 1e-6,
    "schedule.kind": "constant",
    "schedule.steps": 1_000_000,
    "eval.every": 1_000_000,
    "checkpoint.last": False,
}
MOST = "most"
"""As many layers as `price` says fit."""
FLA = {"FLA_FLASH_QLA": "0"}  # else fla hands the delta rule on to flash-qla by itself

RUNGS = (
    Rung(name="1", title="padded, PyTorch reference layers", kind="padded", kernels=False),
    Rung(name="2", title="flash-linear-attention, causal-conv1d", kind="padded", after="1", environment=FLA),
    Rung(name="2s", title="the same, sorted by length", kind="padded", after="2", sorted=True),
    Rung(
        name="3",
        title="packed buffers",
        kind="trainer",
        after="2",
        settings={"model.loss": "plain", "model.checkpointing": 1, "model.fused": "no"},
        cuda={"model.delta_rule": "fla"},
    ),
    Rung(name="4a", title="+ flash-qla", kind="trainer", after="3", cuda={"model.delta_rule": "flash-qla"}),
    Rung(
        name="4b",
        title="+ fused loss, 2,048 tokens at a time",
        kind="trainer",
        after="4a",
        cuda={"model.loss": "liger", "model.loss_chunk": 8},
    ),
    Rung(
        name="4c", title="+ fused norms and SwiGLU", kind="trainer", after="4b", cuda={"model.fused": "yes"}
    ),
    Rung(
        name="4d",
        title="+ products kept as memory allows",
        kind="trainer",
        after="4c",
        settings={"model.keep_layers": MOST},
    ),
    Rung(
        name="4e",
        title="+ 8-bit states, more kept",
        kind="trainer",
        after="4d",
        cuda={"optim.states": "8bit"},
    ),
    Rung(
        name="4f",
        title="+ products of the others kept on the host",
        kind="trainer",
        after="4d",
        settings={"model.host_layers": MOST},
    ),
    Rung(
        name="4g",
        title="+ two buffers a micro-batch",
        kind="trainer",
        after="4f",
        settings={"data.buffers": 2},
    ),
    Rung(
        name="4h",
        title="+ two blocks gathered ahead, 8 channels",
        kind="trainer",
        after="4f",
        settings={"parallel.prefetch": 2},
        environment={"NCCL_MAX_CTAS": "8"},
    ),
    Rung(name="4i", title="+ compiled blocks", kind="trainer", after="4c", cuda={"model.compile": "layers"}),
    Rung(name="4", title="what gained, together", kind="trainer", after="4g"),
    Rung(name="peer", title="TRL's SFTTrainer: packing, liger", kind="peer"),
    Rung(name="peer+", title="the same without recomputation", kind="peer", recompute=False),
)
BY_NAME = {rung.name: rung for rung in RUNGS}
ANCHOR = "3"


def settings_of(rung: Rung, *, cuda: bool) -> dict[str, Any]:
    """The trainer's settings of a rung: those of the rungs it builds on, then its own."""
    before = COMMON if rung.after is None else settings_of(BY_NAME[rung.after], cuda=cuda)
    return {**before, **rung.settings, **(rung.cuda if cuda else {})}


def environment_of(rung: Rung) -> dict[str, str]:
    """The environment of a rung, and of the rungs it builds on."""
    before = environment_of(BY_NAME[rung.after]) if rung.after is not None else {}
    return {**before, **rung.environment}
