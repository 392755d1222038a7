"""One gradient, however the step is cut: packed, accumulated, over ranks, recomputed, or unpacked."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients_worker import configuration, gradients
from tiny_shards import VOCABULARY, examples, write_shards

from packing.example import Example
from packing.loader import PackedDataset, collate
from training.config import Model
from training.data import micro_batch
from training.model import blocks, materialise, read_config, skeleton
from training.parallel import join
from training.train import build, forward_backward, spread

GROUPS = (2, 3, 1, 2, 2)  # five buffers: on two ranks the third step gives rank 1 an all-tail one


@pytest.fixture(scope="module")
def buffers() -> list[list[Example]]:
    found = iter(examples(sum(GROUPS) + 3, seed=3, most=20))
    return [[next(found) for _ in range(size)] for size in (*GROUPS, 3)]


@pytest.fixture(scope="module")
def shards(buffers: list[list[Example]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "shards", train=buffers[:-1], held_out=buffers[-1:])


@pytest.fixture(scope="module")
def alone(buffers: list[list[Example]]) -> dict[str, torch.Tensor]:
    """Each example through the stock model by itself, without packing, sharding or our kernels."""
    config = read_config(Model(config="tiny-qwen3_5"), vocabulary=VOCABULARY)
    model = skeleton(config, precision="fp32")
    materialise(model, model=model, device=torch.device("cpu"), seed=0)
    train = [example for buffer in buffers[:-1] for example in buffer]
    count = sum(example.supervised for example in train)

    def loss_sum(example: Example) -> torch.Tensor:
        ids = torch.from_numpy(example.input_ids).long()[None]
        labels = torch.from_numpy(example.labels).long()[None]
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss * example.supervised

    total = torch.zeros(())
    for example in train:
        loss = loss_sum(example) / count
        loss.backward()
        total += loss.detach()
    found = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        held_out = sum(loss_sum(example) for example in buffers[-1])
    return found | {
        "loss": total,
        "held_out": held_out / sum(example.supervised for example in buffers[-1]),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert sum(float(value.abs().sum()) > 0 for value in expected.values()) == len(expected)
    for name, value in expected.items():
        error = float((found[name] - value).abs().max() / value.abs().max())
        assert error < 1e-4, f"{name}: {error:.1e} of its largest entry"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.buffers=5", "model.checkpointing=0"),
        ("data.buffers=2", "model.checkpointing=2", "parallel.reduce=micro_batch"),
    ],
)
def test_one_rank_equals_each_example_alone(
    shards: Path, alone: dict[str, torch.Tensor], tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Packed and accumulated, side by side, and recomputed in part: the gradient of unpacked examples."""
    (found,) = gradients(configuration(tmp_path, shards, *overrides))
    assert_same(found, alone)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_each_example_alone(
    shards: Path, alone: dict[str, torch.Tensor], tmp_path: Path, ranks: int
) -> None:
    """Ranks with unequal token counts, some with an all-tail buffer; replicas of one rank, or of two."""
    worker = Path(__file__).with_name("gradients_worker.py")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(worker), str(shards), str(tmp_path / "out.pt")),
        ],
        check=True,
        timeout=240,
    )
    found = torch.load(tmp_path / "out.pt")
    assert len(found) == 4
    for gradient in found:
        assert_same(gradient, alone)


def test_accumulation_reduces_once_a_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five micro-batches: each group of parameters is summed over ranks once, or each time if asked."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    reduced: list[int] = []
    reduce = _fsdp_param_group.foreach_reduce

    def counted(*args: Any, **options: Any) -> Any:
        reduced[-1] += 1
        return reduce(*args, **options)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted)
    for when in ("step", "micro_batch"):
        reduced.append(0)
        gradients(configuration(tmp_path, shards, "model.precision=mixed", f"parallel.reduce={when}"))
    assert reduced == [5, 5 * 5], "four layers, and the tied embedding with the final norm"


def test_compiled_are_the_layers_each_by_itself(shards: Path, tmp_path: Path) -> None:
    """Every decoder layer and nothing else: a graph of its own that the next layers reuse."""
    config = configuration(tmp_path, shards, "model.compile=layers")
    with join(config.parallel) as world:
        model_config = read_config(config.model, vocabulary=VOCABULARY)
        root = build(config, model_config, device=world.device, precision="fp32")
        compiled = [module for module in root.modules() if module._compiled_call_impl is not None]
        assert compiled == blocks(root.model)
        assert len(compiled) == 4


@pytest.mark.parametrize(("precision", "dtype"), [("mixed", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16_gradients_are_near(
    buffers: list[list[Example]], tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    """bf16 compute gives the same gradient to bf16's accuracy; norms and decay rates stay fp32 throughout."""
    shards = write_shards(tmp_path / "shards", train=buffers[:1], held_out=buffers[2:3])
    exact, found = gradients(
        configuration(tmp_path, shards), configuration(tmp_path, shards, f"model.precision={precision}")
    )
    assert float((found["loss"] - exact["loss"]).abs()) < 0.02
    names = [name for name in exact if name not in ("loss", "held_out")]
    for name in names:
        small = "norm" in name or name.endswith(("A_log", "dt_bias"))
        assert found[name].dtype == (torch.float32 if small else dtype), name
    error, scale = (
        torch.cat([value.float().flatten() for value in values]).norm()
        for values in ([found[name] - exact[name] for name in names], [exact[name] for name in names])
    )
    assert 0 < float(error / scale) < 0.05


def test_all_tail_buffers_contribute_nothing(shards: Path, tmp_path: Path) -> None:
    """A step of nothing but tail: loss 0, every gradient exactly 0.0, nothing NaN; and no token counted."""
    config = configuration(tmp_path, shards)
    with join(config.parallel) as world:
        model_config = read_config(config.model, vocabulary=VOCABULARY)
        root = build(config, model_config, device=world.device, precision="fp32")
        spread(root, config, world, precision="fp32")
        tail = PackedDataset(shards)[None]
        batch = micro_batch(collate([tail]), [tail])
        assert (batch.real_tokens, batch.supervised_tokens, batch.buffers) == (0, 0, 1)
        loss = forward_backward(root, [batch, batch], num_items_in_batch=0, device=world.device)
        assert float(loss) == 0.0
        gradients = [p.grad for p in root.parameters() if p.grad is not None]
        assert len(gradients) == len(list(root.parameters()))
        assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients)
