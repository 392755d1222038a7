"""Binding: one model, not its modelling file; twice, under checkpointing, compilation and FSDP2."""

import copy
import dataclasses
import functools
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from torch.distributed.fsdp import fully_shard
from transformers.models.qwen3_5 import modeling_qwen3_5

from training.kernels import (
    CHOICES,
    KernelError,
    attention,
    bind,
    binding,
    describe,
    handshake,
    make_batch,
    proof,
    unbind,
)
from training.kernels.families import FAMILIES, build, tiny, tiny_config
from training.kernels.packages import PACKAGES, machine

FAMILY = {family.name: family for family in FAMILIES}
LENGTHS = (1, 63, 64, 65, 7)


def batch_of(lengths: tuple[int, ...] = LENGTHS) -> dict[str, object]:
    return make_batch(torch.arange(sum(lengths)) * 7 % 96, lengths)


@functools.cache
def bound_once(name: str) -> torch.nn.Module:
    return bind(tiny(FAMILY[name]))


@pytest.mark.parametrize("name", FAMILY)
@settings(max_examples=5)
@given(data=st.data())
def test_isolated_for_any_lengths(name: str, data: st.DataObject) -> None:
    """Isolation holds exactly for lengths nobody chose."""
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=2, max_size=4))
    replaced = data.draw(st.integers(0, len(lengths) - 1))
    found = proof.isolation(bound_once(name), lengths, replaced=replaced)
    assert (found.logits, found.gradients, found.across) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", FAMILY)
def test_isolated_under_gradient_checkpointing(name: str) -> None:
    """Recomputing the layers in the backward pass uses the same boundaries: 0.0 there too, same gradients."""
    model = bind(tiny(FAMILY[name])).train()
    plain = proof.alone(model, LENGTHS[-2:])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = proof.isolation(model, LENGTHS, replaced=1)
    assert (found.logits, found.gradients, found.across) == (0.0, 0.0, 0.0)
    again = proof.alone(model, LENGTHS[-2:])
    assert again.worst[1] < 1e-3
    assert again.logits == plain.logits


def test_other_models_of_the_module_are_untouched() -> None:
    """Binding one model changes neither the modelling file's globals nor another model's classes."""
    before = dict(vars(modeling_qwen3_5))
    other = tiny(FAMILY["Qwen3.5"])
    bind(tiny(FAMILY["Qwen3.5"]))
    assert vars(modeling_qwen3_5) == before
    assert not any(hasattr(type(layer), "bound_from") for layer in other.modules())
    assert other.config._attn_implementation != "packed_varlen"


def test_models_of_one_configuration_are_bound_each_for_itself() -> None:
    """Two models built from the same configuration object keep their own attention."""
    config, architecture = tiny_config(FAMILY["Qwen3.5"]), FAMILY["Qwen3.5"].architecture
    one, other = build(config, architecture), build(config, architecture)
    before = other.config._attn_implementation
    bind(one, kernels="reference")
    assert one.config._attn_implementation == "packed_varlen_reference"
    assert other.config._attn_implementation == before


def test_binding_twice_is_binding_once() -> None:
    """A second bind leaves one hook, one layer of subclassing and the same logits."""
    once, twice = bind(tiny(FAMILY["Qwen3.5"])), bind(bind(tiny(FAMILY["Qwen3.5"])))
    assert len(twice._forward_pre_hooks) == 1
    assert [type(layer).__mro__[1].__name__ for layer in twice.modules()] == [
        type(layer).__mro__[1].__name__ for layer in once.modules()
    ]
    assert torch.equal(once(**batch_of()).logits, twice(**batch_of()).logits)


