"""Stored weights of every family: into the model bit for bit, and back under the names they had."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import trained
from tiny_shards import VOCABULARY
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)

from training.__main__ import main
from training.checkpoint import newest, read_model
from training.errors import InputError
from training.kernels.families import FAMILIES, Family, build, tiny_config
from training.model import skeleton
from training.weights import Stored, default_names, load_weights, match_weights

MOE = next(family for family in FAMILIES if family.name == "Qwen3-MoE")


def model_of(family: Family, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model whose every tensor is random, those that initialisation leaves at zero or one as well."""
    config = tiny_config(family)
    config.get_text_config().update(changes)
    model = build(config, family.architecture, seed=seed)
    random = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        value.copy_(torch.randn(value.shape, generator=random).to(value.dtype))
    return model


def taken_back(
    stored: Stored, model: PreTrainedModel, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What an export would write."""
    back = {key: state[name] for name, key in stored.as_they_are.items()}
    for made in stored.made:
        back |= made.revert(model, dict(state))
    return back


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_comes_in_and_goes_back(family: Family, tmp_path: Path) -> None:
    """What transformers' own `save_pretrained` wrote is the model's, bit for bit; taken back, it is what
    the files hold, by their names. So it is by default, where a model has no files yet.

    A multimodal model's text part comes in alone.
    """
    whole = model_of(family)
    whole.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    text = AutoModelForCausalLM.from_pretrained(tmp_path)
    bare = skeleton(copy.deepcopy(whole.config.get_text_config()), precision="fp32")
    found = match_weights(bare, str(tmp_path))
    empty = AutoModelForCausalLM.from_config(bare.config)
    load_weights(empty, stored=found)
    state = empty.state_dict()
    for name, value in text.state_dict().items():
        assert torch.equal(state[name], value), name
    back = taken_back(found, bare, state)
    assert back
    for key, value in back.items():
        assert torch.equal(stored[key], value), key
    left = stored.keys() - back.keys()
    assert not left if type(empty) is type(whole) else all("visual" in key for key in left)
    if type(empty) is type(whole):
        by_default = taken_back(default_names(bare), bare, state)
        assert by_default.keys() - {"lm_head.weight"} == stored.keys() - {"lm_head.weight"}
        assert all(torch.equal(by_default[key], value) for key, value in stored.items())


def test_the_text_of_gemma_3_comes_in_alone(tmp_path: Path) -> None:
    """Published checkpoints keep its text model under another prefix than Qwen3.5's."""
    (family,) = (family for family in FAMILIES if family.name == "Gemma 3")
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tiny_config(family).to_dict()
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    whole = Gemma3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = match_weights(skeleton(config.get_text_config(), precision="fp32"), str(tmp_path))
    assert len(found.as_they_are) == len(whole.model.language_model.state_dict())
    for name, value in whole.model.language_model.state_dict().items():
        assert torch.equal(stored[found.as_they_are[f"model.{name}"]], value), name


def test_a_run_from_experts_stored_one_by_one_exports_them_so(tmp_path: Path) -> None:
    """After training, names and shapes are as they were, and transformers opens the trained model."""
    model_of(MOE, vocab_size=VOCABULARY).save_pretrained(tmp_path / "start")
    run = trained(tmp_path, f"model.weights={tmp_path / 'start'}")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    start, out = (
        {
            key: value
            for file in (tmp_path / name).glob("*.safetensors")
            for key, value in load_file(file).items()
        }
        for name in ("start", "out")
    )
    assert {key: value.shape for key, value in out.items()} == {key: v.shape for key, v in start.items()}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    saved = newest(run / "checkpoints")
    assert saved
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(opened[name], read_model(saved, [name])[name])
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert not torch.equal(out[key], start[key])


def test_stored_experts_that_are_no_model_are_refused(tmp_path: Path) -> None:
    """One missing, of another shape, all of one expert, quantized, a scale beside, one stored twice."""
    model = model_of(MOE)
    model.save_pretrained(tmp_path)
    bare = skeleton(model.config, precision="fp32")
    file = tmp_path / "model.safetensors"
    plain = load_file(file)
    first, fused = "model.layers.1.mlp.experts.{}_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"
    two = {first.format(f"2.{kind}"): None for kind in ("gate", "up", "down")}
    up = first.format("2.up")
    for change, parts in (
        ({up: None}, ("7 stored tensors", "missing")),
        ({up: plain[up][:, 1:].contiguous()}, ("8 stored tensors", "do not fit together")),
        (
            two,
            (
                "3 stored tensors",
                "make model.layers.1.mlp.experts.down_proj of [3, ",
                "it is of [4, ",
                "missing",
            ),
        ),
        ({up: plain[up].to(torch.float8_e4m3fn)}, (up, "F8_E4M3", "quantized")),
        ({f"{up}_scale_inv": torch.ones(1)}, (f"{up}_scale_inv", "quantized")),
        ({fused: model.state_dict()[fused]}, (fused, first.format("0.gate"), "take away")),
        (
            {"norm.weight": torch.ones(32)},
            ("model.norm.weight and norm.weight are both model.norm.weight", "take away"),
        ),
        ({"model.norm.weight": None}, ("1 of 25 parameters", "model.norm.weight")),
    ):
        wanted = {key: value for key, value in {**plain, **change}.items() if value is not None}
        save_file(wanted, file, metadata={"format": "pt"})
        with pytest.raises(InputError) as refusal:
            match_weights(bare, str(tmp_path))
        assert all(part in str(refusal.value) for part in (str(tmp_path), *parts)), refusal.value


def test_the_index_says_which_files_are_the_models(tmp_path: Path) -> None:
    """Another form of the model beside them is left alone; a missing file and a bad index are named."""
    model = model_of(MOE)
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    bare = skeleton(model.config, precision="fp32")
    want = match_weights(bare, str(tmp_path))
    save_file(
        {"norm.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors", metadata={"format": "pt"}
    )
    assert match_weights(bare, str(tmp_path)).as_they_are == want.as_they_are
    index = tmp_path / "model.safetensors.index.json"
    gone = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    (tmp_path / gone).unlink()
    with pytest.raises(InputError, match=f"names {gone}, which is not there"):
        match_weights(bare, str(tmp_path))
    index.write_text("{")
    with pytest.raises(InputError, match=r"index\.json is damaged"):
        match_weights(bare, str(tmp_path))
