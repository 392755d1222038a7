"""On CUDA: the fused kernels of every family, in bf16, at head sizes as published."""

import functools
import os

# cuBLAS reads it at its first call; the proof asks for sums in a fixed order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training import doctor
from training.kernels import KernelError, bind, compilation, handshake, make_batch, proof, record
from training.kernels.families import FAMILIES, Family, build, tiny_config

pytestmark = pytest.mark.gpu
FAMILY = {family.name: family for family in FAMILIES}
LENGTHS = (1, 63, 64, 65, 1000, 2903)


@pytest.fixture(scope="module", autouse=True)
def compiled_in_parallel() -> Iterator[None]:
    with compilation.in_parallel():
        yield


def fused(name: str, **choose: str) -> Any:
    """A family's model on CUDA in bf16 with fused kernels."""
    config = tiny_config(FAMILY[name], real_heads=True)
    model = build(config, FAMILY[name].architecture, device="cuda").to(torch.bfloat16)
    return bind(
        model, kernels="fused", choose={key.replace("_", " "): value for key, value in choose.items()}
    )


@functools.cache
def fused_once(name: str) -> Any:
    return fused(name)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_proven_or_refused(family: Family) -> None:
    """Hand-shake, isolation by exactly 0.0, packed against alone, fused against fp32 with gradients."""
    diagnosis = doctor.run_doctor(families=[family], device="cuda")
    assert diagnosis.exit_code == 0, [check for check in diagnosis.checks if check.state == "fail"]
    if not any(check.state == "refused" for check in diagnosis.checks):
        assert {"hand-shake", "isolation", "fused against fp32"} <= {check.name for check in diagnosis.checks}


@pytest.mark.parametrize("convolution", ["causal-conv1d", "fla"])
@pytest.mark.parametrize("rule", ["flash-qla", "fla"])
def test_every_choice_of_kernels(rule: str, convolution: str) -> None:
    """flash-qla and fla, causal-conv1d and fla's convolution: each pair isolates and agrees with fp32."""
    model = fused("Qwen3.5", delta_rule=rule, convolution=convolution)
    assert proof.isolation(model, LENGTHS, replaced=1).holds
    config, architecture = tiny_config(FAMILY["Qwen3.5"], real_heads=True), FAMILY["Qwen3.5"].architecture
    exact = bind(build(config, architecture, device="cuda"), kernels="reference")
    assert proof.difference(model, exact, LENGTHS).logits < 0.05


def whole(what: str, form: str, argument: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """A last call that has lost the boundaries: one segment over the whole buffer."""
    given = kwargs[argument]
    lost = torch.zeros_like(given) if form == "seq_idx" else given[[0, -1]].contiguous()
    if what == "attention":
        kwargs.update(cu_seq_k=lost, max_q=int(lost[-1]), max_k=int(lost[-1]))
    kwargs.pop("chunk_indices", None)
    record.note(what, form, lost)  # type: ignore[arg-type]
    return kernel(*args, **{**kwargs, argument: lost})


@pytest.mark.parametrize("what", ["convolution", "delta rule", "attention"])
def test_a_lost_boundary_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries lost at one kernel's last call: the proof sees the leak, the hand-shake names the layer."""
    model = fused("Qwen3.5")
    launch = record.launch

    def lose(part: str, *args: Any, **kwargs: Any) -> Any:
        return (whole if part == what else launch)(part, *args, **kwargs)

    monkeypatch.setattr(record, "launch", lose)
    found = proof.isolation(model, LENGTHS, replaced=1)
    assert found.logits > 0.01
    assert not found.holds
    batch = make_batch(torch.arange(sum(LENGTHS)) % 512, LENGTHS, device="cuda")
    with pytest.raises(KernelError, match=f"its {what} ran with"), handshake(model, batch):
        model(**batch)


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 700), min_size=2, max_size=12), data=st.data())
def test_isolated_for_any_lengths(lengths: Sequence[int], data: st.DataObject) -> None:
    """Lengths nobody chose, on the fused path."""
    replaced = data.draw(st.integers(0, len(lengths) - 1))
    found = proof.isolation(fused_once("Qwen3.5"), lengths, replaced=replaced)
    assert found.holds, found


@pytest.mark.parametrize(
    "lengths",
    [(1,) * 300 + (7892,), (8191, 1), (32768 - 12345, 12345), (1, 63, 64, 65) * 40 + (32768 - 7720,)],
    ids=["many of one token", "one token behind", "two in 32768", "many in 32768"],
)  # fmt: skip
def test_isolated_at_the_extremes(lengths: Sequence[int]) -> None:
    """From one token to a whole buffer, and buffers of 32,768 tokens."""
    found = proof.isolation(fused("Qwen3.5"), lengths, replaced=1)
    assert found.holds, found


def test_compiled() -> None:
    """`torch.compile` changes neither isolation nor, beyond rounding, the logits."""
    model = fused("Qwen3.5")
    batch = make_batch(torch.arange(sum(LENGTHS)) % 512, LENGTHS, device="cuda")
    expected = model(**batch).logits.float()
    model.compile(dynamic=False)
    logits = model(**batch).logits.float()
    assert (logits - expected).norm() / expected.norm() < 0.02
    assert proof.isolation(model, LENGTHS, replaced=1).holds
