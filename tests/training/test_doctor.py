"""`padfree doctor`: what it prints, its JSON, its exit code, and the README's table."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from training import doctor
from training.kernels import KernelError, proof
from training.kernels.families import FAMILIES, Family, tiny_config
from training.kernels.packages import Package

FAMILY = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def diagnosis() -> doctor.Diagnosis:
    return doctor.run_doctor(families=[FAMILY["Qwen3.5"], FAMILY["Mistral"]], device="cpu")


def test_a_sound_machine_exits_with_0(diagnosis: doctor.Diagnosis) -> None:
    """On a CPU the proof holds, and the GPU's kernels are not applicable instead of missing."""
    assert diagnosis.exit_code == 0
    names = {check.name for check in diagnosis.checks if check.subject == "Qwen3.5"}
    assert names == {"hand-shake", "isolation", "packed against alone", "one example fills the buffer"}
    assert [check.name for check in diagnosis.checks if check.state == "not applicable"] == ["fused kernels"]


def test_lines_show_versions_bindings_and_figures(diagnosis: doctor.Diagnosis) -> None:
    """A person sees versions, what computes each layer and the figures of the proof."""
    text = "\n".join(diagnosis.lines())
    assert "transformers" in text
    assert "2 x Qwen3_5GatedDeltaNet: delta rule by segment-walking reference" in text
    assert "the others' logits moved by 0, their gradients by 0" in text
    assert "all is well" in text


def test_json_holds_the_figures(diagnosis: doctor.Diagnosis) -> None:
    """A program gets numbers, not sentences."""
    found = json.loads(json.dumps(diagnosis.as_json()))
    isolation = next(check for check in found["checks"] if check["name"] == "isolation")
    assert isolation["figures"]["logits"] == 0.0
    assert isolation["figures"]["replaced"] > 0.5
    assert found["exit_code"] == 0


@pytest.mark.parametrize("as_file", [True, False])
def test_a_model_directory_gives_its_widths(tmp_path: Path, as_file: bool) -> None:
    """A model's own configuration is cut to the layers that show each kind, and proven."""
    config = tiny_config(FAMILY["Qwen3.5"])
    config.layer_types = ["linear_attention", "full_attention"] * 4
    config.num_hidden_layers = 8
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "config.json").rename(named := tmp_path / ("any name.json" if as_file else "config.json"))
    found = doctor.run_doctor(str(named if as_file else tmp_path), device="cpu")
    assert found.exit_code == 0, found.lines()
    (rows,) = found.layers.values()
    assert {row.layer: row.layers for row in rows} == {"Qwen3_5GatedDeltaNet": 1, "Qwen3_5Attention": 1}


def test_what_a_user_can_cause_is_one_line(tmp_path: Path) -> None:
    """A missing directory or a model type nobody proved is a failed check that says the next step."""
    found = doctor.run_doctor(str(tmp_path), device="cpu")
    assert found.exit_code == 1
    assert "has no configuration that transformers reads (" in found.checks[-1].detail
    assert "give a model's folder, its config.json or its name on the Hub" in found.checks[-1].detail
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = doctor.run_doctor(str(tmp_path), device="cpu")
    assert "model type 'gpt2' is not among those proven isolated" in found.checks[-1].detail
    assert all("\n" not in check.detail for check in found.checks)


@pytest.mark.parametrize("name", ["/nope", "./nope", "~/nope", "a/b/nope"])
def test_a_path_to_nothing_is_not_taken_for_a_name_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's rules for names say nothing to who gave a path that leads nowhere."""
    monkeypatch.chdir(tmp_path)
    found = doctor.run_doctor(name, device="cpu")
    assert found.exit_code == 1
    assert found.checks[-1].detail == f"{name}: no such file or directory"


