"""What a run is: frozen dataclasses, filled from a TOML file and `--set section.key=value`.

    [data]
    shards = "shards"
    [model]
    config = "tiny-qwen3_5"

An unknown key, a value of another type and a value out of range are errors that name the nearest
known key or the law. `to_toml` writes the resolved configuration, defaults included and marked.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from pathlib import Path
from typing import Any, Literal

from training.errors import InputError, OptionError

Precision = Literal["fp32", "mixed", "bf16"]


def setting(default: Any = MISSING, *, free: bool, between: tuple[float, float] | None = None) -> Any:
    """A field that says what else is true of it than its type.

    Args:
        default: None given: the setting has to be.
        free: It may change when a run goes on: rounding apart, the losses stay what they would have been.
            Or something else is compared: of the data, the fingerprint and the buffers of a step; of the
            model, its configuration.
        between: The least and the most that a number may be.
    """
    return field(default=default, metadata={"free": free, "between": between})


@dataclass(frozen=True, kw_only=True)
class Run:
    dir: str = setting("run", free=True)
    """Directory of the resolved configuration, the metrics and the checkpoints."""
    steps: int = setting(0, between=(0, 2**31), free=True)
    """Stop after this many steps of the schedule; 0 runs it whole."""
    profile: str = setting("", free=True)
    """Trace the steps FIRST:LAST, counted from 1, as "5:8", into `profile` in the run directory."""
    trace: bool = setting(True, free=True)
    """Write the trace itself beside what was read off it."""
    nonfinite: Literal["stop", "skip"] = setting("stop", free=True)
    """What a NaN or infinite loss or gradient does; either way the examples' numbers are saved."""
    spike: float = setting(10.0, between=(0, 1e6), free=True)
    """A loss so many median deviations above the last steps' median has its examples named; 0 names none."""
    hang_s: float = setting(480.0, between=(0, 1e6), free=True)
    """Seconds without progress, a micro-batch, after which a rank says where it stands and ends with 86.

    Ten times as many in the first step, for an evaluation and for a checkpoint; 0 waits for good. Less than
    parallel.timeout, which would end the ranks that wait, but not name the one they wait for.
    """
    loggers: tuple[str, ...] = setting((), free=True)
    """Where the metrics go besides metrics.jsonl: "tensorboard", "wandb", "trackio"."""
    project: str = setting("padfree", free=True)
    """What wandb and trackio file the run under; its name there is that of its directory."""
    seed: int = setting(0, between=(0, 2**64 - 1), free=False)
    """Of the initial weights, of the order of the data, and of dropout; 0 to 2**64 - 1."""


@dataclass(frozen=True, kw_only=True)
class Data:
    shards: str = setting(free=True)
    """Directory that `padfree pack` wrote."""
    buffers: int = setting(1, between=(1, 1024), free=True)
    """Buffers a micro-batch and rank: they are laid side by side in one row."""
    accumulation: int = setting(1, between=(1, 2**20), free=True)
    """Micro-batches a step."""
    prefetch: int = setting(2, between=(0, 1024), free=True)
    """Micro-batches that a thread makes ready ahead."""


