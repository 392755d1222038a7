"""The batch contract in trainers that others wrote, measured on what they really hand to a model.

    python benchmarks/trainers.py                            the installed versions
    PYTHONPATH=OTHER/site-packages python benchmarks/trainers.py     another transformers in front

Runs every script of `examples/` on tiny models and a CPU, records the arguments of each call of the model,
and writes results/trainers.json (by version of transformers, kept from earlier runs) and trainers.md, the
table in the README. The tests in tests/integrations call the same functions and say what must hold.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from record import RESULTS, save, version

from packing.buffer import PackedBuffer, build_buffer, unpack
from packing.example import IGNORE_INDEX, make_example
from packing.sample import TOKENIZER
from packing.shards import ShardSet, ShardWriter, open_shards

EXAMPLES = Path(__file__).with_name("examples")
TRAINERS = {
    "with_trainer": "transformers.Trainer",
    "with_trl_collator": "TRL SFTTrainer, its collator",
    "with_trl_collate": "TRL SFTTrainer, our collate",
    "with_accelerate": "Accelerate, plain loop",
    "with_lightning": "PyTorch Lightning",
    "plain_torch": "plain torch loop",
}
LEAKING = {
    "TRL SFTTrainer, its defaults": {},
    "TRL SFTTrainer, packing=True": {"packing": True, "max_length": 96},
}
CAPACITY, BUFFERS, EVAL_BUFFERS = 96, 9, 3
CHECKPOINTS = {
    "with_trainer": "checkpoint-2",
    "with_trl_collator": "checkpoint-2",
    "with_trl_collate": "checkpoint-2",
    "with_accelerate": "step-2",
    "with_lightning": "step=2.ckpt",
}
STEP_BUFFERS = {name: 1 if name == "plain_torch" else 4 for name in TRAINERS}
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,  # large enough that a leak moves logits by whole numbers
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "num_hidden_layers": 2},
    "qwen3_5_text": {
        **SIZES,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


# What the trainers get


def make_shards(folder: Path, *, seed: int = 0) -> Path:
    """A shard set with an eval part: neither's buffers are a multiple of two ranks or of a step's buffers."""
    random = np.random.default_rng(seed)
    with ShardWriter(folder, capacity=CAPACITY, fingerprint={"seed": seed}) as writer:
        part = writer.part("eval")
        for out, count in ((part, EVAL_BUFFERS), (writer, BUFFERS)):
            for number in range(count):
                out.write(_buffer(random, first_id=10 * number))
            out.finish({})
    return folder


def _buffer(random: np.random.Generator, *, first_id: int) -> PackedBuffer:
    """Five examples of 2 to 18 tokens; no token is 0, which only the tail has."""
    examples = []
    for length in random.integers(2, 19, 5):
        trained = random.random(length) < 0.6
        trained[-1] = True
        examples.append(make_example(random.integers(1, 1000, length), trained=trained))
    return build_buffer(examples, example_ids=range(first_id, first_id + 5), capacity=CAPACITY)


def make_model(folder: Path, *, family: str) -> Path:
    """A tiny model with random weights, and a tokenizer."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    return folder