def test_unbind_gives_the_model_back() -> None:
    """Classes, hooks, attributes and the attention implementation are as before."""
    model = tiny(FAMILY["Qwen3.5"])
    before = [(type(layer), set(vars(layer))) for layer in model.modules()]
    implementation = model.config._attn_implementation
    unbind(bind(model))
    assert [(type(layer), set(vars(layer))) for layer in model.modules()] == before
    assert model.config._attn_implementation == implementation
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_a_copy_is_bound_by_itself() -> None:
    """`copy.deepcopy` gives a bound model that computes with its own weights."""
    model = bind(tiny(FAMILY["Qwen3.5"]))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert proof.isolation(twin, LENGTHS, replaced=0).holds
    assert twin(**batch_of()).logits.abs().max() > 0.0


def test_state_dict_is_unchanged() -> None:
    """Binding adds nothing to what a checkpoint holds."""
    assert bind(tiny(FAMILY["Qwen3.5"])).state_dict().keys() == tiny(FAMILY["Qwen3.5"]).state_dict().keys()


def test_a_model_on_the_meta_device_can_be_bound() -> None:
    """The trainer binds before the weights are there."""
    with torch.device("meta"):
        model = tiny(FAMILY["Qwen3.5"])
    bind(model, device="cpu")
    assert {row.part for row in describe(model)} == {"attention", "convolution", "delta rule"}


def test_compiled() -> None:
    """`torch.compile` gives the same logits, isolates, and the hand-shake hears the uncompiled layers."""
    torch._dynamo.reset()
    model = bind(tiny(FAMILY["Qwen3.5"]))
    expected = model(**batch_of()).logits
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(**batch_of()).logits, expected)
    with handshake(model, batch := batch_of((3, 2))):
        compiled(**batch)
    model.compile(backend="eager")
    assert proof.isolation(model, LENGTHS, replaced=1).holds
    torch._dynamo.reset()


@pytest.fixture
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("bind_first", [True, False])
def test_under_fsdp2(process_group: None, bind_first: bool) -> None:
    """Sharded before or after binding, with every decoder layer its own group: same logits and hand-shake."""
    expected = bind(tiny(FAMILY["Qwen3.5"]))(**batch_of()).logits
    model = tiny(FAMILY["Qwen3.5"])
    if bind_first:
        bind(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if not bind_first:
        bind(model)
    batch = batch_of()
    with handshake(model, batch):
        logits = model(**batch).logits
        logits.sum().backward()
    assert torch.equal(logits, expected)


def test_describe_names_what_computes() -> None:
    """Each kind of layer with its count, its part and the function's place."""
    rows = {(row.layer, row.part): row for row in describe(bind(tiny(FAMILY["Qwen3.5"])))}
    rule = rows["Qwen3_5GatedDeltaNet", "delta rule"]
    assert (rule.layers, rule.bound) == (2, "segment-walking reference")
    assert rule.origin == "training.kernels.recurrence.rule_by_sequence"
    assert rows["Qwen3_5Attention", "attention"].layers == 1


@pytest.mark.parametrize(
    ("kernels", "name"), [("auto", "packed_varlen"), ("reference", "packed_varlen_reference")]
)
def test_describe_names_the_attention_that_is_bound(kernels: Literal["auto", "reference"], name: str) -> None:
    """The function named is the one that the configuration calls."""
    model = bind(tiny(FAMILY["Llama"]), kernels=kernels)
    (row,) = describe(model)
    assert row.origin == f"training.kernels.attention.{name}"
    assert model.config._attn_implementation == name


def test_only_binding_switches_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking what would compute a layer leaves torch's one switch alone; binding turns it, and back."""
    active: list[str | None] = [None]
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: active.append(None))
    where = dataclasses.replace(machine("cpu"), device="cuda", capability=(9, 0))
    layer = tiny(FAMILY["Llama"]).model.layers[0].self_attn
    for wanted, found in (("FA3", "FA3"), ("FA2", "FA2"), (None, "FA2")):
        assert attention.choose(layer, name="x", where=where, wanted=wanted).endswith(f"({found})")
    assert active == [None]
    monkeypatch.setattr(binding, "machine", lambda _: where)
    model = tiny(FAMILY["Llama"])
    bind(model, device="cuda", choose={"attention": "FA3"})
    assert active[1:] == ["FA3"]
    assert describe(model)[0].bound.endswith("(FA3)")
    bind(model, device="cuda")
    assert active[1:] == ["FA3"]
    bind(model, device="cuda", choose={"attention": "FA2"})
    assert active[1:] == ["FA3", None]


