"""8-bit states and stochastic rounding on sharded weights: they train, and resume on other ranks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from running import losses
from tiny_shards import some_shards
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from training.__main__ import main
from training.config import Optim
from training.optim import make_optimizer, set_learning_rate

pytest.importorskip("torchao")  # the environment with the oldest transformers has none


def test_eight_bit_states_of_two_ranks_go_on_on_one(tmp_path: Path) -> None:
    """bf16 weights rounded at random, 8-bit states: from two ranks' checkpoint one rank takes their steps."""
    shards = some_shards(tmp_path / "shards")
    (tmp_path / "run.toml").write_text(
        f'[data]\nshards = "{shards}"\n[model]\nconfig = "tiny-qwen3_5"\nprecision = "bf16"\n'
        '[optim]\nlr = 1e-2\nstates = "8bit"\nrounding = "stochastic"\n'
        "[schedule]\nsteps = 5\n[checkpoint]\nevery = 2\nkeep = 0\n"
    )
    words = [str(tmp_path / "run.toml"), "--set", f"run.dir={tmp_path / 'two'}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    eager = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # compiling takes a minute on a CPU
    subprocess.run([*torchrun, "-m", "training", *words], check=True, timeout=240, env=eager)
    two = losses(tmp_path / "two")
    assert two[5] < two[1]
    for saved in ("checkpoints/step-00000002", "metrics.jsonl"):
        source, target = tmp_path / "two" / saved, tmp_path / "one" / saved
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    words[-1] = f"run.dir={tmp_path / 'one'}"
    with torch.compiler.set_stance("force_eager"):
        assert main([*words, "--set", "data.accumulation=2", "--resume"]) == 2
        accept = ("--accept", "data.accumulation")
        assert main([*words, "--set", "data.accumulation=2", "--resume", *accept]) == 0
    one = losses(tmp_path / "one")
    assert one[3] == pytest.approx(two[3], rel=1e-3), "the weights"
    assert one[5] == pytest.approx(two[5], rel=5e-3), "the states, and the rounding of their steps"


def test_replicas_round_alike(tmp_path: Path) -> None:
    """Two ranks that hold the same weights (HSDP) round them to the same ones, step after step."""
    shards = some_shards(tmp_path / "shards")
    (tmp_path / "run.toml").write_text(
        f'[data]\nshards = "{shards}"\n[model]\nconfig = "tiny-qwen3_5"\nprecision = "bf16"\n'
        '[optim]\nlr = 1e-2\nrounding = "stochastic"\n[parallel]\nreplicas = 2\n'
        "[schedule]\nsteps = 2\n[checkpoint]\nevery = 0\nlast = false\n"
    )
    worker = Path(__file__).with_name("weights_worker.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [str(tmp_path / "run.toml"), f"run.dir={tmp_path / 'run'}"]
    eager = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    said = subprocess.run(
        [*torchrun, str(worker), *words], check=True, timeout=240, env=eager, capture_output=True, text=True
    ).stdout
    found = sorted(line for line in said.splitlines() if line.startswith("weights "))
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_compiled_step_on_sharded_weights_is_the_step_on_whole_ones(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile takes the 8-bit states of sharded weights, and the weights come out bit for bit the same.

    Traced, not made into machine code: that takes half a minute, and it is the tracing that once failed.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def trained(*, sharded: bool) -> torch.Tensor:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor

        torch.manual_seed(0)
        model = nn.Linear(128, 64, bias=False)
        model.weight = nn.Parameter(placed(torch.randn(64, 128, dtype=torch.bfloat16)))
        optimizer = make_optimizer(model, optim=Optim(states="8bit", lr=1e-2))
        for _ in range(3):
            model.weight.grad = placed(torch.randn(64, 128, dtype=torch.bfloat16))
            set_learning_rate(optimizer, 1e-2)
            optimizer.step()
        weight = model.weight.detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    assert torch.equal(trained(sharded=True), trained(sharded=False))