# Running an example and listening


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the model: its arguments, copied, and whether it was for training."""

    kwargs: Mapping[str, Any]
    training: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """What an example did.

    Attributes:
        calls: Of the model, in order.
        logs: `loss` and `grad_norm` of each step.
        evaluations: The losses of its evaluations.
        model: As trained.
    """

    calls: Sequence[Call]
    logs: Sequence[Mapping[str, float]]
    evaluations: Sequence[float]
    model: Any = field(repr=False)

    @property
    def trained(self) -> list[Call]:
        return [call for call in self.calls if call.training]


@contextlib.contextmanager
def listening() -> Iterator[list[tuple[Any, Call]]]:
    """Records every call of a causal language model."""
    heard: list[tuple[Any, Call]] = []
    call_module = torch.nn.Module.__call__

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if type(module).__name__.endswith("ForCausalLM"):
            copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
            heard.append((module, Call(kwargs=copied, training=module.training)))
        return call_module(module, *args, **kwargs)

    with mock.patch.object(torch.nn.Module, "__call__", call):
        yield heard


def run_example(name: str, *argv: Path | str, bound: bool = True) -> Run:
    """Runs a script of `examples/` in this process.

    Args:
        name: Of the script.
        argv: Its arguments.
        bound: False makes `training.kernels.bind` do nothing, as if the script did not call it, and
            `check_trainer` not ask for it.
    """
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        heard = stack.enter_context(listening())
        stack.enter_context(mock.patch.object(sys, "argv", [name, *map(str, argv)]))
        stack.enter_context(contextlib.redirect_stdout(printed))
        if not bound:
            stack.enter_context(mock.patch("training.kernels.bind", lambda model: model))
            stack.enter_context(mock.patch("packing.trainers._bound", return_value=True))
        scope = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    history = getattr(getattr(scope.get("trainer"), "state", None), "log_history", None)
    if history is None:
        history = [ast.literal_eval(line) for line in printed.getvalue().splitlines() if line.startswith("{")]
    return Run(
        calls=[call for _, call in heard],
        logs=[entry for entry in history if "loss" in entry],
        evaluations=[entry["eval_loss"] for entry in history if "eval_loss" in entry],
        model=heard[-1][0],
    )


# What must hold


def read_call(call: Call, shards: ShardSet) -> tuple[list[int | None], list[int]]:
    """What a call was given, found by its tokens; no token is left over.

    Returns:
        The buffers, None for an empty one; and the lengths that must be kept apart, of examples and tails.
    """
    ids = call.kwargs["input_ids"][0].numpy()
    firsts = {tuple(buffer.input_ids[:4].tolist()): number for number, buffer in enumerate(shards)}
    rows: list[int | None] = []
    lengths: list[int] = []
    place = 0
    while place < ids.size:
        row = firsts.get(tuple(ids[place : place + 4].tolist()))
        if row is not None:
            buffer = shards[row]
            end = place + len(buffer)
            assert np.array_equal(ids[place:end], buffer.input_ids), f"buffer {row} arrived changed"
            lengths += buffer.seq_lengths.tolist()
            place = end
        tail = int(np.argmax(np.append(ids[place:], 1) != 0))
        assert row is not None or tail, f"token {place} is of no buffer"
        lengths += [tail] if tail else []
        rows.append(row)
        place += tail
    return rows, lengths


def rows_of(call: Call, shards: ShardSet) -> list[int | None]:
    """The buffers that a call was given, None for an empty one."""
    return read_call(call, shards)[0]


def lengths_of(call: Call, shards: ShardSet) -> list[int]:
    """The sequences that a call must keep apart: of its buffers, and of the tails behind them."""
    return read_call(call, shards)[1]


def steps_of(name: str, ranks: Sequence[Sequence[Sequence[int | None]]]) -> list[list[int | None]]:
    """The buffers of each optimizer step, over all ranks.

    Args:
        name: Of the example.
        ranks: For each rank, the buffers of each of its calls.
    """
    calls = [[row for rows in step for row in rows] for step in zip(*ranks, strict=True)]
    accumulate = STEP_BUFFERS[name] // len(ranks)
    epoch = -(-BUFFERS // len(ranks))
    epochs = [calls[i : i + epoch] for i in range(0, len(calls), epoch)]
    steps = [epoch[i : i + accumulate] for epoch in epochs for i in range(0, len(epoch), accumulate)]
    return [[row for call in step for row in call] for step in steps]


def arrived(call: Call, lengths: Sequence[int]) -> str:
    """Which arguments carry boundaries, and whether those are the right ones."""
    carriers = {"position_ids": "positions", "cu_seq_lens_q": "cu_seq_lens", "seq_idx": "seq_idx"}
    found = [short for key, short in carriers.items() if call.kwargs.get(key) is not None]
    if call.kwargs.get("attention_mask") is not None:
        found.append("a mask of ones" if call.kwargs["attention_mask"].all() else "a mask")
    ends = call.kwargs.get("cu_seq_lens_q")
    wrong = ends is not None and ends.diff().tolist() != list(lengths)
    return (", ".join(found) or "nothing") + (" of whole buffers" if wrong else "")


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What moves when an example's tokens are replaced.

    Attributes:
        others: The most that a logit of another example moved: 0.0 if they are isolated.
        across: The largest gradient of the others' loss at the replaced example: 0.0 if they are isolated.
        own: The most that its own logits moved: above 0, or nothing was shown.
    """

    others: float
    across: float
    own: float

    @property
    def holds(self) -> bool:
        return self.others == 0.0 and self.across == 0.0 and self.own > 0.0


def isolation(model: Any, call: Call, lengths: Sequence[int], *, replaced: int = 0) -> Isolation:
    """Calls the model as the trainer did, with one example's tokens replaced, and compares."""
    dropped = ("input_ids", "labels", "num_items_in_batch", "fused_lm_head")
    kwargs = {key: value for key, value in call.kwargs.items() if key not in dropped}
    start, end = sum(lengths[:replaced]), sum(lengths[: replaced + 1])
    mine = torch.zeros(call.kwargs["input_ids"].shape[1], dtype=torch.bool)
    mine[start:end] = True
    ids = call.kwargs["input_ids"].clone()
    logits, _ = _logits(model, ids, kwargs, mine)
    ids[0, mine] = ids[0, mine] % 1000 + 1
    moved, across = _logits(model, ids, kwargs, mine)
    difference = (moved - logits).abs()
    return Isolation(others=float(difference[~mine].max()), across=across, own=float(difference[mine].max()))


