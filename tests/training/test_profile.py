"""What is read off a trace: counts, dearest operations, and the diagnosis in words."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from training.errors import OptionError
from training.profile import StepProfiler, covered, diagnose, own_time, summarise, table


def test_covered_counts_every_moment_once() -> None:
    """Overlapping and nested spans count once, gaps not at all."""
    assert covered([]) == 0
    assert covered([(5, 9), (0, 4)]) == 8
    assert covered([(0, 10), (2, 3), (8, 12), (20, 21)]) == 13


def test_own_time_leaves_out_what_a_call_calls() -> None:
    """A call of 10 with two of 3 and 4 within, one of them with 2 within, and another thread beside."""
    calls = [(1, 0, 10, "outer"), (1, 1, 4, "three"), (1, 5, 9, "four"), (1, 6, 8, "two"), (2, 3, 9, "six")]
    own = {name: end - start - inner for name, start, end, inner in own_time([*calls, (1, 10, 11, "one")])}
    assert own == {"outer": 3, "three": 3, "four": 2, "two": 2, "six": 6, "one": 1}


def test_the_times_of_nested_operations_add_up_to_the_whole() -> None:
    """In linear, matmul calls mm: each counts its own time, and all together are no more than the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(10):
            torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    cpu = summarise(profiler, steps=1)["cpu"]
    assert {"aten::linear", "aten::mm"} <= {row["name"] for row in cpu["dearest"]}
    assert cpu["total_ms"] == pytest.approx(cpu["busy_ms"], rel=1e-6)


def test_summary_of_a_real_trace() -> None:
    """Two steps of three products each: three a step, with their time, among the dearest."""
    square = torch.ones(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(6):
            torch.mm(square, square)
    summary = summarise(profiler, steps=2)
    (row,) = [row for row in summary["cpu"]["dearest"] if row["name"] == "aten::mm"]
    assert row["calls"] == 3
    assert row["total_ms"] == pytest.approx(row["mean_us"] * 3 / 1000)
    assert 0 < summary["cpu"]["busy_ms"] <= summary["step_ms"]
    assert summary["gpu"]["operations"] == 0
    assert any("aten::mm" in line for line in table(summary))


def test_steps_are_traced_and_written(tmp_path: Path) -> None:
    """Steps 2 to 3 of 4: a trace that Perfetto opens, and the summary beside it."""
    profiler = StepProfiler("2:3", folder=tmp_path / "profile", active=True)
    texts = []
    for step in range(1, 5):
        profiler.before(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        texts.append(profiler.after(step, values={"fill": 0.5}))
    assert [text is None for text in texts] == [True, True, False, True]
    assert "padding: 50%" in str(texts[2])
    saved = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert saved["steps"] == 2
    with gzip.open(tmp_path / "profile" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]  # Chrome's format, which Perfetto reads
    complete = [event for event in events if event["ph"] == "X" and event["name"] == "aten::mm"]
    assert len(complete) == 2
    assert all({"ts", "dur", "pid", "tid"} <= event.keys() for event in complete)


@pytest.mark.parametrize("text", ["5", "8:5", "0:3", "a:b", "5:"])
def test_bad_steps_are_refused(text: str, tmp_path: Path) -> None:
    """One line says how to write it."""
    with pytest.raises(OptionError, match="FIRST:LAST"):
        StepProfiler(text, folder=tmp_path, active=True)


def figures(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "step_ms": 1000.0,
        "steps": 1,
        "cpu": {
            "operations": 118_316.0,
            "total_ms": 870.0,
            "busy_ms": 900.0,
            "bmm_calls": 0.0,
            "elementwise_calls": 0.0,
            "dearest": [],
        },
        "gpu": {
            "operations": 18_060.0,
            "total_ms": 990.0,
            "busy_ms": 980.0,
            "exposed_ms": 0.0,
            "dearest": [],
        },
    }
    for key, value in changes.items():
        side, _, name = key.partition("_")
        found[side][name] = value
    return found


@pytest.mark.parametrize(
    ("summary", "rest", "words"),
    [
        (figures(gpu_busy_ms=700.0), {}, "launch-bound: the GPU waited 300 of 1000 ms"),
        (figures(cpu_bmm_calls=31_105.0), {}, "reference kernels: 31,105"),
        (figures(gpu_exposed_ms=100.0), {}, "communication not hidden: 100 of 1000 ms"),
        (figures(), {"fill": 0.63}, "padding: 37%"),
        (figures(), {"compilations": 3}, "recompilation: 3 graphs"),
        (figures(), {"mfu": 0.34}, "GPU utilisation 98%"),
        (figures(), {}, "CPU time 870 ms against GPU time 990 ms a step"),
    ],
)
def test_each_diagnosis_has_its_figure(summary: dict[str, Any], rest: dict[str, Any], words: str) -> None:
    """Each finding is said with its figure, and not where its cause is missing."""
    healthy = {"fill": 0.99, "mfu": None, "compilations": 0}
    assert any(words in line for line in diagnose(summary, **{**healthy, **rest}))
    finding = words.partition(":")[0]
    if ":" in words:
        assert not any(finding in line for line in diagnose(figures(), **healthy))
