"""What layers keep changes memory and time, never gradients."""

from collections import Counter
from itertools import groupby
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from training.errors import OptionError
from training.kernels import bind
from training.kernels.contract import make_batch
from training.model import TINY, blocks
from training.recompute import _worth_keeping, layout, recompute


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


def gradients(
    device: str = "cpu", **options: int
) -> tuple[dict[str, torch.Tensor], Counter[tuple[int, ...]]]:
    """Gradients of a tiny model's loss, and the products of its backward pass."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97)
    model = AutoModelForCausalLM.from_config(config).train().to(device)
    bind(model, kernels="reference")
    if options:
        recompute(blocks(model), **options)
    ids = torch.arange(48) % 97
    batch = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in make_batch(ids, [20, 28]).items()
    }
    loss = model(**batch).logits.float().logsumexp(-1).sum()
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
        {"host_layers": 4},
        {"host_layers": 2, "keep_layers": 1},
        {"host_layers": 1, "every": 2, "whole_layers": 1},
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
    """The host's layers are spread; of the others every n-th computes all again, the last keep products."""
    found = layout(7, every=2, keep_layers=2, whole_layers=1, host_layers=1)
    products, host = "all but products", "all but products on the host"
    assert found == [host, "all", "nothing", "all", products, products, "nothing"]
    assert layout(2, every=0, keep_layers=0, whole_layers=0, host_layers=0) == ["nothing", "nothing"]
    assert layout(2, every=1, keep_layers=0, whole_layers=0, host_layers=2) == [host, host]
    assert layout(1, every=1, keep_layers=0, whole_layers=1, host_layers=0) == ["nothing"]
    spread = layout(64, every=1, keep_layers=9, whole_layers=0, host_layers=42)
    assert spread[:6] == [host, host, "all"] * 2
    assert spread[-2:] == [host, products]
    assert Counter(spread) == {host: 42, "all": 13, products: 9}
    assert max(len(list(run)) for what, run in groupby(spread) if what == host) == 2, "two, then another"


def test_kept_products_are_not_computed_again() -> None:
    """Where products are kept, the backward pass computes none of the forward's again."""
    tokens, inner = 48, 160
    whole, products, host, nothing = (
        gradients(**o)[1] for o in ({"whole_layers": 4}, {"keep_layers": 4}, {"host_layers": 4}, {"every": 1})
    )
    assert products == whole
    assert host == whole
    assert nothing[tokens, inner] - whole[tokens, inner] == 8, "gate and up of each of four layers"


def test_the_way_back_from_an_mlp_is_not_kept() -> None:
    """The last product of a layer is read by nothing in its backward: neither kept nor computed again."""
    mm = torch.ops.aten.mm.default
    x, wide = torch.empty(8, 64), torch.empty(8, 160)
    assert not _worth_keeping(mm, (wide, torch.empty(160, 64)))
    assert _worth_keeping(mm, (x, torch.empty(64, 160)))
    assert _worth_keeping(mm, (x, torch.empty(64, 4)))
    tokens, hidden = 48, 64
    nothing, whole = gradients(every=1)[1], gradients(whole_layers=4)[1]
    # Again, with 64 channels: the delta nets' gates (3), the mixers' way back (4), not the MLPs' (4).
    assert nothing[tokens, hidden] - whole[tokens, hidden] == 7


def test_more_layers_than_there_are() -> None:
    """A choice for more layers than the model has is refused with both numbers."""
    config = AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(OptionError, match="2 layers that keep products, 1 on the host and 2 that keep all"):
        recompute(blocks(model), keep_layers=2, whole_layers=2, host_layers=1)


def test_products_on_the_host_live_there_from_step_to_step() -> None:
    """Two passes of a layer whose products wait on the host reuse its memory, and hold nothing after."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97)
    ).train()
    bind(model)
    recompute(blocks(model), host_layers=1, every=0)
    kept = blocks(model)[0]._gradient_checkpointing_func.keywords["context_fn"].args[0]
    places = []
    for _ in range(2):
        batch = make_batch(torch.arange(48) % 97, [20, 28])
        loss = model(**batch).logits.float().logsumexp(-1).sum()
        places.append([host.data_ptr() for host in kept._host])
        assert kept._waiting == len(places[-1]) >= 6, "four of the mixer, gate and up"
        loss.backward()
        assert (kept._products, kept._waiting) == ([], 0)
    assert places[0] == places[1]


def test_products_leave_the_device_two_layers_later() -> None:
    """After a forward pass the last two of four layers' products are still there; after the backward none."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97)
    ).train()
    bind(model)
    recompute(blocks(model), host_layers=4)
    kept = [layer._gradient_checkpointing_func.keywords["context_fn"].args[0] for layer in blocks(model)]
    for _ in range(2):
        loss = model(**make_batch(torch.arange(48) % 97, [20, 28])).logits.float().logsumexp(-1).sum()
        assert [bool(one._products) for one in kept] == [False, False, True, True]
        loss.backward()
        assert not any(one._products for one in kept)


@pytest.mark.gpu
def test_products_come_back_from_the_host_to_a_gpu() -> None:
    """Copied out and back beside the computation, they give the very gradients that kept ones do."""
    kept, _ = gradients("cuda", keep_layers=4)
    found, _ = gradients("cuda", host_layers=3, keep_layers=1)
    for name, gradient in kept.items():
        assert torch.equal(found[name], gradient), name
