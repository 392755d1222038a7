"""Run under torchrun as `gradients_worker.py SHARDS OUT`: rank 0 saves whole gradients of one step."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from training.config import Config, load
from training.launch import leave
from training.model import read_config
from training.parallel import World, join, make_mesh
from training.train import build, evaluate, forward_backward, open_data, precision, spread


def gradients(*configs: Config) -> list[dict[str, torch.Tensor]]:
    """For each configuration the whole gradient of an epoch as one step, its loss, and the held-out loss."""
    with join(configs[0].parallel) as world:
        meshes = [
            make_mesh(world.device, size=world.size, replicas=config.parallel.replicas) for config in configs
        ]
        return [gradient(c, replace(world, mesh=mesh)) for c, mesh in zip(configs, meshes, strict=True)]


def gradient(config: Config, world: World) -> dict[str, torch.Tensor]:
    data, held_out = open_data(config, world)
    model_config, numbers = read_config(config.model, vocabulary=data.vocabulary), precision(config, world)
    root = build(config, model_config, device=world.device, precision=numbers)
    spread(root, config, world, precision=numbers)
    batches = list(data.epoch())
    (count,) = world.sum(sum(batch.supervised_tokens for batch in batches))
    share = forward_backward(
        root,
        batches,
        num_items_in_batch=int(count),
        device=world.device,
        reduce_each=config.parallel.reduce == "micro_batch",
    )
    found = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in root.model.named_parameters()
    }
    assert held_out
    return found | {
        "loss": torch.tensor(world.sum(float(share))[0]),
        "held_out": torch.tensor(evaluate(root, held_out, step=0, world=world)["loss"]),
    }


def configuration(folder: Path, shards: Path, *overrides: str) -> Config:
    """A configuration of the tiny model on the shards, in a file of this rank's own."""
    path = folder / f"gradients-{os.environ.get('RANK', '0')}.toml"
    path.write_text(f'[data]\nshards = "{shards}"\n[model]\nconfig = "tiny-qwen3_5"\n[eval]\nevery = 1\n')
    return load(path, overrides=overrides)


if __name__ == "__main__":
    shards, out = map(Path, sys.argv[1:])
    found = gradients(
        configuration(out.parent, shards),
        configuration(out.parent, shards, "parallel.reduce=micro_batch"),
        configuration(out.parent, shards, "parallel.replicas=2"),
        configuration(out.parent, shards, "parallel.prefetch=2", "parallel.keep_gathered=2"),
    )
    if os.environ["RANK"] == "0":
        torch.save(found, out)
    leave(0)
