"""A run's configuration: what is accepted, and the one line that says why something is not."""

import contextlib
import dataclasses
import re
import typing
from pathlib import Path

import pytest

from training import config
from training.config import NEEDS, SECTIONS, SETTINGS, Schedule, check_schedule, load, to_toml
from training.errors import InputError, OptionError

MINIMAL = '[data]\nshards = "shards"\n[model]\nconfig = "tiny-qwen3_5"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, "utf-8")
    return path


def test_defaults_and_overrides(tmp_path: Path) -> None:
    """A file sets some keys, --set others with or without TOML quotes, and the rest are defaults."""
    config = load(
        written(tmp_path, MINIMAL + "[optim]\nlr = 1\n"),
        overrides=["schedule.steps=7", "data.shards=my/shards", 'run.dir="out"', "optim.clip = 0"],
    )
    assert (config.schedule.steps, config.data.shards, config.run.dir) == (7, "my/shards", "out")
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.clip, float)
    assert config.model.precision == "auto"


def test_resolved_configuration_is_a_configuration(tmp_path: Path) -> None:
    """What the run directory holds loads to an equal configuration."""
    config = load(written(tmp_path, MINIMAL), overrides=['run.dir=a "quoted" name', "optim.lr=3e-4"])
    assert load(written(tmp_path, to_toml(config))) == config


def test_the_resolved_configuration_says_what_is_a_default(tmp_path: Path) -> None:
    """All settings are marked but those that were chosen, where they differ from the default."""
    chosen = ["optim.lr=3e-4", "run.dir=out", "run.loggers=['wandb']", "optim.clip=1", "model.freeze=['a#b']"]
    text = to_toml(load(written(tmp_path, MINIMAL), overrides=chosen))
    assert [
        line for line in text.splitlines() if line[:1] not in ("", "[") and "  # default" not in line
    ] == [
        'dir = "out"',
        'loggers = ["wandb"]',
        'shards = "shards"',
        'config = "tiny-qwen3_5"',
        'freeze = ["a#b"]',
        "lr = 0.0003",
    ]
    assert "\nclip = 1.0  # default\n" in text
    assert text.count("  # default\n") == len(SETTINGS) - 6


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lrr=1", ["optim.lrr", "did you mean optim.lr?"]),
        ("learning.weight_decay=1", ["did you mean optim.weight_decay?"]),
        ("xyzzy=1", ["xyzzy", "the sections are run, data"]),
        ("optim.lr=fast", ["optim.lr", "'fast'", "no float"]),
        ("schedule.steps=1.5", ["schedule.steps", "no int"]),
        ("schedule.steps=true", ["schedule.steps", "no int"]),
        ("schedule.kind=cosin", ["'cosin'", "cosine, linear, constant, wsd"]),
        ("data.accumulation=0", ["data.accumulation", "between 1 and"]),
        ("optim.lr=nan", ["optim.lr", "between 0 and"]),
        ("optim.beta1=1.0", ["optim.beta1", "between 0 and 0.999999"]),
        ("optim.beta2=1.0", ["optim.beta2", "between 0 and 0.999999"]),
        ("lora.dropout=1.0", ["lora.dropout", "between 0 and 0.999999"]),
        ("lora.alpha=0", ["lora.alpha", "between 1e-06 and"]),
        ("run.seed=-1", ["run.seed", "between 0 and"]),
        (f"run.seed={2**64}", ["run.seed", "between 0 and"]),
        ("schedule.kind=wsd", ["schedule.decay"]),
        ("model.weights=somewhere", ["model.weights", "model.config"]),
        ("parallel.context=2", ["context parallelism is not there", "from token to token"]),
        ("optim.lr", ["section.key=value"]),
        ("model.freeze=model.norm", ["model.freeze", 'as ["a", "b"]']),
    ],
)
def test_bad_option_is_named(tmp_path: Path, override: str, words: list[str]) -> None:
    """One line names the key, the value, and the nearest known key or the law."""
    with pytest.raises(OptionError) as caught:
        load(written(tmp_path, MINIMAL), overrides=[override])
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


NEEDED = [
    ("run.trace", "false", "run.profile=", "run.profile=1:2"),
    ("run.project", "mine", 'run.loggers=["tensorboard"]', 'run.loggers=["trackio"]'),
    ("model.loss_chunk", "4", "model.loss=plain", "model.loss=liger"),
    ("model.delta_rule", "fla", "model.kernels=reference", "model.kernels=fused"),
    ("lora.alpha", "8.0", "lora.rank=0", "lora.rank=2"),
    ("lora.dropout", "0.1", "lora.rank=0", "lora.rank=2"),
    ("lora.targets", '["q_proj"]', "lora.rank=0", "lora.rank=2"),
    ("schedule.epochs", "3", "schedule.steps=9", "schedule.steps=0"),
    ("schedule.decay", "3", "schedule.kind=cosine", "schedule.kind=wsd"),
    ("schedule.floor", "0.1", "schedule.kind=constant", "schedule.kind=linear"),
    ("eval.shards", "there", "eval.every=0", "eval.every=5"),
    ("checkpoint.keep_every", "4", "checkpoint.every=0", "checkpoint.every=2"),
]


