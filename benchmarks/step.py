"""One training step through `torchrun -m training`, on packed buffers with the lengths of real chats.

    python benchmarks/step.py --layers 8 --lengths ../shared/data/ultrachat_like_lengths.npy     # one H200
    python benchmarks/step.py --model-config benchmarks/configs/wide-0.6b.json --name step-wide-0.6b \
        --lengths ../shared/data/ultrachat_like_lengths.npy --set data.buffers=4 --set model.loss_chunk=32 \
        --set model.checkpointing=0 --set model.precision=bf16 --steps 60                  # data wait
    python benchmarks/step.py --ranks 2 --buffers 8 --steps 50 --warmup 3 --name step-27b-2gpu \
        --set model.precision=bf16 --set optim.lr=1e-4 --set schedule.warmup=5         # the loss falls
    python benchmarks/step.py --model-config benchmarks/configs/ladder-tiny.json --capacity 1024 --steps 4

A few layers at the width of a 27B model; random weights and tokens. Saves step time, real tokens/s, MFU
(Σ Lᵢ² for attention), peak memory and the share of the time that the device waited for data to
results/step.json, or into $OUT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from ladder.data import read_lengths, write_shards
from record import save, spread

CONFIGS = Path(__file__).with_name("configs")


def main() -> None:
    """Writes shards and a configuration into a temporary folder, runs the trainer, reads its metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-config", type=Path, default=CONFIGS / "ladder-27b.json")
    parser.add_argument("--layers", type=int, help="of the model; all by default")
    parser.add_argument("--lengths", help="a .npy file, a text file or a shard directory; else synthetic")
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=30, help="that count")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that do not")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--buffers", type=int, help="of the set, which is repeated; a new one each by default"
    )
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--name", default="step", help="of the result")
    arguments = parser.parse_args()

    model = json.loads(arguments.model_config.read_text())
    model["num_hidden_layers"] = arguments.layers or model["num_hidden_layers"]
    steps = arguments.warmup + arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "model.json").write_text(json.dumps(model))
        write_shards(
            place / "shards",
            read_lengths(arguments.lengths, most=arguments.capacity),
            capacity=arguments.capacity,
            buffers=arguments.buffers or arguments.ranks * steps,
            probes=1,
            vocabulary=model["vocab_size"],
        )
        settings = [
            f"run.dir={place / 'run'}",
            f"data.shards={place / 'shards'}",
            f"model.config={place / 'model.json'}",
            f"schedule.steps={steps}",
            "checkpoint.last=false",
            *arguments.set,
        ]
        (place / "run.toml").write_text("")
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
        torchrun += ["--log-dir", str(place / "logs")]  # else a temporary folder that stays
        sets = [word for setting in settings for word in ("--set", setting)]
        subprocess.run(
            [sys.executable, "-m", *torchrun, "-m", "training", str(place / "run.toml"), *sets], check=True
        )
        lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]

    train = [line for line in lines if line["kind"] == "train"]
    counted = train[arguments.warmup :]
    tokens = sum(line["real_tokens"] for line in counted)
    seconds = sum(line["step_s"] for line in counted)
    save(
        arguments.name,
        {
            "layers": model["num_hidden_layers"],
            "ranks": arguments.ranks,
            "capacity": arguments.capacity,
            "set": arguments.set,
            "bound": next(line["rows"] for line in lines if line["kind"] == "bound"),
            "step_s": spread(line["step_s"] for line in counted),
            "forward_backward_s": spread(line["forward_backward_s"] for line in counted),
            "optimizer_s": spread(line["optimizer_s"] for line in counted),
            "data_s": spread(line["data_s"] for line in counted),
            "data_share": sum(line["data_s"] for line in counted) / seconds,
            "first_step_s": train[0]["step_s"],
            "real_tokens_per_s_per_rank": tokens / seconds / arguments.ranks,
            "fill": sum(line["fill"] for line in counted) / len(counted),
            "model_flops_per_s_per_rank": sum(line["model_flops"] for line in counted)
            / seconds
            / arguments.ranks,
            "mfu": spread(line["mfu"] for line in counted) if "mfu" in counted[0] else None,
            "hfu": spread(line["hfu"] for line in counted) if "hfu" in counted[0] else None,
            "peak_memory_gib": train[-1]["memory_gib"],
            "losses": [line["loss"] for line in train],
        },
        packages=["flash-linear-attention", "causal-conv1d", "flash-qla", "tilelang", "liger-kernel"],
    )


if __name__ == "__main__":
    main()
