"""What every benchmark needs: time a call several times, and save the result with all that explains it.

from record import save, seconds

ours, floor = seconds(ours_call), seconds(floor_call)
save("plan", {"ours": ours, "counting_sort": floor, "ratio": ours["median"] / floor["median"]})
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

Seconds = dict[str, list[float]]
"""Of each call by its name, one a run."""

RESULTS = Path(__file__).with_name("results")
_RESULTS_IN_TREE = "benchmarks/results"
PACKAGES = [
    "padfree",
    "numpy",
    "numba",
    "pyarrow",
    "datasets",
    "tokenizers",
    "transformers",
    "torch",
    "trl",
    "triton",
]


def spread(samples: Iterable[float]) -> dict[str, Any]:
    """Median, least, most and count of some measurements, in their own unit."""
    values = sorted(samples)
    return {"median": statistics.median(values), "min": values[0], "max": values[-1], "runs": len(values)}


def ratio(above: Iterable[float], below: Iterable[float]) -> dict[str, Any]:
    """The spread of the quotients, run by run."""
    return spread(a / b for a, b in zip(above, below, strict=True))


def seconds(call: Callable[[], object], *, runs: int = 7, warmup: int = 1) -> dict[str, Any]:
    """Wall seconds of a call: the spread over `runs`, after `warmup` calls that do not count."""
    return spread(in_turn({"call": call}, runs=runs, warmup=warmup)[0]["call"])


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    *,
    runs: int,
    warmup: int = 1,
    before: Callable[[], object] = lambda: None,
) -> tuple[Seconds, Seconds]:
    """Wall and processor seconds of each call, that of ended child processes included.

    The calls are taken in turn, `warmup` turns that do not count and `runs` that do, so that what else the
    machine does falls on all alike. `before` goes before each call and is not timed.
    """
    wall: Seconds = {name: [] for name in calls}
    processor: Seconds = {name: [] for name in calls}
    for number in range(warmup + runs):
        for name, call in calls.items():
            before()
            start, used = time.perf_counter(), _processor_seconds()
            call()
            if number >= warmup:
                wall[name].append(time.perf_counter() - start)
                processor[name].append(_processor_seconds() - used)
    return wall, processor


def _processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def save_plot(figure: Any, axes: Any, to: Path) -> None:
    """Saves a picture of times over sizes, both axes logarithmic, with a tick at each size."""
    sizes = sorted({float(x) for line in axes.lines for x in line.get_xdata()})
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(to)
    print(f"saved {to}")


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit at hand, or "unknown" outside a checkout; `-dirty` behind it where tracked files differ.

    $PADFREE_COMMIT goes before: a copy of the tree on another machine may carry a git of another state.
    """
    if named := os.environ.get("PADFREE_COMMIT"):
        return named
    if shutil.which("git") is None:
        return "unknown"
    described, differs = (
        subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
        for words in (
            ["describe", "--always", "--abbrev=12"],
            # A benchmark that saves what it has so far changes no code.
            [
                "status",
                "--porcelain",
                "--untracked-files=no",
                "--",
                ":/",
                f":(exclude,top){_RESULTS_IN_TREE}",
            ],
        )
    )
    return f"{described}{'-dirty' if differs else ''}" or "unknown"


def hardware() -> dict[str, Any]:
    """Processor, cores and memory; and the GPUs, those of the processes that were started too."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next(
        (int(line.split()[1]) // 2**20 for line in _lines("/proc/meminfo") if "MemTotal" in line), None
    )
    found: dict[str, Any] = {"cpu": model, "cores": os.cpu_count(), "memory_gib": memory}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
    elif shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found["gpus"] = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    return found


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def save(name: str, results: Mapping[str, Any], *, packages: Iterable[str] = ()) -> Path:
    """Writes `results/NAME.json` (or into $OUT) and prints the path.

    Args:
        name: The file's name without its ending.
        results: What was measured: numbers with their unit in the key, as from `seconds`.
        packages: Further packages whose versions matter here.
    """
    folder = Path(os.environ.get("OUT", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),
        "python": platform.python_version(),
        "hardware": hardware(),
        "versions": {p: v for p in [*PACKAGES, *packages] if (v := version(p))},
        "results": results,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"saved {path}")
    return path
