"""Going on with a run: the same steps however they are shared out, and nothing from what is damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import launch, losses
from tiny_shards import VOCABULARY, some_shards

from training.__main__ import main
from training.checkpoint import model_sizes, newest, read_model
from training.files import DIGESTS, TRAINER, _digest
from training.kernels.families import FAMILIES, build, tiny_config
from training.metrics import read

ALWAYS = ("schedule.steps=0", "schedule.epochs=2", "checkpoint.every=1", "model.checkpointing=0")


def rates(run: Path) -> list[float]:
    return [line["lr"] for line in read(run / "metrics.jsonl") if line["kind"] == "train"]


def test_another_split_of_the_same_step_changes_nothing(
    words: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Two buffers a step, of five an epoch: two micro-batches, one of two buffers, or two ranks.

    Steps, learning rates and losses are those of a run never stopped, also where an epoch's last step has
    one buffer only.
    """
    five = f"data.shards={some_shards(tmp_path / 'five', buffers=5)}"
    assert main(words(*ALWAYS, five, "data.accumulation=2", run="whole")) == 0
    whole, rate = losses(tmp_path / "whole"), rates(tmp_path / "whole")
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert main(words(*ALWAYS, five, "data.accumulation=2", "run.steps=2", run="cut")) == 0
    assert main(words(*ALWAYS, five, "data.buffers=2", "run.steps=4", run="cut", flags=("--resume",))) == 0
    process = launch(
        words(*ALWAYS, five, run="cut", flags=("--resume",)), "--standalone", "--nproc-per-node", "2"
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert losses(tmp_path / "cut") == pytest.approx(whole, rel=1e-4)
    assert rates(tmp_path / "cut") == rate


def test_shards_in_replicas_train_save_and_go_on(words: Callable[..., list[str]], tmp_path: Path) -> None:
    """Four ranks, two that shard and two of these (HSDP): losses, norms and clipped steps of one rank.

    One rank goes on from their checkpoint.
    """
    here = ("schedule.steps=6", "optim.clip=0.1", "checkpoint.every=0")
    assert main(words(*here, "data.accumulation=4", run="whole")) == 0
    process = launch(
        words(*here, "parallel.replicas=2", "run.steps=3", run="cut"), "--standalone", "--nproc-per-node", "4"
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert main(words(*here, "data.accumulation=4", run="cut", flags=("--resume",))) == 0
    whole, cut = (
        [line for line in read(tmp_path / run / "metrics.jsonl") if line["kind"] == "train"]
        for run in ("whole", "cut")
    )
    assert [line["step"] for line in cut] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in cut] == pytest.approx([line[key] for line in whole], rel=1e-3)
    assert min(line["grad_norm"] for line in whole) > 0.2, "each step is clipped"


def test_dropout_goes_on_in_the_same_split_alone(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left out is a function of the step and the rank: another split is refused until accepted."""
    config = tiny_config(next(family for family in FAMILIES if family.name == "Phi-3"))
    config.vocab_size, config.resid_pdrop = VOCABULARY, 0.1
    config.save_pretrained(tmp_path / "phi")
    here = (f"model.config={tmp_path / 'phi'}", "run.steps=2", "data.accumulation=2")
    assert main(words(*here[:1], "run.steps=1", "data.accumulation=2")) == 0
    other = ("data.accumulation=1", "data.buffers=2")
    assert main(words(*here, *other, flags=("--resume", "--dry-run"))) == 2
    assert "resid_pdrop = 0.1 leaves out other values" in capsys.readouterr().err
    accepted = ("--resume", "--dry-run", "--accept", "data.accumulation")
    assert main(words(*here, *other, flags=accepted)) == 0
    assert main(words(*here, flags=("--resume", "--dry-run"))) == 0


def test_a_tied_head_is_stored_once_and_one_stored_twice_still_goes_on(
    words: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is the embedding, so under one name; from a checkpoint of before, which has both, the same.

    In all three the losses and the last weights are those of a run that was never stopped, bit for bit.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert main(words("run.steps=4", run="whole")) == 0
    whole = saved(tmp_path / "whole")
    names = list(model_sizes(whole))
    assert embedding in names
    assert head not in names
    for run in ("now", "before"):
        with monkeypatch.context() as patch:
            if run == "before":
                patch.setattr("training.checkpoint.tied_names", lambda _: {})
            assert main(words("run.steps=2", run=run)) == 0
        assert (head in model_sizes(saved(tmp_path / run))) == (run == "before")
        assert main(words("run.steps=4", run=run, flags=("--resume",))) == 0
        last = saved(tmp_path / run)
        assert list(model_sizes(last)) == names
        assert losses(tmp_path / run) == losses(tmp_path / "whole")
        one, other = read_model(last, names), read_model(whole, names)
        assert all(torch.equal(one[name], other[name]) for name in names)


def saved(run: Path) -> Path:
    found = newest(run / "checkpoints")
    assert found
    return found


def test_any_changed_or_missing_file_of_a_checkpoint_is_noticed(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit, a file less, another step's file: one line of --resume and export, nothing written."""
    assert main(words("run.steps=2", "checkpoint.every=1")) == 0
    run, whole = tmp_path / "run", tmp_path / "kept"
    last = saved(run)
    shutil.copytree(last, whole)
    before = (run / "metrics.jsonl").read_bytes()
    names = sorted(path.name for path in whole.iterdir())
    assert names == [".metadata", "__0_0.distcp", "digests.json", "trainer.json"]

    def check(name: str, *parts: str) -> None:
        for command in (words(flags=("--resume",)), ["export", str(run), str(tmp_path / "out")]):
            capsys.readouterr()
            assert main(command) == 2
            error = capsys.readouterr().err
            assert error.startswith("training: ")
            assert error.count("\n") == 1
            for part in (name, *parts):
                assert part in error, error
        assert not (tmp_path / "out").exists()
        assert (run / "metrics.jsonl").read_bytes() == before

    for name in names:
        content = bytearray((whole / name).read_bytes())
        content[len(content) // 2] ^= 1
        (last / name).write_bytes(content)
        check("damaged" if name == "digests.json" else name, "remove")
        (last / name).unlink()
        check(name, "missing")
        shutil.copy(whole / name, last / name)
    for name in (".metadata", "__0_0.distcp", "trainer.json"):
        shutil.copy(last.with_name("step-00000001") / name, last / name)
        if (last / name).read_bytes() != (whole / name).read_bytes():
            check(name, "damaged")
        shutil.copy(whole / name, last / name)
    text = (whole / "trainer.json").read_text()
    (last / "trainer.json").write_text(text.replace('"step": 2', '"step": 1'))
    check("trainer.json", "damaged")
    shutil.copy(whole / "trainer.json", last / "trainer.json")
    shutil.copy(last / "__0_0.distcp", last / "__1_0.distcp")
    check("__1_0.distcp", "damaged")
    (last / "__1_0.distcp").unlink()
    last.rename(last.with_name("step-00000003"))
    check("step-00000003", "is of step 2", "step-00000002")
    last.with_name("step-00000003").rename(last)
    assert main(words("run.steps=3", flags=("--resume",))) == 0


def test_a_kept_copy_is_passed_over_and_stays(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint copied beside the others under a name of its own: said, neither read nor removed."""
    options = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=2")
    assert main(words(*options, "run.steps=1")) == 0
    folder = tmp_path / "run" / "checkpoints"
    for name in ("step-00000001-good", "step-9"):
        shutil.copytree(folder / "step-00000001", folder / name)
    assert main(words(*options, "run.steps=3", flags=("--resume",))) == 0
    assert "passed over: step-00000001-good, step-9" in " ".join(capsys.readouterr().out.split())
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-00000001-good", "step-00000002", "step-00000003", "step-9"]
    assert main(["export", str(folder / "step-00000001-good"), str(tmp_path / "out")]) == 0


def test_another_transformers_names_its_defaults_otherwise(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """5.17 wrote part of the rotary settings twice, and others did not write yet: the model is the same.

    What another version knows and this one does not is refused, with both versions' numbers.
    """
    assert main(words("run.steps=1")) == 0
    saved = newest(tmp_path / "run" / "checkpoints")
    assert saved
    before = json.loads((saved / TRAINER).read_text())
    assert "hidden_act" in before["model"]
    shorter = {key: value for key, value in before["model"].items() if key != "hidden_act"}
    older = shorter | {"partial_rotary_factor": 0.25, "transformers_version": "5.16.0"}
    unknown = {"model_type": "qwen9", "transformers_version": "9.0"}
    layers = {"layer_types": ["new_attention"] * 4, "transformers_version": "9.0"}
    for model, said in (
        (older, ""),
        (older | {"clip_qkv": 3.0}, "its clip_qkv is 3.0, here None (saved with transformers 5.16.0, now "),
        (before["model"] | unknown, "not known here (saved with transformers 9.0, now "),
        (before["model"] | layers, "not known here (saved with transformers 9.0, now "),
    ):
        (saved / TRAINER).write_text(json.dumps(before | {"model": model}))
        digests = json.loads((saved / DIGESTS).read_text())
        (saved / DIGESTS).write_text(json.dumps(digests | {TRAINER: _digest(saved / TRAINER)}))
        capsys.readouterr()
        assert main(words("run.steps=1", flags=("--resume", "--dry-run"))) == (2 if said else 0)
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == bool(said)
        assert len(error) < 500
        if said.startswith("not known"):
            assert main(["export", str(saved), str(tmp_path / "out")]) == 2
            assert "is of a model that is not known here" in capsys.readouterr().err


def test_a_run_goes_on_beside_the_weights_that_it_began_from(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is read from them but by the export; so moved ones go on, none do too, and others do not.

    The export says where to name them.
    """
    for seed, name in enumerate(("start", "other")):
        config = tiny_config(FAMILIES[0])
        config.vocab_size = VOCABULARY
        build(config, FAMILIES[0].architecture, seed=seed).save_pretrained(tmp_path / name)
    start, moved, other = (f"model.weights={tmp_path / name}" for name in ("start", "moved", "other"))
    assert main(words("model.config=", start, "run.steps=1")) == 0
    (tmp_path / "start").rename(tmp_path / "moved")
    resume = ("--resume",)
    assert main(words("model.config=", moved, "run.steps=2", flags=resume)) == 0
    capsys.readouterr()
    assert main(words("model.config=", other, "run.steps=3", flags=resume)) == 2
    assert f"did not begin from the weights in {tmp_path / 'other'}" in capsys.readouterr().err
    accepted = (*resume, "--accept", "model.weights")
    assert main(words("model.config=", other, "run.steps=3", flags=accepted)) == 0
    assert main(words("model.config=", other, "run.steps=4", flags=resume)) == 0, "accepted once"
    assert main(words(f"model.config={tmp_path / 'moved'}", "run.steps=5", flags=resume)) == 0
    out = str(tmp_path / "out")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), out]) == 2
    assert "model.weights does not hold the weights that the run began from" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), out, "--weights", str(tmp_path / "other")]) == 2
    assert main(["export", str(tmp_path / "run"), out, "--weights", str(tmp_path / "moved")]) == 0
