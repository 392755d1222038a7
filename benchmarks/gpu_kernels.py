"""Kernel by kernel at 27B dimensions on one GPU: speed, distance from the floor, compilations, the proof.

    python benchmarks/gpu_kernels.py                 every section, results/kernels.json, rewritten after each
    python benchmarks/gpu_kernels.py speed compile   some of them
    python benchmarks/gpu_kernels.py families --families Llama "Gemma 3" --at-once 2 --limit 120
    python benchmarks/gpu_kernels.py --merge A.json B.json   no run: the union of saved ones, the later wins
    python benchmarks/gpu_kernels.py --dry-run       small sizes on a CPU: does the script still run?

A section that fails is recorded with its error and the next one runs: a GPU is lent for minutes. The name is
not kernels.py, which transformers would import in place of the package `kernels`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import record as results
import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_chunk_gated_delta_rule

from training import doctor
from training.kernels import (
    attention,
    bind,
    compilation,
    convolution,
    make_batch,
    proof,
    recurrence,
    with_chunk_indices,
)
from training.kernels.families import FAMILIES, Family, build, few_layers, tiny_config
from training.kernels.packages import probe

# One H200: bytes a second of its memory, dense bf16 operations a second.
BANDWIDTH, OPERATIONS = 4.8e12, 989e12
PACKAGES = (
    "flash-linear-attention",
    "fla-core",
    "flash-qla",
    "tilelang",
    "causal-conv1d",
    "liger-kernel",
)

# Families from the slowest to compile to the quickest, by what mixes their tokens: several run at once, and a
# slow one begun last would keep all waiting.
COMPILES = ("Kimi delta attention", "Mamba-2", "gated delta net", "short convolution", "attention")
SLOWEST_FIRST = sorted(
    FAMILIES, key=lambda family: [family.mixes.startswith(mixer) for mixer in COMPILES].index(True)
)

# Qwen3.5-27B: what `padfree doctor` cuts to the layers that show each kind.
WIDTH_27B = {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 65536,
}  # fmt: skip
WIDTH_DRY = {
    **WIDTH_27B, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


class Bench:
    """Sizes, device and clock of a run, real or dry."""

    def __init__(self, *, dry: bool, families: Sequence[Family], limit: float, at_once: int) -> None:
        self.dry = dry
        self.families = families
        self.limit = limit
        self.at_once = at_once
        self.device = "cpu" if dry else "cuda"
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.width = WIDTH_DRY if dry else WIDTH_27B
        self.capacity = 256 if dry else 8192

    def lengths(self, seed: int, *, capacity: int | None = None) -> list[int]:
        """A buffer of conversations as long as ultrachat_200k's, filled to capacity: mean 1,258 tokens."""
        left = capacity or self.capacity
        draw = torch.Generator().manual_seed(seed)
        mean = 1258 * self.capacity / 8192
        found = []
        while left > 0:
            length = int(torch.randn(1, generator=draw).mul(0.6).exp() * mean * 0.835) + 1
            found.append(min(length, left))
            left -= found[-1]
        return found

    def batch(self, lengths: Sequence[int]) -> dict[str, Any]:
        tokens = torch.arange(sum(lengths)) % 512
        batch = with_chunk_indices(make_batch(tokens, lengths))
        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    def drawn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype).requires_grad_()

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], object], *, runs: int) -> dict[str, float]:
        """Milliseconds of a call on the device: median and least of `runs`, after two that do not count."""
        samples = []
        for _ in range(4 if self.dry else runs + 2):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            samples.append(1e3 * (time.perf_counter() - start))
        kept = samples[2:]
        return {"ms": statistics.median(kept), "least_ms": min(kept), "runs": len(kept)}

    def kernel(
        self,
        call: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        *,
        floors: tuple[float, float],
        runs: int,
    ) -> dict[str, Any]:
        """Forward and backward of one kernel, with how many times its floor each takes."""

        def both() -> None:
            out = call(*inputs)
            torch.autograd.grad(out, inputs, torch.ones_like(out))

        def forward() -> None:
            with torch.no_grad():
                call(*inputs)

        start = time.perf_counter()
        both()
        self.wait()
        first = time.perf_counter() - start
        ahead, whole = self.time(forward, runs=runs), self.time(both, runs=runs)
        back = whole["ms"] - ahead["ms"]
        return {
            "first_call_s": first,
            "forward": ahead,
            "forward_and_backward": whole,
            "floor_ms": {"forward": 1e3 * floors[0], "backward": 1e3 * floors[1]},
            "times_floor": {"forward": ahead["ms"] / 1e3 / floors[0], "backward": back / 1e3 / floors[1]},
        }


