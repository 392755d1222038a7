"""What planning costs and how well it fills, beside a counting sort and beside LightBinPack.

    python benchmarks/plan.py [--runs N]

The floor is a counting sort of the same lengths, compiled alike, its result in an array that numpy made
(so that both have huge pages): any plan that knows the lengths' order costs that much. The peer is measured
where `lightbinpack` is installed (0.1.1 was), from a list and from an array, the faster of the two counting.
Ours and the floor are taken in turn, so that what else the machine does falls on both alike; the peer comes
after them, since the millions of Python lists that it makes leave ours fewer huge pages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from record import in_turn, ratio, save, save_plot, spread

from packing.plan import lower_bound, plan_bins

SHARED = Path(os.environ.get("PADFREE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
CAPACITY = 8192
SIZES = (200_000, 1_000_000, 10_000_000)

Lengths = NDArray[np.int32]


def chat_like(count: int) -> Lengths:
    """Lengths as of ultrachat_200k: the shared file where it is, else a mixture of the same shape."""
    path = SHARED / "data" / "ultrachat_like_lengths.npy"
    random = np.random.default_rng(0)
    if path.exists():
        lengths: Lengths = np.load(path)
        return lengths if count == lengths.size else random.choice(lengths, count)
    part = random.choice(3, count, p=[0.62, 0.28, 0.10])
    median, sigma = np.array([1040, 1480, 520])[part], np.array([0.42, 0.38, 0.60])[part]
    return np.clip(median * np.exp(sigma * random.standard_normal(count)), 24, 4608).astype(np.int32)


def distributions() -> dict[str, Lengths]:
    """200,000 lengths of each kind, and the real ones where they are."""
    random = np.random.default_rng(0)
    count = SIZES[0]

    def uniform(least: int, most: int) -> Lengths:
        return random.integers(least, most + 1, count, np.int32)

    found = {
        "chat_like": chat_like(count),
        "uniform": uniform(1, CAPACITY),
        "bimodal": np.where(random.random(count) < 0.5, uniform(100, 600), uniform(4500, 7000)),
        "above_half": uniform(CAPACITY // 2 + 1, CAPACITY),
        "tiny": uniform(1, 64),
        "quarter_to_half": uniform(CAPACITY // 4, CAPACITY // 2),
        "fifth_to_third": uniform(CAPACITY // 5, CAPACITY // 3),
    }
    path = SHARED / "data" / "real_lengths_qwen3.npy"
    if path.exists():
        real = np.load(path)
        found["real"] = real[real <= CAPACITY]
    return found


@njit(cache=True)
def _counting_sort(lengths: Any, starts: Any, order: Any) -> None:
    for length in lengths:
        starts[length + 1] += 1
    for length in range(starts.size - 1):
        starts[length + 1] += starts[length]
    for i in range(lengths.size):
        order[starts[lengths[i]]] = i
        starts[lengths[i]] += 1


def counting_sort(lengths: Lengths) -> NDArray[np.int64]:
    """The positions, shortest first."""
    order = np.empty(lengths.size, np.int64)
    _counting_sort(lengths, np.zeros(CAPACITY + 2, np.int64), order)
    return order


def peers(lengths: Lengths) -> dict[str, Callable[[], Any]]:
    """LightBinPack's fastest exact best-fit decreasing, if it is installed."""
    try:
        from lightbinpack import obfd
    except ImportError:
        return {}
    as_list = lengths.tolist()
    return {
        "lightbinpack_obfd_list": lambda: obfd(as_list, CAPACITY),
        "lightbinpack_obfd_array": lambda: obfd(lengths, CAPACITY),
    }


