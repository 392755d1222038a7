"""A run's configuration: what is accepted, and the one line that says why something is not."""

import dataclasses
import re
from pathlib import Path

import pytest

from training.config import RANGES, SECTIONS, load, to_toml
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


def test_every_number_has_a_range() -> None:
    """Each whole or real number has a range, and each range a key; defaults lie within."""
    numbers = {
        f"{section}.{field.name}": field.default
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)
        if field.type in ("int", "float")
    }
    assert numbers.keys() == RANGES.keys()
    assert all(least <= numbers[key] <= most for key, (least, most) in RANGES.items())


def test_readme_names_settings_that_exist() -> None:
    """Each `section.key` of the README is one; at least those of its table are found."""
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.(?!json|toml)[a-z_0-9]+)", text))
    assert len(named) > 20
    known = {
        f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)
    }
    assert named <= known