@dataclass(frozen=True, kw_only=True)
class Model:
    weights: str = setting("", free=True)
    """Hugging Face directory to start from."""
    config: str = setting("", free=True)
    """Instead of weights: random ones for this configuration, a file, a directory or "tiny-qwen3_5"."""
    precision: Literal["auto", "fp32", "mixed", "bf16"] = setting("auto", free=False)
    """mixed computes in bf16 on fp32 master weights. auto is mixed on CUDA and fp32 on a CPU."""
    kernels: Literal["auto", "fused", "reference"] = setting("auto", free=True)
    """auto is fused on CUDA and the segment-walking reference on a CPU."""
    loss: Literal["auto", "liger", "plain"] = setting("auto", free=True)
    """liger: the logits are never whole in memory. auto is liger on CUDA, plain on a CPU."""
    loss_chunk: int = setting(8, between=(1, 1024), free=True)
    """Memory of the fused loss: its logits take about so many times that of the hidden states."""
    delta_rule: Literal["auto", "flash-qla", "fla"] = setting("auto", free=True)
    """Which fused kernel computes the gated delta rule, where there are several."""
    fused: Literal["auto", "yes", "no"] = setting("auto", free=True)
    """Norms and SwiGLU in one pass over memory each; auto is yes on CUDA where liger-kernel is."""
    freeze: tuple[str, ...] = setting((), free=False)
    """Patterns of names, as "model.embed_tokens.*", of parameters that stay as they are."""
    compile: Literal["none", "layers"] = setting("none", free=True)
    """torch.compile of each decoder layer."""
    checkpointing: int = setting(1, between=(0, 1024), free=True)
    """Recompute every n-th layer's activations in the backward pass; 0 keeps all, 1 recomputes each layer."""
    keep_layers: int = setting(0, between=(0, 1024), free=True)
    """So many layers before the last `whole_layers` recompute all but their matrix products."""
    whole_layers: int = setting(0, between=(0, 1024), free=True)
    """So many layers at the end recompute nothing."""
    host_layers: int = setting(0, between=(0, 1024), free=True)
    """So many layers, spread evenly, recompute all but their matrix products, kept in the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: int = setting(0, between=(0, 4096), free=False)
    """Of the adapters that are trained in place of the model's weights (PEFT); 0: none."""
    alpha: float = setting(16.0, between=(1e-6, 1e6), free=False)
    """What an adapter adds is scaled by alpha ÷ rank."""
    dropout: float = setting(0.0, between=(0, 0.999999), free=False)
    """Share of an adapter's inputs that are left out."""
    targets: tuple[str, ...] = setting((), free=False)
    """Linear layers that get one, as "q_proj"; none named: all but the head."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    device: Literal["auto", "cpu", "cuda"] = setting("auto", free=True)
    """auto is CUDA where there is any."""
    reduce: Literal["step", "micro_batch"] = setting("step", free=True)
    """When gradients are summed over ranks: once a step, which keeps them whole on each rank until then."""
    replicas: int = setting(1, between=(1, 2**16), free=True)
    """Groups of ranks that hold the whole model each, sharded over the group (HSDP); as many as nodes."""
    prefetch: int = setting(1, between=(1, 16), free=True)
    """Layers that are gathered ahead, in the forward and in the backward pass."""
    keep_gathered: int = setting(0, between=(0, 1024), free=True)
    """So many layers at the end stay gathered from the forward to the backward pass."""
    offload: bool = setting(False, free=True)
    """Weights, gradients and optimizer states lie in the host's memory, the update runs there: far slower."""
    context: int = setting(1, between=(1, 1024), free=True)
    """GPUs that share one sequence: only 1, see the error for others."""
    timeout: float = setting(600.0, between=(1, 1e6), free=True)
    """Seconds after which a collective that some rank never joined ends the run."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = setting(1e-5, between=(0, 10), free=False)
    """Peak learning rate."""
    beta1: float = setting(0.9, between=(0, 0.999999), free=False)
    """AdamW's: how much of the first moment, the mean of gradients, stays from step to step."""
    beta2: float = setting(0.95, between=(0, 0.999999), free=False)
    """AdamW's: how much of the second moment, the mean of their squares, stays."""
    eps: float = setting(1e-8, between=(0, 1), free=False)
    """AdamW's: added to the second moment's root, by which the first is divided."""
    weight_decay: float = setting(0.0, between=(0, 10), free=False)
    """On matrices; never on norms, biases and the delta rule's per-head scalars."""
    states: Literal["weights", "8bit"] = setting("weights", free=False)
    """Both moments in the weights' own type, or in 8 bits (torchao)."""
    rounding: Literal["nearest", "stochastic"] = setting("nearest", free=False)
    """Of bf16 weights (torchao): stochastic keeps steps that are smaller than half a bf16 step on average."""
    clip: float = setting(1.0, between=(0, 1e9), free=False)
    """Largest norm of the whole gradient; 0 leaves it as it is."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    kind: Literal["cosine", "linear", "constant", "wsd"] = setting("cosine", free=False)
    """wsd: warm-up, stable, decay."""
    steps: int = setting(0, between=(0, 2**31), free=False)
    """Steps from the first to the last; 0 takes them from `epochs`."""
    epochs: int = setting(1, between=(1, 10_000), free=False)
    """Passes over the data, where `steps` is 0; the last step of each takes what is left of it."""
    warmup: int = setting(0, between=(0, 2**31), free=False)
    """Steps in which the learning rate rises from nothing to its peak."""
    decay: int = setting(0, between=(0, 2**31), free=False)
    """wsd: the last steps, in which it falls linearly."""
    floor: float = setting(0.0, between=(0, 1), free=False)
    """Where it ends, as a share of the peak."""


@dataclass(frozen=True, kw_only=True)
class Eval:
    every: int = setting(0, between=(0, 2**31), free=True)
    """Evaluate after every n-th step, before the first and after the last; 0 never does."""
    shards: str = setting("", free=True)
    """Shard directory to evaluate on; "" is what `--eval-fraction` held out, `eval` in the shards."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: int = setting(0, between=(0, 2**31), free=True)
    """Save after every n-th step; 0 does not."""
    last: bool = setting(True, free=True)
    """Save after the last step."""
    keep: int = setting(2, between=(0, 2**31), free=True)
    """Newest checkpoints that stay; 0 keeps all."""
    keep_every: int = setting(0, between=(0, 2**31), free=True)
    """Those of every n-th step stay besides; 0 for none."""
    background: bool = setting(False, free=True)
    """Go on training while a checkpoint is written; needs host memory for a copy of the state."""


