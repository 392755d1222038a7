"""The ladder: from padded batches and reference layers to packed buffers and beyond, on this machine.

    python benchmarks/ladder.py --gpus 2                               # the whole ladder, 27B dimensions
    python benchmarks/ladder.py --gpus 2 --rungs 1,4 --deadline-s 570  # a piece; rung 3 is repeated beside it
    python benchmarks/ladder.py --gpus 2 --plan                        # what it would do, what it should cost
    python benchmarks/ladder.py --gpus 2 --report                      # table and picture of the results

Each rung runs in processes of its own, on the same lengths, from the same random weights. What it shows goes
into results/MODEL-Ngpu.json (or into $OUT), and joins what the same code measured before on such a machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ladder import data, launch, price, report, result
from ladder.rungs import ANCHOR, BY_NAME, RUNGS, Rung, environment_of, settings_of
from record import RESULTS, save

ROOT = Path(__file__).resolve().parents[1]
START = 30.0
"""Seconds from a rung's start to its first step: imports, random weights, NCCL."""
FIRST = 20.0
"""Seconds of a first step beyond a usual one: kernels are loaded, and compiled where the cache lacks them."""
PROFILE = 12.0
"""Seconds of the profiled step beyond a usual one."""
PINNED = 2.5e9
"""Bytes/s at which a machine that grows its memory as it is used gives pinned memory, over all ranks."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="processes; on a CPU a dry run")
    parser.add_argument(
        "--model-config", default=str(ROOT / "benchmarks/configs/ladder-27b.json"), metavar="FILE"
    )
    parser.add_argument("--layers", type=int, metavar="L", help="cut the model to so many layers")
    parser.add_argument(
        "--lengths", metavar="FILE", help=".npy, text or shard directory; else like ultrachat_200k's"
    )
    parser.add_argument(
        "--capacity", type=int, default=8192, help="tokens of a buffer, slots of a padded batch"
    )
    parser.add_argument(
        "--rungs", default=",".join(BY_NAME), help=f"of {', '.join(rung.name for rung in RUNGS)}"
    )
    parser.add_argument("--precision", choices=["bf16", "mixed"], default="bf16", help="mixed: fp32 masters")
    parser.add_argument("--steps", type=int, default=30, help="timed steps a rung")
    parser.add_argument("--anchor-steps", type=int, help=f"timed steps of rung {ANCHOR} where only an anchor")
    parser.add_argument("--set", action="append", default=[], metavar="RUNG:section.key=value")
    parser.add_argument(
        "--deadline-s", type=float, help="stop after so many seconds, with what is there by then"
    )
    parser.add_argument("--profile", metavar="RUNGS", help="profile one step of these alone; all by default")
    parser.add_argument("--plan", action="store_true", help="print plan and prices, run nothing")
    parser.add_argument(
        "--report", action="store_true", help="make table and picture from the JSON, run nothing"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the rungs; 0 if each of them came to its end."""
    began = time.monotonic()
    args = arguments(words)
    model = json.loads(Path(args.model_config).read_text("utf-8"))
    if args.layers:
        model["num_hidden_layers"] = args.layers
    cuda = shutil.which("nvidia-smi") is not None
    cut = f"-cut{args.layers}" if args.layers else ""
    name = f"{Path(args.model_config).stem}{cut}-{args.gpus}{'gpu' if cuda else 'cpu'}"
    if args.report:
        report.write(_place(name))
        return 0
    rungs = chosen(args.rungs)
    plans = [plan(rung, args=args, model=model, cuda=cuda) for rung in rungs]
    print(f"{name}: {', '.join(rung.name for rung in rungs)}; about {sum(p['seconds'] for p in plans):.0f} s")
    for planned in plans:
        print("  " + price.describe(planned))
    if args.plan:
        print(price.table(model, capacity=args.capacity))
        return 0
    results = _earlier(name)
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        work = Path(folder)
        lengths = prepare(work, args=args, model=model, plans=plans)
        results |= {"lengths": lengths, "model": model, "machine": _machine(), "code": _code()}
        problems = 0
        for rung, planned in zip(rungs, plans, strict=True):
            left = None if args.deadline_s is None else args.deadline_s - (time.monotonic() - began)
            if left is not None and left < planned["least"]:
                print(
                    f"rung {rung.name}: left out, {left:.0f} s are left and it needs {planned['least']:.0f}"
                )
                continue
            print(f"{time.strftime('%H:%M:%S')} rung {rung.name} begins", flush=True)
            row = climb(rung, planned, work=work, gpus=args.gpus, seconds=left)
            price.judge(row, lengths=lengths, machine=results["machine"])
            print(f"rung {rung.name}: {report.line(row)}", flush=True)
            problems += "problem" in row
            _merge(results, rung, row)
            save(name, results, packages=PACKAGES)
    if _place(name).exists():
        report.write(_place(name))
    return 1 if problems else 0


