"""Binds the layers of one model to functions that honour the boundaries, or refuses by name."""

from __future__ import annotations

import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from training.kernels import attention, convolution, recurrence
from training.kernels.contract import KernelError, check_call, check_model
from training.kernels.families import ARCHITECTURES, MIXERS, UNFUSED
from training.kernels.packages import Machine, machine
from training.packed import turning

Kernels = Literal["auto", "fused", "reference"]
CHOICES: Mapping[str, tuple[str, ...]] = {
    "attention": ("FA2", "FA3", "FA4"),
    convolution.WHAT: ("causal-conv1d", "fla"),
    recurrence.DELTA_RULE: ("flash-qla", "fla"),
}
REPEATING = {"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}
"""Layers whose forward asks for `num_k_heads` only to repeat queries and keys, where it does."""
_M = TypeVar("_M", bound=torch.nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What computes one part of one kind of layer.

    Attributes:
        layer: The layer's class.
        layers: How many such layers the model has.
        part: "attention", "convolution", "delta rule", …
        bound: What computes it.
        origin: Where that function comes from.
    """

    layer: str
    layers: int
    part: str
    bound: str
    origin: str


class CallCheck:
    """The root's forward-pre hook: checks every call's arguments; remembers what binding changed."""

    def __init__(self, *, device: str, kernels: Kernels, attention_before: str, config: Any) -> None:
        self.device = device
        self.kernels = kernels
        self.attention_before = attention_before
        self.turning = tuple(turning(config))

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = {"input_ids": args[0], **kwargs} if args else dict(kwargs)
        if call.get("use_cache") is None:
            call["use_cache"] = model.config.get_text_config().use_cache
        check_call(call)
        for most, kind in self.turning:
            if call["max_length_q"] > most:
                raise KernelError(
                    f"a sequence of {call['max_length_q']} tokens: beyond {most} the rotary embedding "
                    f"({kind}) turns the others of a batch otherwise: pack with --capacity {most} or less"
                )
        device = call["cu_seq_lens_q"].device.type
        if self.kernels != "reference" and device != self.device:
            raise KernelError(
                f"the kernels were bound for {self.device}, the batch is on {device}: move the model first "
                'and bind it then, or write kernels = "reference"'
            )


def bind(
    model: _M,
    *,
    kernels: Kernels = "auto",
    device: str | None = None,
    choose: Mapping[str, str] | None = None,
) -> _M:
    """Binds a model's layers so that no example of a packed batch sees another.

    Nothing of the modelling file is changed: each mixing layer gets a subclass of its class whose forward
    finds other functions, and the configuration another attention implementation. Binding again replaces
    the binding; `unbind` takes it away. Bind before or after gradient checkpointing, `torch.compile` and
    `fully_shard`; parameters may be on the meta device.

    Args:
        model: A model of one of `families.FAMILIES`, or the decoder inside one.
        kernels: "fused": CUDA's kernels; "reference": the modelling file's own functions, sequence by
            sequence, many times slower, on any device; "auto": fused on CUDA, the references on a CPU.
        device: "cuda" or "cpu", where the model will run; None means where its parameters are, and
            for the meta device CUDA if there is one.
        choose: One of several fused kernels by name, see `CHOICES`.

    Returns:
        The model.

    Raises:
        KernelError: a layer that can't be isolated here: its name, the cause and what to do.
    """
    if kernels not in ("auto", "fused", "reference"):
        raise KernelError(f'kernels must be "auto", "fused" or "reference", not {kernels!r}')
    wanted = _checked(choose or {})
    unbind(model)
    decoder = _decoder(model)
    place = device or _device(model)
    if kernels == "fused" and place != "cuda":
        raise KernelError(
            f'kernels = "fused" needs CUDA, the model is on {place}: write "auto" or "reference"'
        )
    where = machine("cpu" if kernels == "reference" else place)
    mixers, attentions = find_mixers(decoder), find_attentions(decoder)
    for name, layer in {**mixers, **attentions}.items():
        if "forward" in vars(layer):
            raise KernelError(
                f"{name}: its forward was replaced, by hub kernels or a hook: load without use_kernels and "
                "set USE_HUB_KERNELS=NO, or bind before what replaces it"
            )
    for name, layer in attentions.items():
        attention.choose(layer, name=name, where=where, wanted=wanted.get("attention"))
    classes: dict[type, type] = {}
    for name, layer in mixers.items():
        if type(layer) not in classes:
            classes[type(layer)] = _bound_class(layer, name, where, wanted)
    if "attention" in wanted and where.device == "cuda":
        attention.activate(wanted["attention"])
    for name, layer in {**mixers, **attentions}.items():
        layer.packed_name = name
        layer.__class__ = classes.get(type(layer), type(layer))
    attention.register()
    check = CallCheck(
        device=place,
        kernels=kernels,
        attention_before=decoder.config._attn_implementation,
        config=decoder.config,
    )
    decoder.set_attn_implementation(attention.REFERENCE if kernels == "reference" else attention.FUSED)
    model.register_forward_pre_hook(check, with_kwargs=True)
    return model


def unbind(model: _M) -> _M:
    """Takes a binding away: the model is as transformers made it. Does nothing where there is none.

    Raises:
        KernelError: it is no model.
    """
    check_model(model)
    for handle, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, CallCheck):
            del model._forward_pre_hooks[handle]
            model._forward_pre_hooks_with_kwargs.pop(handle, None)
            _decoder(model).set_attn_implementation(hook.attention_before)
    for layer in model.modules():
        if "bound_from" in vars(type(layer)):
            layer.__class__ = vars(type(layer))["bound_from"]
        if "packed_name" in vars(layer):
            del layer.packed_name
    return model


def describe(model: torch.nn.Module) -> list[Row]:
    """What computes each kind of layer of a bound model, and where it comes from.

    Raises:
        KernelError: the model is not bound, or no model.
    """
    check = binding_of(model)
    decoder = _decoder(model)
    where = machine("cpu" if check.kernels == "reference" else check.device)
    rows = []
    attentions = find_attentions(decoder)
    for cls, count in Counter[Any](map(type, attentions.values())).items():
        name, layer = next((name, layer) for name, layer in attentions.items() if type(layer) is cls)
        reference = check.kernels == "reference"
        function = attention.packed_varlen_reference if reference else attention.packed_varlen
        bound = attention.choose(layer, name=name, where=where, wanted=None)
        rows.append(_row(cls.__name__, count, "attention", bound, function))
    for cls, count in Counter[Any](map(type, find_mixers(decoder).values())).items():
        for what, (bound, function) in cls.bound_to.items():
            rows.append(_row(cls.bound_from.__name__, count, what, bound, function))
    return rows


def _row(layer: str, layers: int, part: str, bound: str, function: Callable[..., Any]) -> Row:
    origin = f"{function.__module__}.{function.__qualname__.partition('.')[0]}"
    return Row(layer=layer, layers=layers, part=part, bound=bound, origin=origin)


def binding_of(model: torch.nn.Module) -> CallCheck:
    """The binding of a model.

    Raises:
        KernelError: there is none, or no model.
    """
    check_model(model)
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, CallCheck):
            return hook
    raise KernelError(f"{type(model).__name__} is not bound: call training.kernels.bind(model) first")


def find_mixers(decoder: torch.nn.Module) -> dict[str, Any]:
    """Name -> layer, for the layers with a convolution or a recurrence."""
    return {
        name: module for name, module in decoder.named_modules() if _mixer_class(type(module)) is not None
    }


def parts(mixer: torch.nn.Module) -> set[str]:
    """What a layer of `find_mixers` computes: its convolution, its recurrence."""
    cls = _mixer_class(type(mixer))
    assert cls is not None
    return set(MIXERS[cls.__name__].values()) - {UNFUSED}


def find_attentions(decoder: torch.nn.Module) -> dict[str, Any]:
    """Name -> layer, for the layers that call transformers' attention interface."""
    return {
        name: module
        for name, module in decoder.named_modules()
        if _mixer_class(type(module)) is None
        and hasattr(module, "layer_idx")
        and any(cls.__name__.endswith("Attention") for cls in type(module).__mro__)
    }


def _mixer_class(cls: type) -> type | None:
    return next((base for base in cls.__mro__ if base.__name__ in MIXERS), None)


def _decoder(model: Any) -> Any:
    names = [cls.__name__ for cls in type(model).__mro__]
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or not (ARCHITECTURES.intersection(names) or _is_known_decoder(names)):
        raise KernelError(
            f"{names[0]} is not among the model classes proven isolated ({', '.join(sorted(ARCHITECTURES))})"
        )
    return decoder


def _is_known_decoder(names: list[str]) -> bool:
    suffixes = ("ForCausalLM", "ForConditionalGeneration")
    stems = {
        name.removesuffix(suffix) for name in ARCHITECTURES for suffix in suffixes if name.endswith(suffix)
    }
    return any(name in (f"{stem}Model", f"{stem}TextModel") for name in names for stem in stems)


def _device(model: torch.nn.Module) -> str:
    place = next(model.parameters()).device.type
    if place == "meta":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return place


def _checked(choose: Mapping[str, str]) -> Mapping[str, str]:
    for part, kernel in choose.items():
        if kernel not in CHOICES.get(part, ()):
            raise KernelError(f"choose: there is no {kernel!r} for {part!r}; there are {dict(CHOICES)}")
    return choose


def _bound_class(layer: torch.nn.Module, name: str, where: Machine, wanted: Mapping[str, str]) -> type:
    """A subclass of the layer's class whose forward finds our functions where it looks for its module's.

    The forward's code is used as it is, with a copy of its module's globals in which the mixing functions
    are replaced: no other model of that module is touched, and nothing has to be put back.
    """
    cls = type(layer)
    base = _mixer_class(cls)
    assert base is not None
    module = sys.modules[base.__module__]
    forward = inspect.unwrap(base.forward)  # type: ignore[attr-defined]
    bound_to: dict[str, tuple[str, Callable[..., Any]]] = {}
    scope = dict(forward.__globals__)
    for function, what in MIXERS[base.__name__].items():
        if function not in forward.__code__.co_names:
            raise KernelError(
                f"{name}: {base.__name__} does not call {function}: a transformers not known here"
            )
        if what == UNFUSED:
            scope[function] = _no_short_cut
            continue
        bound_to[what] = _choose(what, layer, name, where, inspect.unwrap(getattr(module, function)), wanted)
        scope[function] = bound_to[what][1]
    for function in forward.__code__.co_names:
        if function not in MIXERS[base.__name__] and hasattr(scope.get(function), "__wrapped__"):
            scope[function] = _refusing(function)
    # Under its own name dynamo would look the globals up in the module instead of here.
    del scope["__name__"]
    inner = types.FunctionType(
        forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__
    )
    inner.__kwdefaults__ = forward.__kwdefaults__

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(self, *args, **kwargs)
        except KernelError as error:
            raise type(error)(f"{self.packed_name}: {error}") from error

    members = {"forward": named, "__module__": __name__, "bound_from": cls, "bound_to": bound_to}
    rule = bound_to.get(recurrence.DELTA_RULE)
    repeats = base.__name__ in REPEATING and "repeat_interleave" in forward.__code__.co_names
    if rule is not None and rule[1] in recurrence.GROUPED and repeats:
        members["num_k_heads"] = property(_value_heads)
    return type(f"Packed{cls.__name__}", (cls,), members)


def _value_heads(layer: Any) -> int:
    """As many key heads as value heads: the forward, which asks for nothing else, then repeats none.

    transformers 5.17 repeats queries and keys for each value head, later ones leave that to the kernel. At
    Qwen3.5-27B's sizes it costs 51 ms a step on an H200, in copies and in the work on what was copied.
    """
    heads: int = layer.num_v_heads
    return heads


def _choose(
    what: str,
    layer: torch.nn.Module,
    name: str,
    where: Machine,
    reference: Callable[..., Any],
    wanted: Mapping[str, str],
) -> tuple[str, Callable[..., Any]]:
    if not isinstance(reference, types.FunctionType):
        raise KernelError(
            f"{name}: a hub kernel stands in for its {what}: set USE_HUB_KERNELS=NO before import"
        )
    choice = wanted.get(what)
    if what == convolution.WHAT:
        # transformers 5.17's LFM2 layers take seq_idx alone and hand nothing else on.
        forward = inspect.unwrap(type(layer).forward)
        passes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values())
        return convolution.choose(
            layer, name=name, where=where, reference=reference, passes_cu_seqlens=passes, wanted=choice
        )
    return recurrence.choose(what, layer, name=name, where=where, reference=reference, wanted=choice)


def _no_short_cut(*_: Any, **__: Any) -> None:
    return None


def _refusing(function: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise KernelError(f"{function} is not bound; it serves decoding with a cache: pass use_cache=False")

    return refuse