@dataclass(frozen=True, kw_only=True)
class Config:
    run: Run = field(default_factory=Run)
    data: Data
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    parallel: Parallel = field(default_factory=Parallel)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


SECTIONS: dict[str, type[Any]] = typing.get_type_hints(Config)
SETTINGS: dict[str, Field[Any]] = {
    f"{section}.{part.name}": part for section, cls in SECTIONS.items() for part in dataclasses.fields(cls)
}

# key -> what it does nothing without, and whether that is there
NEEDS: dict[str, tuple[str, Callable[[Config], object]]] = {
    "run.trace": ("run.profile", lambda config: config.run.profile),
    "run.project": (
        '"wandb" or "trackio" in run.loggers',
        lambda config: {"wandb", "trackio"} & {*config.run.loggers},
    ),
    "model.loss_chunk": ("the loss in chunks (model.loss)", lambda config: config.model.loss != "plain"),
    "model.delta_rule": ("fused kernels (model.kernels)", lambda config: config.model.kernels != "reference"),
    "lora.alpha": ("lora.rank", lambda config: config.lora.rank),
    "lora.dropout": ("lora.rank", lambda config: config.lora.rank),
    "lora.targets": ("lora.rank", lambda config: config.lora.rank),
    "schedule.epochs": ("schedule.steps = 0", lambda config: not config.schedule.steps),
    "schedule.decay": ("schedule.kind = wsd", lambda config: config.schedule.kind == "wsd"),
    "schedule.floor": ("a schedule.kind that falls", lambda config: config.schedule.kind != "constant"),
    "eval.shards": ("eval.every", lambda config: config.eval.every),
    "checkpoint.keep_every": (
        "checkpoint.every and checkpoint.keep",
        lambda config: config.checkpoint.every and config.checkpoint.keep,
    ),
}


