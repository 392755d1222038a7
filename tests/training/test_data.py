"""What the trainer asks of shards beyond that they are whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_shards import examples, write_shards

from training.__main__ import main
from training.data import TrainingData
from training.errors import OptionError


def opened(out: Path, **chat: Any) -> TrainingData:
    return TrainingData(str(write_shards(out, train=[examples(2)], **chat)), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("here", "there", "what"),
    [
        ({"tokenizer": "one"}, {"tokenizer": "other"}, "another tokenizer"),
        ({"chat_template": ["one"]}, {"chat_template": ["other"]}, "another chat template"),
        ({"chat_template": ["all", "one"]}, {"chat_template": ["all", "other"]}, "another chat template"),
        ({"tokenizer": "one", "chat_template": ["all"]}, {"tokenizer": "one", "chat_template": ["all"]}, ""),
        ({"chat_template": ["all"]}, {"chat_template": ["all", "with tools"]}, ""),
        ({"tokenizer": "one", "chat_template": ["all"]}, {}, ""),
    ],
)
def test_both_parts_are_of_one_tokenizer_and_template(
    tmp_path: Path, here: dict[str, Any], there: dict[str, Any], what: str
) -> None:
    """Another one is refused from either side; one that a part does not name, or did not need, is not."""
    parts = opened(tmp_path / "here", **here), opened(tmp_path / "there", **there)
    for mine, other in (parts, parts[::-1]):
        if what:
            with pytest.raises(OptionError, match=f"{what} than .*: pack both alike"):
                mine.check_alike(other)
        else:
            mine.check_alike(other)


def test_evaluation_shards_of_another_tokenizer_are_refused(
    words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command: one line before the first step, though the vocabularies are of one size."""
    parts = [write_shards(tmp_path / name, train=[examples(2)], tokenizer=name) for name in ("one", "other")]
    here = (f"data.shards={parts[0]}", f"eval.shards={parts[1]}", "eval.every=1", "schedule.steps=1")
    assert main(words(*here)) == 2
    assert "other was packed with another tokenizer than" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