@pytest.mark.parametrize("name", ["tiny-qwen3_5", "Mistral"])
def test_a_built_in_model_can_be_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's tiny model and the families that doctor lists go by name; a folder comes first."""
    monkeypatch.chdir(tmp_path)
    found = doctor.run_doctor(name, device="cpu")
    assert found.exit_code == 0
    assert [check.state for check in found.checks if (check.subject, check.name) == (name, "isolation")] == [
        "ok"
    ]
    Path(name).mkdir()
    found = doctor.run_doctor(name, device="cpu")
    assert found.exit_code == 1
    assert "give a model's folder" in found.checks[-1].detail


def test_an_unknown_name_is_told_those_that_are_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing has that name the line lists the built-in ones; of a folder that is wrong it does not."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = doctor.run_doctor("tiny-qwen", device="cpu")
    assert found.exit_code == 1
    (detail,) = (check.detail for check in found.checks if check.subject == "tiny-qwen")
    assert "built in are tiny-qwen3_5, Qwen3.5, " in detail
    assert "'Gemma 3', Mistral" in detail


def test_a_refused_layer_fails_the_model_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the built-in models a refusal is an answer and named at the end; of the user's own it is a 1."""
    config = tiny_config(FAMILY["Llama"])
    config.attention_dropout = 0.1
    config.save_pretrained(tmp_path)
    found = doctor.run_doctor(str(tmp_path), device="cpu")
    assert found.exit_code == 1
    assert "attention dropout 0.1 is not supported" in found.checks[-1].detail
    monkeypatch.setattr(doctor, "tiny_config", lambda *_, **__: config)
    found = doctor.run_doctor(families=[FAMILY["Llama"]], device="cpu")
    assert found.exit_code == 0
    assert found.lines()[-1] == "all is well; refused: Llama"


def test_a_width_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    """A model that would get doctor killed on this CPU is a failed check, found before anything is built."""
    config = tiny_config(FAMILY["Llama"])
    config.hidden_size, config.intermediate_size = 2**16, 2**20
    config.save_pretrained(tmp_path)
    found = doctor.run_doctor(str(tmp_path), device="cpu")
    assert found.exit_code == 1
    assert "on a CPU takes about" in found.checks[-1].detail


def test_a_broken_package_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-installed package is a failure even where another would serve: transformers falls back."""
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("import a_missing_subpackage\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)
    found = doctor.run_doctor(families=[], device="cpu")
    assert found.exit_code == 1
    assert "No module named 'a_missing_subpackage'" in found.checks[0].detail


@pytest.mark.parametrize(("place", "states"), [("cuda", ["fail"]), ("cpu", ["not applicable"])])
def test_a_missing_compiler_fails_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, place: str, states: list[str]
) -> None:
    """What flash-qla lacks is told with the packages, once, and on a machine with a GPU alone."""
    monkeypatch.setattr(doctor.compilation, "tilelang_unready", lambda: "install the CUDA toolkit")
    patient = doctor._Patient(place, "auto", None, may_refuse=True)
    there = [
        Package(module=module, distribution=module, version="1.0", cause=None)
        for module in ("tilelang", "flash_qla")
    ]
    patient.check_packages(there)
    assert [check.state for check in patient.checks] == states
    assert ("install the CUDA toolkit" in patient.checks[0].detail) is (place == "cuda")
    patient.checks.clear()
    patient.check_packages(there[:1])
    assert not [check for check in patient.checks if check.state == "fail"]


def test_warm_has_nothing_to_do_on_a_cpu() -> None:
    """At image build without a GPU, `--warm` says that it does not apply and exits with 0."""
    found = doctor.run_doctor(warm=True, families=[FAMILY["Qwen3.5"]], device="cpu")
    assert found.exit_code == 0
    assert {check.state for check in found.checks} == {"not applicable"}


@pytest.fixture
def gpu_patient(monkeypatch: pytest.MonkeyPatch) -> doctor._Patient:
    """Examines as on CUDA, on this CPU: what runs there runs here too, in bf16 and by the references."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(doctor._CAPACITY, "cuda", 256)
    patient = doctor._Patient("cpu", "auto", None, may_refuse=True)
    patient.fused, patient.dtype = True, torch.bfloat16
    return patient


