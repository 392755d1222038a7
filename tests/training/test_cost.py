"""What a step costs: operations by hand-counted examples, memory against a measured run."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, Qwen3_5ForCausalLM, Qwen3Config, Qwen3MoeConfig

from training import cost
from training.config import Checkpoint, Config, Data, Lora, Model, Optim, Parallel
from training.cost import Work, flops, itemised, most, price, price_on_host, recomputed, risks, work
from training.errors import OptionError
from training.kernels.binding import find_attentions
from training.kernels.families import FAMILIES, Family, tiny_config
from training.lora import add_adapters
from training.model import blocks, read_config, skeleton
from training.recompute import recompute

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def test_attention_counts_pairs_within_examples() -> None:
    """Two examples of 3 and 5 tokens have 6 + 15 pairs, 5 + 9 in a window of 2, wherever they are packed."""
    for window, pairs in ((0, 21), (2, 14)):
        counted = Work(layer_products=0, head_products=0, attention=((10, window),), recurrence=0)
        assert counted.step([3, 5]) == 3 * 2 * 10 * pairs
        assert counted.step([3]) + counted.step([5]) == counted.step([5, 3])


def plain() -> Qwen3Config:
    """Two layers of attention and MLP, small enough to count by hand."""
    return Qwen3Config(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )


def test_operations_of_a_plain_model_by_hand() -> None:
    """6 x weights in products x tokens, 12 x heads x width x pairs; embedding and norms count nothing."""
    config = plain()
    weights = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12) + 50 * 8
    pairs = 3 * 4 // 2 + 7 * 8 // 2
    assert flops(config, [3, 7]) == 6 * weights * 10 + 2 * 12 * (2 * 4) * pairs


def test_operations_of_the_hybrid_at_27b() -> None:
    """At Qwen3.5-27B's dimensions 25.6 billion weights are in products; the rest is the embedding."""
    config = AutoConfig.for_model(**json.loads((CONFIGS / "ladder-27b.json").read_text()))
    counted = work(skeleton(config, precision="bf16"))
    assert counted
    assert counted.layer_products + counted.head_products == pytest.approx(25.6e9, rel=0.005)
    assert len(counted.attention) == 16
    assert counted.recurrence == 6 * 48 * 48 * 128 * 128
    tokens = counted.step([8192])
    assert counted.hardware([8192], recomputed=1, mixing_again=0) == pytest.approx(4 / 3 * tokens, rel=0.02)


def test_a_mixture_counts_the_experts_that_a_token_meets() -> None:
    """Two of eight experts: a quarter of the experts' weights."""
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=8,
        moe_intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
    )
    counted = work(skeleton(config, precision="fp32"))
    assert counted
    experts = 2 * 3 * 8 * 12
    assert abs(counted.layer_products - (8 * 8 + 2 * 8 * 4 + 8 * 8 + experts)) <= 8 * 8  # and the router


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_counted_by_the_layers_it_has(family: Family, tmp_path: Path) -> None:
    """As saved and read again: products, attention and recurrences, each where the family has such layers."""
    tiny_config(family).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path).get_text_config()
    model = skeleton(config, precision="fp32")
    counted = work(model)
    assert counted
    assert counted.layer_products > 0
    assert len(counted.attention) == len(find_attentions(model)) > 0
    assert all(width > 0 for width, _ in counted.attention)
    assert (counted.recurrence > 0) == any(word in family.mixes for word in ("delta", "Mamba"))
    assert any(window for _, window in counted.attention) == ("window" in family.mixes)


