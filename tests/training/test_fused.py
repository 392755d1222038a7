"""Fused norms and MLPs: what is replaced, and that it computes the same."""

import importlib

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from training import fused
from training.errors import OptionError
from training.fused import FUSED, fuse
from training.model import TINY


def tiny() -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97))


def test_every_layer_of_a_known_class_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, gated norms and MLPs each get their kernel; names and values of parameters stay."""
    monkeypatch.setattr(fused, "find_spec", lambda package: package)
    model = tiny()
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert fuse(model) == {
        "Qwen3_5RMSNorm: liger RMSNorm": 2 * 4 + 1 + 2,
        "Qwen3_5RMSNormGated: fla gated RMSNorm": 3,
        "Qwen3_5MLP: liger SwiGLU": 4,
    }
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert type(model.model.norm).__name__ == "FusedQwen3_5RMSNorm"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernels there is an error, never the slow layers in silence."""
    monkeypatch.setattr(fused, "find_spec", lambda package: None)
    with pytest.raises(OptionError, match="no fla gated RMSNorm: install flash-linear-attention"):
        fuse(tiny())


def test_another_activation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP with gelu is no SwiGLU."""
    monkeypatch.setattr(fused, "find_spec", lambda package: package)
    config = AutoConfig.for_model(**TINY["tiny-qwen3_5"], vocab_size=97, hidden_act="gelu")
    with pytest.raises(OptionError, match="has the activation gelu"):
        fuse(AutoModelForCausalLM.from_config(config))


def test_every_class_exists() -> None:
    """Each name in the table is a class of transformers: a renamed one would silently stay slow."""
    families = {"Qwen3_5Moe": "qwen3_5_moe", "Qwen3_5": "qwen3_5", "Qwen3Next": "qwen3_next"}
    for name in FUSED:
        prefix = name.removesuffix("Gated").removesuffix("RMSNorm").removesuffix("MLP")
        family = families.get(prefix, prefix.lower())
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert hasattr(module, name), name


@pytest.mark.gpu
def test_fused_layers_compute_what_transformers_computes() -> None:
    """Outputs and gradients in bf16 with fp32 norm weights stay within bf16's rounding of fp32's."""
    config = AutoConfig.for_model(
        **TINY["tiny-qwen3_5"] | {"hidden_size": 256, "linear_value_head_dim": 128}, vocab_size=97
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).cuda()
    layer = model.model.layers[0]
    parts = {
        "norm": (layer.input_layernorm, (256,)),
        "gated": (layer.linear_attn.norm, (128, 128)),
        "mlp": (layer.mlp, (256,)),
    }
    inputs = {
        name: [torch.randn(512, width, device="cuda") for width in widths]
        for name, (_, widths) in parts.items()
    }

    # Random pulls, as a norm's output has one length whatever its input: the gradient of Σ out² would be 0.
    pulls = {name: torch.randn(512, widths[0], device="cuda") for name, (_, widths) in parts.items()}

    def run(dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
        found = {}
        for name, (module, _) in parts.items():
            module.to(dtype if name == "mlp" else torch.float32)
            given = [x.detach().to(dtype).requires_grad_() for x in inputs[name]]
            out = module(*given).to(dtype)
            (out.float() * pulls[name]).sum().backward()
            found[name] = [t.float() for t in (out, *(x.grad for x in given))]
            module.zero_grad()
        return found

    exact = run(torch.float32)
    fuse(model)
    for name, tensors in run(torch.bfloat16).items():
        for got, wanted in zip(tensors, exact[name], strict=True):
            assert (got - wanted).norm() / wanted.norm() < 3e-2, name