def test_fused_kernels_are_compared_and_timed(gpu_patient: doctor._Patient) -> None:
    """On CUDA the fused step is held against fp32, with what bf16 costs the reference, and timed."""
    gpu_patient.examine("Llama", tiny_config(FAMILY["Llama"]), "LlamaForCausalLM")
    found = {check.name: check for check in gpu_patient.checks}
    assert found["fused against fp32"].state == "ok"
    figures = found["fused against fp32"].figures
    assert 1e-4 < figures["logits"] <= 2 * figures["logits_rounding"] + 0.02
    assert 1e-4 < figures["gradients"] <= 2 * figures["gradients_rounding"] + 0.02
    assert found["step time"].figures.keys() == {"fused_ms", "reference_ms"}


def test_kernels_that_compute_something_else_fail(
    gpu_patient: doctor._Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel that isolates but computes wrong values, or only wrong gradients, fails against fp32."""
    build = gpu_patient.build

    def wrong(config: Any, architecture: str, *, kernels: Any, dtype: torch.dtype) -> Any:
        model = build(config, architecture, kernels=kernels, dtype=dtype)
        if kernels == "auto":
            layer = model.model.layers[0].self_attn.o_proj
            layer.register_full_backward_hook(lambda _, grad_in, grad_out: (1.2 * grad_in[0],))
        return model

    monkeypatch.setattr(gpu_patient, "build", wrong)
    gpu_patient.examine("Llama", tiny_config(FAMILY["Llama"]), "LlamaForCausalLM")
    states = {check.name: check.state for check in gpu_patient.checks}
    assert states["isolation"] == states["packed against alone"] == "ok"
    assert states["fused against fp32"] == "fail"


def test_warm_says_what_it_compiled(
    gpu_patient: doctor._Patient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With empty caches the first step compiles, a second process finds all: both say how many."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "none"))
    step = doctor._step

    def compiling(*args: Any) -> Any:
        for number in range(3):
            (tmp_path / f"{number}.cubin").touch()
        return step(*args)

    monkeypatch.setattr(doctor, "_step", compiling)
    for _ in range(2):
        gpu_patient.warm("Llama", tiny_config(FAMILY["Llama"]), "LlamaForCausalLM")
    first, second = gpu_patient.checks
    assert (first.figures["before"], first.figures["compiled"]) == (0, 3)
    assert (second.figures["before"], second.figures["compiled"]) == (3, 0)
    assert second.detail.endswith("compiled 0 kernels, the caches hold 3")


def test_what_a_kernel_raises_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile fails its check, and the examination goes on."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("nvcc is missing\nand more")

    monkeypatch.setattr(doctor.proof, "isolation", broken)
    found = doctor.run_doctor(families=[FAMILY["Llama"]], device="cpu")
    states = {check.name: (check.state, check.detail) for check in found.checks}
    state, detail = states["isolation"]
    assert state == "fail"
    assert re.fullmatch(r"RuntimeError: nvcc is missing \(test_doctor\.py:\d+\)", detail)
    assert states["packed against alone"][0] == "ok"


def test_compilers_do_not_write_into_the_json(
    two_families: list[Family], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compilers log to stdout, in Python and from C++: with `--json` one document is there, that aside."""
    isolation = doctor.proof.isolation

    def logging(*args: Any, **kwargs: Any) -> proof.Isolation:
        os.write(1, b"[TileLang] begins to compile\n")
        print("TileLang completes to compile", file=sys.__stdout__)
        return isolation(*args, **kwargs)

    monkeypatch.setattr(doctor.proof, "isolation", logging)
    assert doctor.main(["--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["exit_code"] == 0
    assert "begins to compile" in printed.err
    assert "completes to compile" in printed.err


def test_checks_are_told_as_they_come() -> None:
    """Whoever asks hears each check before the next begins, and all of them."""
    heard: list[doctor.Check] = []
    found = doctor.run_doctor(families=[FAMILY["Llama"]], device="cpu", heard=heard.append)
    assert heard == found.checks


@pytest.fixture
def two_families(monkeypatch: pytest.MonkeyPatch) -> list[Family]:
    families = [FAMILY["Llama"], FAMILY["LFM2"]]
    monkeypatch.setattr(doctor, "FAMILIES", families)
    return families


def test_the_table_comes_from_the_proof(two_families: list[Family], tmp_path: Path) -> None:
    """The README's rows are a diagnosis, put between its markers; running again changes nothing else."""
    found = doctor.run_doctor(families=two_families, device="cpu")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{doctor.BEGIN}\nold\n{doctor.END}\nafter\n")
    for _ in range(2):
        doctor.write_families(readme, found, fused=found.as_json())
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| Llama | `LlamaForCausalLM` | attention | 0.0 |" in text
    assert text.count("| LFM2 |") == 1


def test_no_table_of_a_failed_proof(
    two_families: list[Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed check leaves the README as it is; in the column of another machine it reads FAILED."""
    found = doctor.run_doctor(families=two_families, device="cpu")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("nvcc is missing")

    monkeypatch.setattr(doctor.proof, "isolation", broken)
    failed = doctor.run_doctor(families=two_families[:1], device="cpu")
    readme = tmp_path / "README.md"
    readme.write_text(before := f"{doctor.BEGIN}\nold\n{doctor.END}")
    with pytest.raises(KernelError, match=r"Llama failed isolation: RuntimeError: nvcc is missing \("):
        doctor.write_families(readme, failed)
    assert readme.read_text() == before
    table = doctor.families_table(found, fused=failed.as_json())
    assert "| FAILED: RuntimeError: nvcc is missing (test_doctor.py:" in table
    beside = doctor.Check(subject="Llama", name="fused against fp32", state="fail", detail="far apart")
    isolated = next(check for check in found.checks if check.name == "isolation")
    assert doctor._cell([isolated, beside], "isolation") == "0.0; FAILED fused against fp32: far apart"
    refusal = doctor.Check(subject="Llama", name="bind", state="refused", detail="no sinks")
    assert doctor._cell([refusal], "isolation") == "refused: no sinks"


def test_the_readme_lists_every_family() -> None:
    """Where the README has the table, it has each family that the code lists, and no other."""
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    if doctor.BEGIN not in text:
        pytest.skip("the README has no table of families yet")
    table = text[text.index(doctor.BEGIN) : text.index(doctor.END)]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("|") and "`" in line]
    assert [row[1].strip("`") for row in rows] == [family.architecture for family in FAMILIES]
    # What `test_kernels_families` proves of each, on every run.
    assert {row[3] for row in rows} == {"0.0"}


def test_main_prints_and_returns_the_exit_code(
    two_families: list[Family], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command prints lines or JSON and returns 0 or 1; an option that can't be is one line and 2."""
    assert doctor.main([str(tmp_path)]) == 1
    assert "checks failed" in capsys.readouterr().out
    assert doctor.main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1
    (readme := tmp_path / "README.md").write_text("no markers")
    assert doctor.main(["--families", str(readme)]) == 2
    assert "has no markers" in capsys.readouterr().err


def test_a_mistake_of_ours_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel raises, as a name that is not defined or an interrupt, is not turned into a line."""
    for mistake in (NameError, KeyboardInterrupt):

        def broken(*_: object, mistake: type[BaseException] = mistake, **__: object) -> None:
            raise mistake

        monkeypatch.setattr(doctor.proof, "isolation", broken)
        with pytest.raises(mistake):
            doctor.run_doctor(families=[FAMILY["Llama"]], device="cpu")
