"""Tiny shards and configurations for the trainer's tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma3Config, Qwen3Config

from packing.buffer import build_buffer
from packing.example import Example, make_example
from packing.shards import PartWriter, ShardWriter, open_shards
from training.kernels.families import FAMILIES, tiny_config

VOCABULARY = 97
CAPACITY = 64


def examples(count: int, *, seed: int = 0, most: int = 24) -> list[Example]:
    """Examples with a rule to learn: each token is its predecessor plus a step that the first token tells."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(random.integers(4, most))
        start, step = random.integers(0, VOCABULARY), random.integers(1, 4)
        ids = (start + step * np.arange(length)) % VOCABULARY
        found.append(make_example(ids, trained=np.arange(length) >= 2))
    return found


def write_shards(
    out: Path,
    *,
    train: Sequence[Sequence[Example]],
    held_out: Sequence[Sequence[Example]] = (),
    capacity: int = CAPACITY,
    vocabulary: int | None = VOCABULARY,
    **chat: Any,
) -> Path:
    """A shard directory of the given buffers, and its part `eval` if there are held-out ones."""
    if vocabulary is not None:
        chat["vocabulary"] = vocabulary
    with ShardWriter(out, capacity=capacity, fingerprint={"chat": chat}) as writer:
        if held_out:
            part = writer.part("eval")
            _write(part, held_out)
            part.finish({})
        _write(writer, train)
        writer.finish({})
    return out


def _write(writer: PartWriter, buffers: Sequence[Sequence[Example]]) -> None:
    number = 0
    for buffer in buffers:
        writer.write(build_buffer(buffer, example_ids=range(number, number + len(buffer))))
        number += len(buffer)


def some_shards(out: Path, *, buffers: int = 12, seed: int = 0, capacity: int = CAPACITY) -> Path:
    """Shards of buffers with two or three examples each, and two held-out buffers."""
    found = iter(examples(3 * buffers + 6, seed=seed))
    groups = [[next(found) for _ in range(2 if number % 3 else 3)] for number in range(buffers + 2)]
    groups = [[e for e in group if len(e) <= CAPACITY // 3] or group[:1] for group in groups]
    return write_shards(out, train=groups[2:], held_out=groups[:2], capacity=capacity)


def held_out_loss(model: torch.nn.Module, shards: Path) -> float:
    """Each held-out example by itself through a model as transformers or PEFT opens it."""
    held_out = open_shards(shards / "eval")
    total, count = 0.0, 0
    for number in held_out.example_ids:
        example = held_out.example(int(number))
        ids, labels = (torch.tensor(x).long()[None] for x in (example.input_ids, example.labels))
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * example.supervised
        count += example.supervised
    return total / count


def tiny_qwen3(**changes: Any) -> Qwen3Config:
    """Two layers of attention and MLP."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**{**shape, **changes})


TINY_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""Of a vision tower, to stand beside a text model."""


def tiny_gemma3() -> Gemma3Config:
    """The multimodal model; its text part is the family's tiny one, with the shards' vocabulary."""
    (family,) = (family for family in FAMILIES if family.name == "Gemma 3")
    text = tiny_config(family).to_dict() | {"vocab_size": VOCABULARY, "pad_token_id": 0}
    return Gemma3Config(text_config=text, vision_config=TINY_VISION, image_token_index=90)
