"""LoRA: adapters alone are trained, saved, resumed and exported, on any number of ranks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import losses
from safetensors.torch import load_file, save_file
from tiny_shards import TINY_VISION, VOCABULARY, held_out_loss, some_shards, tiny_gemma3
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3_5TextConfig,
)

from packing.sample import TOKENIZER
from training.__main__ import main
from training.checkpoint import model_sizes, newest, read_model
from training.kernels.families import FAMILIES, build, tiny_config
from training.model import TINY

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
peft = pytest.importorskip("peft")  # the environment with the oldest transformers has none


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a hybrid model's weights and a configuration that trains adapters on them."""
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(3)
    text = {key: value for key, value in TINY["tiny-qwen3_5"].items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**text, vocab_size=VOCABULARY))
    model.save_pretrained(folder / "weights")
    prepare(folder)
    return folder


def prepare(folder: Path) -> None:
    """Shards, and a configuration that trains adapters on them beside the weights that are there."""
    some_shards(folder / "shards")
    (folder / "run.toml").write_text(
        f'[data]\nshards = "{folder / "shards"}"\naccumulation = 2\n'
        f'[model]\nweights = "{folder / "weights"}"\ncheckpointing = 1\n'
        "[lora]\nrank = 4\nalpha = 8\n[optim]\nlr = 2e-2\n[schedule]\nsteps = 4\n[eval]\nevery = 2\n"
        f'[checkpoint]\nevery = 2\n[run]\ndir = "{folder / "run"}"\n'
    )


def command(place: Path, *settings: str, flags: tuple[str, ...] = ()) -> list[str]:
    return [str(place / "run.toml"), *flags, *(word for item in settings for word in ("--set", item))]


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A whole run on one rank."""
    assert main(command(place)) == 0
    return place / "run"


def test_exported_adapters_open_in_peft_with_equal_loss(place: Path, run: Path) -> None:
    """Before the first step the stock model's loss, after the last the trained one's, opened by PEFT."""
    stock = AutoModelForCausalLM.from_pretrained(place / "weights").eval()
    first, *_, last = losses(run, "eval").values()
    assert first == pytest.approx(held_out_loss(stock, place / "shards"), rel=1e-5)
    assert last < first - 0.05
    assert main(["export", str(run), str(place / "adapter"), "--tokenizer", str(TOKENIZER)]) == 0
    assert (place / "adapter" / "tokenizer_config.json").exists()
    opened = peft.PeftModel.from_pretrained(stock, place / "adapter").eval()
    assert held_out_loss(opened, place / "shards") == pytest.approx(last, rel=1e-5)
    config = peft.PeftConfig.from_pretrained(place / "adapter")
    assert (config.r, config.lora_alpha) == (4, 8)
    assert config.base_model_name_or_path == str(place / "weights")
    assert main(["export", str(run), str(place / "half"), "--dtype", "bfloat16"]) == 0
    half = load_file(place / "half" / "adapter_model.safetensors")
    assert {value.dtype for value in half.values()} == {torch.bfloat16}


def test_a_checkpoint_holds_adapters_alone(run: Path) -> None:
    """In the model's part nothing but A and B, fp32; each B has moved from nothing."""
    saved = newest(run / "checkpoints")
    assert saved
    found = load_adapters(saved)
    assert len(found) == 2 * (3 * 8 + 7), "eight linear layers in a delta-net layer, seven beside attention"
    for name, value in found.items():
        assert ".lora_" in name
        assert value.dtype == torch.float32
        assert value.abs().max() > 0, name