@pytest.mark.parametrize(
    ("name", "attention", "recurrence"),
    [
        ("Bamba", ((4 * (8 + 8), 0),), 4 * 8 * 8 * 8),
        ("Falcon-H1", ((4 * (8 + 8), 0),) * 2, 2 * 4 * 8 * 8 * 8),
        ("Kimi-linear", ((4 * (12 + 8), 0),), 2 * 6 * 4 * 8 * 8),
        ("OLMo-hybrid", ((4 * (8 + 8), 0),), 2 * 6 * 4 * 8 * 8),
        ("gpt-oss", ((4 * (8 + 8), 16), (4 * (8 + 8), 0)), 0),
        ("Mistral", ((4 * (8 + 8), 16),) * 2, 0),
    ],
)
def test_what_mixes_tokens_by_hand(
    name: str, attention: tuple[tuple[int, int], ...], recurrence: int
) -> None:
    """Heads x (key + value width) and window of each attention; a state's elements x 6, of Mamba-2 x 4."""
    family = next(family for family in FAMILIES if family.name == name)
    counted = work(skeleton(tiny_config(family), precision="fp32"))
    assert counted
    assert (counted.attention, counted.recurrence) == (attention, recurrence)


def test_unknown_widths_are_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose widths have other names costs a run its MFU; the dry run says so."""
    layer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=4), width=8)
    monkeypatch.setattr("training.cost.find_attentions", lambda _: {"layer": layer})
    config = Qwen3Config(vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=1, head_dim=4)
    assert work(skeleton(config, precision="fp32")) is None
    assert "no MFU" in most(None, capacity=64)
    with pytest.raises(OptionError, match="qwen3 can't be counted"):
        flops(config, [3])


def test_price_of_a_measured_run() -> None:
    """27B in bf16 on two GPUs, all layers recomputing: measured 110.5 GiB at the fullest moment."""
    config = Config(data=Data(shards=""), model=Model(config="x", precision="bf16"))
    model = skeleton(
        AutoConfig.for_model(**json.loads((CONFIGS / "ladder-27b.json").read_text())), precision="bf16"
    )
    items = price(config, model, ranks=2, capacity=8192, precision="bf16")
    assert sum(items.values()) / 2**30 == pytest.approx(110.5, rel=0.1)
    eight = Config(data=config.data, model=config.model, optim=Optim(states="8bit"))
    saved = sum(items.values()) - sum(price(eight, model, ranks=2, capacity=8192, precision="bf16").values())
    assert saved / 2**30 == pytest.approx(25, abs=1)
    more = Config(data=Data(shards="", accumulation=2), model=config.model, parallel=Parallel())
    assert price(more, model, ranks=2, capacity=8192, precision="bf16")[
        "gradients kept whole over the micro-batches of a step"
    ] / 2**30 == pytest.approx(100, abs=1)


def test_price_counts_the_layers_that_recompute() -> None:
    """Of 64 layers 32 keep all, or 16 keep products and 16 all: what they keep and their inputs by hand."""
    model = skeleton(
        AutoConfig.for_model(**json.loads((CONFIGS / "ladder-27b.json").read_text())), precision="bf16"
    )

    def kept(**options: int) -> tuple[int, int]:
        chosen = Model(config="x", precision="bf16", **options)  # type: ignore[arg-type]
        config = Config(data=Data(shards=""), model=chosen)
        items = price(config, model, ranks=2, capacity=8192, precision="bf16")
        return (
            items["inputs of layers that recompute"],
            items["activations of one layer, and of those that keep them"],
        )

    inputs, one = kept()
    assert inputs == 64 * 8192 * 5120 * 2
    assert kept(checkpointing=2) == (inputs // 2, one * (1 + 32))
    assert kept(keep_layers=16, whole_layers=16) == (inputs // 2, one * (1 + 16) + one * 16 // 2)
    assert kept(checkpointing=0) == (0, one * 65)
    assert kept(host_layers=64) == (inputs, one + one), (
        "two are on their way, the others in the host's memory"
    )


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, (1.0, 0.0)),
        ({"checkpointing": 0}, (0.0, 0.0)),
        ({"checkpointing": 2}, (0.5, 0.0)),
        ({"keep_layers": 2, "whole_layers": 1}, (0.625, 0.25)),
        ({"keep_layers": 2, "whole_layers": 1, "host_layers": 3}, (0.25, 0.625)),
    ],
)
def test_shares_that_recompute(options: dict[str, int], shares: tuple[float, float]) -> None:
    """Of eight layers, those that compute all again and those that keep their products."""
    model = Model(config="x", **options)  # type: ignore[arg-type]
    assert recomputed(Config(data=Data(shards=""), model=model), layers=8) == shares


@pytest.mark.parametrize(("states", "each"), [("weights", 8), ("8bit", 6)])
def test_offloading_moves_weights_gradients_and_states_to_the_host(
    states: Literal["weights", "8bit"], each: int
) -> None:
    """What the GPU no longer holds, the host does: 8 bytes a parameter in bf16; what is gathered stays."""
    model = skeleton(
        AutoConfig.for_model(**json.loads((CONFIGS / "ladder-27b.json").read_text())), precision="bf16"
    )
    bills, hosts = [], []
    for offload in (False, True):
        config = Config(
            data=Data(shards=""),
            model=Model(config="x", precision="bf16"),
            parallel=Parallel(offload=offload),
            optim=Optim(states=states),
        )
        bills.append(price(config, model, ranks=2, capacity=8192, precision="bf16"))
        on_host = price_on_host(config, model, ranks=2, capacity=8192, precision="bf16")
        hosts.append(sum(on_host.values()))
    assert hosts == [0, model.num_parameters() * each // 2]
    assert sum(bills[0].values()) - sum(bills[1].values()) == pytest.approx(hosts[1], abs=4)
    kept = "gathered layers, their gradients and sums"
    assert bills[0][kept] == bills[1][kept] > 0


def test_products_on_the_host_are_what_a_step_puts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the three first layers of four, a delta rule's in all: to the byte, in an fp32 step on a CPU."""
    config = Config(data=Data(shards=""), model=Model(config="tiny-qwen3_5", host_layers=3))
    model = Qwen3_5ForCausalLM(read_config(config.model, vocabulary=50)).train()
    recompute(blocks(model), host_layers=3)
    model(input_ids=torch.arange(40)[None], use_cache=False)
    contexts = [layer._gradient_checkpointing_func.keywords["context_fn"] for layer in blocks(model)[:3]]
    held = sum(host.nbytes for context in contexts for host in context.args[0]._host)
    priced = price_on_host(config, model, ranks=2, capacity=40, precision="fp32")
    assert priced == {
        "weights, gradients and optimizer states": 0,
        "kept products, pinned": held,
        "copy of what a checkpoint holds, while it is written": 0,
    }
    world: Any = SimpleNamespace(size=4, local_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(cost, "free_memory", lambda: 3 * 2**30)
    lines = itemised(config, model, world=world, capacity=40, precision="fp32")
    assert lines[-2].endswith("in the host's memory for each rank: kept products, pinned")
    assert re.fullmatch(
        rf" *{2 * held / 2**20:.2f} MiB  in the host's memory for its 2 ranks, .*, at most 3.00 GiB are free",
        lines[-1],
    )


def test_too_little_memory_is_foreseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU's ranks' price, or what a GPU's keep on the host, against what is free; the most is named."""
    config = Config(data=Data(shards=""), checkpoint=Checkpoint(background=True))
    model = skeleton(plain(), precision="fp32")
    arguments: dict[str, Any] = {"ranks": 4, "capacity": 8192, "precision": "fp32"}
    on_host = 2 * sum(price_on_host(config, model, **arguments).values())
    needed = on_host + 2 * sum(price(config, model, **arguments).values())
    monkeypatch.setattr(cost, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cost, "CGROUP", tmp_path / "none")

    def found(free: int | None, device: str) -> list[str]:
        """With so many KiB free."""
        if free is not None:
            cost.MEMINFO.write_text(f"MemTotal: 99 kB\nMemAvailable:   {free} kB\nBuffers: 1 kB\n")
        world: Any = SimpleNamespace(size=4, local_size=2, device=torch.device(device))
        return list(risks(config, model, world=world, capacity=8192, precision="fp32"))

    assert found(None, "cpu") == []
    assert found(needed // 1024 + 1, "cpu") == []
    (line,) = found(needed // 1024 - 1, "cpu")
    assert line.startswith(
        f"{needed / 2**20:.2f} MiB of memory for this machine's 2 ranks, estimated, most for"
    )
    assert "most for logits of the loss, and" in line
    assert found(on_host // 1024 + 1, "cuda") == []
    (line,) = found(on_host // 1024 - 1, "cuda")
    assert "most for copy of what a checkpoint holds" in line
    cost.MEMINFO.write_text("MemTotal: 99 kB\n")  # says nothing of what is available
    assert found(None, "cpu") == []


V1, V2 = "memory.limit_in_bytes", "memory.max"


@pytest.mark.parametrize(
    ("groups", "mounts", "file"),
    [
        # version 2, in a container with a name space of its own, in one without, and in a Slurm job
        ("0::/", "/ {}/cgroup rw - cgroup2 cgroup rw,nsdelegate", f"cgroup/{V2}"),
        ("0::/kubepods/pod1", "/ {}/cgroup rw - cgroup2 cgroup rw", f"cgroup/{V2}"),
        ("0::/kube/pod1/a", "/kube/pod1 {}/cgroup rw shared:9 master:2 - cgroup2 none rw", f"cgroup/a/{V2}"),
        ("0::/slurm/job_7/step_0", "/ {}/cgroup rw - cgroup2 cgroup rw", f"cgroup/slurm/job_7/{V2}"),
        # mounted from outside of our name space, of which it is an ancestor
        ("0::/", "/../.. {}/cgroup rw - cgroup2 cgroup rw", f"cgroup/{V2}"),
        # version 1: alone, under a joint name, anywhere, as a container's part
        (
            "4:memory:/docker/5",
            "/docker/5 {}/cgroup/memory rw - cgroup cgroup rw,memory",
            f"cgroup/memory/{V1}",
        ),
        ("4:cpu,memory:/job", "/ {}/cpu,memory rw - cgroup cgroup rw,cpu,memory", f"cpu,memory/job/{V1}"),
        ("9:cpu:/\n4:hugetlb,memory:/job", "/ {}/m rw - cgroup none rw,memory,hugetlb", f"m/{V1}"),
        ("4:memory:/a\\x2db c", "/a\\134x2db\\040c {}/my\\040own rw - cgroup c rw,memory", f"my own/{V1}"),
        # hybrid: version 2 beside, without the controller
        (
            "4:memory:/job\n0::/user",
            "/ {0}/unified rw - cgroup2 cgroup2 rw\n/ {0}/memory rw - cgroup cgroup rw,memory",
            f"memory/job/{V1}",
        ),
    ],
)
def test_a_control_group_s_limit_counts(
    groups: str, mounts: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tightest limit of this process's groups and those around them, wherever they are mounted."""
    for what in ("MEMINFO", "CGROUP", "MOUNTS"):
        monkeypatch.setattr(cost, what, tmp_path / what)
    cost.MEMINFO.write_text("MemAvailable: 2000 kB\n")
    assert cost.free_memory() == 2000 * 1024
    cost.CGROUP.write_text(f"{groups}\n")
    assert cost.free_memory() == 2000 * 1024
    others = (
        f"23 28 0:21 / {tmp_path}/proc rw - proc proc rw\n24 28 0:22 / {tmp_path}/cpu rw - cgroup c rw,cpu\n"
    )
    lines = mounts.format(tmp_path).splitlines()
    cost.MOUNTS.write_text(others + "".join(f"3{i} 25 0:2{i} {line}\n" for i, line in enumerate(lines)))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / V1).write_text("1\n")
    limited = tmp_path / file
    limited.parent.mkdir(parents=True)
    assert cost.free_memory() == 2000 * 1024
    for limit, free in (("max\n", 2000 * 1024), (f"{2**63 - 4096}\n", 2000 * 1024), ("12345\n", 12345)):
        limited.write_text(limit)
        assert cost.free_memory() == free


def test_another_control_group_s_limit_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of somebody else's group that is mounted here says nothing of what this process may take."""
    for what in ("MEMINFO", "CGROUP", "MOUNTS"):
        monkeypatch.setattr(cost, what, tmp_path / what)
    cost.MEMINFO.write_text("MemAvailable: 2000 kB\n")
    cost.CGROUP.write_text("0::/docker/mine\n")
    cost.MOUNTS.write_text(f"30 25 0:20 /docker/other {tmp_path}/theirs rw - cgroup2 cgroup rw\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / V2).write_text("12345\n")
    assert cost.free_memory() == 2000 * 1024


def test_a_checkpoint_that_torchrun_would_cut_off_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun alone: before torch 2.12 after 30 s in any case, since after what the variable says."""
    config = Config(data=Data(shards=""))
    model = skeleton(plain(), precision="fp32")
    world: Any = SimpleNamespace(size=2, local_size=1, device=torch.device("cuda"))
    monkeypatch.setattr(
        cost, "WRITTEN_PER_S", 12 * model.num_parameters() / 2 / 45
    )  # 45 s, weights and moments

    def found(version: str, **variables: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", version)
            patch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            return list(risks(config, model, world=world, capacity=64, precision="fp32"))

    under = {"TORCHELASTIC_ERROR_FILE": "logs/run_x/attempt_0/0/error.json"}
    assert found("2.11.0+cu130") == []
    for version, seconds in (("2.11.0+cu130", "580"), ("2.13.0", "30"), ("2.13.0", "40")):
        (line,) = found(version, **under, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=seconds)
        told = "30" if version.startswith("2.11") else seconds
        assert line.startswith(f"torchrun kills its ranks {told} s after SIGTERM")
        assert " takes 45 s " in line
    assert found("2.13.0", **under, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="580") == []


def test_replicas_hold_as_much_as_their_group_does_alone() -> None:
    """Four ranks as two replicas of two: each line is that of two ranks, which is more than four hold."""
    model = skeleton(plain(), precision="fp32")

    def lines(ranks: int, replicas: int) -> list[str]:
        config = Config(data=Data(shards=""), parallel=Parallel(replicas=replicas))
        world: Any = SimpleNamespace(size=ranks, local_size=ranks, device=torch.device("cpu"))
        found = itemised(config, model, world=world, capacity=64, precision="fp32")
        return [re.sub(r"on each of \d ranks", "", line) for line in found]

    assert lines(4, replicas=2) == lines(2, replicas=1) != lines(4, replicas=1)


def test_a_checkpoint_in_the_background_is_priced_on_the_host() -> None:
    """Weights and both moments, 12 bytes a parameter in fp32, over the ranks; with adapters theirs alone."""
    pytest.importorskip("peft")
    behind = Checkpoint(background=True)
    model = skeleton(plain(), precision="fp32")
    whole = price_on_host(
        Config(data=Data(shards=""), checkpoint=behind), model, ranks=2, capacity=64, precision="fp32"
    )
    assert sum(whole.values()) == pytest.approx(12 * model.num_parameters() / 2, abs=4)
    lora = Lora(rank=4)
    add_adapters(model, lora=lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = Config(data=Data(shards=""), lora=lora, checkpoint=behind)
    adapters = price_on_host(config, model, ranks=2, capacity=64, precision="fp32")
    assert sum(adapters.values()) == pytest.approx(12 * trained / 2, abs=4)
    assert trained < model.num_parameters() / 2


def test_frozen_weights_cost_no_gradient() -> None:
    """With adapters of rank 4 the model's own products cost 4 a weight and token, the adapters' 6."""
    pytest.importorskip("peft")
    config = plain()
    own = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12) + 50 * 8
    added = 4 * 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 12))
    model = skeleton(config, precision="bf16")
    before = price(Config(data=Data(shards="")), model, ranks=1, capacity=64, precision="bf16")
    add_adapters(model, lora=Lora(rank=4))
    pairs = 10 * 11 // 2
    counted = work(model)
    assert counted
    assert counted.step([10]) == (4 * own + 6 * added) * 10 + 2 * 12 * (2 * 4) * pairs
    lora = Config(data=Data(shards=""), lora=Lora(rank=4))
    after = price(lora, model, ranks=1, capacity=64, precision="bf16")
    assert after["weights"] - before["weights"] == 4 * added
    assert (after["gradients"], after["optimizer states"]) == (4 * added, 8 * added)
