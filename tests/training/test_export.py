"""Round trip: start from a directory, train, export, open with transformers: equal logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_shards import VOCABULARY, some_shards, tiny_qwen3
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3ForCausalLM,
)

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


def tiny(*, tied: bool = False) -> Qwen3ForCausalLM:
    """A random model of two layers."""
    return Qwen3ForCausalLM(tiny_qwen3(tie_word_embeddings=tied)).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_export_opens_with_equal_logits(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exported directory gives the checkpoint's logits, bit for bit, and no longer the starting ones."""
    start = tiny(tied=tied)
    start.save_pretrained(tmp_path / "start")
    if tied:  # as some checkpoints are: the head is stored although it is the embedding
        stored = load_file(tmp_path / "start/model.safetensors")
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
        save_file(stored, tmp_path / "start/model.safetensors", metadata={"format": "pt"})
    run = trained(tmp_path, f"model.weights={tmp_path / 'start'}")
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--tokenizer", str(TOKENIZER)]) == 0
    assert "no tokenizer" not in capsys.readouterr().out
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


def test_export_of_random_weights_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without starting weights the configuration comes from the checkpoint, and no tokenizer, as is said."""
    run = trained(tmp_path, "model.config=tiny-qwen3_5")
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "no tokenizer copied: add --tokenizer DIR" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "other"), "--weights", str(tmp_path / "out")]) == 2
    assert "the run began from random weights: leave --weights out" in capsys.readouterr().err
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
    """Vision tower and multi-token heads as they were; both of its classes open it with the trained text."""
    text = {k: v for k, v in TINY["tiny-qwen3_5"].items() if k != "model_type"} | {"vocab_size": VOCABULARY}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=True,
            **{name: 90 + number for number, name in enumerate(special)},
        )
    ).eval()
    start = tmp_path / "start"
    model.save_pretrained(start)
    tensors = load_file(start / "model.safetensors") | {"mtp.fc.weight": torch.full((2, 2), 7.0)}
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    save_file({"norm.weight": torch.ones(2)}, start / "consolidated.safetensors")  # another form of it
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer_config.json"):
        (start / name).write_text("{}")
    run = trained(tmp_path, f"model.weights={start}")
    out = tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    found = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == tensors.keys()
    trained_ones = {name for name in tensors if name.startswith("model.language_model.")}
    assert {name for name in tensors if not torch.equal(found[name], tensors[name])} == trained_ones
    for name in ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (out / name).read_text() == (start / name).read_text()
    ids = torch.arange(20)[None]
    multimodal, causal = (
        cls.from_pretrained(out).eval() for cls in (Qwen3_5ForConditionalGeneration, AutoModelForCausalLM)
    )
    logits = causal(input_ids=ids).logits
    assert torch.equal(multimodal(input_ids=ids).logits, logits)
    assert not torch.allclose(model(input_ids=ids).logits, logits, atol=1e-3)


def test_an_export_needs_what_its_run_began_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the starting weights, or with another configuration there, names and untrained parts would be
    others: refused, and nothing is left behind.
    """
    start = tmp_path / "start"
    tiny().save_pretrained(start)
    run = trained(tmp_path, f"model.weights={start}")
    for out in ("", ".", "/"):
        assert main(["export", str(run), out]) == 2
        assert "choose another name" in capsys.readouterr().err
    config = (start / "config.json").read_text()
    other = json.dumps(json.loads(config) | {"rms_norm_eps": 0.5})
    for text, said in (
        ("{}", "config"),
        ('{"model_type": "llama"}', "model_type is 'qwen3', here 'llama'"),
        (json.dumps(json.loads(config) | {"dtype": "auto"}), "no configuration that transformers reads"),
        (other, "rms_norm_eps is 1e-06, here 0.5"),
    ):
        (start / "config.json").write_text(text)
        assert main(["export", str(run), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert str(start) in error
        assert said in error
    (start / "config.json").write_text(config)
    start.rename(tmp_path / "elsewhere")
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert f"{start} does not hold the weights that the run began from" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run", "run.toml", "shards"]


def test_an_export_says_its_type_and_keeps_what_is_no_plain_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """config.json names the type of the weights, in which transformers opens them. Integers and quantized
    numbers that training left alone are not cast; a weight that a type can't hold is refused.
    """
    start = tmp_path / "start"
    model = tiny().bfloat16()
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 3] = 1e6
    model.save_pretrained(start)
    left = {
        "visual.steps": torch.tensor([300_000_001]),
        "visual.mask": torch.tensor([True]),
        "visual.weight": torch.ones(2).to(torch.float8_e4m3fn),
    }
    config = json.loads((start / "config.json").read_text())
    del config["dtype"]
    (start / "config.json").write_text(json.dumps(config | {"text_config": None}))
    stored = load_file(start / "model.safetensors")
    save_file(stored | left, start / "model.safetensors", metadata={"format": "pt"})
    run = trained(tmp_path, f"model.weights={start}", "model.freeze=['model.embed_tokens.weight']")
    assert "3 stored tensors are left alone, among them visual.mask" in capsys.readouterr().err
    for dtype in (None, "bfloat16"):
        out = tmp_path / f"{dtype}"
        assert main(["export", str(run), str(out), *(["--dtype", dtype] if dtype else [])]) == 0
        found = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
        assert all(torch.equal(found[key].float(), value.float()) for key, value in left.items())
        assert all(found[key].dtype == value.dtype for key, value in left.items())
        opened = AutoModelForCausalLM.from_pretrained(out)
        assert opened.dtype == getattr(torch, dtype or "float32")
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(opened.get_parameter(name), found[name])
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "float16"]) == 2
    assert "model.embed_tokens.weight holds 999424, beyond its 65504" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "out"))]
