"""`benchmarks/gpu_kernels.py`: families in processes of their own, and the union of what runs saved."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from training.kernels.families import FAMILIES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAMILY = {family.name: family for family in FAMILIES}

# In place of the benchmark's own process: saves one check of the family it is given, then ends or hangs.
CHILD = """
import json, os, pathlib, sys, time
name = sys.argv[sys.argv.index("--families") + 1]
check = {"subject": name, "name": "isolation", "state": "ok", "detail": "", "figures": {}}
section = {"checks": [check], "layers": {name: []}, f"seconds, {name}": 1.0}
if name != "Qwen3":
    text = json.dumps({"results": {"families": section}})
    pathlib.Path(os.environ["OUT"], "kernels.json").write_text(text)
if name == "Mistral":
    time.sleep(60)
sys.exit(3 if name == "Qwen3" else 0)
"""


@pytest.fixture(scope="module")
def gpu_kernels() -> Any:
    sys.path.insert(0, str(BENCHMARKS))  # for the benchmarks' own `record`
    spec = importlib.util.spec_from_file_location("gpu_kernels", BENCHMARKS / "gpu_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def test_one_family_stops_no_other(gpu_kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs keeps what it saved, one that dies is named, and the others are all there."""
    (child := tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(gpu_kernels, "__file__", str(child))
    names = ["Llama", "Mistral", "Qwen3", "LFM2"]
    bench = gpu_kernels.Bench(dry=True, families=[FAMILY[name] for name in names], limit=4, at_once=2)
    noted: dict[str, Any] = {}
    gpu_kernels.families(bench, noted.__setitem__)
    assert {check["subject"] for check in noted["checks"]} == {"Llama", "Mistral", "LFM2"}
    assert noted["layers"].keys() == {"Llama", "Mistral", "LFM2"}
    assert noted["stopped, Mistral"] == "not done after 4 s"
    assert noted["stopped, Qwen3"] == "exit status 3"


def saved(path: Path, commit: str, **sections: Any) -> Path:
    about = {"date": "2026-11-29", "command": "x", "hardware": {}, "versions": {}}
    path.write_text(json.dumps({"commit": commit, **about, "results": sections}))
    return path


def checks(*names: str, state: str) -> list[dict[str, str]]:
    return [{"subject": name, "name": "isolation", "state": state} for name in names]


def test_the_later_run_wins_family_by_family(gpu_kernels: Any, tmp_path: Path) -> None:
    """Sections of the later file replace the earlier's, families one by one, each with its own commit."""
    older = {"checks": checks("Llama", "Bamba", state="fail"), "layers": {"Llama": ["a"]}, "seconds": 9}
    newer = {"checks": checks("Bamba", state="ok"), "layers": {"Bamba": ["b"]}}
    first = saved(tmp_path / "1.json", "aaa", families=older, speed={"x": 1})
    second = saved(tmp_path / "2.json", "bbb", families=newer, compile={"y": 2})
    union = gpu_kernels.merge([first, second])
    families = union["results"]["families"]
    assert {check["subject"]: check["state"] for check in families["checks"]} == {
        "Llama": "fail",
        "Bamba": "ok",
    }
    assert families["layers"] == {"Llama": ["a"], "Bamba": ["b"]}
    assert "seconds" not in families
    assert union["results"]["speed"] == {"x": 1}
    commits = {part: origin["commit"] for part, origin in union["parts"].items()}
    assert commits == {"families, Llama": "aaa", "families, Bamba": "bbb", "speed": "aaa", "compile": "bbb"}
    (tmp_path / "3.json").write_text(json.dumps(union))
    again = gpu_kernels.merge([tmp_path / "3.json"])
    assert again["parts"] == union["parts"]
