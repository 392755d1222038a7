"""Stored weights of every family: into the model bit for bit, and back under the names they had."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import trained
from tiny_shards import VOCABULARY, tiny_gemma3
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)

from training.__main__ import main
from training.checkpoint import newest, read_model
from training.config import Model
from training.errors import InputError
from training.kernels.families import FAMILIES, Family, build, tiny_config
from training.model import read_config, skeleton
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


def test_parts_of_unequal_size_come_apart_again(tmp_path: Path) -> None:
    """OLMo-hybrid's convolutions of query, key and value, kept as one: its values are twice as wide."""
    (family,) = (family for family in FAMILIES if family.name == "OLMo-hybrid")
    config = tiny_config(family)
    config.linear_value_head_dim = 2 * config.linear_key_head_dim
    model = build(config, family.architecture)
    fused = "model.layers.0.linear_attn.conv1d.weight"
    plain = {name: value for name, value in model.state_dict().items() if ".conv1d." not in name}
    for name in set(model.state_dict()) - set(plain):
        value = model.state_dict()[name]
        sizes = [value.shape[0] // 4, value.shape[0] // 4, value.shape[0] // 2]
        for part, kept in zip("qkv", value.split(sizes), strict=True):
            plain[name.replace("conv1d", f"{part}_conv1d")] = kept.clone()
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    empty = build(config, family.architecture, seed=1)
    found = match_weights(empty, str(tmp_path))
    assert fused in {name for made in found.made for name in made.targets.values()}
    load_weights(empty, stored=found)
    for name, value in model.state_dict().items():
        assert torch.equal(empty.state_dict()[name], value), name
    back = taken_back(found, empty, empty.state_dict())
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[name], value) for name, value in plain.items())


def taken_back(
    stored: Stored, model: PreTrainedModel, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What an export would write."""
    back = {key: state[name] for name, key in stored.as_they_are.items()}
    for made in stored.made:
        back |= made.revert(model, state)
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
    """Its checkpoints keep the text model under another prefix than Qwen3.5's."""
    whole = Gemma3ForConditionalGeneration(tiny_gemma3())
    whole.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = match_weights(skeleton(whole.config.get_text_config(), precision="fp32"), str(tmp_path))
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
                "it is [4, ",
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
        ({up.replace(".2.", ".4."): plain[up], up: None}, ("8 stored tensors", "can't be told apart again")),
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
    other = {"norm.weight": torch.ones(2), "model.norm.weight": torch.ones(32)}
    save_file(other, tmp_path / "consolidated.safetensors", metadata={"format": "pt"})
    (tmp_path / "._model.safetensors").write_bytes(b"another system's note")
    found = match_weights(bare, str(tmp_path))
    assert (found.as_they_are, found.places) == (want.as_they_are, want.places)
    empty = AutoModelForCausalLM.from_config(bare.config)
    load_weights(empty, stored=found)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in empty.state_dict().items())
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    gone = tmp_path / files["model.norm.weight"]
    gone.rename(tmp_path / "sub")
    with pytest.raises(InputError, match=f"names '{gone.name}', which is no file"):
        match_weights(bare, str(tmp_path))
    for text in ("{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(InputError, match=r"index\.json: no index of weights"):
            match_weights(bare, str(tmp_path))


def test_without_an_index_all_files_are_the_models(tmp_path: Path) -> None:
    """But for what another system noted beside them; and a configuration that names others is refused."""
    model = model_of(MOE)
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "._model.safetensors").write_bytes(b"another system's note")
    empty = AutoModelForCausalLM.from_config(model.config)
    load_weights(empty, stored=match_weights(empty, str(tmp_path)))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in empty.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "transformers_weights": "other.safetensors"
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"transformers_weights names other\.safetensors"):
        read_config(Model(weights=str(tmp_path)), vocabulary=VOCABULARY)


def test_one_file_comes_before_an_index(tmp_path: Path) -> None:
    """As for transformers; so an index that lies beside it, of other files, changes nothing."""
    seeds = [model_of(MOE, seed=seed) for seed in (0, 1)]
    seeds[0].save_pretrained(tmp_path, max_shard_size=20_000)
    seeds[1].save_pretrained(tmp_path / "one")
    (tmp_path / "one/model.safetensors").rename(tmp_path / "model.safetensors")
    empty = AutoModelForCausalLM.from_config(seeds[0].config)
    load_weights(empty, stored=match_weights(empty, str(tmp_path)))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in empty.state_dict().items():
        assert torch.equal(value, theirs[name]), name
        assert torch.equal(value, seeds[1].state_dict()[name]), name


def test_what_is_left_changes_no_block_that_trains(tmp_path: Path) -> None:
    """Beside a block, left tensors are counted; in one, refused: an expert, norms or adapters too many.

    What old checkpoints hold and every model computes is neither. A left tensor may be of any type.
    """
    model = model_of(MOE)
    model.save_pretrained(tmp_path)
    bare = skeleton(model.config, precision="fp32")
    file = tmp_path / "model.safetensors"
    plain = load_file(file)
    more = {
        "mtp.layers.0.weight": torch.ones(2),
        "visual.blocks.0.weight_scale": torch.ones(2).to(torch.float8_e5m2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.2.self_attn.q_proj.weight": torch.ones(2),  # as DeepSeek's head of several tokens
    }
    save_file(plain | more, file, metadata={"format": "pt"})
    assert match_weights(bare, str(tmp_path)).left == tuple(sorted(more))
    for name in ("self_attn.sinks", "mlp.shared_expert.up_proj.weight", "self_attn.q_proj.lora_A.weight"):
        save_file(plain | {f"model.layers.0.{name}": torch.ones(2)}, file, metadata={"format": "pt"})
        with pytest.raises(InputError, match=f"{name} is in the safetensors, and Qwen3MoeForCausalLM"):
            match_weights(bare, str(tmp_path))


def test_a_tied_matrix_may_be_stored_as_the_head(tmp_path: Path) -> None:
    """It is the embedding too, and goes back as the head."""
    model = model_of(MOE, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    plain = load_file(file)
    plain["lm_head.weight"] = plain.pop("model.embed_tokens.weight")
    save_file(plain, file, metadata={"format": "pt"})
    bare = skeleton(model.config, precision="fp32")
    found = match_weights(bare, str(tmp_path))
    assert found.as_they_are["model.embed_tokens.weight"] == "lm_head.weight"
    assert "lm_head.weight" not in found.as_they_are
