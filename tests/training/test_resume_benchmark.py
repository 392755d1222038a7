"""The benchmark of a killed run, on a CPU: what it says holds, and what it refuses."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from resume import apart, seconds  # noqa: E402

TINY = ("--model-config", str(BENCHMARKS / "configs" / "ladder-tiny.json"), "--capacity", "256")


def run(*words: str, out: Path) -> "subprocess.CompletedProcess[str]":
    """The benchmark with these words; its result goes into the folder."""
    command = [sys.executable, str(BENCHMARKS / "resume.py"), *TINY, *words]
    environment = os.environ | {"OUT": str(out)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_one_rank_is_killed_and_half_of_them_go_on(tmp_path: Path) -> None:
    """Two ranks save at step 2, one is killed after step 3, one rank goes on: the same tokens and losses.

    The result says what was saved, and what that cost.
    """
    words = ("--layers", "4", "--ranks", "2", "--resume-ranks", "1", "--steps", "5", "--every", "2")
    words += ("--kill-after", "3", "--kill", "one", "--eval-every", "5", "--apart", "--limit", "1e-4")
    ended = run(*words, out=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads((tmp_path / "resume.json").read_text())["results"]
    assert found["holds"]
    assert found["same_tokens_each_step"]
    assert found["resumed_from_step"] in (2, 4)
    assert found["killed_after_step"] >= 3
    assert found["resumed_on"] == 1
    assert len(found["losses"]["killed and resumed"]) == 5
    assert found["evaluations"]["killed and resumed"]["5"] == pytest.approx(
        found["evaluations"]["whole"]["5"], rel=1e-4
    )
    # A tensor costs a few KB beside its bytes, which only a tiny model sees.
    assert found["expected_bytes"] < found["checkpoint_bytes"] < 2 * found["expected_bytes"]
    assert len(found["held_s"]) >= 1
    assert all(held > 0 for held in found["held_s"])
    assert "saving_over_whole" in found


def test_losses_are_apart_where_one_is_none() -> None:
    """No number, a step that is missing, and zeros: only like runs are near."""
    assert apart({1: 2.0, 2: 4.0}, {1: 2.0, 2: 4.4}) == pytest.approx(0.1)
    assert apart({}, {}) == 0 == apart({1: 0.0}, {1: 0.0})
    assert apart({1: 1.0, 2: 1.0}, {1: 1.0, 2: math.nan}) == math.inf
    assert apart({1: 1.0, 2: 1.0}, {1: 1.0}) == math.inf


def test_saving_is_what_steps_took_and_what_held_them_up() -> None:
    """From the second step on, which has nothing to compile, to the last that is asked for."""
    steps: list[dict[str, Any]] = [{"kind": "train", "step": step, "step_s": 1.0} for step in range(1, 5)]
    saves = [{"kind": "checkpoint", "step": step, "held_s": 0.25} for step in (2, 4)]
    other = [{"kind": "eval", "step": 3, "loss": 1.0, "eval_s": 9.0}]
    assert seconds([*steps, *saves, *other]) == 3.5
    assert seconds([*steps, *saves, *other], last=3) == 2.25


def test_what_can_not_go_on_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Three ranks are no half of four; a checkpoint larger than the disk is named with its size."""
    ended = run("--ranks", "4", "--resume-ranks", "3", out=tmp_path)
    assert ended.returncode
    assert "4 ranks can't go on as 3" in ended.stderr
    model = json.loads((BENCHMARKS / "configs" / "ladder-tiny.json").read_text())
    (tmp_path / "large.json").write_text(json.dumps(model | {"vocab_size": 10**10}))
    ended = run("--model-config", str(tmp_path / "large.json"), out=tmp_path)
    assert ended.returncode
    assert "a checkpoint takes 7680." in ended.stdout
    assert "fewer --layers" in ended.stderr