def floor(moved: float, operations: float) -> float:
    """Seconds below which no kernel can be: all its bytes once, or all its operations."""
    return max(moved / BANDWIDTH, operations / OPERATIONS)


# --- sections ----------------------------------------------------------------------------------------------


def speed(bench: Bench, note: Callable[[str, Any], None]) -> None:
    """Each kernel at 27B dimensions on one packed buffer."""
    lengths = bench.lengths(0)
    note("lengths", lengths)
    for name, call in (("delta rule", delta_rule), ("convolution", conv), ("attention", attend)):
        for kernel, figures in call(bench, lengths):
            note(f"{name}: {kernel}", attempt(figures))


def attempt(call: Callable[[], Any]) -> Any:
    """A result, or the error as the result: one kernel that fails leaves the others their turn."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its row in the result
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


Rows = list[tuple[str, Callable[[], Any]]]


def delta_rule(bench: Bench, lengths: Sequence[int]) -> Rows:
    w, tokens = bench.width, sum(lengths)
    keys, values = w["linear_num_key_heads"], w["linear_num_value_heads"]
    size, size_v = w["linear_key_head_dim"], w["linear_value_head_dim"]
    batch = bench.batch(lengths)
    q, k = (bench.drawn(1, tokens, keys, size) for _ in range(2))
    v = bench.drawn(1, tokens, values, size_v)
    gate = bench.drawn(1, tokens, values, dtype=torch.float32)
    beta = torch.rand(1, tokens, values, device=bench.device, dtype=bench.dtype).requires_grad_()
    inputs = (q, k, v, gate, beta)
    # q, k, v in, the output out; the backward reads them and the output's gradient, and writes as much. The
    # operations are the recurrence's: decay and read, correct, write, 6 a state element and token.
    one_way = tokens * 2 * (2 * keys * size + 2 * values * size_v)
    operations = 6 * tokens * values * size * size_v
    floors = floor(one_way, operations), floor(2 * one_way, 2 * operations)

    def rule(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, g, b: function(
            q, k, v, g=F.logsigmoid(g), beta=b, use_qk_l2norm_in_kernel=True,
            cu_seqlens=batch["cu_seq_lens_q"], chunk_indices=batch["chunk_indices"],
        )[0]  # fmt: skip

    by_sequence = recurrence.rule_by_sequence(
        recurrence.DELTA_RULE, inspect.unwrap(torch_chunk_gated_delta_rule)
    )

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        # It wants as many key heads as value heads; the kernels repeat them inside.
        return by_sequence(*(t.repeat_interleave(values // keys, dim=2) for t in (q, k)), v, **options)

    found = [("reference, sequence by sequence", reference, 3)]
    if not bench.dry:
        found += [("fla", recurrence.fla_delta_rule, 20), ("flash-qla", recurrence.flash_qla_delta_rule, 20)]
    return [
        (name, lambda f=f, n=n: bench.kernel(rule(f), inputs, floors=floors, runs=n)) for name, f, n in found
    ]


def conv(bench: Bench, lengths: Sequence[int]) -> Rows:
    w, tokens = bench.width, sum(lengths)
    channels = 2 * w["linear_num_key_heads"] * w["linear_key_head_dim"]
    channels += w["linear_num_value_heads"] * w["linear_value_head_dim"]
    batch = bench.batch(lengths)
    wide = bench.drawn(1, tokens, channels)
    weight = bench.drawn(channels, 4)
    moved = 2 * tokens * channels
    floors = floor(2 * moved, 8 * tokens * channels), floor(3 * moved, 16 * tokens * channels)

    def convolve(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, weight: function(
            x.transpose(1, 2), weight, None, "silu",
            seq_idx=batch["seq_idx"], cu_seq_lens_q=batch["cu_seq_lens_q"],
        )  # fmt: skip

    reference = convolution.by_sequence(inspect.unwrap(causal_conv1d_fn))
    found = [("reference, sequence by sequence", reference, 5)]
    if not bench.dry:
        found += [("causal-conv1d", convolution.causal_conv1d, 20), ("fla", convolution.fla_convolution, 20)]
    return [
        (name, lambda f=f, n=n: bench.kernel(convolve(f), (wide, weight), floors=floors, runs=n))
        for name, f, n in found
    ]


def attend(bench: Bench, lengths: Sequence[int]) -> Rows:
    w, tokens = bench.width, sum(lengths)
    heads, keys, size = w["num_attention_heads"], w["num_key_value_heads"], w["head_dim"]
    batch = bench.batch(lengths)
    q = bench.drawn(1, heads, tokens, size)
    k, v = (bench.drawn(1, keys, tokens, size) for _ in range(2))
    moved = 2 * tokens * size * (2 * heads + 2 * keys)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    operations = 4 * pairs * heads * size
    floors = floor(moved, operations), floor(2 * moved, 2.5 * operations)
    layer = torch.nn.Module()

    def varlen(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: function(
            layer, q, k, v, None,
            cu_seq_lens_q=batch["cu_seq_lens_q"], max_length_q=batch["max_length_q"],
        )[0]  # fmt: skip

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        index = batch["seq_idx"][0]
        seen = (index[:, None] == index[None, :]).tril()
        groups = heads // keys
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    found = [
        ("sdpa, sequence by sequence", varlen(attention.packed_varlen_reference), 5),
        ("sdpa with a T x T mask", masked, 5),
    ]
    if not bench.dry:
        found.append(("torch varlen_attn", varlen(attention.packed_varlen), 20))
    return [
        (name, lambda f=f, n=n: bench.kernel(f, (q, k, v), floors=floors, runs=n)) for name, f, n in found
    ]


def wide_config(bench: Bench) -> Any:
    """Qwen3.5 at 27B width, cut to three delta-net layers and one of attention."""
    config = transformers.AutoConfig.for_model("qwen3_5_text", **bench.width)
    return few_layers(config)


def compile_count(bench: Bench, note: Callable[[str, Any], None]) -> None:
    """The first step, and what is compiled over 50 different batches of the same capacity."""
    model = bind(build(wide_config(bench), "Qwen3_5ForCausalLM", device=bench.device).to(bench.dtype))

    def step(seed: int) -> float:
        batch = bench.batch(bench.lengths(seed))
        bench.wait()
        start = time.perf_counter()
        model(**batch).logits.float().square().mean().backward()
        bench.wait()
        return time.perf_counter() - start

    before = compilation.count_cached()
    note("first step", {"seconds": step(0), "kernels_compiled": compilation.count_cached() - before})
    before = compilation.count_cached()
    samples = [step(seed) for seed in range(1, 4 if bench.dry else 51)]
    note(
        "further batches",
        {
            "batches": len(samples),
            "different_numbers_of_examples": len({len(bench.lengths(s)) for s in range(1, len(samples) + 1)}),
            "kernels_compiled": compilation.count_cached() - before,
            "seconds": results.spread(samples),
        },
    )


def first_step(bench: Bench, note: Callable[[str, Any], None]) -> None:
    """The first step of a process: with empty caches, and again by a second process that finds them full.

    fla's rule is triton's, whose autotuners measure many configurations, compiled one by one or all at once;
    flash-qla's kernels are tilelang's, one configuration each. All three pairs run side by side.
    """
    ways = {"flash-qla": ["flash-qla"], "fla": ["fla"], "fla, compiled one by one": ["fla", "--serially"]}

    def pair(way: list[str]) -> Any:
        with tempfile.TemporaryDirectory() as caches:
            places = {"TRITON_CACHE_DIR": f"{caches}/triton", "TILELANG_CACHE_DIR": f"{caches}/tilelang"}
            return {name: one_process(bench, way, places) for name in ("empty caches", "full caches")}

    with ThreadPoolExecutor(len(ways)) as pool:
        jobs = {pool.submit(attempt, partial(pair, way)): name for name, way in ways.items()}
        for job in as_completed(jobs):
            note(jobs[job], job.result())


def one_process(bench: Bench, way: Sequence[str], places: Mapping[str, str]) -> Any:
    """What `one_first_step` prints, last of all, in a new process with these caches."""
    command = [sys.executable, __file__, "--first-step", *way, *(["--dry-run"] if bench.dry else [])]
    done = subprocess.run(
        command,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=bench.limit,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-400:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def one_first_step(bench: Bench, rule: str, *, serially: bool) -> dict[str, float]:
    """Seconds from a bound model at 27B width to its gradients, and kernels compiled for that."""
    convolution_too = {"delta rule": rule, "convolution": "fla" if rule == "fla" else "causal-conv1d"}
    model = build(wide_config(bench), "Qwen3_5ForCausalLM", device=bench.device).to(bench.dtype)
    bind(model, choose=convolution_too)
    batch = bench.batch(bench.lengths(0))
    before, start = compilation.count_cached(), time.perf_counter()
    with nullcontext() if serially else compilation.in_parallel():
        model(**batch).logits.float().square().mean().backward()
        bench.wait()
    return {"seconds": time.perf_counter() - start, "kernels_compiled": compilation.count_cached() - before}


def width(bench: Bench, note: Callable[[str, Any], None]) -> None:
    """What `padfree doctor` says of a 27B configuration."""
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoConfig.for_model("qwen3_5_text", **bench.width).save_pretrained(folder)
        found = doctor.run_doctor(folder, device=bench.device)
    print("\n".join(found.lines()), flush=True)
    named = json.loads(json.dumps(found.as_json()).replace(json.dumps(folder), '"Qwen3.5 at 27B width"'))
    note("doctor", {**named, "machine": portable(found.machine)})


def portable(machine: Mapping[str, str]) -> dict[str, str]:
    """The facts that mean something elsewhere: no folder of the machine."""
    return {name: value for name, value in machine.items() if not name.endswith("_DIR")}


def families(bench: Bench, note: Callable[[str, Any], None]) -> None:
    """What `padfree doctor` says of every family, each in a process of its own with a limit of its own.

    So compilations overlap, and one that fails, hangs or takes the device down stops no other.
    """
    if len(bench.families) == 1:
        return examine(bench, note, bench.families[0])
    joined: dict[str, Any] = {"checks": [], "layers": {}}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(bench.at_once) as pool:
        jobs = {
            pool.submit(apart, bench, family, Path(folder) / str(number)): family.name
            for number, family in enumerate(bench.families)
        }
        for job in as_completed(jobs):
            section, cause = job.result()
            joined = _with_families(joined, section)
            if cause is not None:
                joined[f"stopped, {jobs[job]}"] = cause
                print(f"{jobs[job]}: stopped: {cause}", flush=True)
            for key, value in joined.items():
                note(key, value)
    return None


def examine(bench: Bench, note: Callable[[str, Any], None], family: Family) -> None:
    """One family in this process; noted check by check, so that a limit loses only what was not known."""
    checks: list[Any] = []

    def heard(check: doctor.Check) -> None:
        print(f"{check.subject}: {check.state} {check.name}: {check.detail}", flush=True)
        if check.subject == family.name:
            checks.append(dataclasses.asdict(check))
            note("checks", checks)

    print(f"{family.name}: begun", flush=True)
    note("layers", {})
    start = time.monotonic()
    found = doctor.run_doctor(families=[family], device=bench.device, heard=heard)
    note("machine", portable(found.machine))
    note("layers", found.as_json()["layers"])
    note(f"seconds, {family.name}", time.monotonic() - start)


def apart(bench: Bench, family: Family, folder: Path) -> tuple[dict[str, Any], str | None]:
    """Runs `examine` in a process: what it saved, and why it did not come to its end, if so."""
    folder.mkdir()
    command = [sys.executable, __file__, "families", "--families", family.name]
    command += ["--dry-run"] if bench.dry else []
    cause = None
    try:
        done = subprocess.run(
            command, env={**os.environ, "OUT": str(folder)}, timeout=bench.limit, check=False
        )
        if done.returncode != 0:
            cause = f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        cause = f"not done after {bench.limit:.0f} s"
    saved = folder / "kernels.json"
    if not saved.exists():
        return {"checks": [], "layers": {}}, cause or "nothing was saved"
    return json.loads(saved.read_text("utf-8"))["results"]["families"], cause


def choices(bench: Bench, note: Callable[[str, Any], None]) -> None:
    """Each pair of delta rule and convolution: isolation, and how far from fp32."""
    family = FAMILIES[0]
    config = tiny_config(family, real_heads=not bench.dry)
    exact = bind(build(config, family.architecture, device=bench.device), kernels="reference")
    lengths = (1, 63, 64, 65, 63) if bench.dry else (1, 63, 64, 65, 1000, 6999)
    pairs = (
        [(None, None)]
        if bench.dry
        else [(r, c) for r in ("flash-qla", "fla") for c in ("causal-conv1d", "fla")]
    )
    for rule, conv_name in pairs:
        choose = {} if rule is None else {"delta rule": rule, "convolution": conv_name}

        def pair(choose: Mapping[str, str] = choose) -> Any:
            model = build(config, family.architecture, device=bench.device).to(bench.dtype)
            bind(model, choose=choose)
            isolation = [proof.isolation(model, lengths, replaced=i) for i in (0, 1, 3)]
            apart = proof.difference(model, exact, lengths)
            return {
                "holds": all(one.holds for one in isolation),
                "logits": max(one.logits for one in isolation),
                "gradients": max(one.gradients for one in isolation),
                "across": max(one.across for one in isolation),
                "noise": max(one.noise for one in isolation),
                "from_fp32": {"logits": apart.logits, "gradients": dict(apart.gradients)},
            }

        note(f"{rule}, {conv_name}", attempt(pair))


def draws(bench: Bench, note: Callable[[str, Any], None]) -> None:
    """How far the reference in bf16 lies from fp32, draw by draw: what one draw is worth as a limit."""
    lengths = (1, 63, 64, 65, 1855)
    for family in bench.families:
        config = tiny_config(family, real_heads=True)
        exact, plain = (
            bind(build(config, family.architecture, device=bench.device).to(dtype), kernels="reference")
            for dtype in (torch.float32, torch.bfloat16)
        )
        found = [proof.difference(plain, exact, lengths, seed=seed) for seed in range(8)]
        small = {name: p.numel() for name, p in exact.named_parameters() if p.numel() <= 64}
        gradients = {name: [one.gradients[name] for one in found] for name in small}
        note(
            family.name, {"logits": [one.logits for one in found], "elements": small, "gradients": gradients}
        )


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """The union of saved results: of each section, and in `families` of each family, the last that was saved.

    `parts` says of each what it comes from; the rest of the record is that of the last file.
    """
    union: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    origins: dict[str, dict[str, Any]] = {}
    for path in paths:
        saved = json.loads(path.read_text("utf-8"))
        union |= saved
        origin = {key: saved[key] for key in ("commit", "date", "command", "hardware", "versions")}
        parts = saved.get("parts", {})
        for name, section in saved["results"].items():
            if name == "families":
                sections[name] = _with_families(sections.get(name, {}), section)
                subjects = dict.fromkeys(check["subject"] for check in section["checks"])
                origins |= {f"families, {one}": parts.get(f"families, {one}", origin) for one in subjects}
            else:
                sections[name] = section
                origins[name] = parts.get(name, origin)
    return {**union, "results": sections, "parts": origins}


def _with_families(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    anew = {check["subject"] for check in after["checks"]}
    kept = [check for check in before.get("checks", ()) if check["subject"] not in anew]
    joined = {**before, **after, "layers": {**before.get("layers", {}), **after["layers"]}}
    joined["checks"] = kept + after["checks"]
    joined.pop("seconds", None)  # of one run, not of the union
    for name in anew & {check["subject"] for check in after["checks"] if check["name"] == "step time"}:
        joined.pop(f"stopped, {name}", None)
    return joined


SECTIONS: dict[str, Callable[[Bench, Callable[[str, Any], None]], None]] = {
    "speed": speed,
    "compile": compile_count,
    "first_step": first_step,
    "width": width,
    "choices": choices,
    "families": families,
    "draws": draws,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument(
        "--dry-run", action="store_true", help="small sizes on a CPU, nothing saved in results"
    )
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds that a family may take; default 240"
    )
    parser.add_argument("--at-once", type=int, default=4, help="families examined at once; default 4")
    parser.add_argument(
        "--families", nargs="+", choices=[family.name for family in FAMILIES], metavar="NAME",
        help="the families of that section; default all",
    )  # fmt: skip
    parser.add_argument(
        "--first-step", choices=("flash-qla", "fla"), help="one first step in this process, printed"
    )
    parser.add_argument("--serially", action="store_true", help="there, compile one after the other")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="saved results to join")
    arguments = parser.parse_args()
    if arguments.merge:
        target = results.RESULTS / "kernels.json"
        target.write_text(json.dumps(merge(arguments.merge), indent=1) + "\n", "utf-8")
        print(f"saved {target}")
        return
    wanted = [f for f in SLOWEST_FIRST if arguments.families is None or f.name in arguments.families]
    bench = Bench(dry=arguments.dry_run, families=wanted, limit=arguments.limit, at_once=arguments.at_once)
    if bench.dry:
        torch.set_num_threads(1)
    if arguments.first_step:
        print(json.dumps(one_first_step(bench, arguments.first_step, serially=arguments.serially)))
        return
    found: dict[str, Any] = {
        "packages": {
            name: probe(name).cause or "imports" for name in ("fla", "flash_qla", "causal_conv1d", "tilelang")
        }
    }
    for name in arguments.sections:
        section: dict[str, Any] = found.setdefault(name, {})

        def note(key: str, value: Any, section: dict[str, Any] = section) -> None:
            section[key] = value
            if "OUT" in os.environ or not bench.dry:
                results.save("kernels", found, packages=PACKAGES)

        start = time.monotonic()
        with compilation.in_parallel():
            failed = attempt(partial(SECTIONS[name], bench, note))
        if failed is not None:
            note("failed", failed["failed"])
        note("seconds", time.monotonic() - start)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        if not bench.dry:
            torch.cuda.empty_cache()
    if bench.dry:
        print(found)


if __name__ == "__main__":
    main()
    sys.exit(0)
