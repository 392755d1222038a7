"""No process ever holds a whole model: not while values are drawn, loaded or exported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_worker import FILE_BYTES
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory in /proc")


@pytest.fixture(scope="module", params=["dense", "experts"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model of 345 MiB in several files; 288 MiB of the other are experts, stored one by one."""
    path = tmp_path_factory.mktemp("memory")
    shape = {
        "vocab_size": 8192,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    if request.param == "dense":
        dense = Qwen3Config(intermediate_size=2048, num_hidden_layers=12, **shape)
        Qwen3ForCausalLM(dense).save_pretrained(path / "model", max_shard_size=FILE_BYTES)
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        sparse = Qwen3MoeConfig(num_hidden_layers=8, **experts, **shape)
        Qwen3MoeForCausalLM(sparse).save_pretrained(path / "model", max_shard_size=FILE_BYTES)
    return path


def measure(folder: Path, kind: str, *words: Path, ranks: int = 1) -> list[dict[str, int]]:
    """What each rank says of itself."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    worker = Path(__file__).with_name("memory_worker.py")
    subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), worker, folder, kind, *words],
        check=True,
        timeout=240,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # glibc gives back what is freed, at once
    )
    return [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(ranks)]


def test_random_values_are_drawn_block_by_block(folder: Path) -> None:
    """A rank has its shards, one block, whole and in FSDP's copy, and what libraries take."""
    for found in measure(folder, "random", folder / "model", ranks=2):
        assert 2 * found["shards"] < 1.01 * found["whole"]
        assert found["peak"] < 0.75 * found["whole"]


def test_no_rank_loads_the_whole_model_and_none_exports_it(folder: Path) -> None:
    """A rank has its shards, one mapped file and one conversion; an export one file, and one tensor.

    A whole model read after the export shows in the same measure. What was loaded by two ranks, saved and
    exported is what the files held, bit for bit.
    """
    run, out = folder / "run", folder / "out"
    for found in measure(folder, "load", folder / "model", run, ranks=2):
        assert found["peak"] < 0.8 * found["whole"]
    (exported,) = measure(folder, "export", run, out)
    assert exported["peak"] < 0.4 * found["whole"]
    assert exported["control"] > 0.95 * found["whole"], "the measure does not see a whole model"
    assert len(list(out.glob("*.safetensors"))) > 5
    start, end = (
        {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
        for path in (folder / "model", out)
    )
    assert start.keys() == end.keys()
    assert all(torch.equal(value, end[name]) for name, value in start.items())
