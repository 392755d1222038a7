"""Known traps, each with a message of its own that says what to do."""

import dataclasses
import functools
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from training.kernels import (
    KernelError,
    attention,
    bind,
    binding,
    compilation,
    convolution,
    describe,
    handshake,
    make_batch,
    record,
    recurrence,
    with_chunk_indices,
)
from training.kernels import packages as packages_module
from training.kernels.families import FAMILIES, tiny
from training.kernels.packages import Machine, machine, probe

FAMILY = {family.name: family for family in FAMILIES}
LENGTHS = (3, 2, 4)


def batch_of(**changes: Any) -> dict[str, Any]:
    return make_batch(torch.arange(9), LENGTHS) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(1, 9)}, "attention_mask was given"),
        ({"use_cache": True}, "pass use_cache=False"),
        ({"use_cache": None}, "pass use_cache=False"),
        ({"past_key_values": object()}, "pass use_cache=False"),
        ({"position_ids": torch.zeros(3, 1, 9, dtype=torch.long)}, r"got \(3, 1, 9\): a 3-D tensor"),
        ({"position_ids": None}, r"position_ids must be int64\[1, 9\]"),
        ({"cu_seq_lens_q": None}, r"cu_seq_lens_q must be int32\[N \+ 1\]; got nothing"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "got torch.int64 of shape"),
        ({"cu_seq_lens_k": None}, "cu_seq_lens_k must be"),
        ({"max_length_q": torch.tensor(4)}, "max_length_q must be a Python int"),
        ({"seq_idx": None}, r"seq_idx must be int32\[1, 9\]; got nothing"),
        ({"seq_idx": torch.zeros(1, 9, dtype=torch.long)}, "seq_idx must be int32"),
        ({"input_ids": torch.zeros(2, 9, dtype=torch.long)}, r"one row, int64\[1, T\]; got \(2, 9\)"),
        ({"input_ids": None}, "one row"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 3, 9], dtype=torch.int32)}, "self_attn: boundaries that"),
    ],
)  # fmt: skip
def test_a_call_that_turns_isolation_off_is_refused(changes: dict[str, Any], message: str) -> None:
    """Every argument that other code would pass over in silence stops the call."""
    model = bind(tiny(FAMILY["Llama"]))
    with pytest.raises(KernelError, match=message):
        model(**batch_of(**changes))