def _logits(
    model: Any, ids: torch.Tensor, kwargs: Mapping[str, Any], mine: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Logits [T, V], and the largest gradient of the others' at the embeddings of `mine`."""
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, **kwargs).logits[0]
    (gradient,) = torch.autograd.grad(logits[~mine].square().sum(), embeds)
    return logits.detach(), float(gradient[0, mine].abs().max())


def each_alone(
    model: Path, shards: ShardSet, steps: Sequence[Sequence[int | None]]
) -> list[dict[str, float]]:
    """Ours: the same steps with every example of every buffer by itself, in a stock model.

    Args:
        model: Folder of the weights to begin with.
        steps: The buffers of each step, over all ranks.

    Returns:
        `loss` and `grad_norm` of each step.
    """
    stock = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-4, weight_decay=0.0)
    logs = []
    for rows in steps:
        examples = [example for row in rows if row is not None for example in unpack(shards[row])]
        count = sum(example.supervised for example in examples)
        total = 0.0
        for example in examples:
            loss = _loss_sum(stock, example) / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append({"loss": total, "grad_norm": norm.item()})
    return logs


def evaluation_alone(model: Any, shards: ShardSet) -> float:
    """What Trainer's eval_loss is with one buffer a batch: the mean over buffers of the mean over tokens."""
    means = []
    with torch.no_grad():
        for buffer in shards:
            examples = unpack(buffer)
            losses = sum(_loss_sum(model, example).item() for example in examples)
            means.append(losses / sum(example.supervised for example in examples))
    return float(np.mean(means))


