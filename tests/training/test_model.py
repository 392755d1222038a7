"""A model's first values, of every family: none is left out, and buffers are transformers' own."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import losses
from tiny_shards import VOCABULARY
from transformers import AutoModelForCausalLM

from training.__main__ import main
from training.kernels.families import FAMILIES, Family, tiny_config
from training.model import materialise, skeleton

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@EACH
def test_nothing_is_left_without_a_value(family: Family) -> None:
    """Parameters are numbers, the same each time; buffers, which no file holds, are those of transformers."""
    config = tiny_config(family).get_text_config()
    models = [skeleton(config, precision="fp32") for _ in range(2)]
    for model in models:
        materialise(model, model=model, device=torch.device("cpu"), seed=3)
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        assert one.isfinite().all(), name
        assert torch.equal(one, other), name
    theirs = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    ours = dict(models[0].named_buffers())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@EACH
def test_every_family_trains(
    words: Callable[..., list[str]], tmp_path: Path, family: Family, precision: str
) -> None:
    """From a configuration that transformers saved, by the command: two steps with losses near chance."""
    config = tiny_config(family)
    config.get_text_config().vocab_size = VOCABULARY
    config.save_pretrained(tmp_path / "model")
    short = (f"model.precision={precision}", "run.steps=2", "checkpoint.every=0", "checkpoint.last=false")
    assert main(words(f"model.config={tmp_path / 'model'}", *short)) == 0
    found = losses(tmp_path / "run")
    assert list(found) == [1, 2]
    assert all(abs(loss - math.log(VOCABULARY)) < 2 for loss in found.values())
