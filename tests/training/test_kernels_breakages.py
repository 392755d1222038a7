"""Boundaries lost on purpose: the proof sees the leak, the hand-shake names the layer, doctor fails."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from training import doctor
from training.kernels import (
    KernelError,
    attention,
    bind,
    convolution,
    handshake,
    make_batch,
    proof,
    record,
    recurrence,
)
from training.kernels.contract import segment_lengths
from training.kernels.families import FAMILIES, tiny

FAMILY = {family.name: family for family in FAMILIES}
LENGTHS = (1, 63, 64, 65, 7)
TOKENS = sum(LENGTHS)


class Stock:
    """A model as transformers made it, called with positions alone, as a user of 5.17 would call it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        return self.model(inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def whole(*, cu_seqlens: torch.Tensor | None = None, seq_idx: torch.Tensor | None = None) -> list[int]:
    """A reading of the boundaries that finds none: one segment over the whole buffer."""
    return [TOKENS]


# What breaks -> (the module whose boundaries are lost, a family with such a layer, the hand-shake's words).
LOST: dict[str, tuple[Any, str, str]] = {
    "convolution": (
        convolution,
        "Qwen3.5",
        r"layers\.0\.linear_attn: its convolution ran with lengths \[200\]",
    ),
    "delta rule": (recurrence, "Qwen3.5", r"layers\.0\.linear_attn: its delta rule ran with lengths \[200\]"),
    "Kimi delta attention": (recurrence, "Kimi-linear", r"its Kimi delta attention ran with lengths \[200\]"),
    "state space": (recurrence, "Bamba", r"layers\.0\.mamba: its state space ran with lengths \[200\]"),
    "short convolution": (convolution, "LFM2", r"layers\.0\.conv: its convolution ran with lengths \[200\]"),
    "attention": (attention, "Llama", r"layers\.0\.self_attn: its attention ran with lengths \[200\]"),
}
every_loss = pytest.mark.parametrize("what", LOST)


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3-Next", "OLMo-hybrid", "Kimi-linear", "Bamba", "LFM2"])
def test_the_leak_is_visible_on_stock_code(name: str) -> None:
    """Without binding, later examples' logits move by a good part of their spread: the proof can fail."""
    found = proof.isolation(Stock(tiny(FAMILY[name])), LENGTHS, replaced=1)
    assert found.logits > 0.1
    assert found.across > 0.0
    assert not found.holds


@every_loss
def test_one_lost_boundary_is_a_visible_leak(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part matters by itself: with its boundaries left out and all others in place, examples leak."""
    module, name, _ = LOST[what]
    model = bind(tiny(FAMILY[name]))
    assert proof.isolation(model, LENGTHS, replaced=1).holds
    monkeypatch.setattr(module, "segment_lengths", whole)
    found = proof.isolation(model, LENGTHS, replaced=1)
    assert found.logits > 0.01
    assert not found.holds


@every_loss
def test_the_hand_shake_names_the_layer(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the function computed with is compared, so a boundary lost on the way stops the first step."""
    module, name, message = LOST[what]
    model = bind(tiny(FAMILY[name]))
    monkeypatch.setattr(module, "segment_lengths", whole)
    batch = make_batch(torch.arange(TOKENS) % 96, LENGTHS)
    with pytest.raises(KernelError, match=message), handshake(model, batch):
        model(**batch)


@every_loss
def test_doctor_fails(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor exits with 1 and says in which layer examples see each other."""
    module, name, _ = LOST[what]
    monkeypatch.setattr(module, "segment_lengths", lambda **given: [sum(segment_lengths(**given))])
    diagnosis = doctor.run_doctor(families=[FAMILY[name]], device="cpu")
    failed = {check.name: check.detail for check in diagnosis.checks if check.state == "fail"}
    assert {"hand-shake", "isolation"} <= failed.keys()
    assert "examples see each other" in failed["hand-shake"]
    assert diagnosis.exit_code == 1


def ones(real: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def make(*args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = real(*args, **kwargs)
        return batch | {"attention_mask": torch.ones_like(batch["position_ids"])}

    return make


def shuffled(real: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def make(*args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = real(*args, **kwargs)
        order = torch.randperm(batch["position_ids"].shape[1], generator=torch.Generator().manual_seed(0))
        return batch | {"position_ids": batch["position_ids"][:, order]}

    return make


@pytest.fixture(params=[ones, shuffled])
def spoiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for module in (doctor, proof):
        monkeypatch.setattr(module, "make_batch", request.param(make_batch))
    return request.param


def test_doctor_fails_on_a_spoiled_batch(spoiled: Any) -> None:
    """A mask of ones, or positions in another order, is found by doctor."""
    diagnosis = doctor.run_doctor(families=[FAMILY["Qwen3.5"]], device="cpu")
    failed = {check.name: check.detail for check in diagnosis.checks if check.state == "fail"}
    assert {"hand-shake", "packed against alone"} <= failed.keys()
    assert ("attention_mask was given" if spoiled is ones else "position_ids") in failed["hand-shake"]
    assert diagnosis.exit_code == 1


def test_the_hand_shake_refuses_a_mask_of_ones() -> None:
    """A mask added by a trainer is refused at the first call, with its own message."""
    model, batch = bind(tiny(FAMILY["Llama"])), ones(make_batch)(torch.arange(TOKENS) % 96, LENGTHS)
    with pytest.raises(KernelError, match="attention_mask was given"), handshake(model, batch):
        model(**batch)


def test_the_hand_shake_finds_positions_shuffled_in_the_batch() -> None:
    """The batch's own boundaries have to agree with each other."""
    model, batch = bind(tiny(FAMILY["Llama"])), shuffled(make_batch)(torch.arange(TOKENS) % 96, LENGTHS)
    with pytest.raises(KernelError, match="contradicts itself: position_ids"), handshake(model, batch):
        model(**batch)


def test_the_hand_shake_finds_positions_shuffled_on_the_way() -> None:
    """Positions that something changed between the batch and the rotary embedding are found there."""
    model = bind(tiny(FAMILY["Qwen3.5"]))

    def shift(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"position_ids": kwargs["position_ids"].roll(1, dims=1)}

    model.model.register_forward_pre_hook(shift, with_kwargs=True)
    batch = make_batch(torch.arange(TOKENS) % 96, LENGTHS)
    with pytest.raises(KernelError, match=r"rotary_emb: its positions ran with"), handshake(model, batch):
        model(**batch)


def test_the_hand_shake_misses_a_layer_that_something_else_computed() -> None:
    """A layer whose forward was replaced after binding does not report, and is named."""
    model = bind(tiny(FAMILY["Qwen3.5"]))
    layer = model.model.layers[1].linear_attn
    layer.forward = lambda hidden_states, **_: hidden_states
    batch = make_batch(torch.arange(TOKENS) % 96, LENGTHS)
    with (
        pytest.raises(KernelError, match=r"layers\.1\.linear_attn: its .* did not report"),
        handshake(model, batch),
    ):
        model(**batch)


def test_taking_the_argument_away_at_the_last_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call before a kernel refuses to run without boundaries, and one that bypasses it is silent."""
    with pytest.raises(KernelError, match="delta rule was called without cu_seqlens"):
        record.launch("delta rule", "cu_seqlens", "cu_seqlens", lambda **_: None, cu_seqlens=None)
    tape = record.Tape(layers=["layer"])
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    record.listen(tape)
    record.launch("delta rule", "cu_seqlens", "cu_seqlens", lambda **_: None, cu_seqlens=ends)
    record.hang_up(tape)
    assert [(note[0], note[1]) for note in tape.notes] == [("layer", "delta rule")]
    assert torch.equal(tape.notes[0][3], ends)


def test_the_hand_shake_listens_to_one_step_only() -> None:
    """After the block nothing is noted, and no hook of it is left."""
    model = bind(tiny(FAMILY["Qwen3.5"]))
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    batch = make_batch(torch.arange(TOKENS) % 96, LENGTHS)
    with handshake(model, batch):
        model(**batch)
    assert not record._listening
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


@pytest.mark.parametrize("key", ["seq_idx", "position_ids", "cu_seq_lens_k", "max_length_q"])
def test_a_batch_that_contradicts_itself_is_refused(key: str) -> None:
    """Each boundary of a batch is compared with the others before the first step."""
    model = bind(tiny(FAMILY["Llama"]))
    batch, other = (make_batch(torch.arange(TOKENS) % 96, lengths) for lengths in (LENGTHS, (100, 100)))
    batch[key] = other[key]
    with pytest.raises(KernelError, match=f"contradicts itself: {key}"), handshake(model, batch):
        model(**batch)