def _loss_sum(model: Any, example: Any) -> torch.Tensor:
    ids = torch.from_numpy(example.input_ids.astype(np.int64))
    labels = torch.from_numpy(example.labels.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(
        logits[:-1], labels[1:], ignore_index=IGNORE_INDEX, reduction="sum"
    )


def apart(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> float:
    """The largest relative difference of a step's loss or gradient norm."""
    return max(
        abs(theirs[i][key] - log[key]) / log[key]
        for i, log in enumerate(ours)
        for key in ("loss", "grad_norm")
    )


# Two ranks, and the wrong settings


def on_two_ranks(shards: Path, model: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs every example that can under torchrun: name -> what each rank saw and logged (see `_rank`)."""
    names = [name for name in TRAINERS if name != "plain_torch"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(folder / "logs")]  # else a temporary folder that stays
    folder.mkdir()
    done = subprocess.run(
        [*command, __file__, "--rank", str(folder), str(shards), str(model), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-8000:])
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in names}


def _rank(folder: Path, shards: Path, model: Path, names: Sequence[str]) -> None:
    opened = open_shards(shards)
    seen = {}
    for name in names:
        run = run_example(name, shards, model, folder / name)
        seen[name] = {
            "rows": [rows_of(call, opened) for call in run.trained],
            "arrived": sorted({arrived(call, lengths_of(call, opened)) for call in run.trained}),
            "logs": run.logs,
            "evaluations": run.evaluations,
        }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))


def run_trl(shards: Path, model: Path, out: Path, *, check: bool, **settings: Any) -> Run:
    """One step of TRL's SFTTrainer on a shard set, with settings that may be wrong."""
    from datasets import load_from_disk
    from trl import SFTConfig, SFTTrainer

    from packing.trainers import check_trainer
    from training.kernels import bind

    common = {"max_steps": 1, "save_strategy": "no", "logging_steps": 1, "report_to": [], "bf16": False}
    stock = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with listening() as heard:
        trainer = SFTTrainer(
            bind(stock) if check else stock,
            SFTConfig(str(out), per_device_train_batch_size=1, **common, **settings),
            train_dataset=load_from_disk(str(shards)),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
        )
        if check:
            check_trainer(trainer)
        trainer.train()
    return Run(calls=[call for _, call in heard], logs=[], evaluations=[], model=trainer.model)


# The table


def leak_of_stock(name: str, shards: Path, model: Path, out: Path) -> str:
    """What an example does to Qwen3.5 without `bind`: refused by transformers, or a leak's size."""
    try:
        run = run_example(name, shards, model, out, bound=False)
    except ValueError as error:
        if "can't keep packed sequences apart" not in str(error):
            raise
        return "refused"
    found = isolation(run.model, run.trained[0], lengths_of(run.trained[0], open_shards(shards)))
    return f"leaks: {found.others:.1f}"


def measure(name: str, folder: Path, ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """One row of the table."""
    shards = folder / "shards"
    opened, evaluated = open_shards(shards), open_shards(shards).part("eval")
    dense, hybrid = folder / "qwen3", folder / "qwen3_5_text"
    run = run_example(name, shards, dense, folder / name, bound=False)
    rows = [[rows_of(call, opened) for call in run.trained]]
    own = {"arrives": arrived(run.trained[0], lengths_of(run.trained[0], opened))}
    own["other examples, Qwen3"] = f"{_others(run, opened)}"
    own["Qwen3.5, stock"] = leak_of_stock(name, shards, hybrid, folder / f"{name}-stock")
    own["Qwen3.5, bound"] = f"{_others(run_example(name, shards, hybrid, folder / f'{name}-bound'), opened)}"
    own["loss, each alone"] = f"{apart(run.logs, each_alone(dense, opened, steps_of(name, rows))):.0e}"
    if run.evaluations:
        ours = evaluation_alone(run.model, evaluated)
        own["evaluation"] = f"{abs(run.evaluations[-1] - ours) / ours:.0e}"
    if name in CHECKPOINTS:
        again = run_example(
            name, shards, dense, folder / name, folder / name / CHECKPOINTS[name], bound=False
        )
        own["resumed"] = "same weights" if same_weights(run.model, again.model) else "other weights"
    if name in ranks:
        steps = steps_of(name, [rank["rows"] for rank in ranks[name]])
        own["two ranks"] = f"{apart(ranks[name][0]['logs'], each_alone(dense, opened, steps)):.0e}"
    return own


def same_weights(one: Any, other: Any) -> bool:
    """Whether two models' weights are the same bits."""
    theirs = other.state_dict()
    return all(torch.equal(weight, theirs[key]) for key, weight in one.state_dict().items())


def _others(run: Run, shards: ShardSet) -> float:
    found = isolation(run.model, run.trained[0], lengths_of(run.trained[0], shards))
    assert found.own > 0.0
    return found.others


def main() -> None:
    """Measures with the installed versions and renders what was measured with all versions so far."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = make_shards(folder / "shards")
        for family in FAMILIES:
            make_model(folder / family, family=family)
        ranks = on_two_ranks(shards, folder / "qwen3", folder / "ranks")
        table = {title: measure(script, folder, ranks) for script, title in TRAINERS.items()}
        for title, settings in LEAKING.items():
            run = run_trl(shards, folder / "qwen3", folder / "leaking", check=False, **settings)
            lengths = lengths_of(run.trained[0], open_shards(shards))
            leak = isolation(run.model, run.trained[0], lengths)
            table[title] = {
                "arrives": arrived(run.trained[0], lengths),
                "other examples, Qwen3": f"leaks: {leak.others:.1f}",
            }
    saved = Path(os.environ.get("OUT", RESULTS)) / "trainers.json"
    versions = json.loads(saved.read_text())["results"] if saved.exists() else {}
    versions[transformers.__version__] = table
    save("trainers", versions, packages=["accelerate", "lightning"])
    saved.with_suffix(".md").write_text(render(versions), "utf-8")


def render(versions: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The table in Markdown: a cell says by version what differs by version."""
    ordered = sorted(versions, key=lambda text: [int(part) for part in text.split(".")])
    newest = versions[ordered[-1]]
    columns = list(newest["transformers.Trainer"])
    lines = [f"| trainer | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for title in newest:
        cells = []
        for column in columns:
            by_version = {version: versions[version][title].get(column, "–") for version in ordered}
            same = len(set(by_version.values())) == 1
            cells.append(
                by_version[ordered[-1]] if same else "; ".join(f"{v}: {x}" for v, x in by_version.items())
            )
        lines.append(f"| {title} | {' | '.join(cells)} |")
    torch_version = torch.__version__.partition("+")[0]
    packages = ", ".join(f"{p} {version(p)}" for p in ("trl", "accelerate", "lightning"))
    return f"""{chr(10).join(lines)}

transformers {" and ".join(ordered)}, {packages}, torch {torch_version}, tiny models on a CPU in fp32.
Other examples: the most that their logits move when one example is replaced. Loss, evaluation and two ranks:
the largest relative difference (of loss and gradient norm, in any step) from every example run by itself, in
steps of four buffers, accumulated (one in the plain loop). Resumed: in the middle of an epoch.
"""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(*map(Path, sys.argv[2:5]), sys.argv[5:])
    else:
        main()