def load_adapters(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_model(checkpoint, list(model_sizes(checkpoint)))


def test_resumed_adapters_go_on_as_never_stopped(
    place: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Base from its directory or a copy, adapters and states from the checkpoint, bit for bit."""
    cut = f"run.dir={place / 'cut'}"
    assert main(command(place, cut, "run.steps=2")) == 0
    shutil.copytree(place / "weights", place / "copy")
    moved = f"model.weights={place / 'copy'}"
    assert main(command(place, cut, moved, flags=("--resume",))) == 0
    assert losses(place / "cut") == losses(run)

    # A base of another training has the same names and shapes; one parameter of it may differ.
    file = place / "copy" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["export", str(place / "cut"), str(place / "cut-adapter")]) == 2
    assert "does not hold the weights that the run began from" in capsys.readouterr().err
    last = newest(place / "cut" / "checkpoints")
    assert last
    shutil.rmtree(last)
    resume = command(place, cut, moved, flags=("--resume", "--dry-run"))
    assert main(resume) == 2
    error = capsys.readouterr().err
    assert "trained beside other weights" in error
    assert "--accept model.weights" in error
    assert main([*resume, "--accept", "model.weights"]) == 0
    assert main(["export", str(place / "cut"), str(place / "cut-adapter")]) == 0  # step 2's are as they were


def test_two_ranks_train_the_same_adapters(place: Path, run: Path) -> None:
    """Sharded over two ranks, the same examples a step: the same losses, the same exported adapters."""
    two = command(place, f"run.dir={place / 'two'}", "data.accumulation=1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, "-m", "training", *two], check=True, timeout=240)
    assert losses(place / "two") == pytest.approx(losses(run), rel=1e-4)
    for name, source in (("one", run), ("both", place / "two")):
        assert main(["export", str(source), str(place / name)]) == 0
    one, both = (load_file(place / name / "adapter_model.safetensors") for name in ("one", "both"))
    assert one.keys() == both.keys()
    for name, value in one.items():
        assert torch.allclose(both[name], value, atol=1e-3 * float(value.abs().max())), name


@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_adapters_are_fp32_beside_any_weights(place: Path, precision: str) -> None:
    """Beside bf16 weights a small step would be lost in bf16."""
    settings = (f"run.dir={place / precision}", f"model.precision={precision}", "run.steps=1")
    assert main(command(place, *settings)) == 0
    saved = newest(place / precision / "checkpoints")
    assert saved
    assert {value.dtype for value in load_adapters(saved).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('lora.targets=["q_proj", "nowhere"]', "no linear layer is named nowhere; there are down_proj"),
        ('lora.targets=["lm_head"]', "lm_head is the head"),
    ],
)
def test_bad_targets_are_refused(
    place: Path, setting: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says which there are."""
    assert main(command(place, f"run.dir={place / 'bad'}", setting)) == 2
    assert words in capsys.readouterr().err


def test_adapters_of_a_text_part_open_on_the_whole_model(tmp_path: Path) -> None:
    """Gemma 3 opens as a multimodal model, whose layers have other names: its adapter moves the logits."""
    Gemma3ForConditionalGeneration(tiny_gemma3()).save_pretrained(tmp_path / "weights")
    prepare(tmp_path)
    assert main(command(tmp_path)) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").eval()
    ids = torch.arange(20)[None]
    before = stock(input_ids=ids).logits
    opened = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    assert (opened(input_ids=ids).logits - before).abs().max() > 1e-2


def test_adapters_open_on_the_class_that_config_json_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of LLaVA AutoModelForCausalLM makes nothing. A class that is not there is named."""
    text = {**TINY_LLAMA, "vocab_size": VOCABULARY}
    config = LlavaConfig(
        text_config=text,
        vision_config={"model_type": "clip_vision_model", **TINY_VISION},
        image_token_index=90,
        tie_word_embeddings=False,
    )
    place = tmp_path / "weights"
    LlavaForConditionalGeneration(config).save_pretrained(place)
    prepare(tmp_path)
    assert main(command(tmp_path)) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert "tensors for LlavaForConditionalGeneration" in capsys.readouterr().out
    stock = LlavaForConditionalGeneration.from_pretrained(place).eval()
    ids = torch.arange(20)[None]
    before = stock(input_ids=ids).logits
    opened = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    assert (opened(input_ids=ids).logits - before).abs().max() > 1e-2
    saved = json.loads((place / "config.json").read_text())
    for names in (["MyOwnModel"], ["LlamaForCausalLM"], ["LlavaConfig"], ["AutoModelForCausalLM"], [], None):
        (place / "config.json").write_text(json.dumps(saved | {"architectures": names}))
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "other")]) == 2
        error = capsys.readouterr().err
        assert "architectures name no class of transformers for llava" in error
        assert not names or f"but {names[0]}, so no adapter would open" in error


def test_layers_that_take_no_adapter_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel of Nemotron-H takes its layer's weight past the adapter: one line, with PEFT's reason."""
    (family,) = (family for family in FAMILIES if family.name == "Nemotron-H")
    config = tiny_config(family)
    config.vocab_size = VOCABULARY
    build(config, family.architecture).save_pretrained(tmp_path / "weights")
    prepare(tmp_path)
    capsys.readouterr()
    assert main(command(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("training: lora.targets: PEFT refuses (")
    assert error.count("\n") == 1
