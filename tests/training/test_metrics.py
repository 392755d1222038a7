"""What a run says of itself: the line and the live display, the picture, and the loggers."""

import json
import resource
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_shards import some_shards

from training import loggers
from training.__main__ import main
from training.config import Config, Data, Run
from training.errors import OptionError, OutputError
from training.files import replace_text
from training.loggers import check_loggers, open_loggers
from training.metrics import Metrics, plot, read

# The environment with the oldest transformers has none of them.
wandb = pytest.importorskip("wandb")

VALUES: dict[str, Any] = {
    "step": 1,
    "loss": 2.5,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "real_tokens_per_s": 12_000.0,
    "real_tokens_per_s_per_rank": 6_000.0,
    "supervised_tokens_per_s": 8_000.0,
    "supervised_tokens_per_s_per_rank": 4_000.0,
    "fill": 0.99,
    "step_s": 0.7,
    "memory_gib": 3.0,
}


def shown(folder: Path, **more: Any) -> None:
    with Metrics(folder, steps=3, done=0, active=True) as metrics:
        metrics.train(VALUES | more)


def test_plain_line_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a step, each number with what it counts, in all and a rank; a single rank says it once."""
    shown(tmp_path, mfu=0.384)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 1/3  loss 2.5000")
    assert "12,000 real and 8,000 supervised tokens/s (6,000 and 4,000 a rank)  MFU 38.4%" in line
    shown(tmp_path, real_tokens_per_s=6_000.0, supervised_tokens_per_s=4_000.0)
    assert "6,000 real and 4,000 supervised tokens/s  fill 0.990" in capsys.readouterr().out


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """A resume that can't write its metrics, and any file that is replaced: the old one is there, whole."""
    with Metrics(tmp_path, steps=3, done=0, active=True) as metrics:
        for step in (1, 2, 3):
            metrics.train(VALUES | {"step": step})
    file, picture = tmp_path / "metrics.jsonl", Path(plot(str(tmp_path)))
    before = file.read_bytes(), picture.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # bytes of a file
    try:
        with pytest.raises(OutputError, match=r"metrics\.jsonl"):
            Metrics(tmp_path, steps=3, done=2, active=True)
        with pytest.raises(OutputError, match=r"metrics\.jsonl"):
            replace_text(file, "x" * 101)
        with pytest.raises(OutputError, match=r"metrics\.svg"):
            plot(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (file.read_bytes(), picture.read_bytes()) == before
    assert {path.name for path in tmp_path.iterdir()} == {file.name, picture.name}
    with Metrics(tmp_path, steps=3, done=2, active=True) as metrics:
        metrics.train(VALUES | {"step": 3, "loss": 1.5})
    assert [line["step"] for line in read(file)] == [1, 2, 3]
    assert read(file)[-1]["loss"] == 1.5


def test_live_display_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the same figures stand in one line that is drawn again, with a bar, not in one a step."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    shown(tmp_path)
    output = capsys.readouterr().out
    assert "1/3" in output
    assert "━" in output
    assert "12,000 real and 8,000 supervised tokens/s" in output
    assert "\x1b[2K" in output, "the line is erased and drawn again"


def trackio_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackio reads its folder when it is imported, which another test's trainer may have done."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", folder)


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """The training losses by step that each logger holds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload().Scalars("train/loss")
    (database,) = (folder / "trackio").glob("*.db")
    rows = sqlite3.connect(database).execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1, "a resumed run is the same run"
    local = [(step, json.loads(text)) for _, step, text in rows]
    names = [(step, name) for step, values in local for name in values]
    assert len(set(names)) == len(names), "a step that is taken again is logged once"
    return {
        "tensorboard": {event.step: event.value for event in events},
        "trackio": {step: values["train/loss"] for step, values in local if "train/loss" in values},
    }


def test_loggers_get_what_the_file_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three at once, no network; a resumed run goes on in the same; and the file makes a picture."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackio_into(tmp_path / "trackio", monkeypatch)
    shards = some_shards(tmp_path / "shards")
    (tmp_path / "run.toml").write_text(
        f'[data]\nshards = "{shards}"\n[model]\nconfig = "tiny-qwen3_5"\n[eval]\nevery = 2\n'
        f'[run]\ndir = "{tmp_path / "run"}"\nloggers = ["tensorboard", "wandb", "trackio"]\n'
        "[schedule]\nsteps = 4\n[checkpoint]\nevery = 2\n"
    )
    saving = ["--set", "checkpoint.last=false"]
    assert main([str(tmp_path / "run.toml"), *saving, "--set", "run.steps=3"]) == 0
    assert main([str(tmp_path / "run.toml"), *saving, "--resume"]) == 0  # takes step 3 again
    lines = read(tmp_path / "run" / "metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    assert list(losses) == [1, 2, 3, 4]
    for name, found in logged(tmp_path).items():
        assert found == pytest.approx(losses, rel=1e-6), name
    offline = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(offline) == 2
    assert len({file.name for file in offline}) == 1, "a resumed run has the id of the first"
    for file, steps in zip(offline, ((1, 2, 3), (3, 4)), strict=True):
        content = file.read_bytes()
        assert b"train/loss" in content
        for step in steps:
            assert str(losses[step]).encode() in content
        assert b"eval/loss" in content
    assert main(["plot", str(tmp_path / "run"), "--out", str(tmp_path / "run.svg")]) == 0
    picture = (tmp_path / "run.svg").read_text()
    assert picture.startswith("<?xml")
    assert picture.count('id="axes_') == 4, "loss, gradient norm, learning rate, speed"


def test_loggers_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line: which there are, or what to install."""
    with pytest.raises(OptionError, match="no 'mlflow'; there are tensorboard, wandb, trackio"):
        check_loggers(["tensorboard", "mlflow"])
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="wandb is not installed: pip install wandb"):
        check_loggers(["wandb"])
    check_loggers([])


def test_wandb_without_a_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody logged in, no terminal to ask on: the error says the two ways out."""

    def init(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    config = Config(run=Run(loggers=("wandb",)), data=Data(shards="shards"))
    with pytest.raises(OptionError, match=r"^wandb: No API key configured.*WANDB_MODE=offline"):
        open_loggers(config, directory=tmp_path, done=0)
