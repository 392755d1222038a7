"""Offloading to the host: refused where there is no GPU, and the same step where there is one."""

from pathlib import Path

import pytest
import torch
from gradients_worker import configuration, gradients
from tiny_shards import some_shards

from training.errors import OptionError
from training.metrics import read
from training.parallel import join
from training.train import train


def test_offloading_without_a_gpu_is_refused(tmp_path: Path) -> None:
    """There is nowhere to move from; the error says what to do."""
    config = configuration(tmp_path, tmp_path, "parallel.offload=true", "parallel.device=cpu")
    with pytest.raises(OptionError, match="there is no GPU: leave it off"), join(config.parallel):
        pass


@pytest.mark.gpu
def test_offloaded_step_is_the_same_step(tmp_path: Path) -> None:
    """With weights and gradients on the host: the same loss and gradients to bf16's rounding, on the CPU."""
    shards = some_shards(tmp_path / "shards")
    here = ("model.precision=mixed", "model.kernels=reference", "model.fused=no", "model.loss=plain")
    offload = (*here, "parallel.offload=true")
    on_gpu, on_host = gradients(
        configuration(tmp_path, shards, *here), configuration(tmp_path, shards, *offload)
    )
    assert float(on_host["loss"]) == pytest.approx(float(on_gpu["loss"]), rel=1e-3)
    for name, gradient in on_gpu.items():
        if gradient.ndim > 1:
            assert on_host[name].device.type == "cpu", name
            scale = float(gradient.abs().max())
            assert torch.allclose(on_host[name], gradient.cpu(), atol=0.02 * scale), name
    losses = []
    for name, settings in (("gpu", here), ("host", offload)):
        run = ("schedule.steps=4", "optim.lr=1e-3", f"run.dir={tmp_path / name}", *settings)
        train(configuration(tmp_path, shards, *run))
        lines = read(tmp_path / name / "metrics.jsonl")
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