def speed(count: int, *, runs: int) -> dict[str, Any]:
    lengths = chat_like(count)
    samples, _ = in_turn(
        {
            "best_fit_decreasing": lambda: plan_bins(lengths, capacity=CAPACITY),
            "counting_sort": lambda: counting_sort(lengths),
        },
        runs=runs,
    )
    found, _ = in_turn(peers(lengths), runs=max(3, runs // 3))
    result: dict[str, Any] = {f"{name}_s": spread(taken) for name, taken in (samples | found).items()}
    ours = samples["best_fit_decreasing"]
    result["over_counting_sort"] = ratio(ours, samples["counting_sort"])
    if found:
        fastest = min(map(statistics.median, found.values()))
        result["lightbinpack_over_ours"] = spread(fastest / taken for taken in ours)
    return result


def fill(lengths: Lengths) -> dict[str, Any]:
    """Bins, bound and seconds of each algorithm."""
    bound = lower_bound(lengths, capacity=CAPACITY)
    result: dict[str, Any] = {"examples": lengths.size, "lower_bound": bound}
    for algorithm in ("best_fit_decreasing", "swap_search", "first_fit_decreasing", "next_fit"):
        start = time.perf_counter()
        plan = plan_bins(lengths, capacity=CAPACITY, algorithm=algorithm)
        seconds = time.perf_counter() - start
        result[algorithm] = {
            "bins": len(plan),
            "percent_above_bound": 100 * (len(plan) / bound - 1),
            "seconds": seconds,
        }
    if found := peers(lengths):
        result["lightbinpack_obfd"] = {"bins": len(found["lightbinpack_obfd_list"]())}
    return result


def memory(count: int) -> dict[str, Any]:
    """Peak memory of a plan above that of its input, in a process of its own."""
    code = (
        "import sys; from plan import CAPACITY, chat_like, plan_bins\n"
        "plan_bins([1], capacity=CAPACITY); lengths = chat_like(int(sys.argv[1]))\n"
        "def status(key): return next(int(l.split()[1]) for l in open('/proc/self/status') if key in l)\n"
        "open('/proc/self/clear_refs', 'w').write('5'); before = status('VmRSS')\n"
        "plan = plan_bins(lengths, capacity=CAPACITY); print(status('VmHWM') - before, lengths.nbytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(count)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    kib, input_bytes = map(int, done.stdout.split())
    return {"peak_mib": kib / 1024, "input_mib": input_bytes / 2**20, "over_input": kib * 1024 / input_bytes}


def plot(speed: Mapping[int, Mapping[str, Any]], *, to: Path) -> None:
    """Time against examples, both axes by factors of ten."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {
        "counting_sort_s": "counting sort",
        "best_fit_decreasing_s": "padfree, best-fit decreasing",
        "lightbinpack_obfd_list_s": "LightBinPack obfd",
    }
    figure, axes = pyplot.subplots(figsize=(6, 4), dpi=90)
    for name, label in names.items():
        if all(name in found for found in speed.values()):
            axes.plot(list(speed), [found[name]["median"] for found in speed.values()], "o-", label=label)
    axes.set(xlabel="lengths", ylabel="seconds, median")
    save_plot(figure, axes, to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    for algorithm in ("best_fit_decreasing", "swap_search", "first_fit_decreasing", "next_fit"):
        plan_bins(
            np.arange(1, 5000), capacity=CAPACITY, algorithm=algorithm
        )  # compiled, or read from the cache
    results: dict[str, Any] = {"capacity": CAPACITY, "speed": {}, "fill": {}}
    for count in SIZES:
        results["speed"][count] = speed(count, runs=runs if count < SIZES[-1] else max(3, runs // 3))
        print(count, {name: round(value["median"], 5) for name, value in results["speed"][count].items()})
    results["memory"] = {SIZES[-1]: memory(SIZES[-1])}
    print("memory", results["memory"])
    for name, lengths in distributions().items():
        results["fill"][name] = fill(lengths)
        print(name, results["fill"][name])
    saved = save("plan", results, packages=["lightbinpack"])
    plot(results["speed"], to=saved.with_suffix(".png"))


if __name__ == "__main__":
    main()
