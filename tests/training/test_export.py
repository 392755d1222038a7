"""Round trip: start from a directory, train, export, open with transformers: equal logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_shards import VOCABULARY, some_shards
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from packing.sample import TOKENIZER
from training.__main__ import main
from training.checkpoint import newest, read_model
from training.model import TINY


def trained(folder: Path, *overrides: str) -> Path:
    """The run directory of two steps."""
    shards = some_shards(folder / "shards")
    (folder / "run.toml").write_text("")
    sets = [
        f"data.shards={shards}",
        f"run.dir={folder / 'run'}",
        "schedule.steps=2",
        "optim.lr=1e-2",
        *overrides,
    ]
    assert main([str(folder / "run.toml"), *(word for item in sets for word in ("--set", item))]) == 0
    return folder / "run"


@pytest.mark.parametrize("tied", [False, True])
def test_export_opens_with_equal_logits(tmp_path: Path, tied: bool) -> None:
    """The exported directory gives the checkpoint's logits, bit for bit, and no longer the starting ones."""
    start = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=tied,
        )
    ).eval()
    start.save_pretrained(tmp_path / "start")
    run = trained(tmp_path, f"model.weights={tmp_path / 'start'}")
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--tokenizer", str(TOKENIZER)]) == 0
    opened = AutoModelForCausalLM.from_pretrained(out).eval()
    assert (out / "tokenizer_config.json").exists()
    saved = newest(run / "checkpoints")
    assert saved
    names = [name for name, _ in start.named_parameters()]
    start_logits = start(torch.arange(20)[None]).logits
    start.load_state_dict(read_model(saved, names), strict=False)
    ids = torch.arange(20)[None]
    assert torch.equal(opened(ids).logits, start(ids).logits)
    assert not torch.allclose(opened(ids).logits, start_logits, atol=1e-3)


def test_export_of_random_weights_in_bf16(tmp_path: Path) -> None:
    """Without starting weights the configuration comes from the checkpoint; --dtype casts."""
    run = trained(tmp_path, "model.config=tiny-qwen3_5")
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(opened).__name__ == "Qwen3_5ForCausalLM"
    saved = newest(run / "checkpoints")
    assert saved
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(opened.get_parameter(name).bfloat16(), read_model(saved, [name])[name].bfloat16())
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path), str(tmp_path / "other")]) == 2
    assert main(["export", str(run), str(tmp_path / "other"), "--dtype", "int8"]) == 2


def test_a_conditional_generation_checkpoint_keeps_what_training_left_alone(tmp_path: Path) -> None:
    """Text weights under their first names, vision tower and multi-token heads carried over untouched."""
    text = Qwen3_5TextConfig(
        **{k: v for k, v in TINY["tiny-qwen3_5"].items() if k != "model_type"}, vocab_size=VOCABULARY
    )
    model = AutoModelForCausalLM.from_config(text)
    start = tmp_path / "start"
    start.mkdir()
    tensors = {
        name.replace("model.", "model.language_model.", 1): parameter.detach().clone()
        for name, parameter in model.named_parameters()
    }
    alone = {"model.visual.blocks.0.weight": torch.ones(3), "mtp.fc.weight": torch.full((2, 2), 7.0)}
    save_file({**tensors, **alone}, start / "model.safetensors")
    config = {"model_type": "qwen3_5", "text_config": text.to_dict(), "tie_word_embeddings": True}
    (start / "config.json").write_text(json.dumps(config))
    run = trained(tmp_path, f"model.weights={start}")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == tensors.keys() | alone.keys()
    for name, value in alone.items():
        assert torch.equal(found[name], value)
    assert (tmp_path / "out" / "config.json").read_text() == (start / "config.json").read_text()
    changed = [name for name, value in tensors.items() if not torch.equal(found[name], value)]
    assert len(changed) == len(tensors)