def test_the_error_names_the_layer() -> None:
    """A boundary that does not reach a layer is reported with the layer's name."""
    model = bind(tiny(FAMILY["Qwen3.5"]))
    layer = model.model.layers[1]

    def drop(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {key: value for key, value in kwargs.items() if key != "seq_idx"}

    layer.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(KernelError, match=r"layers\.1\.linear_attn: .* without boundaries"):
        model(**batch_of())


def test_dropout_is_refused() -> None:
    """Attention dropout is named when the model is bound."""
    model = tiny(FAMILY["Llama"])
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(KernelError, match=r"layers\.0\.self_attn: attention dropout 0.1"):
        bind(model)


def test_attention_in_both_directions_is_refused() -> None:
    """Gemma 3's bidirectional variant is named when the model is bound."""
    model = tiny(FAMILY["Gemma 3"])
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(KernelError, match=r"layers\.1\.self_attn: attention in both directions"):
        bind(model)


def test_an_unknown_attention_feature_is_refused() -> None:
    """A keyword that could change what attention computes is refused by its name, not dropped."""
    model = bind(tiny(FAMILY["Llama"]))
    with pytest.raises(
        KernelError, match=r"self_attn: attention has features that are not known here: position_bias"
    ):
        model(**batch_of(position_bias=torch.zeros(1)))


@pytest.mark.parametrize(
    ("name", "layer", "feature"),
    [
        ("Qwen3.5", r"layers\.0\.linear_attn: the convolution", "initial_states"),
        ("Kimi-linear", r"layers\.0\.self_attn: the convolution", "residual"),
        ("LFM2", r"layers\.0\.conv: the convolution", "bias_of_another_kind"),
    ],
)  # fmt: skip
def test_unknown_features_of_other_layers_are_refused(name: str, layer: str, feature: str) -> None:
    """So is one that would change a convolution or a recurrence."""
    if name == "LFM2" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("5.17's LFM2 layer hands nothing on")
    model = bind(tiny(FAMILY[name]))
    with pytest.raises(KernelError, match=f"{layer} has features that are not known here: {feature}"):
        model(**batch_of(**{feature: torch.zeros(1)}))


def test_recurrences_refuse_what_they_would_drop() -> None:
    """A first state or a gate from a later transformers stops the reference and the fused function alike."""
    x = torch.zeros(1, 4, 2, 8)
    flat = torch.zeros(1, 4, 2)
    ends = {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "chunk_size": 16, "z": None}
    scans = (
        recurrence.fla_state_space,
        recurrence.scan_by_sequence(recurrence.STATE_SPACE, lambda *_, **__: x),
    )
    for scan in scans:
        for feature in ("z", "initial_states"):
            with pytest.raises(KernelError, match=f"the state space has features .* here: {feature}"):
                scan(x, flat, flat[0, 0], x, x, **{**ends, feature: x})
    rules = (
        recurrence.fla_delta_rule, recurrence.flash_qla_delta_rule, recurrence.fla_kimi_delta,
        recurrence.rule_by_sequence(recurrence.DELTA_RULE, lambda *_, **__: (x, None)),
    )  # fmt: skip
    for rule in rules:
        with pytest.raises(KernelError, match="has features that are not known here: initial_state"):
            rule(x, x, x, g=flat, beta=flat, cu_seqlens=ends["cu_seq_lens_q"], initial_state=x)


def test_a_replaced_forward_is_refused() -> None:
    """Hub kernels replace a layer's forward on the instance: then ours would never be called."""
    model = tiny(FAMILY["Qwen3.5"])
    model.model.layers[0].linear_attn.forward = lambda *_: None
    with pytest.raises(KernelError, match=r"linear_attn: its forward was replaced.*USE_HUB_KERNELS=NO"):
        bind(model)


def test_a_hub_kernel_in_the_modelling_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel object stands in a reference's place, there is nothing to walk the segments with."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", torch.nn.Identity())
    with pytest.raises(KernelError, match="a hub kernel stands in for its convolution"):
        bind(tiny(FAMILY["Qwen3.5"]))


def test_a_transformers_that_calls_other_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a layer no longer calls the function that is bound, binding says so instead of doing nothing."""
    monkeypatch.setitem(binding.MIXERS, "Lfm2ShortConv", {"another_function": "convolution"})
    with pytest.raises(KernelError, match="Lfm2ShortConv does not call another_function"):
        bind(tiny(FAMILY["LFM2"]))


def test_options_that_can_not_be_are_refused() -> None:
    """Unknown kernels, fused ones without CUDA, and unknown choices."""
    model = tiny(FAMILY["Llama"])
    with pytest.raises(KernelError, match='must be "auto", "fused" or "reference"'):
        bind(model, kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match='"fused" needs CUDA, the model is on cpu'):
        bind(model, kernels="fused")
    with pytest.raises(KernelError, match="there is no 'mine' for 'delta rule'"):
        bind(model, choose={"delta rule": "mine"})


# --- a machine with CUDA, pretended ------------------------------------------------------------------------

HOPPER = Machine(device="cuda", name="H200", capability=(9, 0), triton="3.6.0")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bind(model, device="cuda")` sees an H200 with triton 3.6 and a compiler."""
    monkeypatch.setattr(compilation, "tilelang_unready", lambda: None)
    monkeypatch.setattr(
        recurrence, "_fla_takes_tilelang", lambda what: sys.modules.get("tilelang") is not None
    )
    monkeypatch.setattr(binding, "machine", lambda device: HOPPER if device == "cuda" else machine(device))


def pretend(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Puts packages in place: a namespace for one that imports, None for one that does not."""
    for name, content in modules.items():
        module = name.replace("__", ".")
        if content is not None:
            content.__path__ = []
        monkeypatch.setitem(sys.modules, module, content)


def package(**functions: Any) -> Any:
    module = types.ModuleType("pretended")
    module.__file__ = "pretended.py"
    vars(module).update(functions)
    return module


def published(name: str) -> Any:
    from training.kernels.families import build, tiny_config

    with torch.device("meta"):
        return build(tiny_config(FAMILY[name], real_heads=True), FAMILY[name].architecture, device="meta")


def test_fla_is_not_flash_qla_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where flash-qla is installed, fla hands calls on to it; who chose fla gets fla's own kernels."""
    x = torch.zeros(1, 4, 2, 8)

    def own(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return x + 1, None

    @functools.wraps(own)
    def dispatching(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return x + 2, None

    pretend(
        monkeypatch,
        fla=package(),
        fla__ops=package(),
        fla__ops__gated_delta_rule=package(chunk_gated_delta_rule=torch.compiler.disable(dispatching)),
    )
    ends = torch.tensor([0, 4], dtype=torch.int32)
    out, _ = recurrence.fla_delta_rule(x, x, x, g=x[..., 0], beta=x[..., 0], cu_seqlens=ends)
    assert torch.equal(out, x + 1)


def test_without_packages_cuda_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent fallback: training on a GPU needs kernels or the word "reference"."""
    pretend(monkeypatch, fla=None, flash_qla=None, causal_conv1d=None)
    with pytest.raises(
        KernelError, match=r"linear_attn: no fused convolution: causal-conv1d: .*fla: .*reference"
    ):
        bind(published("Qwen3.5"), device="cuda")
    bound = bind(published("Qwen3.5"), device="cuda", kernels="reference")
    assert {row.bound for row in describe(bound)} == {
        "sdpa, sequence by sequence",
        "segment-walking reference",
    }


def test_flash_qla_serves_heads_of_128(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper flash-qla comes first, for head dims of 128; another can be chosen by name."""
    pretend(monkeypatch, fla=package(), flash_qla=package(), causal_conv1d=package(), tilelang=package())
    bound = {row.part: row.bound for row in describe(bind(published("Qwen3.5"), device="cuda"))}
    assert bound["delta rule"] == "flash-qla"
    assert bound["convolution"] == "causal-conv1d"
    assert bound["attention"].startswith("torch varlen_attn")
    chosen = bind(published("Qwen3.5"), device="cuda", choose={"delta rule": "fla", "convolution": "fla"})
    assert {row.bound for row in describe(chosen) if row.part != "attention"} == {"fla"}


def test_a_missing_compiler_is_named_when_the_model_is_bound(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first step: flash-qla is refused, not passed over; so is fla if it takes tilelang."""
    pretend(monkeypatch, fla=package(), flash_qla=package(), causal_conv1d=package(), tilelang=package())
    for function in ("tilelang_unready", "no_compiler"):
        monkeypatch.setattr(compilation, function, lambda: "install the CUDA toolkit")
    with pytest.raises(
        KernelError, match=r'linear_attn: flash-qla: install the CUDA toolkit; or choose "fla" for the delta'
    ):
        bind(published("Qwen3.5"), device="cuda")
    fla = {"delta rule": "fla"}
    for name in ("Qwen3.5", "Bamba", "Kimi-linear"):
        with pytest.raises(KernelError, match=r"takes a kernel of tilelang: install the CUDA toolkit"):
            bind(published(name), device="cuda", choose=fla)
    # Without nvcc fla goes by itself to triton, if that is sound.
    monkeypatch.setattr(recurrence, "_fla_takes_tilelang", lambda what: False)
    for name in ("Qwen3.5", "Bamba"):
        with pytest.raises(KernelError, match=r"tilelang can't stand in \(install the CUDA toolkit\)"):
            bind(published(name), device="cuda", choose=fla)
    bind(published("Kimi-linear"), device="cuda")
    monkeypatch.setattr(binding, "machine", lambda device: dataclasses.replace(HOPPER, triton="3.7.1"))
    for name in ("Qwen3.5", "Bamba"):
        bind(published(name), device="cuda", choose=fla)


def test_flas_own_choice_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its backend is there, with an nvcc, and not turned off; Kimi's rule has one of its own."""
    there: dict[str, bool] = {}

    class Backend:
        @staticmethod
        def is_available() -> bool:
            return there["nvcc"]

        def is_enabled(self) -> bool:
            return there["on"]

    class Other(Backend):
        def is_enabled(self) -> bool:
            return not there["on"]

    pretend(
        monkeypatch,
        fla=package(),
        fla__ops=package(),
        fla__ops__common=package(),
        fla__ops__common__backends=package(CommonTileLangBackend=Backend),
        fla__ops__kda=package(),
        fla__ops__kda__backends=package(KDATileLangBackend=Other),
    )
    for nvcc, on in itertools.product((False, True), repeat=2):
        there.update(nvcc=nvcc, on=on)
        for what in (recurrence.DELTA_RULE, recurrence.STATE_SPACE):
            assert recurrence._fla_takes_tilelang(what) is (nvcc and on)
        assert recurrence._fla_takes_tilelang(recurrence.KIMI_DELTA) is (nvcc and not on)


def test_the_real_fla_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed: its backends are found, and FLA_TILELANG=0 turns them off."""
    pytest.importorskip("fla")
    monkeypatch.setenv("FLA_TILELANG", "0")
    for what in (recurrence.DELTA_RULE, recurrence.STATE_SPACE, recurrence.KIMI_DELTA):
        assert recurrence._fla_takes_tilelang(what) is False


@pytest.mark.parametrize(
    ("name", "heads", "present", "message"),
    [
        ("Qwen3.5", 128, {"fla": package(), "tilelang": None}, "tilelang can't stand in"),
        ("Qwen3.5", 64, {"fla": package(), "tilelang": package()}, "head dims 33 to 64 are wrong"),
        ("Bamba", None, {"fla": package(), "tilelang": None}, r"state space: fla: .*triton>=3.7.1"),
    ],
)  # fmt: skip
def test_the_triton_fault_on_hopper_is_refused(
    hopper: None, monkeypatch: pytest.MonkeyPatch, name: str, heads: int | None, present: Any, message: str
) -> None:
    """Gated backward kernels are miscompiled by triton 3.4 to 3.7.0: refused, with what to install."""
    pretend(monkeypatch, flash_qla=None, causal_conv1d=package(), **present)
    model = published(name)
    if heads:
        for layer in model.model.layers[:2]:
            layer.linear_attn.head_k_dim = heads
    with pytest.raises(KernelError, match=message):
        bind(model, device="cuda")


@pytest.mark.parametrize(
    ("triton", "capability", "fault"),
    [("3.3.1", (9, 0), False), ("3.4.0", (9, 0), True), ("3.7.0", (9, 0), True), ("3.7.1", (9, 0), False),
     ("3.6.0", (8, 0), False), ("3.6.0", (10, 0), False), (None, (9, 0), False)],
)  # fmt: skip
def test_which_triton_has_the_fault(triton: str | None, capability: tuple[int, int], fault: bool) -> None:
    """Hopper, 3.4.0 <= triton < 3.7.1, nothing else."""
    assert Machine(device="cuda", name="", capability=capability, triton=triton).triton_fault is fault


@pytest.mark.parametrize(
    ("channels", "width", "message"), [(12, 4, "8 channels, not 12"), (16, 5, "widths 2 to 4, not 5")]
)  # fmt: skip
def test_causal_conv1d_shapes_are_checked(
    hopper: None, monkeypatch: pytest.MonkeyPatch, channels: int, width: int, message: str
) -> None:
    """Shapes that causal-conv1d can't compute are found when the model is bound."""
    pretend(monkeypatch, fla=None, causal_conv1d=package())
    model = published("LFM2")
    model.model.layers[0].conv.conv = torch.nn.Conv1d(channels, channels, width, groups=channels)
    with pytest.raises(KernelError, match=message):
        bind(model, device="cuda")


def test_an_old_causal_conv1d_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.7 it reads out of bounds at some lengths."""
    pretend(monkeypatch, fla=None, causal_conv1d=package())
    monkeypatch.setattr(packages_module, "_version", lambda distribution: "1.6.2")
    with pytest.raises(KernelError, match=r"1\.6\.2 reads out of bounds"):
        bind(published("LFM2"), device="cuda")


def test_sinks_are_refused_on_cuda(hopper: None) -> None:
    """Where attention has no sinks, gpt-oss is refused by name, not computed without them."""
    with pytest.raises(KernelError, match=r"layers\.0\.self_attn: .* has no sinks"):
        bind(published("gpt-oss"), device="cuda")


def test_a_batch_on_another_device_is_refused(hopper: None) -> None:
    """Kernels bound for CUDA are not called on a CPU, nor the other way round."""
    model = bind(tiny(FAMILY["Llama"]), device="cuda")
    with pytest.raises(KernelError, match="bound for cuda, the batch is on cpu"):
        model(**batch_of())


def test_the_boundaries_reach_the_packages(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What packages get: the batch's own int32 tensors, channel-last input, indices made on the host."""
    got: dict[str, Any] = {}

    def conv(x: torch.Tensor, weight: torch.Tensor, bias: Any, **options: Any) -> torch.Tensor:
        got.update(x=x, seq_idx=options["seq_idx"])
        return x

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        got.update(options)
        return v, None

    pretend(
        monkeypatch,
        fla=package(),
        fla__ops=package(),
        fla__ops__gated_delta_rule=package(chunk_gated_delta_rule=rule),
        tilelang=package(),
        causal_conv1d=package(causal_conv1d_fn=conv),
    )
    model = tiny(FAMILY["Qwen3.5"])
    bind(model, device="cuda", choose={"delta rule": "fla"})
    binding.binding_of(model).device = "cpu"
    batch = with_chunk_indices(batch_of())
    with handshake(model, batch):
        model(**batch)
    assert got["cu_seqlens"] is batch["cu_seq_lens_q"]
    assert got["seq_idx"] is batch["seq_idx"]
    assert got["chunk_indices"].tolist() == [[0, 0], [1, 0], [2, 0]]
    assert got["chunk_indices"].dtype == torch.int32
    assert got["x"].stride(1) == 1

    monkeypatch.setattr(
        record,
        "launch",
        lambda what, form, argument, kernel, *args, **options: kernel(*args, **{**options, argument: None}),
    )
    with pytest.raises(KernelError, match="did not report"), handshake(model, batch):
        model(**batch)


# --- packages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_missing_part", "ModuleNotFoundError: No module named 'a_missing_part'"),
        ("from os import symbol_of_another_version", "ImportError: cannot import name 'symbol_of_another"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12:"),
        ("raise RuntimeError('no kernel image for sm_70')", "RuntimeError: no kernel image for sm_70"),
        ("import os; os.gone_from_this_torch", "AttributeError: module 'os' has no attribute 'gone_from"),
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "AssertionError: Torch not"),
        ("raise ValueError('numpy.dtype size changed')", "ValueError: numpy.dtype size changed"),
    ],
    ids=["part", "symbol", "library", "architecture", "torch", "cuda", "numpy"],
)  # fmt: skip
def test_a_broken_package_is_reported_with_its_cause(
    source: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is there but does not import is not called missing."""
    (tmp_path / "half_installed.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(probe("half_installed").cause).startswith(cause)
    assert "half_installed" not in sys.modules


def test_an_absent_package_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a name nowhere to be found nor a mere folder of that name is a package that fails."""
    (tmp_path / "a_mere_folder" / "part").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("a_mere_folder", "a_mere_folder.part", "nowhere_to_be_found"):
        assert probe(module).cause == "not installed"
    monkeypatch.setattr(packages_module, "_version", lambda distribution: "1.0")
    assert probe("a_mere_folder").cause == "a folder of that name on the path hides it"
    assert probe("torch").cause is None


def test_a_part_counts_only_with_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 4 lives inside `flash_attn`, whose version 2 brings an unfinished part of that name."""
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "__init__.py").touch()
    (tmp_path / "older" / "part.py").write_text("import a_missing_part\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(packages_module.PACKAGES, "older.part", "newer")
    assert probe("older.part").cause == "not installed"
    monkeypatch.setattr(packages_module, "_version", lambda distribution: "4.0")
    assert "a_missing_part" in str(probe("older.part").cause)


def test_flash_attention_that_is_not_installed_is_refused(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 3 or 4, asked for by name, is had or refused with its cause; the model stays unbound."""
    model = tiny(FAMILY["Llama"])
    for wanted in ("FA3", "FA4"):
        with pytest.raises(KernelError, match=f"attention: {wanted} can't be used: No module named"):
            bind(model, device="cuda", choose={"attention": wanted})
        with pytest.raises(KernelError, match="is not bound"):
            describe(model)

    def broken(wanted: str) -> None:
        raise RuntimeError(f"Module 'flash_attn_interface' does not expose {wanted} kernels")

    monkeypatch.setattr(attention, "activate_flash_attention_impl", broken)
    with pytest.raises(KernelError, match=r"FA3 can't be used: Module .* does not expose FA3 kernels"):
        bind(model, device="cuda", choose={"attention": "FA3"})


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3"])
def test_flash_attention_4_is_refused_for_windows(
    hopper: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its backward has no window, which a layer or its configuration knows: refused, chosen or active."""
    refused = r"layers\.0\.self_attn: FlashAttention 4 can't train with a sliding window"
    with pytest.raises(KernelError, match=refused):
        bind(published(name), device="cuda", choose={"attention": "FA4"})
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA4")
    with pytest.raises(KernelError, match=refused):
        bind(published(name), device="cuda")
    bind(published("Llama"), device="cuda")


def test_mamba_2_goes_through_tilelang_in_fp32(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where triton's backward is wrong, the state space takes the detour that tilelang's kernel accepts."""
    pretend(monkeypatch, fla=package(), tilelang=package(), causal_conv1d=package())
    rows = {row.part: row for row in describe(bind(published("Bamba"), device="cuda"))}
    assert rows["state space"].bound == "fla, in fp32"
    assert rows["state space"].origin == "training.kernels.recurrence.fla_state_space_fp32"


@pytest.mark.parametrize("layout", ["transposed", "contiguous", "sliced", "offset"])
def test_causal_conv1d_gets_a_layout_that_it_reads(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """`seq_idx` is read in the channel-last layout alone, with strides and address in units of 16 bytes."""
    wide = torch.randn(1, 9, 44)
    x = {
        "transposed": torch.randn(1, 9, 16).transpose(1, 2),
        "contiguous": torch.randn(1, 16, 9),
        "sliced": wide[:, :, 8:24].transpose(1, 2),
        "offset": torch.randn(1, 9, 48)[:, :, 3:19].transpose(1, 2),
    }[layout]
    got: list[torch.Tensor] = []
    pretend(monkeypatch, causal_conv1d=package(causal_conv1d_fn=lambda x, *_, **__: got.append(x) or x))
    out = convolution.causal_conv1d(x, torch.ones(16, 4), seq_idx=torch.zeros(1, 9, dtype=torch.int32))
    assert torch.equal(out, x)
    assert got[0].stride(1) == 1
    assert got[0].stride(2) % 8 == 0
    assert got[0].data_ptr() % 16 == 0


def test_compiled_layers_call_what_is_bound(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inlining a layer, dynamo finds our function too, not the modelling file's."""
    torch._dynamo.reset()
    pretend(monkeypatch, fla=None, causal_conv1d=package(causal_conv1d_fn=lambda x, *_, **__: 3.0 * x))
    model = bind(tiny(FAMILY["LFM2"]), device="cuda")
    layer = model.model.layers[0].conv
    call = {"seq_idx": batch_of()["seq_idx"]}  # all that 5.17's layer takes
    hidden = torch.randn(1, 9, 32)
    compiled = torch.compile(lambda hidden: layer(hidden, **call), backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden), layer(hidden, **call))
    torch._dynamo.reset()
