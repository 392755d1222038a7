"""Peaks of memory, as `memory_worker.py OUT KIND …`; each rank writes a JSON object into OUT/KIND-RANK.json.

    random FOLDER        the trainer's way from a configuration, under torchrun
    load FOLDER RUN      the same from safetensors; leaves a checkpoint in RUN
    export RUN DIRECTORY  and then, as a control, reads all that was exported: it has to be seen

The peak is that of the whole process, as the system counts it, less what was resident before: it can only
be too high. It holds what torch, safetensors, gloo and mapped files take alike.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_shards import VOCABULARY

from training import export
from training.checkpoint import FOLDER, Saver
from training.config import Checkpoint, Config, Data, Model, Parallel
from training.launch import leave
from training.model import read_config, skeleton
from training.parallel import World, join
from training.train import build, spread
from training.weights import load_weights, match_weights

FILE_BYTES = 48 * 2**20
"""Of a file of the model, and of the export."""


def resident(key: str) -> int:
    """Bytes: "VmRSS" are now, "VmHWM" were at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(found)


def sharded(model: Model, world: World, *, run: Path | None = None) -> dict[str, int]:
    """As the trainer comes to a model that is spread over the ranks; with a checkpoint of it if asked for."""
    config = Config(data=Data(shards=""), model=model)
    model_config = read_config(model, vocabulary=VOCABULARY)
    before = resident("VmRSS")
    root = build(config, model_config, device=world.device, precision="fp32")
    stored = match_weights(root.model, model.weights) if model.weights else None
    spread(root, config, world, precision="fp32")
    if stored:
        load_weights(root.model, stored=stored)
    peak = resident("VmHWM") - before
    if run:
        saver = Saver(run / FOLDER, options=Checkpoint(), world=world)
        settings = {"lora": {"rank": 0}, "model": {"weights": ""}}
        trainer = {"model": model_config.to_dict(), "base": "", "config": settings}
        saver.save(1, model=root.model, optimizer=torch.optim.SGD(root.parameters()), trainer=trainer)
    return {
        "peak": peak,
        "whole": sum(parameter.nbytes for parameter in root.parameters()),
        "shards": sum(parameter.to_local().nbytes for parameter in root.parameters()),
    }


def main(kind: str, *words: str) -> dict[str, int]:
    tiny = Model(config="tiny-qwen3_5")  # what libraries bring in at first use is no model
    if kind == "export":
        skeleton(read_config(tiny, vocabulary=VOCABULARY), precision="fp32")
        before = resident("VmRSS")
        export.FILE_BYTES = FILE_BYTES
        export.export(words[0], words[1])
        peak = resident("VmHWM") - before
        parts = [load_file(file) for file in Path(words[1]).glob("*.safetensors")]
        assert all(value.isfinite().all() for part in parts for value in part.values())
        return {"peak": peak, "control": resident("VmHWM") - before}
    with join(Parallel()) as world:
        sharded(tiny, world)
        if kind == "random":
            return sharded(Model(config=words[0]), world)
        return sharded(Model(weights=words[0]), world, run=Path(words[1]))


if __name__ == "__main__":
    out, kind, *words = sys.argv[1:]
    found = main(kind, *words)
    (Path(out) / f"{kind}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    leave(0)
