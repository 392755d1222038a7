"""Whole runs of the command: what they write, kill and resume, and what is refused before the first step."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import launch, losses, wait_for
from safetensors.torch import load_file, save_file
from tiny_shards import (
    CAPACITY,
    VOCABULARY,
    examples,
    held_out_loss,
    some_shards,
    tiny_qwen3,
    write_shards,
)
from transformers import AutoConfig, Qwen3ForCausalLM

from packing import PackOptions, pack_dataset
from packing.example import make_example
from packing.sample import CHATS, TOKENIZER
from packing.shards import open_shards
from training.__main__ import main
from training.checkpoint import newest, read_model, read_trainer
from training.config import Model, load
from training.cost import work
from training.data import TrainingData
from training.errors import OptionError
from training.kernels.families import FAMILIES, tiny_config
from training.metrics import read
from training.model import read_config, skeleton
from training.train import step_seed


def test_killed_and_resumed_run_has_the_losses_of_one_never_stopped(
    words: Callable[..., list[str]], tmp_path: Path
) -> None:
    """After SIGKILL, --resume repeats bit for bit what a run without a stop computes."""
    process = launch(words(run="cut"))
    wait_for(6, run=tmp_path / "cut", process=process)
    process.kill()
    process.communicate()
    assert max(losses(tmp_path / "cut")) < 30
    assert main(words(run="cut", flags=("--resume",))) == 0
    assert main(words(run="whole")) == 0
    whole = losses(tmp_path / "whole")
    assert list(whole) == list(range(1, 31))
    assert len(set(whole.values())) == 30
    assert losses(tmp_path / "cut") == whole


def test_a_run_directory_tells_all(words: Callable[..., list[str]], tmp_path: Path, shards: Path) -> None:
    """Resolved configuration, a metrics line a step with all figures, evaluations, the newest checkpoints."""
    schedule = ("schedule.steps=10", "schedule.warmup=3")
    assert main(words("eval.every=2", *schedule, "checkpoint.every=2")) == 0
    run = tmp_path / "run"
    config = load(run / "config.toml")
    assert (config.data.shards, config.schedule.steps) == (str(shards), 10)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000008", "step-00000010"]
    lines = read(run / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert list(losses(run, "eval")) == [0, 2, 4, 6, 8, 10]
    for line in steps:
        assert 0 < line["supervised_tokens"] < line["real_tokens"] <= CAPACITY
        assert line["fill"] == line["real_tokens"] / CAPACITY
        assert line["real_tokens_per_s"] == pytest.approx(line["real_tokens"] / line["step_s"])
        assert line["grad_norm"] > 0
        assert line["memory_gib"] > 0
    assert steps[0]["lr"] == pytest.approx(5e-3 / 3)
    assert main(["check", str(run), "--eval-ratio", "0.99"]) == 0
    assert main(["check", str(run), "--eval-ratio", "0.1"]) == 1


@pytest.mark.parametrize(("every", "again"), [(0, 0.0), (1, 1.0), (2, 0.5)])
def test_utilisation_is_a_steps_operations_over_what_the_device_could(
    words: Callable[..., list[str]],
    tmp_path: Path,
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    again: float,
) -> None:
    """MFU counts the examples' operations, HFU what layers compute again, too; both over the step."""
    monkeypatch.setattr("training.train.peak_flops", lambda device: 1e12)
    assert main(words("schedule.steps=3", "checkpoint.last=false", f"model.checkpointing={every}")) == 0
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    model = skeleton(read_config(Model(config="tiny-qwen3_5"), vocabulary=VOCABULARY), precision="fp32")
    operations = work(model)
    assert operations
    batches = TrainingData(str(shards), rank=0, world_size=1).epoch()
    assert len(lines) == 3
    for line, batch in zip(lines, batches, strict=False):
        flops = operations.step(batch.seq_lengths)
        layers, _, mixing = operations.forward(batch.seq_lengths)
        assert line["model_flops"] == flops
        assert line["mfu"] == pytest.approx(flops / line["step_s"] / 1e12)
        assert line["hfu"] == pytest.approx((flops + again * (layers + mixing)) / line["step_s"] / 1e12)
        parts = line["forward_backward_s"], line["optimizer_s"]
        assert min(parts) > 0
        assert sum(parts) < line["step_s"]
        assert 0 <= line["data_s"] < line["forward_backward_s"]  # read while the device computes


