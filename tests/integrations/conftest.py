"""What the trainers' tests share: the script that measures, tiny models, and each example run once."""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs the network, and a lookup would wait for it

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def trainers() -> ModuleType:
    """benchmarks/trainers.py, which runs the examples and measures what they hand to a model."""
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("trainers", BENCHMARKS / "trainers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trainers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Data:
    """A shard set and two tiny models on disk.

    Attributes:
        folder: Where they lie, and where runs may write.
        shards: The shard set's folder; its part is in shards/eval.
        dense: A Qwen3.
        hybrid: A Qwen3.5, whose gated-delta-net layers leak in a stock transformers.
    """

    folder: Path
    shards: Path
    dense: Path
    hybrid: Path


@pytest.fixture(scope="session")
def data(trainers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("trainers")
    return Data(
        folder=folder,
        shards=trainers.make_shards(folder / "shards"),
        dense=trainers.make_model(folder / "dense", family="qwen3"),
        hybrid=trainers.make_model(folder / "hybrid", family="qwen3_5_text"),
    )


@pytest.fixture(scope="session")
def dense_run(trainers: ModuleType, data: Data) -> Callable[[str], Any]:
    """Runs an example on the dense model without `bind`; the same run for every test that asks."""
    runs: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in runs:
            runs[name] = trainers.run_example(name, data.shards, data.dense, data.folder / name, bound=False)
        return runs[name]

    return run
