"""The learning benchmark on a CPU: it cuts the same steps in two ways, and judges by what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_shards import VOCABULARY, some_shards

from packing.shards import open_shards

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from learning import TOLERANCE, judge, unigram  # noqa: E402


def test_packed_and_alone_learn_the_same(tmp_path: Path) -> None:
    """In fp32 the first losses agree to rounding, and both ends are near each other and below unigram."""
    shards = some_shards(tmp_path / "shards", buffers=24)
    model = json.loads((BENCHMARKS / "configs" / "ladder-tiny.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(model | {"vocab_size": VOCABULARY}))
    words = ("--shards", str(shards), "--model-config", str(tmp_path / "model.json"), "--seeds", "1")
    words += ("--steps", "16", "--buffers", "2", "--lr", "5e-3")
    command = [sys.executable, str(BENCHMARKS / "learning.py"), *words]
    subprocess.run(command, env={**os.environ, "OUT": str(tmp_path)}, check=True, timeout=240)
    found = json.loads((tmp_path / "learning.json").read_text())["results"]
    (seed,) = found["seeds"]
    packed, alone = seed["packed"], seed["alone"]
    assert packed["train_losses"][:4] == pytest.approx(alone["train_losses"][:4], rel=1e-4)
    assert packed["micro_batches"] == 2 * 16 < alone["micro_batches"]
    assert packed["first_loss"] == alone["first_loss"] > found["unigram_loss"] > packed["loss"]


def test_baseline_is_add_one_unigram(tmp_path: Path) -> None:
    """Words counted among the training part's supervised tokens alone, and one more each."""
    shards = open_shards(some_shards(tmp_path / "shards"))
    labels, held_out = (
        np.concatenate([buffer.labels for buffer in part]) for part in (shards, shards.part("eval"))
    )
    counts = 1 + np.bincount(labels[labels != -100], minlength=VOCABULARY)
    share = (counts / counts.sum())[held_out[held_out != -100]]
    found = unigram(shards, shards.part("eval"), words=VOCABULARY)
    assert found == pytest.approx(-np.log(share).mean())


@pytest.mark.parametrize(
    ("packed", "holds"), [((4.0, 4.1), True), ((4.0, 4.1 + 2 * TOLERANCE), False), ((5.5, 4.1), False)]
)
def test_one_seed_that_differs_or_stays_above_the_baseline_is_enough(
    packed: tuple[float, ...], holds: bool
) -> None:
    """Each seed counts by itself: a mean would let two errors cancel."""

    def run(loss: float) -> dict[str, Any]:
        return {"loss": loss, "seconds": 1.0}

    alone = (packed[0], 4.1)
    seeds = [{"packed": run(a), "alone": run(b)} for a, b in zip(packed, alone, strict=True)]
    assert judge(seeds, baseline=5.0)["holds"] is holds