@pytest.mark.parametrize(("key", "value", "without", "beside"), NEEDED)
def test_a_setting_that_does_nothing_is_refused(
    tmp_path: Path, key: str, value: str, without: str, beside: str
) -> None:
    """Its need is named; with the need, or at its default, it is taken."""
    path, name = written(tmp_path, MINIMAL), key.partition(".")[2]
    with pytest.raises(
        OptionError, match=rf"{key} = .* does nothing without .*: set that, or leave {key} out"
    ):
        load(path, overrides=[f"{key}={value}", without])
    given = load(path, overrides=[f"{key}={value}", beside])
    default = load(path, overrides=[without])
    section = key.partition(".")[0]
    assert getattr(getattr(given, section), name) != getattr(getattr(default, section), name)


def test_every_need_is_tried() -> None:
    """The cases above are all of the table."""
    assert [key for key, *_ in NEEDED] == list(NEEDS)


@pytest.mark.parametrize(
    ("schedule", "steps", "what"),
    [
        (Schedule(warmup=11), 10, "schedule.warmup = 11 steps, and the schedule has 10"),
        (Schedule(kind="wsd", warmup=6, decay=5), 10, "schedule.warmup + schedule.decay = 11 steps"),
        (Schedule(kind="wsd", decay=11), 10, "schedule.warmup + schedule.decay = 11 steps"),
        (Schedule(warmup=10), 10, ""),
        (Schedule(kind="wsd", warmup=5, decay=5), 10, ""),
    ],
)
def test_a_schedule_has_room_in_its_steps(schedule: Schedule, steps: int, what: str) -> None:
    """A rise and a fall of more steps than there are is refused; of as many it is not."""
    with pytest.raises(OptionError, match=re.escape(what)) if what else contextlib.nullcontext():
        check_schedule(schedule, steps=steps)


@pytest.mark.parametrize("other", ["optim.states=8bit", "optim.rounding=stochastic"])
def test_what_offloading_excludes_is_named(tmp_path: Path, other: str) -> None:
    """The update runs on the CPU, where torchao's optimizers are not there."""
    with pytest.raises(OptionError, match=r"parallel\.offload updates the weights on the CPU"):
        load(written(tmp_path, MINIMAL), overrides=["parallel.offload=true", "model.precision=bf16", other])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data\n", ["run.toml", "not a TOML file"]),
        ("[model]\nconfig = 'tiny-qwen3_5'\n", ["data.shards is missing"]),
        (MINIMAL.replace("[model]", "[mode]"), ["unknown key mode.config", "model.config"]),
        ("[data]\nshards = 'shards'\n", ["model.weights", "model.config"]),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    """A file that is no TOML, lacks what has to be there or has unknown keys is refused in one line."""
    with pytest.raises((OptionError, InputError)) as caught:
        load(written(tmp_path, text))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A missing configuration is named with its path."""
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


def test_every_setting_says_what_is_true_of_it() -> None:
    """Whether it may change on a resume; numbers, and they alone, their range; and in words what it is."""
    source = Path(config.__file__).read_text("utf-8")
    for key, setting in SETTINGS.items():
        assert setting.metadata.keys() == {"free", "between"}, f"{key} is no setting()"
        assert (setting.metadata["between"] is not None) == (setting.type in ("int", "float")), key
        section, _, name = key.partition(".")
        body = source.partition(f"class {SECTIONS[section].__name__}:")[2]
        assert re.search(rf'\n    {name}: .*\n    """', body), key


def test_every_default_is_a_value_that_could_be_set() -> None:
    """Of its setting's type and within its range."""
    for key, setting in SETTINGS.items():
        name = key.partition(".")[2]
        kind = typing.get_type_hints(SECTIONS[key.partition(".")[0]])[name]
        if setting.default is not dataclasses.MISSING:
            given = list(setting.default) if isinstance(setting.default, tuple) else setting.default
            assert config._checked(key, given, kind, "") == setting.default


def test_readme_names_settings_that_exist() -> None:
    """Each `section.key` of the README is one; at least those of its table are found."""
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.(?!json|toml)[a-z_0-9]+)", text))
    assert len(named) > 20
    assert named <= SETTINGS.keys()