PACKAGES = [
    "flash-linear-attention",
    "flash-qla",
    "causal-conv1d",
    "liger-kernel",
    "torchao",
    "tilelang",
    "nvidia-nccl-cu13",
]


def chosen(names: str) -> list[Rung]:
    """The rungs in the ladder's order, the anchor among them, first.

    The anchor comes first, so that a piece cut short by its deadline has it.
    """
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in BY_NAME:
            raise SystemExit(f"--rungs {name}: there are {', '.join(BY_NAME)}")
    if any(BY_NAME[name].kind != "peer" for name in wanted):
        wanted = [ANCHOR, *(name for name in wanted if name != ANCHOR)]
    return [BY_NAME[name] for name in dict.fromkeys(wanted)]


def plan(rung: Rung, *, args: argparse.Namespace, model: Mapping[str, Any], cuda: bool) -> dict[str, Any]:
    """What a rung will do: settings, steps, expected seconds, the least worth beginning, price."""
    only_anchor = rung.name == ANCHOR and ANCHOR not in args.rungs.split(",") and args.anchor_steps
    timed = args.anchor_steps if only_anchor else args.steps
    profiled = args.profile is None or rung.name in args.profile.split(",")
    settings = settings_of(rung, cuda=cuda) | {"model.precision": args.precision if cuda else "fp32"}
    own = {}
    for override in args.set:
        name, _, assignment = override.partition(":")
        key, _, value = assignment.partition("=")
        if name == rung.name:
            own[key] = _value(value)
    settings |= own
    foreseen = price.foresee(settings, rung=rung, model=model, gpus=args.gpus, capacity=args.capacity)
    if not cuda:
        foreseen = None  # priced for GPUs only
    step = foreseen["step"] if foreseen else 1.0
    before = START + FIRST + PROFILE * profiled if cuda else 15.0
    before += args.gpus * foreseen["host_bytes"] / PINNED if foreseen else 0.0
    first = result.WARMUP + profiled
    return {
        "rung": rung.name,
        "title": rung.title,
        "settings": settings,
        "own": own,
        "steps": first + timed,
        "first": first,
        "profile_step": result.WARMUP if profiled else -1,
        "seconds": before + (first + timed + 2) * step,
        "least": before + (first + timed / 3) * step,
        "price": foreseen,
    }