def load(path: str | Path, *, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file, with `section.key=value` overrides on top.

    Raises:
        InputError: the file is missing or not TOML.
        OptionError: an unknown key, a value of another type or out of range, options that exclude each other,
            one that does nothing without another.
    """
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: can't read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file: {error}") from error
    values = {key: (value, str(path)) for key, value in _flatten(table)}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise OptionError(f"--set {override}: write it as section.key=value")
        values[key.strip()] = (_parse(text.strip()), f"--set {override}")
    return _build(values)


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML, defaults marked: `load` of it gives an equal one."""
    lines = []
    for section, values in dataclasses.asdict(config).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            mark = "  # default" if value == SETTINGS[f"{section}.{key}"].default else ""
            lines.append(f"{key} = {json.dumps(value)}{mark}")
        lines.append("")
    return "\n".join(lines)


def _flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in table.items():
        if isinstance(values, Mapping):
            yield from ((f"{section}.{key}", value) for key, value in values.items())
        else:
            yield section, values


def _parse(text: str) -> Any:
    """A TOML value, or the text itself, so that `--set data.shards=my/shards` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(values: Mapping[str, tuple[Any, str]]) -> Config:
    types = {
        f"{section}.{key}": kind
        for section, cls in SECTIONS.items()
        for key, kind in typing.get_type_hints(cls).items()
    }
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, (value, origin) in values.items():
        if key not in types:
            raise OptionError(f"{origin}: unknown key {key}; {_nearest(key, list(types))}")
        section, _, name = key.partition(".")
        sections[section][name] = _checked(key, value, types[key], origin)
    if "shards" not in sections["data"]:
        raise OptionError("data.shards is missing: the directory that `padfree pack` wrote")
    config = Config(**{section: SECTIONS[section](**given) for section, given in sections.items()})
    if bool(config.model.weights) == bool(config.model.config):
        raise OptionError(
            "set one of model.weights (a Hugging Face directory to start from) "
            "and model.config (random weights for a configuration)"
        )
    if config.model.compile == "layers" and (config.model.keep_layers or config.model.host_layers):
        raise OptionError(
            "model.compile = layers hides the products that keep_layers and host_layers would keep: set them "
            "to 0; whole_layers keeps what the compiler chooses"
        )
    if config.parallel.context > 1:
        raise OptionError(
            f"parallel.context = {config.parallel.context}: context parallelism is not there: the delta rule "
            "hands its state from token to token, and examples are packed to lie whole on one GPU; for long "
            "ones recompute all layers (model.checkpointing=1) and spread the weights over more GPUs"
        )
    if config.parallel.offload and (config.optim.states == "8bit" or config.optim.rounding == "stochastic"):
        raise OptionError(
            "parallel.offload updates the weights on the CPU, where optim.states = 8bit and optim.rounding = "
            "stochastic are not there: the host's memory holds the full states"
        )
    if config.schedule.kind == "wsd" and config.schedule.decay == 0:
        raise OptionError("schedule.kind = wsd needs schedule.decay, the number of steps that it falls in")
    _check_needs(config)
    return config


def _check_needs(config: Config) -> None:
    """Refuses a setting that would do nothing: who made it expects something of it.

    Raises:
        OptionError: names the first, and what it needs.
    """
    for key, (need, there) in NEEDS.items():
        section, _, name = key.partition(".")
        value, default = (getattr(part, name) for part in (getattr(config, section), SECTIONS[section]))
        if value != default and not there(config):
            raise OptionError(f"{key} = {value!r} does nothing without {need}: set that, or leave {key} out")


def check_schedule(schedule: Schedule, *, steps: int) -> None:
    """Refuses a schedule of which the steps leave out a part.

    Args:
        schedule: Of the learning rate.
        steps: From its first to its last, by `schedule.steps` or the epochs.

    Raises:
        OptionError: it rises, or rises and falls, in more steps than there are.
    """
    falls = schedule.decay if schedule.kind == "wsd" else 0
    if schedule.warmup + falls > steps:
        what = "schedule.warmup + schedule.decay" if falls else "schedule.warmup"
        raise OptionError(
            f"{what} = {schedule.warmup + falls} steps, and the schedule has {steps}: the rate can't go "
            "as they say"
        )


def _nearest(key: str, known: list[str]) -> str:
    names = [name.partition(".")[2] for name in known]
    name = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or [
        known[names.index(match)] for match in difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    ]
    return f"did you mean {close[0]}?" if close else f"the sections are {', '.join(SECTIONS)}"


def _checked(key: str, value: Any, kind: Any, origin: str) -> Any:
    """The value, a whole number as float where a float is wanted.

    Raises:
        OptionError: another type, no choice of the list, or out of range.
    """
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise OptionError(f"{origin}: {key} = {value!r} is none of {', '.join(choices)}")
        return value
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise OptionError(f'{origin}: {key} = {value!r} is no list of texts, as ["a", "b"]')
        return tuple(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise OptionError(f"{origin}: {key} = {value!r} is no {kind.__name__}")
    if between := SETTINGS[key].metadata["between"]:
        least, most = between
        if not least <= value <= most:
            raise OptionError(f"{origin}: {key} = {value!r} is not between {least:g} and {most:g}")
    return value
