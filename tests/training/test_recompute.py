"""What layers keep changes memory and time, never gradients."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from training.data import OptionError
from training.kernels import bind
from training.kernels.contract import make_batch
from training.model import TINY, blocks
from training.recompute import _keep_products, layout, recompute


class Products(TorchDispatchMode):
    """Counts matrix products by the shape of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.counts[tuple(out.shape)] += 1
        return out


def gradients(**options: int) -> tuple[dict[str, torch.Tensor], Counter[tuple[int, ...]]]:
    """Gradients of a tiny model's loss, and the products of its backward pass."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97)
    model = AutoModelForCausalLM.from_config(config).train()
    bind(model)
    if options:
        recompute(blocks(model), **options)
    ids = torch.arange(48) % 97
    loss = model(**make_batch(ids, [20, 28])).logits.float().logsumexp(-1).sum()
    with Products() as products:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, products.counts


@pytest.mark.parametrize(
    "options",
    [
        {"every": 1},
        {"every": 2},
        {"keep_layers": 4},
        {"keep_layers": 2, "whole_layers": 1},
        {"whole_layers": 4},
        {"every": 0},
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_what_is_kept(options: dict[str, int]) -> None:
    """Every choice gives the very gradients of a model that keeps everything."""
    kept, _ = gradients()
    found, _ = gradients(**options)
    for name, gradient in kept.items():
        assert torch.equal(found[name], gradient), name


def test_layout() -> None:
    """Every n-th layer of the first computes all again, then come those that keep products, then all."""
    found = layout(6, every=2, keep_layers=2, whole_layers=1)
    assert found == ["all", "nothing", "all", "all but products", "all but products", "nothing"]
    assert layout(2, every=0, keep_layers=0, whole_layers=0) == ["nothing", "nothing"]


def test_kept_products_are_not_computed_again() -> None:
    """Where products are kept, the backward pass computes none of the forward's again."""
    tokens, inner = 48, 160
    whole, products, nothing = (
        gradients(**o)[1] for o in ({"whole_layers": 4}, {"keep_layers": 4}, {"every": 1})
    )
    assert products == whole
    assert nothing[tokens, inner] - whole[tokens, inner] == 8, "gate and up of each of four layers"


def test_the_way_back_from_an_mlp_is_not_kept() -> None:
    """The last product of a layer is read by nothing in its backward: neither kept nor computed again."""
    mm = torch.ops.aten.mm.default
    x, wide = torch.empty(8, 64), torch.empty(8, 160)
    assert _keep_products(None, mm, wide, torch.empty(160, 64)) is CheckpointPolicy.PREFER_RECOMPUTE
    assert _keep_products(None, mm, x, torch.empty(64, 160)) is CheckpointPolicy.MUST_SAVE
    assert _keep_products(None, mm, x, torch.empty(64, 4)) is CheckpointPolicy.MUST_SAVE
    tokens, hidden = 48, 64
    nothing, whole = gradients(every=1)[1], gradients(whole_layers=4)[1]
    # Again, with 64 channels: the delta nets' gates (3), the mixers' way back (4), not the MLPs' (4).
    assert nothing[tokens, hidden] - whole[tokens, hidden] == 7


def test_more_layers_than_there_are() -> None:
    """A choice for more layers than the model has is refused with both numbers."""
    config = AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(OptionError, match="3 layers that keep products and 2 that keep all are more than 4"):
        recompute(blocks(model), keep_layers=3, whole_layers=2)
