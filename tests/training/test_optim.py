"""The learning rate as a function of the step, the optimizer's groups and the clipped norm."""

import itertools

import pytest
import torch
from torch import nn

from training.config import Optim, Schedule
from training.errors import OptionError
from training.optim import clip, gradient_norm, learning_rate, make_optimizer, set_learning_rate


def rates(kind: str, *, steps: int = 10, **options: float) -> list[float]:
    schedule = Schedule(kind=kind, **options)  # type: ignore[arg-type]
    return [learning_rate(step, schedule=schedule, steps=steps, peak=2.0) for step in range(steps)]


def test_schedules_by_their_numbers() -> None:
    """Each schedule's first, middle and last steps are the numbers that its name promises."""
    assert rates("constant") == [2.0] * 10
    assert rates("linear", steps=4) == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert rates("cosine", steps=4) == pytest.approx([2.0, 1.7071068, 1.0, 0.2928932])
    assert rates("wsd", steps=5, decay=2) == pytest.approx([2.0, 2.0, 2.0, 2.0, 1.0])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warmup_and_floor(kind: str) -> None:
    """Warm-up rises in equal steps to the peak; the end is above the floor, or the peak if constant."""
    options = {"decay": 4} if kind == "wsd" else {}
    found = rates(kind, warmup=4, floor=0.1, **options)
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert max(found) == pytest.approx(2.0)
    end = learning_rate(10, schedule=Schedule(kind=kind, warmup=4, floor=0.1, **options), steps=10, peak=2.0)
    assert end == pytest.approx(2.0 if kind == "constant" else 0.2)
    assert found[-1] > 0.2
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(found[4:]))


def test_schedules_of_few_steps_are_finite() -> None:
    """One step, and a warm-up as long as the run, divide by nothing."""
    for kind in ("constant", "linear", "cosine"):
        assert rates(kind, steps=1) == [2.0]
        assert rates(kind, steps=3, warmup=3)[-1] == pytest.approx(2.0)


def test_weight_decay_spares_vectors_and_frozen_ones_are_left_out() -> None:
    """Matrices decay, one-dimensional parameters do not, frozen parameters are in no group."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    optimizer = make_optimizer(model, optim=Optim(weight_decay=0.5))
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays.pop(model[0].weight) == 0.5
    assert model[2].weight not in decays
    assert set(decays.values()) == {0.0}
    assert len(decays) == 4


def test_clip_scales_to_the_limit() -> None:
    """A gradient of norm 5 clipped to 1 keeps its direction; a limit of 0 or above it changes nothing."""
    for limit, scale in ((1.0, 0.2), (0.0, 1.0), (7.0, 1.0)):
        parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2, 2))]
        parameters[0].grad = torch.tensor([3.0])
        parameters[1].grad = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
        norm = gradient_norm(parameters)
        assert norm == pytest.approx(5.0)
        clip(parameters, norm=norm, limit=limit)
        assert float(parameters[0].grad) == pytest.approx(3 * scale)
        assert float(parameters[1].grad[0, 1]) == pytest.approx(4 * scale)


def test_stochastic_rounding_keeps_steps_that_nearest_loses() -> None:
    """At 1.0 a bf16 step is 1/128: a thousandth a step is lost to nearest rounding, not on average."""
    pytest.importorskip("torchao")
    moved = {}
    with torch.compiler.set_stance("force_eager"):
        for rounding in ("nearest", "stochastic"):
            torch.manual_seed(0)
            model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            nn.init.ones_(model.weight)
            optimizer = make_optimizer(model, optim=Optim(rounding=rounding, lr=1e-3))  # type: ignore[arg-type]
            for _ in range(20):
                model.weight.grad = torch.ones_like(model.weight)
                set_learning_rate(optimizer, 1e-3)
                optimizer.step()
            moved[rounding] = 1 - float(model.weight.detach().float().mean())
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(0.02, rel=0.1)


def test_eight_bit_states_take_an_eighth_of_fp32s_memory_for_the_same_direction() -> None:
    """Two bytes and a little a weight instead of eight, and a step like AdamW's."""
    pytest.importorskip("torchao")
    weights = {}
    with torch.compiler.set_stance("force_eager"):
        for states in ("weights", "8bit"):
            torch.manual_seed(0)
            model = nn.Linear(128, 64, bias=False)
            optimizer = make_optimizer(model, optim=Optim(states=states, lr=1e-2))  # type: ignore[arg-type]
            for _ in range(5):
                model.weight.grad = torch.randn_like(model.weight)
                set_learning_rate(optimizer, 1e-2)
                optimizer.step()
            weights[states] = model.weight.detach().clone()
    state = optimizer.state[model.weight]["exp_avg"]
    assert state.codes.dtype == torch.uint8
    assert state.codes.numel() + 4 * state.scale.numel() < 1.05 * model.weight.numel()
    assert float((weights["8bit"] - weights["weights"]).abs().max()) < 5e-3


def test_stochastic_rounding_of_fp32_weights_is_refused() -> None:
    """It would round nothing: the error says which precision it is for."""
    with pytest.raises(OptionError, match=r"model\.precision=bf16"):
        make_optimizer(nn.Linear(2, 2), optim=Optim(rounding="stochastic"))
