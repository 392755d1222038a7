"""Every family of the README's table: isolated, and still the model that transformers made."""

import pytest
import torch

from training.kernels import bind, handshake, make_batch, proof
from training.kernels.families import FAMILIES, Family, tiny

LENGTHS = (1, 63, 64, 65, 7)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@every_family
def test_replacing_one_example_moves_no_other(family: Family) -> None:
    """Logits, own gradients and gradients across move by exactly 0.0, whichever example is replaced."""
    model = bind(tiny(family))
    for replaced in range(len(LENGTHS)):
        found = proof.isolation(model, LENGTHS, replaced=replaced)
        assert (found.logits, found.gradients, found.across, found.noise) == (0.0, 0.0, 0.0, 0.0)
        assert found.replaced > 0.5, "the replaced example itself must move, or nothing is proven"


@every_family
def test_packed_is_each_example_alone(family: Family) -> None:
    """Logits and every parameter's gradient agree with each example by itself, to fp32 rounding."""
    apart = proof.alone(bind(tiny(family)), LENGTHS)
    assert apart.logits < 1e-5
    assert len(apart.gradients) > 10
    assert apart.worst[1] < 1e-3, apart.worst


@every_family
def test_bound_computes_what_transformers_computes(family: Family) -> None:
    """One example gives the logits of the unbound model with eager attention: windows, sinks, scale."""
    model = tiny(family)
    model.set_attn_implementation("eager")
    ids = torch.randint(96, (70,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        stock = model(input_ids=ids[None], use_cache=False).logits
        bound = bind(model)(**make_batch(ids, [70])).logits
    assert stock.std() > 0.1
    assert (bound - stock).norm() / stock.norm() < 1e-5


@every_family
def test_every_layer_shakes_hands(family: Family) -> None:
    """The hand-shake hears from every mixing layer and finds this batch's boundaries."""
    model = bind(tiny(family))
    batch = make_batch(torch.arange(sum(LENGTHS)) % 96, LENGTHS)
    with handshake(model, batch):
        model(**batch).logits.sum().backward()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.experts], ids=lambda family: family.name)
def test_experts_get_the_first_routing_again(family: Family) -> None:
    """Replaying gives other tokens the recorded experts, in every family that has any."""
    model = bind(tiny(family))
    routing: list[torch.Tensor] = []
    with proof._recording(model, routing):
        model(**make_batch(torch.arange(9), (4, 5)))
    assert routing, "no router was found"
    assert {picked.dtype for picked in routing} == {torch.int64}
    own: list[torch.Tensor] = []
    with proof._recording(model, own):
        model(**make_batch(torch.arange(9) + 20, (4, 5)))
    assert not all(torch.equal(a, b) for a, b in zip(routing, own, strict=True))
    replayed: list[torch.Tensor] = []
    with proof._replaying(model, routing), proof._recording(model, replayed):
        model(**make_batch(torch.arange(9) + 20, (4, 5)))
    assert all(torch.equal(a, b) for a, b in zip(routing, replayed, strict=True))


def test_several_draws_are_typical_of_their_size() -> None:
    """The root mean square of each figure: one lucky draw of a small parameter does not set a limit."""
    found = [proof.Apart(logits=x, gradients={"dt_bias": 10 * x, "other": 1.0}) for x in (3.0, 4.0)]
    typical = proof.typical(found)
    assert typical.logits == pytest.approx(12.5**0.5)
    assert typical.gradients == {"dt_bias": pytest.approx(10 * 12.5**0.5), "other": pytest.approx(1.0)}
