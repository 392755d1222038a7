"""A tail of more tokens than a model has positions: whom it moves, and that this alone is refused."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from packing.shards import too_long
from training.kernels import KernelError, bind
from training.kernels.binding import CallCheck
from training.kernels.contract import make_batch
from training.kernels.families import FAMILIES, build, tiny_config

FAMILY = {family.name: family for family in FAMILIES}
POSITIONS, ORIGINAL = 24, 16
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC, SCALED = {"rope_type": "dynamic", "factor": 4.0}, {"factor": 4.0, "rope_theta": 1e4}
ROPES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "default": ("Llama", {"rope_type": "default", "rope_theta": 1e4}, None),
    "linear": ("Llama", {"rope_type": "linear", **SCALED}, None),
    "yarn": ("Llama", {"rope_type": "yarn", **SCALED, "original_max_position_embeddings": ORIGINAL}, None),
    "llama3": ("Llama", {**LLAMA_3, **SCALED, "original_max_position_embeddings": ORIGINAL}, None),
    "proportional": ("Llama", {"rope_type": "proportional", **SCALED}, None),
    "dynamic": ("Llama", {"rope_type": "dynamic", **SCALED}, POSITIONS),
    "longrope": (
        "Phi-3",
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4},
        ORIGINAL,
    ),
    "dynamic in some layers": (
        "Gemma 3",
        {
            "full_attention": {"rope_type": "dynamic", **SCALED},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        POSITIONS,
    ),
}
"""Kind -> family, parameters, and the most tokens of a sequence that leave the others of the batch alone."""


def moved(config: Any, architecture: str, *, tail: int) -> float:
    """How far two examples' logits are from what they are before tails of 4 tokens, where one is longer.

    As many tokens in all, the same ones, so that all products are of the same shapes.
    """
    model = bind(build(config, architecture))
    (check,) = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, CallCheck))
    limits, check.turning = check.turning, ()  # to see what is refused otherwise
    tokens = torch.randint(90, (5 + 9 + 64,), generator=torch.Generator().manual_seed(1))
    logits = []
    for first in (4, tail):
        pieces = [first, *[4] * ((64 - first) // 4), (64 - first) % 4]
        with torch.no_grad():
            batch = make_batch(tokens, [5, 9, *filter(None, pieces)])
            logits.append(model(**batch).logits[0, :14])
            check.turning = limits
            if any(most < tail for most, _ in limits) and first == tail:
                with pytest.raises(KernelError, match=f"a sequence of {tail} tokens: beyond "):
                    model(**batch)
            else:
                model(**batch)
            check.turning = ()
    return float((logits[0] - logits[1]).abs().max())


@pytest.mark.parametrize("name", FAMILY)
def test_a_tail_of_more_tokens_than_positions_moves_no_example(name: str) -> None:
    """Of no family that can be bound, as they are published: none looks its positions up in a table.

    Experts compute in groups whose sizes depend on the tail's tokens, so there last bits may differ.
    """
    config = tiny_config(FAMILY[name])
    config.get_text_config().max_position_embeddings = POSITIONS
    assert moved(config, FAMILY[name].architecture, tail=64) <= (1e-5 if FAMILY[name].experts else 0.0)
    assert not list(too_long(config.get_text_config(), holder="set", longest=POSITIONS, tail=64))


def test_a_model_with_a_table_of_positions_is_not_taken() -> None:
    """In a long tail it would read beyond its table."""
    with pytest.raises(KernelError, match="GPT2LMHeadModel is not among the model classes"):
        bind(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_positions=8)))


@pytest.mark.parametrize(("name", "rope", "alike"), ROPES.values(), ids=ROPES)
def test_what_a_rotary_embedding_turns_by_the_longest_of_a_batch_is_refused(
    name: str, rope: dict[str, Any], alike: int | None
) -> None:
    """One token beyond the limit moves the other examples, of two kinds; a tail of any length of the others.

    `too_long` refuses those tails, and so does a bound model, and no others.
    """
    more = {"original_max_position_embeddings": ORIGINAL} if name == "Phi-3" else {}
    family = FAMILY[name]
    arguments = {**family.tiny, **more, "max_position_embeddings": POSITIONS, "rope_parameters": rope}
    config = type(tiny_config(family))(**arguments)

    def lines(longest: int, tail: int) -> list[str]:
        return list(too_long(config, holder="set", longest=longest, tail=tail))

    for tail in (ORIGINAL, ORIGINAL + 1, POSITIONS, POSITIONS + 1, 64):
        by = moved(config, family.architecture, tail=tail)
        assert by == 0.0 if alike is None or tail <= alike else by > 1e-4
        assert bool(lines(ORIGINAL, tail)) == (by != 0.0)
    assert lines(POSITIONS + 1, 0)[0] == (
        "set has examples of 25 tokens, the model takes 24 positions: pack with --capacity 24 or less"
    )
    if alike is not None:
        (line,) = lines(ORIGINAL, 64)
        assert line.startswith(f"set has room for a tail of 64 tokens, and beyond {alike} the model's rotary")
        assert line.endswith(
            f"turns the other examples of a batch otherwise: pack with --capacity {alike} or less"
        )
        assert f"set has examples of {alike + 1} tokens, and beyond {alike} " in lines(alike + 1, 0)[-1]
