"""The whole ladder as a dry run: a tiny model, two ranks under gloo, on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from ladder import padded, price, result, trace  # noqa: E402
from ladder.rungs import BY_NAME, RUNGS, settings_of  # noqa: E402

from training.config import load  # noqa: E402

RUN = ["1", "2s", "3", "4d"]


def ladder(out: Path, *words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "ladder.py"), "--model-config"]
    command += [str(BENCHMARKS / "configs/ladder-tiny.json"), "--capacity", "256", *words]
    done = subprocess.run(
        command, env={**os.environ, "OUT": str(out)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One piece of the ladder, rung 3 beside it as its anchor."""
    out = tmp_path_factory.mktemp("ladder")
    lengths = out / "lengths.txt"
    lengths.write_text(" ".join(map(str, np.random.default_rng(0).integers(16, 120, 300))), "utf-8")
    kept = ["--set", "4d:model.keep_layers=2", "--set", "4d:model.whole_layers=1"]
    ladder(out, "--gpus", "2", "--steps", "2", "--lengths", str(lengths), "--rungs", "1,2s,4d", *kept)
    return out


@pytest.fixture(scope="module")
def rows(climbed: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((climbed / "ladder-tiny-2cpu.json").read_text())["results"]["rungs"]
    return found


def test_every_rung_is_there(rows: dict[str, Any]) -> None:
    """The anchor runs unasked beside the rungs asked for; each has its steps, its counts and its trace."""
    assert sorted(rows) == sorted(RUN)
    for name, row in rows.items():
        assert "problem" not in row, name
        assert row["steps"] == 2, name
        assert row["real_tokens_per_s_per_gpu"] > 0
        assert row["profile"]["cpu"]["operations"] > 1000
        assert len(row["profile"]["cpu"]["top"]) == 10
        assert row["compiles"]["batches"] == 2 * (result.WARMUP + 1 + 2)


def test_losses_and_gradients_agree(rows: dict[str, Any]) -> None:
    """On the same examples from the same weights every rung has rung 1's loss and first gradient."""
    first = rows["1"]
    for name, row in rows.items():
        assert row["probe_loss"] == pytest.approx(first["probe_loss"], rel=1e-5), name
        if name != "4g":  # twice the examples a step
            assert row["first_step"]["real_tokens"] == first["first_step"]["real_tokens"], name
            assert row["first_step"]["loss"] == pytest.approx(first["first_step"]["loss"], rel=1e-5), name
            assert row["first_step"]["grad_norm"] == pytest.approx(
                first["first_step"]["grad_norm"], rel=1e-4
            ), name


def test_fill(rows: dict[str, Any]) -> None:
    """Packed buffers are fuller than sorted batches, those fuller than shuffled ones."""
    assert rows["1"]["fill"] < rows["2s"]["fill"] < 1
    assert rows["3"]["fill"] > rows["1"]["fill"]


def test_table_and_picture(climbed: Path, rows: dict[str, Any]) -> None:
    """The table has a line a rung with its speed over rung 1's, and the dearest operations."""
    text = (climbed / "ladder-tiny-2cpu.md").read_text()
    rows_of = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    for name in RUN:
        ratio = rows[name]["real_tokens_per_s_per_gpu"] / rows["1"]["real_tokens_per_s_per_gpu"]
        assert f"| {ratio:.2f} |" in rows_of[name]
    assert "## Rung 4d" in text
    assert (climbed / "ladder-tiny-2cpu.png").read_bytes().startswith(b"\x89PNG")


def test_pieces_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the same code measured before on such a machine is joined; of two runs the longer stays."""
    spec = importlib.util.spec_from_file_location("ladder_command", BENCHMARKS / "ladder.py")
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(command, "_code", lambda: "this")
    row = {"steps": 30, "step_s": {"median": 1.0}, "real_tokens_per_s_per_gpu": 2.0}
    results = command._earlier("some")
    assert results == {"rungs": {}, "anchors": []}
    command._merge(results, BY_NAME["3"], row)
    command._merge(results, BY_NAME["3"], {**row, "steps": 8})
    assert results["rungs"]["3"]["steps"] == 30
    assert len(results["anchors"]) == 2
    for code, joined in (("this", results["rungs"]), ("another", {})):
        found = {"results": {**results, "code": code, "machine": command._machine()}}
        (tmp_path / "some.json").write_text(json.dumps(found))
        assert command._earlier("some")["rungs"] == joined


def test_deadline(tmp_path: Path) -> None:
    """With no time left a rung is left out and said so; there is no half a row."""
    said = ladder(tmp_path, "--gpus", "2", "--steps", "2", "--rungs", "3", "--deadline-s", "1")
    assert "rung 3: left out" in said
    assert not (tmp_path / "ladder-tiny-2cpu.json").exists()


def test_batches_stay_within_their_slots() -> None:
    """Every example is in exactly one batch, and batch times longest is at most the slots."""
    lengths = np.random.default_rng(1).integers(1, 200, 500).tolist()
    for in_order in (False, True):
        found = padded.batches(lengths, slots=512, in_order_of_length=in_order)
        assert sorted(place for batch in found for place in batch) == list(range(500))
        assert all(len(batch) * max(lengths[place] for place in batch) <= 512 for batch in found)


def test_prices_of_the_27b_shape() -> None:
    """26.9 B parameters; bf16 states fit two GPUs and fp32 ones four, with what is kept chosen to fit."""
    model = json.loads((BENCHMARKS / "configs/ladder-27b.json").read_text())
    sizes = price.shape(model)
    assert sizes is not None
    assert sizes.parameters == pytest.approx(26.9e9, rel=2e-3)
    assert price.price(sizes, price.Setting(gpus=2, tokens=8192)).peak < price.CAPACITY
    full = price.Setting(gpus=2, tokens=8192, states=price.STATES["fp32"])
    assert price.price(sizes, full).peak > price.CAPACITY
    settings = settings_of(BY_NAME["4d"], cuda=True) | {"model.precision": "bf16"}
    foreseen = price.foresee(settings, rung=BY_NAME["4d"], model=model, gpus=2, capacity=8192)
    assert foreseen is not None
    assert 0 < settings["model.keep_layers"] < 64
    assert foreseen["peak_gib"] * 2**30 <= price.FILLED * price.CAPACITY
    assert foreseen["host_bytes"] == 0
    settings = settings_of(BY_NAME["4g"], cuda=True) | {"model.precision": "bf16"}
    more = price.foresee(settings, rung=BY_NAME["4g"], model=model, gpus=2, capacity=8192)
    assert more is not None
    assert more["peak_gib"] * 2**30 <= price.FILLED * price.CAPACITY
    host = settings["model.host_layers"]
    assert 0 < host <= 64 - settings["model.keep_layers"], "those that find no room on the GPU"
    assert more["host_bytes"] == pytest.approx(host * 2 * 8192 * 2 * 56_320, rel=0.03), "products of a layer"
    assert more["hardware_flops"] < foreseen["hardware_flops"]


@pytest.mark.parametrize("cuda", [False, True])
def test_every_setting_is_one_that_the_trainer_knows(cuda: bool, tmp_path: Path) -> None:
    """A renamed key of the trainer's configuration shows here, not on borrowed GPUs."""
    model = json.loads((BENCHMARKS / "configs/ladder-27b.json").read_text())
    for rung in RUNGS:
        settings = settings_of(rung, cuda=cuda) | {"model.precision": "bf16", "data.shards": "shards"}
        price.foresee(settings, rung=rung, model=model, gpus=2, capacity=8192)
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        (tmp_path / "run.toml").write_text('[model]\nconfig = "model.json"\n')
        load(tmp_path / "run.toml", overrides=overrides)


def test_every_rung_builds_on_one_above() -> None:
    """Names are unique and `after` names an earlier rung, so a gain is counted against something measured."""
    seen: set[str] = set()
    for rung in RUNGS:
        assert rung.name not in seen
        assert rung.after is None or rung.after in seen
        seen.add(rung.name)


class Event:
    """A profiler's raw event."""

    def __init__(self, name: str, start: int, end: int, *, gpu: bool) -> None:
        from torch.autograd import DeviceType

        self._name, self._start, self._end = name, start, end
        self._device = DeviceType.CUDA if gpu else DeviceType.CPU

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._end - self._start

    def device_type(self) -> Any:
        return self._device

    def start_thread_id(self) -> int:
        return 1

    def is_user_annotation(self) -> bool:
        return self._name == "note"

    def is_hidden_event(self) -> bool:
        return False


def test_a_trace_in_numbers() -> None:
    """Nested calls count once in time; communication is exposed only where no other kernel runs."""
    events = [
        Event("outer", 0, 4_000_000, gpu=False),
        Event("inner", 1_000_000, 2_000_000, gpu=False),
        Event("note", 0, 9_000_000, gpu=True),
        Event("sm90_gemm", 0, 3_000_000, gpu=True),
        Event("ncclDevKernel_ReduceScatter", 2_000_000, 5_000_000, gpu=True),
        Event("vectorized_elementwise_kernel", 6_000_000, 7_000_000, gpu=True),
    ]
    found = trace.summarise(events)
    assert found["cpu"]["operations"] == 2
    assert found["cpu"]["total_ms"] == 4
    assert found["gpu"]["operations"] == 3
    assert (found["gpu"]["total_ms"], found["gpu"]["busy_ms"], found["gpu"]["span_ms"]) == (7, 6, 7)
    assert found["gpu"]["exposed_communication_ms"] == 2
    assert found["gpu"]["by_kind_ms"] == {"matrix products": 3, "communication": 3, "elementwise": 1}