def prepare(
    work: Path, *, args: argparse.Namespace, model: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Writes the model's configuration and the shard set into the folder; returns facts of the lengths."""
    (work / "model.json").write_text(json.dumps(model), "utf-8")
    lengths = data.read_lengths(args.lengths, most=args.capacity)
    each = max(p["steps"] * p["settings"].get("data.buffers", 1) for p in plans)
    data.write_shards(
        work / "shards",
        lengths,
        capacity=args.capacity,
        buffers=each * args.gpus,
        probes=args.gpus,
        vocabulary=model["vocab_size"],
    )
    return data.facts(lengths, work=work, source=args.lengths)


def climb(
    rung: Rung, planned: Mapping[str, Any], *, work: Path, gpus: int, seconds: float | None
) -> dict[str, Any]:
    """Runs one rung in processes of its own and reads what it left."""
    folder = work / f"rung-{rung.name}"
    run = folder / "run"
    run.parent.mkdir()
    settings = {
        "run.dir": str(run),
        "run.steps": planned["steps"],
        "data.shards": str(work / "shards"),
        "model.config": str(work / "model.json"),
        **planned["settings"],
    }
    (folder / "run.toml").write_text(_toml(settings), "utf-8")
    spec = {
        "kind": rung.kind,
        "folder": str(folder),
        "config": str(folder / "run.toml"),
        "profile_step": planned["profile_step"],
        "kernels": rung.kernels,
        "sorted": rung.sorted,
        "recompute": rung.recompute,
    }
    (folder / "spec.json").write_text(json.dumps(spec), "utf-8")
    log = folder / "log.txt"
    ranks = 1 if rung.kind == "peer" else gpus
    started = time.monotonic()
    with launch.Watch() as watch:
        problem = launch.run(
            folder / "spec.json",
            ranks=ranks,
            environment={**environment_of(rung), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            seconds=seconds,
            log=log,
        )
    row: dict[str, Any] = {
        "title": rung.title,
        "kind": rung.kind,
        "gpus": ranks,
        "settings": planned["settings"],
        "own": planned["own"],
        "environment": environment_of(rung),
        "price": planned["price"],
        "seconds": time.monotonic() - started,
        **result.read(folder, run=run, gpus=ranks, samples=watch.samples, first=planned["first"]),
    }
    said = log.read_text("utf-8", errors="replace")
    if problem:
        row["problem"] = problem
        print(said[-3000:], file=sys.stderr)
    if "OUT" in os.environ:
        Path(os.environ["OUT"]).mkdir(parents=True, exist_ok=True)
        with (Path(os.environ["OUT"]) / "ladder.log").open("a", encoding="utf-8") as logs:
            logs.write(f"\n=== rung {rung.name}\n{said[:20_000]}\n…\n{said[-20_000:]}")
    return row


def _toml(settings: Mapping[str, Any]) -> str:
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    return "".join(f"[{section}]\n" + "\n".join(lines) + "\n\n" for section, lines in sections.items())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _place(name: str) -> Path:
    return Path(os.environ.get("OUT", RESULTS)) / f"{name}.json"


def _earlier(name: str) -> dict[str, Any]:
    """What the same code measured before on such a machine, else nothing."""
    for folder in (Path(os.environ.get("OUT", RESULTS)), RESULTS):
        if (path := folder / f"{name}.json").exists():
            found: dict[str, Any] = json.loads(path.read_text("utf-8"))["results"]
            if (found["code"], found["machine"]) == (_code(), _machine()):
                return found
            print(f"{path} is of other code or another machine: not joined")
    return {"rungs": {}, "anchors": []}


def _merge(results: dict[str, Any], rung: Rung, row: dict[str, Any]) -> None:
    """Puts a row in its place; of two, the one with more timed steps stays. Every anchor is kept."""
    results.setdefault("rungs", {})
    if rung.name == ANCHOR and "step_s" in row:
        results.setdefault("anchors", []).append(
            {"step_s": row["step_s"], "real_tokens_per_s_per_gpu": row["real_tokens_per_s_per_gpu"]}
        )
    if row["steps"] >= results["rungs"].get(rung.name, {}).get("steps", 0):
        results["rungs"][rung.name] = row


def _machine() -> str:
    """The GPUs' names, or the processor's."""
    if shutil.which("nvidia-smi"):
        said = subprocess.run(launch.query("name"), capture_output=True, text=True, check=True)
        names = said.stdout.split("\n")
        return ", ".join(filter(None, names))
    return "cpu"


def _code() -> str:
    """Digest of all code that a rung runs: a piece of another commit that changes none of it may join."""
    digest = hashlib.sha256()
    folders = ("packing", "training", "benchmarks/ladder")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([*files, ROOT / "benchmarks/ladder.py"]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