def test_a_model_that_is_not_bound_is_said_to_be() -> None:
    """Asking an unbound model what is bound is an error of one line."""
    with pytest.raises(KernelError, match="Qwen3_5ForCausalLM is not bound"):
        describe(tiny(FAMILY["Qwen3.5"]))


def test_unlisted_models_are_refused_by_name() -> None:
    """A model class that nobody proved is refused, and the proven ones are named."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with pytest.raises(KernelError, match=r"GPT2LMHeadModel is not among .*LlamaForCausalLM"):
        bind(model)


def test_the_decoder_alone_can_be_bound() -> None:
    """The model without its head is bound the same way."""
    model = bind(tiny(FAMILY["Qwen3.5"]).model)
    hidden = model(**batch_of()).last_hidden_state
    assert hidden.shape == (1, sum(LENGTHS), 32)


def test_every_mixing_function_is_looked_up_where_binding_puts_it() -> None:
    """The layer's forward reads its module's globals by name: binding rests on that, on each transformers."""
    names = inspect.unwrap(modeling_qwen3_5.Qwen3_5GatedDeltaNet.forward).__code__.co_names
    assert {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"} <= set(names)


@pytest.mark.parametrize("given", ["m", None, torch.nn.Linear, torch.nn.Linear(1, 1)], ids=repr)
def test_what_is_no_model_is_refused_by_name(given: object) -> None:
    """A model's name, its class or a layer in a model's place: a typed error that says what was given."""
    model = tiny(FAMILY["Qwen3"])
    calls = {
        "bind": lambda: bind(given),
        "unbind": lambda: unbind(given),
        "describe": lambda: describe(given),
        "handshake": lambda: handshake(given, batch_of()).__enter__(),
        "isolation": lambda: proof.isolation(given, LENGTHS, replaced=0),
        "alone": lambda: proof.alone(given, LENGTHS),
        "difference": lambda: proof.difference(model, given, LENGTHS),
    }
    for call in calls.values():
        with pytest.raises(
            KernelError, match=rf"from_pretrained\(…\) returns it, not the {type(given).__name__} "
        ):
            call()


def test_the_extra_installs_every_kernel_that_bind_prefers() -> None:
    """`'.[kernels]'` names each fused kernel of a convolution or recurrence; attention's is torch's own."""
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text("utf-8"))[
        "project"
    ]
    named = {Requirement(line).name for line in project["optional-dependencies"]["kernels"]}
    wanted = {kernel for part, kernels in CHOICES.items() if part != "attention" for kernel in kernels}
    assert {PACKAGES.get(kernel, kernel) for kernel in wanted} <= named


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.5-MoE"])
def test_a_rule_that_takes_grouped_heads_gets_them_unrepeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys reach such a rule with their own number of heads, and the logits stay as they were."""
    model = bind(tiny(FAMILY[name]))
    expected = model(**batch_of()).logits
    heads = set()
    chosen = binding.recurrence.choose

    def choose(what: str, layer: torch.nn.Module, **options: object) -> tuple[str, object]:
        _, rule = chosen(what, layer, **options)  # type: ignore[arg-type]

        def grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: object) -> object:
            heads.add((query.shape[2], key.shape[2], value.shape[2]))
            times = value.shape[2] // query.shape[2]
            query, key = (each.repeat_interleave(times, dim=2) for each in (query, key))
            return rule(query, key, value, **more)

        monkeypatch.setattr(binding.recurrence, "GROUPED", {grouped})
        return "grouped", grouped

    monkeypatch.setattr(binding.recurrence, "choose", choose)
    assert torch.equal(bind(model)(**batch_of()).logits, expected)
    assert len(heads) == 1
    queries, keys, values = heads.pop()
    assert queries == keys < values