def test_steps_of_epochs_and_an_early_stop(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without schedule.steps the epochs decide, each rounded up; run.steps stops on the same schedule."""
    epochs = ("schedule.steps=0", "schedule.epochs=2", "schedule.warmup=3", "data.accumulation=5")
    assert main(words(*epochs, "run.steps=2")) == 0
    assert main(words(*epochs, flags=("--resume",))) == 0
    assert "run.steps 2 → to the end" in " ".join(capsys.readouterr().out.split())
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["buffers"] for line in lines] == [5, 5, 2, 5, 5, 2]  # 2 x 12 buffers, 5 a step
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["lr"] < lines[2]["lr"] == 5e-3


def test_a_warmup_beyond_the_epochs_is_refused(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that the epochs come to are compared, before anything is written."""
    here = ("schedule.steps=0", "schedule.warmup=13")
    refused(words(*here), capsys, "schedule.warmup = 13 steps", "has 12", untouched=tmp_path / "run")


def test_a_saved_hybrid_trains_goes_on_and_is_exported(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bamba's configuration as transformers saves it, an infinite number in it: dry run, steps, export."""
    family = next(family for family in FAMILIES if family.name == "Bamba")
    config = tiny_config(family)
    config.vocab_size = VOCABULARY
    config.save_pretrained(tmp_path / "bamba")
    assert '"__float__": "Infinity"' in (tmp_path / "bamba" / "config.json").read_text()
    here = (f"model.config={tmp_path / 'bamba'}", "checkpoint.every=1")
    assert main(words(*here, flags=("--dry-run",))) == 0
    assert "TFLOP at most a buffer" in capsys.readouterr().out
    assert main(words(*here, "run.steps=1")) == 0
    assert main(words(*here, "run.steps=2", flags=("--resume",))) == 0
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["model_flops"] > 0 for line in lines)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert AutoConfig.from_pretrained(tmp_path / "out").time_step_limit[1] == float("inf")


def test_dry_run_checks_and_writes_nothing(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--dry-run prints the resolved configuration and the model, and leaves no run directory."""
    assert main(words(flags=("--dry-run",))) == 0
    output = capsys.readouterr().out
    assert "[schedule]" in output
    assert "Qwen3_5ForCausalLM" in output
    assert "\n12 buffers: at most 12 ranks\n" in output
    assert not (tmp_path / "run").exists()
    assert main(words("data.shards=nowhere", flags=("--dry-run",))) == 2


def test_a_run_says_beforehand_what_may_end_it(
    words: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that may be killed for memory says so before it takes any, and goes on; so does a dry run."""
    few = ("schedule.steps=1", "schedule.warmup=0")
    assert main(words(*few)) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("training.cost.free_memory", lambda: 2**20)
    assert main(words(*few, run="tight")) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("training: ")
    assert captured.err.count("and at most 1.00 MiB are free") == captured.err.count("\n") == 1
    assert "step 1/1" in captured.out
    assert main(words(run="other", flags=("--dry-run",))) == 0
    assert "and at most 1.00 MiB are free" in capsys.readouterr().out.splitlines()[-1]


def test_training_starts_from_the_weights_of_a_directory(
    words: Callable[..., list[str]], tmp_path: Path, shards: Path
) -> None:
    """The evaluation before the first step is the saved stock model's loss, tied and bf16 or not."""
    for tied in (False, True):
        torch.manual_seed(5)
        model = Qwen3ForCausalLM(tiny_qwen3(tie_word_embeddings=tied)).eval()
        with torch.no_grad():
            model.lm_head.weight *= 8  # far from any fresh initialisation
        weights = tmp_path / f"weights-{tied}"
        # Published weights are bf16, and a run's may be fp32.
        model.to(torch.bfloat16 if tied else torch.float32)
        model.save_pretrained(weights, max_shard_size="20KB")
        model.float()
        assert len(list(weights.glob("*.safetensors"))) > 1
        run = f"from-{tied}"
        overrides = (f"model.weights={weights}", "model.config=", "eval.every=1", "schedule.steps=1")
        assert main(words(*overrides, run=run)) == 0
        assert losses(tmp_path / run, "eval")[0] == pytest.approx(held_out_loss(model, shards), rel=1e-5)


def refused(
    words: list[str], capsys: pytest.CaptureFixture[str], *parts: str, untouched: Path | None = None
) -> None:
    """The command ends with 2 and one line that holds all the parts."""
    capsys.readouterr()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("training: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err, captured.err
    if untouched is not None:
        assert not untouched.exists()


def test_bad_data_is_refused(
    words: Callable[..., list[str]], tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, damaged, of another vocabulary, without a held-out part: one line, no run directory."""
    run = tmp_path / "run"
    refused(words("data.shards=nowhere"), capsys, "nowhere", "no such directory", untouched=run)
    large = write_shards(tmp_path / "large", train=[examples(2)], vocabulary=5000)
    refused(words(f"data.shards={large}", "eval.every=1"), capsys, "has no part 'eval'", untouched=run)
    (tmp_path / "small.json").write_text(tiny_qwen3(vocab_size=90).to_json_string(use_diff=False))
    (tmp_path / "huge.json").write_text(tiny_qwen3(vocab_size=97 + 2049).to_json_string(use_diff=False))
    for name, parts in {
        "small.json": ("97 words and holds ids up to 96", "the model has 90", "own tokenizer"),
        "huge.json": ("97 words", "the model has 2146", "own tokenizer"),
    }.items():
        refused(words(f"model.config={tmp_path / name}"), capsys, *parts, untouched=run)
    damaged = some_shards(tmp_path / "damaged")
    file = damaged / "data-00000.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused(words(f"data.shards={damaged}"), capsys, "data-00000.arrow", "damaged")


def test_a_model_has_positions_for_each_example_and_the_tail_where_it_counts(
    words: Callable[..., list[str]], tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positions restart with each example, so a buffer may have more tokens than a model takes.

    One less than the longest example has is refused. So is the tail where the rotary embedding is "dynamic";
    then too for the held-out part, whose examples are as long as they were packed.
    """
    longest = int(open_shards(shards).seq_lengths.max())
    assert longest < CAPACITY
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for positions, more, parts in (
        (longest, {}, ()),
        (longest - 1, {}, (f"examples of {longest} tokens, the model takes {longest - 1} positions: pack",)),
        (CAPACITY, {"rope_parameters": rope}, ()),
        (
            CAPACITY - 1,
            {"rope_parameters": rope},
            ("tail of 64 tokens, and beyond 63", "--capacity 63 or less"),
        ),
    ):
        config = tiny_qwen3(max_position_embeddings=positions, **more)
        (tmp_path / "model.json").write_text(config.to_json_string(use_diff=False))
        for flags in (("--dry-run",), ()):
            command = words(
                f"model.config={tmp_path / 'model.json'}",
                "run.steps=1",
                flags=flags,
                run=f"run-{positions}",
            )
            if parts:
                refused(command, capsys, *parts, untouched=tmp_path / f"run-{positions}")
            else:
                assert main(command) == 0
    held_out = write_shards(
        tmp_path / "held-out", train=[examples(2, most=6)], held_out=[examples(3, most=25, seed=4)]
    )
    longest = int(open_shards(held_out / "eval").seq_lengths.max())
    (tmp_path / "model.json").write_text(
        tiny_qwen3(max_position_embeddings=longest - 1).to_json_string(use_diff=False)
    )
    command = words(f"model.config={tmp_path / 'model.json'}", f"data.shards={held_out}", "run.steps=1")
    assert main(command) == 0
    refused(
        words(
            f"model.config={tmp_path / 'model.json'}", f"data.shards={held_out}", "eval.every=1", run="other"
        ),
        capsys,
        f"eval has examples of {longest} tokens",
        untouched=tmp_path / "other",
    )


def test_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    """What `pack_dataset` writes says how many words the tokenizer has; both parts are checked with it."""
    pack_dataset(
        CHATS,
        tokenizer=TOKENIZER,
        out=tmp_path / "packed",
        options=PackOptions(capacity=2048, eval_fraction=0.1),
    )
    for part in (None, "eval"):
        data = TrainingData(str(tmp_path / "packed"), part=part, rank=0, world_size=1)
        assert data.shards.vocabulary == data.vocabulary == 1019


def test_a_tokenizer_may_have_words_that_no_row_uses(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Gemma 3's image token: a model with fewer words than the tokenizer trains where no id is beyond."""
    example = make_example(np.array([1, 2, 80]), trained=np.ones(3, bool))
    packed = write_shards(tmp_path / "packed", train=[[example]], vocabulary=82)
    for rows in (80, 81):
        (tmp_path / "model.json").write_text(tiny_qwen3(vocab_size=rows).to_json_string(use_diff=False))
        here = words(f"data.shards={packed}", f"model.config={tmp_path / 'model.json'}", "schedule.steps=1")
        if rows == 80:
            refused(here, capsys, "82 words and holds ids up to 80", "the model has 80 words")
        else:
            assert main(here) == 0


def test_without_words_the_ids_of_both_parts_decide(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards that don't say how many words: the largest id of train and eval together, and said so."""
    low, high = (make_example(np.array([1, 2, top]), trained=np.ones(3, bool)) for top in (60, 80))
    bare = write_shards(tmp_path / "bare", train=[[low]], held_out=[[high]], vocabulary=None)
    (tmp_path / "small.json").write_text(tiny_qwen3(vocab_size=80).to_json_string(use_diff=False))
    here = (f"data.shards={bare}", "eval.every=1", "schedule.steps=1")
    model = f"model.config={tmp_path / 'small.json'}"
    refused(words(*here, model), capsys, "ids up to 80", "the model has 80 words")
    assert main(words(*here)) == 0


def test_any_seed(words: Callable[..., list[str]], tmp_path: Path) -> None:
    """A date and the largest seed run; each seed, step and rank has a number of its own."""
    for seed in (20261129, 2**64 - 1):
        assert (
            main(words(f"run.seed={seed}", "schedule.steps=1", "checkpoint.last=false", run=str(seed))) == 0
        )
    places = itertools.product((0, 1, 20261129, 2**64 - 1), range(20), range(8))
    seeds = {step_seed(seed, step=step, rank=rank) for seed, step, rank in places}
    assert len(seeds) == 4 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_what_the_system_refuses_is_one_line(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run directory below a file, checkpoints that are a file, a full disk: one line with the place."""
    (tmp_path / "file").write_text("")
    short = ("schedule.steps=2", "checkpoint.every=1")
    refused(words(*short, run="file/run"), capsys, "file/run", "can't write: Not a directory")
    for name, flags in {"metrics.jsonl": ("--resume",), "config.toml": ()}.items():
        (tmp_path / name / name).mkdir(parents=True)
        refused(words(*short, run=name, flags=flags), capsys, name, "can't write: Is a directory")
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "checkpoints").write_text("")
    refused(words(*short, run="blocked", flags=("--resume",)), capsys, "blocked/checkpoints", "can't write")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for behind in ("false", "true"):
            here = words(*short, f"checkpoint.background={behind}", run=f"full-{behind}")
            refused(here, capsys, ".step-00000001.partial", "rank 0 can't write", "No space left")
    assert main(words(*short, run="whole")) == 0
    refused(["export", str(tmp_path / "whole"), str(tmp_path / "file" / "out")], capsys, "Not a directory")
    refused(["plot", str(tmp_path / "whole"), "--out", str(tmp_path / "file" / "x.svg")], capsys, "refuses")


def test_more_ranks_than_buffers_are_refused(shards: Path) -> None:
    """Twelve buffers do for twelve ranks, not for thirteen."""
    TrainingData(str(shards), rank=0, world_size=12).check_ranks()
    with pytest.raises(OptionError, match="12 buffers, too few for 13 ranks"):
        TrainingData(str(shards), rank=0, world_size=13).check_ranks()


def test_bad_model_is_refused(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or unknown configuration, weights that are missing or another model's: one line.

    A dry run says it too: headers tell, before any memory is taken.
    """
    refused(words("model.config=tiny-qwen4"), capsys, "tiny-qwen4", "built in are tiny-qwen3_5")
    refused(words("model.config=", "model.weights=tiny-qwen3_5"), capsys, "tiny-qwen3_5: no such file")
    (tmp_path / "other.json").write_text('{"model_type": "no-such-model"}')
    refused(words(f"model.config={tmp_path / 'other.json'}"), capsys, "other.json", "no-such-model")
    (tmp_path / "list.json").write_text("[]")
    refused(words(f"model.config={tmp_path / 'list.json'}"), capsys, "list.json")
    (tmp_path / "text.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    refused(
        words(f"model.config={tmp_path / 'text.json'}"), capsys, "text.json", "hidden_size", "expected int"
    )
    (tmp_path / "heads.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    refused(words(f"model.config={tmp_path / 'heads.json'}"), capsys, "heads.json", "modulo by zero")
    (tmp_path / "encoder.json").write_text('{"model_type": "vit"}')
    refused(words(f"model.config={tmp_path / 'encoder.json'}"), capsys, "vit", "no causal language model")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(tiny_qwen3().to_json_string(use_diff=False))
    here = ("model.config=", f"model.weights={empty}")
    for dry in ([], ["--dry-run"]):
        refused([*words(*here), *dry], capsys, "no *.safetensors")
    Qwen3ForCausalLM(tiny_qwen3(num_hidden_layers=1)).save_pretrained(empty)
    (empty / "config.json").write_text(tiny_qwen3().to_json_string(use_diff=False))
    refused(words(*here), capsys, "not in the safetensors", "model.layers.1.")
    Qwen3ForCausalLM(tiny_qwen3(intermediate_size=48)).save_pretrained(empty)
    (empty / "config.json").write_text(tiny_qwen3().to_json_string(use_diff=False))
    for dry in ([], ["--dry-run"]):
        refused(
            [*words(*here), *dry], capsys, "is of [32, 48] in the safetensors, of [32, 64] by config.json"
        )
    file = empty / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(words(*here), capsys, "model.safetensors", "damaged or cut off")
    refused(words("parallel.device=cuda"), capsys, "no GPU", "parallel.device=cpu")
    refused(words("model.loss=liger"), capsys, "model.loss=plain")


def test_a_folder_comes_before_a_built_in_model_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As doctor does, a run takes the user's own configuration, of weights and without."""
    monkeypatch.chdir(tmp_path)
    assert read_config(Model(config="tiny-qwen3_5"), vocabulary=7).model_type == "qwen3_5_text"
    tiny_qwen3().save_pretrained("tiny-qwen3_5")
    for model in (Model(config="tiny-qwen3_5"), Model(weights="tiny-qwen3_5")):
        assert read_config(model, vocabulary=7).model_type == "qwen3"


def test_weights_of_two_models_are_refused(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name in two files, a stored head unlike the embedding it is tied to, and a config of two minds."""
    place = tmp_path / "weights"
    Qwen3ForCausalLM(tiny_qwen3(tie_word_embeddings=True)).save_pretrained(place)
    here = (f"model.weights={place}", "model.config=", "schedule.steps=1")
    stored = load_file(place / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    for change in (0.0, 1.0):
        save_file(
            stored | {"lm_head.weight": embedding + change},
            place / "model.safetensors",
            metadata={"format": "pt"},
        )
        if change:
            refused(words(*here), capsys, "lm_head.weight and model.embed_tokens.weight are tied", "differ")
        else:
            assert main(words(*here, run="same")) == 0
    names = ("old.safetensors", "one.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, place / names[0], metadata={"format": "pt"})
    save_file(stored, place / names[1], metadata={"format": "pt"})
    (place / "model.safetensors").unlink()
    index = {"weight_map": dict(zip(("model.norm.weight", "model.embed_tokens.weight"), names, strict=True))}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(words(*here), capsys, "model.norm.weight is in old.safetensors and in one.safetensors")
    two = {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": True},
    }
    (tmp_path / "two.json").write_text(json.dumps(two))
    refused(
        words(f"model.config={tmp_path / 'two.json'}"), capsys, "False for the model and True for its text"
    )


def test_weights_that_are_not_plain_numbers_are_refused(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quantized by config.json, by the stored type, or by a scale beside a weight; also a bias too many."""
    Qwen3ForCausalLM(tiny_qwen3()).save_pretrained(tmp_path / "weights")
    file, config = (tmp_path / "weights" / name for name in ("model.safetensors", "config.json"))
    plain = load_file(file)
    here = (f"model.weights={tmp_path / 'weights'}", "model.config=", "schedule.steps=1")
    name = "model.layers.1.mlp.up_proj"
    weight = plain[f"{name}.weight"]
    for change, parts in (
        ({f"{name}.weight": weight.to(torch.float8_e4m3fn)}, (f"{name}.weight", "F8_E4M3", "quantized")),
        ({f"{name}.weight": weight.to(torch.int8)}, (f"{name}.weight", "I8", "quantized")),
        ({f"{name}.weight_scale_inv": torch.ones(1, 1)}, (f"{name}.weight_scale_inv", "quantized")),
        ({f"{name}.SCB": torch.ones(64)}, (f"{name}.SCB", "quantized")),
        ({f"{name}.weight.absmax": torch.ones(64)}, (f"{name}.weight.absmax", "quantized")),
        ({"model.layers.1.self_attn.q_proj.bias": torch.ones(32)}, ("q_proj.bias", "another model")),
    ):
        save_file(plain | change, file, metadata={"format": "pt"})
        refused(words(*here), capsys, *parts)
    left = {"visual.blocks.0.weight_scale": torch.ones(1), "mtp.fc.weight": torch.ones(1)}
    save_file(plain | left, file, metadata={"format": "pt"})
    assert main(words(*here, run="plain")) == 0
    for key in ("quantization_config", "compression_config"):
        saved = json.loads(config.read_text()) | {key: {"quant_method": "fp8"}}
        (tmp_path / "other.json").write_text(json.dumps(saved))
        refused(words(f"model.config={tmp_path / 'other.json'}"), capsys, "quantized", key, "fp8")


def test_wrong_resume_is_refused(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a run, of none, with other shards, another model, past the end: one line, nothing lost.

    At the end there is nothing to do, and that is no failure.
    """
    assert main(words("run.steps=2")) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    resume: dict[str, Any] = {"flags": ("--resume",)}
    refused(words(), capsys, "holds a run already", "--resume")
    nowhere = tmp_path / "nowhere"
    refused(words(run="nowhere", **resume), capsys, "nowhere holds no run", "run.dir", untouched=nowhere)
    other = some_shards(tmp_path / "other", seed=1)
    refused(words(f"data.shards={other}", **resume), capsys, "fingerprint")
    refused(words("run.seed=1", **resume), capsys, "seed")
    (tmp_path / "other.json").write_text(tiny_qwen3().to_json_string(use_diff=False))
    refused(words(f"model.config={tmp_path / 'other.json'}", **resume), capsys, "another model")
    refused(words("run.steps=1", **resume), capsys, "2 of 1 steps")
    refused(words("run.steps=2"), capsys, "holds a run already")
    assert main(words("run.steps=2", **resume)) == 0
    assert capsys.readouterr().out == "finished: 2 of 2 steps, nothing to do\n"
    trainer = tmp_path / "run" / "checkpoints" / "step-00000002" / "trainer.json"
    text = trainer.read_text()
    trainer.write_text(json.dumps(json.loads(text) | {"format": 99}))
    refused(words(**resume), capsys, "format 99")
    trainer.write_text(text[:-20])
    refused(words(**resume), capsys, "trainer.json")
    trainer.write_text(text)
    file = next(trainer.parent.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused(words(**resume), capsys, file.name, "damaged", "remove")
    file.unlink()
    refused(words(**resume), capsys, file.name, "missing", "can't be loaded")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_changed_settings_are_named(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On resume, what changes the losses is refused by name until accepted; what does not is said."""
    assert main(words("run.steps=2")) == 0
    changed = ("optim.lr=0.001", "optim.clip=2.5", "data.prefetch=1", "run.steps=3")
    refused(
        words(*changed, flags=("--resume", "--accept", "optim.lr")),
        capsys,
        "optim.clip = 1.0 (here 2.5): set it so again, or add --accept optim.clip",
    )
    refused(words(*changed, flags=("--resume", "--accept", "optim.lrr")), capsys, "optim.lrr: no setting")
    refused(
        words("data.accumulation=2", flags=("--resume",)),
        capsys,
        "steps were of 1 buffers on 1 ranks, here of 2 on 1",
    )
    flags = ("--resume", "--accept", "optim.lr", "--accept", "optim.clip")
    assert main(words(*changed, flags=flags)) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("data.prefetch 2 → 1", "optim.lr 0.005 → 0.001", "optim.clip 1.0 → 2.5"):
        assert part in said
    assert read(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 3


def test_a_flag_is_written_out(words: Callable[..., list[str]], tmp_path: Path) -> None:
    """The beginning of a flag is no flag: nothing runs."""
    with pytest.raises(SystemExit) as ended:
        main(words(flags=("--resum",)))
    assert ended.value.code == 2
    assert not (tmp_path / "run").exists()


def test_frozen_parameters_stay_and_the_rest_moves(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a pattern names is bit for bit what it was; a pattern that names nothing is refused."""
    torch.manual_seed(1)
    start = Qwen3ForCausalLM(tiny_qwen3())
    start.save_pretrained(tmp_path / "start")
    here = (f"model.weights={tmp_path / 'start'}", "model.config=", "schedule.steps=2")
    assert main(words(*here, 'model.freeze=["model.embed_tokens.*", "model.layers.0.*"]')) == 0
    saved = newest(tmp_path / "run" / "checkpoints")
    assert saved
    names = [name for name, _ in start.named_parameters()]
    after = read_model(saved, names)
    same = {name for name, value in start.named_parameters() if torch.equal(value, after[name])}
    assert same == {name for name in names if name.startswith(("model.embed_tokens.", "model.layers.0."))}
    refused(words(*here, 'model.freeze=["layers.*"]', run="other"), capsys, "'layers.*' matches no parameter")
    refused(words(*here, 'model.freeze=["*"]', run="other"), capsys, "nothing to train")


def test_checkpoints_in_the_background_are_the_same(words: Callable[..., list[str]], tmp_path: Path) -> None:
    """Training goes on while they are written; resuming gives the same losses; some stay for good."""
    options = ("checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4", "schedule.steps=11")
    assert main(words(*options, "checkpoint.background=true", run="behind")) == 0
    assert main(words(*options, run="whole")) == 0
    folders = [tmp_path / run / "checkpoints" for run in ("behind", "whole")]
    for folder in folders:
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["step-00000004", "step-00000008", "step-00000011"]
    shutil.rmtree(folders[0] / "step-00000011")
    assert main(words(*options, run="behind", flags=("--resume",))) == 0
    assert losses(tmp_path / "behind") == losses(tmp_path / "whole")


def test_partial_checkpoint_is_never_resumed_from(words: Callable[..., list[str]], tmp_path: Path) -> None:
    """What a kill leaves of a checkpoint has another name; the run goes on from the last whole one."""
    assert main(words("schedule.steps=4", "checkpoint.every=2", "run.steps=3")) == 0
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-00000003").rename(folder / ".step-00000003.partial")
    assert main(words("schedule.steps=4", flags=("--resume",))) == 0
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


def test_sigterm_saves_and_leaves_with_a_status_of_its_own(
    words: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The run ends after the step at hand with 85, and goes on as if never stopped."""
    process = launch(words("checkpoint.every=0", run="cut"))
    wait_for(2, run=tmp_path / "cut", process=process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 85, output
    assert "SIGTERM after step" in output
    taken = max(losses(tmp_path / "cut"))
    assert taken < 30
    assert main(words("checkpoint.every=0", "run.steps=30", run="cut", flags=("--resume",))) == 0
    assert main(words("checkpoint.every=0", f"run.steps={taken + 2}", run="whole")) == 0
    whole, cut = losses(tmp_path / "whole"), losses(tmp_path / "cut")
    assert {step: cut[step] for step in whole} == whole


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_examples(
    words: Callable[..., list[str]], tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default it ends with one line and the batch; with skip the step changes no weight."""
    model = Qwen3ForCausalLM(tiny_qwen3())
    with torch.no_grad():
        model.model.embed_tokens.weight[:40] = torch.nan  # whatever meets one of these words
    model.save_pretrained(tmp_path / "weights")
    here = (f"model.weights={tmp_path / 'weights'}", "model.config=", "schedule.steps=2")
    refused(words(*here), capsys, "step 1: loss nan", "run.nonfinite=skip")
    folder = tmp_path / "run" / "nonfinite"
    found = json.loads((folder / "step-00000001-rank-0.json").read_text())
    (numbers,) = found["example_ids"]
    (inputs,) = torch.load(folder / "step-00000001-rank-0.pt")
    ids = torch.cat([torch.tensor(open_shards(shards).example(n).input_ids) for n in numbers])
    assert inputs["input_ids"][0, : len(ids)].tolist() == ids.tolist()
    assert main(words(*here, "run.nonfinite=skip", run="skip")) == 0
    lines = [line for line in read(tmp_path / "skip" / "metrics.jsonl") if line["kind"] == "train"]
    assert all(line["loss"] != line["loss"] for line in lines)
    saved = newest(tmp_path / "skip" / "checkpoints")
    assert saved
    assert read_trainer(saved)["loader"]["buffers"] == 2  # a step that is left out has used its data
    before = load_file(tmp_path / "weights" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(read_model(saved, ["lm_head.weight"])["lm_head.weight"], before)
