"""From the files that a rung left to the numbers of its row."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from record import spread

WARMUP = 3
"""Steps before anything counts; compilations after them are counted too."""


def read(
    folder: Path, *, run: Path, gpus: int, samples: list[dict[str, float]], first: int
) -> dict[str, Any]:
    """A rung's numbers; whatever it did not come to is left out.

    Args:
        folder: Of the observer's files.
        run: The run directory, with metrics.jsonl.
        gpus: Ranks.
        samples: From `launch.Watch`.
        first: The first step that is timed, from 0.
    """
    lines = _lines(run / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    timed = steps[first:]
    seen = [_lines(path) for path in sorted(folder.glob("steps-*.jsonl"))]
    found: dict[str, Any] = {"steps": len(timed)}
    bound = [line["rows"] for line in lines if line["kind"] == "bound"]
    if bound:
        found["bound"] = bound[0]
    probes = [line["loss"] for line in lines if line["kind"] == "eval" and line["step"] == 0]
    if probes:
        found["probe_loss"] = probes[0]
    if steps:
        found["first_step"] = {k: steps[0].get(k) for k in ("loss", "grad_norm", "real_tokens", "step_s")}
    if timed:
        seconds = [line["step_s"] for line in timed]
        tokens = [line["real_tokens"] for line in timed]
        found |= {
            "step_s": spread(seconds) | {"deciles": np.quantile(seconds, [0.1, 0.9]).round(4).tolist()},
            "real_tokens_per_s_per_gpu": sum(tokens) / sum(seconds) / gpus,
            "real_tokens_per_step": statistics.mean(tokens),
            "fill": statistics.mean(line["fill"] for line in timed),
            "data_s": statistics.median(line.get("data_s", 0.0) for line in timed),
        }
    if seen and all(seen):
        found["compiles"] = _compiles(seen)
        if "allocated" in seen[0][-1]:
            found["peak_gib"] = {
                kind: max(rank[-1][kind] for rank in seen) / 2**30 for kind in ("allocated", "reserved")
            } | {"retries": max(rank[-1]["retries"] for rank in seen)}
        window = [line["time"] for line in seen[0][first - 1 :]]
        if timed and len(window) > 1:
            # From outside: all that happens between steps counts as well.
            found["wall_s_per_step"] = (window[-1] - window[0]) / (len(window) - 1)
            found |= _gpus([s for s in samples if window[0] <= s["time"] <= window[-1]])
    for key, file in (("profile", folder / "profile-0.json"), ("bound", folder / "bound.json")):
        if key not in found and file.exists():
            found[key] = json.loads(file.read_text("utf-8"))
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON; a last one cut off by a kill is left out."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _compiles(seen: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Compilations and autotuning runs over all ranks: up to the warm-up's end, and after it."""
    kinds = ("compiled", "loaded", "autotuned", "graphs")
    last = [rank[-1] for rank in seen]
    warm = [rank[min(WARMUP, len(rank)) - 1] for rank in seen]
    return {
        "warmup": {kind: sum(line[kind] for line in warm) for kind in kinds},
        "after": {kind: sum(b[kind] - a[kind] for a, b in zip(warm, last, strict=True)) for kind in kinds},
        "batches": sum(len(rank) for rank in seen),
    }


def _gpus(samples: list[dict[str, float]]) -> dict[str, Any]:
    if not samples:
        return {}
    named = {"utilization.gpu": "utilisation_percent", "power.draw": "power_w", "clocks.sm": "clock_mhz"}
    return {"gpu": {name: statistics.mean(sample[key] for sample in samples) for key, name in named.items()}}
