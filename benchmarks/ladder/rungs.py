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
        after: The rung whose settings it starts from.
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
}
COMMON_CUDA: dict[str, Any] = {"model.precision": "bf16"}
FLA = {"FLA_FLASH_QLA": "0"}  # else fla hands the delta rule on to flash-qla by itself

RUNGS = (
    Rung(name="1", title="padded, PyTorch reference layers", kind="padded", kernels=False),
    Rung(name="2", title="flash-linear-attention, causal-conv1d", kind="padded", environment=FLA),
    Rung(name="2s", title="the same, sorted by length", kind="padded", environment=FLA, sorted=True),
    Rung(
        name="3",
        title="packed buffers",
        kind="trainer",
        settings={"model.loss": "plain"},
        environment=FLA,
    ),
    Rung(name="peer", title="TRL's SFTTrainer: packing, liger", kind="peer", environment=FLA),
    Rung(name="peer+", title="the same without recomputation", kind="peer", environment=FLA, recompute=False),
)
BY_NAME = {rung.name: rung for rung in RUNGS}
ANCHOR = "3"


def settings_of(rung: Rung, *, cuda: bool) -> dict[str, Any]:
    """The trainer's settings of a rung: those of the rungs it builds on, then its own."""
    if rung.after is not None:
        before = settings_of(BY_NAME[rung.after], cuda=cuda)
    else:
        before = COMMON | (COMMON_CUDA if cuda else {})
    return {**before, **rung.settings, **(rung.cuda if cuda else {})}


def environment_of(rung: Rung) -> dict[str, str]:
    """The environment of a rung, and of the rungs it builds on."""
    before = environment_of(BY_NAME[rung.after]) if rung.after is not None else {}
    return {**before, **rung.environment}
