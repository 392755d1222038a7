"""`padfree doctor`: what computes each layer on this machine, and the proof that no example sees another.

python -m training.doctor                       the built-in tiny models
python -m training.doctor MODEL_OR_CONFIG       a model's own widths, with as few layers as show each kind
python -m training.doctor --warm                compiles what a first step would compile
python -m training.doctor --families README.md  writes the table of families between the README's markers
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from training.cost import free_memory
from training.errors import InputError, PadfreeError, one_line
from training.kernels import compilation, proof
from training.kernels.binding import Kernels, Row, bind, describe
from training.kernels.contract import KernelError, Unsupported, make_batch
from training.kernels.families import (
    FAMILIES,
    Family,
    architecture_of,
    build,
    few_layers,
    tiny_config,
)
from training.kernels.handshake import handshake
from training.kernels.packages import PACKAGES, Package, failures, machine, probe
from training.launch import tidy
from training.model import TINY, is_built_in, saved_config

State = Literal["ok", "fail", "refused", "not applicable"]

# Chunks of 64 tokens are the kernels' unit: one token, one below, one, one above; then the rest of a buffer.
_EDGES = (1, 63, 64, 65)
_CAPACITY = {"cpu": 512, "cuda": 8192}
BUILT_IN = (*TINY, *(family.name for family in FAMILIES))
"""Names of tiny models that need no files: those of the trainer's `model.config`, and of the families."""
_DRAWS = 4  # of tokens and random losses, to compare fused kernels with fp32
# Packed against alone: the same mathematics in another order of additions, at the precision of the weights.
_TOLERANCE = {torch.float32: (1e-5, 1e-3), torch.bfloat16: (5e-2, 2e-1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the diagnosis.

    Attributes:
        subject: The model, or "packages".
        name: What was checked.
        state: "refused" is a layer refused by design, which fails nothing unless that model was asked for.
        detail: The figures, or the cause and what to do.
        figures: The numbers, for machines.
    """

    subject: str
    name: str
    state: State
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What doctor found; `exit_code` is 1 where a check failed."""

    machine: Mapping[str, str]
    packages: Sequence[Package]
    layers: Mapping[str, Sequence[Row]]
    checks: Sequence[Check]

    @property
    def exit_code(self) -> int:
        return int(any(check.state == "fail" for check in self.checks))

    def as_json(self) -> dict[str, Any]:
        """Everything, as what `json.dumps` takes."""
        return {**dataclasses.asdict(self), "exit_code": self.exit_code}

    def lines(self) -> list[str]:
        """Everything, as lines to print."""
        lines = [", ".join(f"{name} {value}" for name, value in self.machine.items()), ""]
        for package in self.packages:
            found = package.cause or package.version or "imports, its version is not recorded"
            lines.append(f"{package.distribution:28} {found}")
        for subject in dict.fromkeys(check.subject for check in self.checks):
            lines += ["", subject]
            for row in self.layers.get(subject, ()):
                lines.append(f"  {row.layers} x {row.layer}: {row.part} by {row.bound}, {row.origin}")
            for check in self.checks:
                if check.subject == subject:
                    lines.append(f"  {check.state} {check.name}: {check.detail}")
        failed = sum(check.state == "fail" for check in self.checks)
        refused = [check.subject for check in self.checks if check.state == "refused"]
        verdict = f"{failed} of {len(self.checks)} checks failed" if failed else "all is well"
        return [*lines, "", verdict + (f"; refused: {', '.join(refused)}" if refused else "")]


def run_doctor(
    target: str | None = None,
    *,
    kernels: Kernels = "auto",
    warm: bool = False,
    families: Sequence[Family] | None = None,
    device: str | None = None,
    heard: Callable[[Check], None] | None = None,
) -> Diagnosis:
    """Examines this machine.

    Args:
        target: A model directory, a config.json or a name on the Hub: its configuration at full width with
            few layers and random weights. Or one of `BUILT_IN`; None tries all of them.
        kernels: As in `bind`.
        warm: Only run one step of each model, so that its kernels are compiled and kept in the caches.
        families: Which tiny models, without a target; None means all.
        device: "cuda" or "cpu"; None means CUDA if there is one.
        heard: Told each check as soon as it is known; on a GPU whose caches are empty a family takes minutes.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # cuBLAS reads it at its first call, and the proof asks for sums in a fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    packages = [probe(name) for name in PACKAGES]
    patient = _Patient(place, kernels, heard, may_refuse=target is None)
    patient.check_packages(packages)
    threads = _threads(
        1 if target is None or is_built_in(target, among=BUILT_IN) else torch.get_num_threads()
    )
    with threads, compilation.in_parallel():
        for subject, config, architecture in _subjects(
            patient, target, FAMILIES if families is None else families
        ):
            if warm:
                patient.warm(subject, config, architecture)
            else:
                patient.examine(subject, config, architecture)
    return Diagnosis(machine=_facts(place), packages=packages, layers=patient.layers, checks=patient.checks)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Tiny matmuls lose more by waiting for threads than they win: 17 s with one, minutes with busy ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _facts(place: str) -> dict[str, str]:
    where = machine(place)
    facts = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": where.triton or "none",
    }
    if place == "cuda":
        facts |= {"CUDA": str(torch.version.cuda), "capability": ".".join(map(str, where.capability))}
        for name in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TRITON_CACHE_AUTOTUNING"):
            facts[name] = os.environ.get(name, "not set")
    return {**facts, "on": where.name}


def _subjects(
    patient: _Patient, target: str | None, families: Sequence[Family]
) -> Iterator[tuple[str, Any, str]]:
    if target is not None:
        here = is_built_in(target, among=BUILT_IN)
        families = [family for family in FAMILIES if here and family.name == target]
    for family in families:
        yield family.name, tiny_config(family, real_heads=patient.place == "cuda"), family.architecture
    if target is not None and not families:
        with patient.reporting(target, "configuration"):
            config = _config(target)
            architecture = architecture_of(config)
            yield target, few_layers(config), architecture


def _config(target: str) -> Any:
    if is_built_in(target):
        return transformers.AutoConfig.for_model(**TINY[target])
    try:
        return saved_config(target)
    except InputError as error:
        if os.path.exists(target) or "/" in target:
            raise
        raise InputError(f"{error}; built in are {', '.join(map(shlex.quote, BUILT_IN))}") from error


class _Patient:
    """The machine under examination, and what was found so far."""

    def __init__(
        self, place: str, kernels: Kernels, heard: Callable[[Check], None] | None, *, may_refuse: bool
    ) -> None:
        self.place = place
        self.heard = heard
        self.may_refuse = may_refuse  # one family of many; of the model that was asked for it is a failure
        self.kernels: Kernels = kernels
        self.fused = place == "cuda" and kernels != "reference"
        self.dtype = torch.bfloat16 if self.fused else torch.float32
        self.layers: dict[str, list[Row]] = {}
        self.checks: list[Check] = []

    def note(self, subject: str, name: str, state: State, detail: str, **figures: float) -> None:
        self.checks.append(Check(subject=subject, name=name, state=state, detail=detail, figures=figures))
        if self.heard is not None:
            self.heard(self.checks[-1])

    @contextmanager
    def reporting(self, subject: str, name: str) -> Iterator[None]:
        """Turns what a kernel raises into a failed check: a diagnosis goes on."""
        try:
            yield
        except Unsupported as error:
            self.note(subject, name, "refused" if self.may_refuse else "fail", str(error))
        except failures() as error:
            said, place = one_line(error), traceback.extract_tb(error.__traceback__)[-1]
            named = f"{type(error).__name__}: {said} ({Path(place.filename).name}:{place.lineno})"
            self.note(subject, name, "fail", said if isinstance(error, PadfreeError) else named)

    def check_packages(self, packages: Sequence[Package]) -> None:
        for package in packages:
            if package.cause not in (None, "not installed"):
                self.note(
                    "packages",
                    package.distribution,
                    "fail",
                    f"installed, but does not import: {package.cause}. Install it again or remove it: "
                    "transformers would fall back to a reference that lets examples see each other",
                )
        there = {package.module for package in packages if package.cause is None}
        # Without flash-qla the layers decide: fla does without tilelang where it can.
        both = self.place == "cuda" and {"tilelang", "flash_qla"} <= there
        if both and (missing := compilation.tilelang_unready()):
            self.note("packages", "flash-qla", "fail", missing)
        if self.place != "cuda":
            self.note("packages", "fused kernels", "not applicable", "there is no CUDA device")

    def build(self, config: Any, architecture: str, *, kernels: Kernels, dtype: torch.dtype) -> Any:
        model = build(config, architecture, device=self.place).to(dtype)
        return bind(model, kernels=kernels)

    def check_memory(self, config: Any, architecture: str) -> None:
        """Refuses what would be killed for memory: weights, and their gradients in four copies, in fp32.

        Raises:
            KernelError: the machine has less.
        """
        weights = sum(p.numel() for p in build(config, architecture, device="meta").parameters())
        needed, free = 20 * weights, free_memory()
        if self.place == "cpu" and free is not None and needed > free:
            raise KernelError(
                f"proving this width on a CPU takes about {needed / 2**30:.0f} GiB, and "
                f"{free / 2**30:.0f} are free: run doctor on the machine with the GPU"
            )

    def examine(self, subject: str, config: Any, architecture: str) -> None:
        with self.reporting(subject, "bind"):
            self.check_memory(config, architecture)
            model = self.build(config, architecture, kernels=self.kernels, dtype=self.dtype)
            self.layers[subject] = describe(model)
            lengths: tuple[int, ...] = (*_EDGES, _CAPACITY[self.place] - sum(_EDGES))
            if self.place == "cpu" and sum(p.numel() for p in model.parameters()) > 10**7:
                lengths = _EDGES  # a real model's width: minutes instead of hours
            with self.reporting(subject, "hand-shake"):
                self._shake_hands(subject, model, lengths)
            with self.reporting(subject, "isolation"):
                self._isolate(subject, model, lengths)
            with self.reporting(subject, "packed against alone"):
                self._compare_alone(subject, model, lengths)
            with self.reporting(subject, "one example fills the buffer"):
                self._fill(subject, model, sum(lengths))
            if self.fused:
                with self.reporting(subject, "fused against fp32"):
                    self._compare_fused(subject, model, config, architecture, lengths)

    def _shake_hands(self, subject: str, model: Any, lengths: Sequence[int]) -> None:
        batch = _batch(model, lengths)
        with handshake(model, batch):
            _step(model, batch)
        self.note(subject, "hand-shake", "ok", f"every layer got the boundaries of {len(lengths)} examples")

    def _isolate(self, subject: str, model: Any, lengths: Sequence[int]) -> None:
        found = [proof.isolation(model, lengths, replaced=i) for i in range(len(lengths))]
        worst = {
            name: max(getattr(one, name) for one in found)
            for name in ("logits", "gradients", "across", "noise")
        }
        moved = min(one.replaced for one in found)
        holds = all(one.holds for one in found)
        detail = (
            f"each of {len(lengths)} examples replaced in turn: the others' logits moved by "
            f"{worst['logits']:g}, their gradients by {worst['gradients']:g}"
        )
        if worst["noise"]:
            detail += f" (the same buffer twice: {worst['noise']:.1g})"
        detail += f", gradient across {worst['across']:g}, its own logits moved by {moved:.2g}"
        self.note(subject, "isolation", "ok" if holds else "fail", detail, **worst, replaced=moved)

    def _compare_alone(self, subject: str, model: Any, lengths: Sequence[int]) -> None:
        apart = proof.alone(model, lengths)
        logits, gradients = _TOLERANCE[self.dtype]
        name, worst = apart.worst
        holds = apart.logits <= logits and worst <= gradients
        detail = (
            f"logits {apart.logits:.1e} apart (at most {logits:g}), gradients at most {worst:.1e}, that of "
            f"{name} (at most {gradients:g})"
        )
        self.note(
            subject,
            "packed against alone",
            "ok" if holds else "fail",
            detail,
            logits=apart.logits,
            gradients=worst,
        )

    def _fill(self, subject: str, model: Any, capacity: int) -> None:
        gradients = _step(model, _batch(model, [capacity]))
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        detail = f"{capacity} tokens, gradients {'finite' if finite else 'not finite'}"
        self.note(subject, "one example fills the buffer", "ok" if finite else "fail", detail)

    def _compare_fused(
        self, subject: str, model: Any, config: Any, architecture: str, lengths: Sequence[int]
    ) -> None:
        exact = self.build(config, architecture, kernels="reference", dtype=torch.float32)
        plain = self.build(config, architecture, kernels="reference", dtype=self.dtype)
        ours, rounding = (
            proof.typical([proof.difference(one, exact, lengths, seed=seed) for seed in range(_DRAWS)])
            for one in (model, plain)
        )
        # Twice what the rounding to bf16 costs the reference, and a floor for what it happens to hit well.
        # With one draw Nemotron-H's dt_bias, 8 numbers, was beyond it by chance: 0.149 against 0.059.
        bound = {name: 2 * apart + 0.02 for name, apart in rounding.gradients.items()}
        name = max(bound, key=lambda key: ours.gradients[key] / bound[key])
        holds = ours.logits <= 2 * rounding.logits + 0.02 and ours.gradients[name] <= bound[name]
        self.note(
            subject,
            "fused against fp32",
            "ok" if holds else "fail",
            f"logits {ours.logits:.1e} apart (the reference in bf16: {rounding.logits:.1e}), the gradient of "
            f"{name} {ours.gradients[name]:.1e} (the reference in bf16: {rounding.gradients[name]:.1e})",
            logits=ours.logits,
            logits_rounding=rounding.logits,
            gradients=ours.gradients[name],
            gradients_rounding=rounding.gradients[name],
        )
        batch = _batch(model, lengths)
        fast, slow = _milliseconds(lambda: _step(model, batch)), _milliseconds(lambda: _step(plain, batch))
        self.note(
            subject,
            "step time",
            "ok",
            f"{fast:.1f} ms fused, {slow:.1f} ms by the reference: {slow / fast:.1f} times faster",
            fused_ms=fast,
            reference_ms=slow,
        )

    def warm(self, subject: str, config: Any, architecture: str) -> None:
        if not self.fused:
            self.note(subject, "warm", "not applicable", "there is no CUDA device")
            return
        with self.reporting(subject, "warm"):
            model = self.build(config, architecture, kernels=self.kernels, dtype=self.dtype)
            self.layers[subject] = describe(model)
            lengths = (*_EDGES, _CAPACITY["cuda"] - sum(_EDGES))
            before, start = compilation.count_cached(), time.perf_counter()
            _step(model, _batch(model, lengths))
            torch.cuda.synchronize()
            first, compiled = time.perf_counter() - start, compilation.count_cached() - before
            detail = f"the first step took {first:.1f} s and compiled {compiled} kernels, the caches hold"
            detail += f" {before + compiled}"
            self.note(subject, "warm", "ok", detail, first_step_s=first, compiled=compiled, before=before)


def _batch(model: Any, lengths: Sequence[int]) -> dict[str, Any]:
    words = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(words, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return make_batch(tokens, lengths, device=next(model.parameters()).device)


def _step(model: Any, batch: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """One forward and backward; the gradients of the parameters that have one."""
    logits = model(**batch).logits
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(logits.float().square().mean(), parameters, allow_unused=True)
    return [gradient for gradient in gradients if gradient is not None]


def _milliseconds(step: Callable[[], object], *, runs: int = 5) -> float:
    """The median of some runs on CUDA, after one that does not count."""
    step()
    samples = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


# --- the table of families in the README -------------------------------------------------------------------

BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"


def families_table(diagnosis: Diagnosis, *, fused: Mapping[str, Any] | None = None) -> str:
    """A markdown table from a diagnosis of the tiny models.

    Args:
        diagnosis: Of all families, on a CPU.
        fused: `Diagnosis.as_json()` of the same on CUDA, for one more column.
    """
    head = [
        "Family",
        "Class in transformers",
        "Mixes tokens by",
        "CPU: others moved by",
        "packed against alone",
    ]
    head += ["CUDA, fused: others moved by"] if fused else []
    rows = [head, ["---"] * len(head)]
    for family in FAMILIES:
        ours = [check for check in diagnosis.checks if check.subject == family.name]
        cells = [family.name, f"`{family.architecture}`", family.mixes]
        cells += [_cell(ours, "isolation"), _cell(ours, "packed against alone")]
        if fused:
            theirs = [Check(**check) for check in fused["checks"] if check["subject"] == family.name]
            cells.append(_cell(theirs, "isolation"))
        rows.append(cells)
    facts = diagnosis.machine
    caption = f"torch {facts['torch']}, transformers {facts['transformers']}"
    if fused:
        caption += (
            f"; CUDA: torch {fused['machine']['torch']}, transformers {fused['machine']['transformers']}, "
            f"{fused['machine']['on']}, bf16"
        )
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\nMade by `python -m training.doctor --families README.md` ({caption})."


def _cell(checks: Sequence[Check], name: str) -> str:
    """The figure of one check; a refusal in its place; behind it what else failed."""
    for check in checks:
        if check.state == "refused" or (check.state, check.name) == ("fail", name):
            return f"{'FAILED' if check.state == 'fail' else 'refused'}: {check.detail}"
    failed = [f"; FAILED {check.name}: {check.detail}" for check in checks if check.state == "fail"]
    figures = next((check.figures for check in checks if check.name == name), None)
    if figures is None:
        return "not run" + "".join(failed)
    worst = max(figures["logits"], figures.get("across", 0.0))
    shown = f"{worst:.0e}" if name != "isolation" else f"{worst:g}" if worst else "0.0"
    return shown + "".join(failed)


def write_families(readme: Path, diagnosis: Diagnosis, *, fused: Mapping[str, Any] | None = None) -> None:
    """Puts the table of `families_table` between the README's markers.

    Raises:
        KernelError: a check of the diagnosis failed, or the markers are not there.
    """
    for check in diagnosis.checks:
        if check.state == "fail":
            raise KernelError(
                f"{readme} is left as it is: {check.subject} failed {check.name}: {check.detail}"
            )
    table = families_table(diagnosis, fused=fused)
    text = readme.read_text("utf-8")
    if BEGIN not in text or END not in text:
        raise KernelError(f"{readme} has no markers {BEGIN} and {END} to put the table between")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    readme.write_text(f"{before}\n{table}\n{after}", "utf-8")


def _saved(path: Path) -> Any:
    """A diagnosis as `--json` prints it, or inside what `benchmarks/gpu_kernels.py` saved."""
    try:
        saved = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KernelError(f"{path} is no saved diagnosis: {error}") from error
    return saved["results"]["families"] if "results" in saved else saved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `padfree doctor`."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL_OR_CONFIG",
        help="a model directory, a config.json, a name on the Hub, or one of the built-in tiny models' names",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--warm", action="store_true", help="only compile the kernels into their caches")
    parser.add_argument(
        "--kernels",
        choices=("auto", "fused", "reference"),
        default="auto",
        help="as in the training configuration",
    )
    parser.add_argument(
        "--families", type=Path, metavar="README", help="write the table of families between its markers"
    )
    parser.add_argument(
        "--cuda-result", type=Path, metavar="JSON", help="what a CUDA machine saved, for one more column"
    )


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """What compilers print goes to the error stream: tilelang logs to stdout, where `--json` has to be alone.

    On the level of file descriptors, since compilers write from C++ and from processes of their own.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run(arguments: argparse.Namespace) -> int:
    """Runs `padfree doctor` with parsed options; returns the exit code.

    Raises:
        KernelError: what a user can cause; one line.
    """
    with _stdout_kept_clean():
        diagnosis = run_doctor(arguments.target, kernels=arguments.kernels, warm=arguments.warm)
    if arguments.families:
        fused = _saved(arguments.cuda_result) if arguments.cuda_result else None
        write_families(arguments.families, diagnosis, fused=fused)
    print(json.dumps(diagnosis.as_json(), indent=1) if arguments.json else "\n".join(diagnosis.lines()))
    return diagnosis.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m training.doctor`."""
    parser = argparse.ArgumentParser(
        prog="padfree doctor", description="What computes each layer here, and proof."
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except KernelError as error:
        print(f"padfree: {error}", file=sys.stderr)
        return 2
    finally:
        tidy()


if __name__ == "__main__":
    sys.exit(main())
