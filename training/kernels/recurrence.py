"""The linear recurrences, whose state ends with each sequence: delta rules and state space."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from training.kernels import compilation, record
from training.kernels.contract import KernelError, outside_compile, refuse_unknown, segment_lengths
from training.kernels.packages import Machine, probe

DELTA_RULE = "delta rule"
KIMI_DELTA = "Kimi delta attention"
STATE_SPACE = "state space"
Rule = Callable[..., Any]


# --- references: one sequence after the other --------------------------------------------------------------


def rule_by_sequence(what: str, reference: Rule) -> Rule:
    """The modelling file's own delta rule (`what` is DELTA_RULE or KIMI_DELTA), sequence by sequence."""

    @outside_compile
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query, key [1, T, H, d], value [1, T, H_v, d_v], g and beta [1, T, H_v, …] to [1, T, H_v, d_v]."""
        _refuse(what, output_final_state, options)
        lengths = segment_lengths(cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens)
        record.note(what, "lengths", lengths)
        parts = zip(*(torch.split(t, lengths, dim=1) for t in (query, key, value, g, beta)), strict=True)
        outputs = [
            reference(q, k, v, g=decay, beta=b, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
            for q, k, v, decay, b in parts
        ]
        return torch.cat(outputs, dim=1), None

    return rule


_SCAN = {"chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit"}
"""What Mamba-2's scan takes beside its tensors and boundaries; a first state and a gate it is never given."""


def scan_by_sequence(what: str, reference: Rule) -> Rule:
    """The modelling file's own Mamba-2 scan, sequence by sequence."""

    @outside_compile
    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        seq_idx: torch.Tensor | None = None,
        return_final_states: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """hidden_states [1, T, H, d], dt [1, T, H], A [H], B and C [1, T, groups, n] to [1, T, H, d]."""
        _refuse(what, return_final_states, {k: v for k, v in options.items() if k not in _SCAN})
        lengths = segment_lengths(cu_seqlens=None, seq_idx=seq_idx)
        record.note(what, "lengths", lengths)
        parts = zip(*(torch.split(t, lengths, dim=1) for t in (hidden_states, dt, B, C)), strict=True)
        return torch.cat([reference(x, step, A, b, c, **options) for x, step, b, c in parts], dim=1)

    return scan


def _refuse(what: str, last_state: bool, options: Mapping[str, Any]) -> None:
    if last_state:
        raise KernelError(f"the {what} was asked for its last state: pass use_cache=False")
    refuse_unknown(f"the {what}", options)


# --- fused -------------------------------------------------------------------------------------------------


def fla_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """flash-linear-attention's gated delta rule in triton: shapes as above, cu_seqlens int32[N + 1].

    With `chunk_indices` (int32[NT, 2], see `with_chunk_indices`) there is no sync; without, one a batch.
    """
    _refuse(DELTA_RULE, output_final_state, options)
    return record.launch(
        DELTA_RULE,
        "cu_seqlens",
        "cu_seqlens",
        _triton_delta_rule,
        query,
        key,
        value,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )[0], None


@outside_compile
def _triton_delta_rule(*inputs: torch.Tensor, **options: Any) -> Any:
    """The function beneath fla's wrapper, which hands calls to flash-qla where that is installed."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return inspect.unwrap(chunk_gated_delta_rule)(*inputs, **options)


def flash_qla_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """flash-qla's gated delta rule: bf16 or fp16, head dims of 128; it reads the boundaries once a batch."""
    _refuse(DELTA_RULE, output_final_state, options)
    from flash_qla import chunk_gated_delta_rule

    if query.dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"flash-qla takes bf16 and fp16, not {query.dtype}: choose fla for the delta rule")
    return record.launch(
        DELTA_RULE,
        "cu_seqlens",
        "cu_seqlens",
        chunk_gated_delta_rule,
        query,
        key,
        value,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )[0], None


def fla_kimi_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """flash-linear-attention's KDA; the layer hands on `cu_seq_lens_q`, the kernel calls it `cu_seqlens`."""
    _refuse(KIMI_DELTA, output_final_state, options)
    from fla.ops.kda import chunk_kda

    return record.launch(
        KIMI_DELTA,
        "cu_seqlens",
        "cu_seqlens",
        chunk_kda,
        query,
        key,
        value,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
    )[0], None


def fla_state_space(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    cu_seq_lens_q: torch.Tensor | None = None,
    chunk_size: int | None = None,
    return_final_states: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Mamba-2's scan on flash-linear-attention's simple gated linear attention; shapes as above.

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t and y_t = C_t h_t + D x_t are its recurrence with q = C, k = B,
    v = dt x, log gate A dt and scale 1. B and C are repeated for each head: 2 H n T elements. It has a
    chunk size of its own.
    """
    _refuse(STATE_SPACE, return_final_states, options)
    from fla.ops.simple_gla import chunk_simple_gla

    heads = hidden_states.shape[2] // B.shape[2]
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    out: torch.Tensor = record.launch(
        STATE_SPACE,
        "cu_seqlens",
        "cu_seqlens",
        chunk_simple_gla,
        C.repeat_interleave(heads, dim=2),
        B.repeat_interleave(heads, dim=2),
        (hidden_states * step[..., None]).to(hidden_states.dtype),
        g=A.float() * step,
        scale=1.0,
        cu_seqlens=cu_seq_lens_q,
    )[0]
    return out if D is None else (out + D[:, None] * hidden_states).to(out.dtype)


def fla_state_space_fp32(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The same in fp32, for Hopper with a triton whose backward is wrong.

    The backward keeps its states in fp32, and tilelang's kernel, which stands in for triton's there, wants
    all inputs in the states' dtype. Costs twice the memory traffic.
    """
    out = fla_state_space(hidden_states.float(), dt, A, B.float(), C.float(), **options)
    return out.to(hidden_states.dtype)


# --- the choice --------------------------------------------------------------------------------------------

_FUSED: dict[str, dict[str, Rule]] = {
    DELTA_RULE: {"flash-qla": flash_qla_delta_rule, "fla": fla_delta_rule},
    KIMI_DELTA: {"fla": fla_kimi_delta},
    STATE_SPACE: {"fla": fla_state_space},
}
GROUPED: set[Rule] = {flash_qla_delta_rule, fla_delta_rule}
"""They take fewer query and key heads than value heads, each for several of those."""
_BY_SEQUENCE: dict[str, Callable[[str, Rule], Rule]] = {
    DELTA_RULE: rule_by_sequence,
    KIMI_DELTA: rule_by_sequence,
    STATE_SPACE: scan_by_sequence,
}


def choose(
    what: str, layer: torch.nn.Module, *, name: str, where: Machine, reference: Rule, wanted: str | None
) -> tuple[str, Rule]:
    """What computes a layer's recurrence here.

    Args:
        what: DELTA_RULE, KIMI_DELTA or STATE_SPACE.
        layer: The layer.
        name: Its name in the model.
        where: The machine.
        reference: The modelling file's own function.
        wanted: "flash-qla" or "fla" to have that one; None for the first that serves.

    Raises:
        KernelError: none serves: each with its cause; or the first that would can't be compiled.
    """
    if where.device != "cuda":
        return "segment-walking reference", _BY_SEQUENCE[what](what, reference)
    dims = _head_dims(what, layer)
    causes = {}
    for choice, function in _FUSED[what].items():
        if wanted not in (None, choice):
            continue
        cause = _qla_unserved(where, dims) if choice == "flash-qla" else _fla_unserved(what, where, dims)
        if cause is None and choice == "flash-qla" and (missing := compilation.tilelang_unready()):
            # Not passed over for a slower one: who installed it expects it.
            raise KernelError(f'{name}: flash-qla: {missing}; or choose "fla" for the {what}')
        if cause is None and what == STATE_SPACE and where.triton_fault:
            return f"{choice}, in fp32", fla_state_space_fp32
        if cause is None:
            return choice, function
        causes[choice] = cause
    raise KernelError(
        f"{name}: no fused {what}: {'; '.join(f'{choice}: {cause}' for choice, cause in causes.items())}. "
        "Install flash-linear-attention>=0.6 or mend the cause, or write "
        'kernels = "reference" (many times slower)'
    )


def _head_dims(what: str, layer: Any) -> tuple[int, int]:
    if what == DELTA_RULE:
        return layer.head_k_dim, layer.head_v_dim
    return (layer.head_dim, layer.head_dim) if what == KIMI_DELTA else (layer.ssm_state_size, layer.head_dim)


def _qla_unserved(where: Machine, dims: tuple[int, int]) -> str | None:
    if where.capability[0] not in (9, 10):
        return f"needs Hopper or Blackwell of compute capability 9 or 10, not {where.capability}"
    if dims != (128, 128):
        return f"needs head dims of 128, not {dims}"
    if (package := probe("flash_qla")).cause is not None:
        return package.cause
    return None


def _fla_unserved(what: str, where: Machine, dims: tuple[int, int]) -> str | None:
    if (package := probe("fla")).cause is not None:
        return package.cause
    faulty = where.triton_fault and what != KIMI_DELTA  # KDA's backward does not use the faulty kernel
    if faulty and what == DELTA_RULE and any(32 < dim <= 64 for dim in dims):
        return f"head dims 33 to 64 are wrong with triton {where.triton} on Hopper: install triton>=3.7.1"
    if _fla_takes_tilelang(what):
        missing = compilation.tilelang_unready()
        return missing and f"its backward takes a kernel of tilelang: {missing}"
    if faulty:
        cause = probe("tilelang").cause or compilation.no_compiler() or "FLA_TILELANG turns it off"
        return (
            f"the backward is wrong with triton {where.triton} on Hopper and tilelang can't stand in "
            f"({cause}): install tilelang or triton>=3.7.1"
        )
    return None


def _fla_takes_tilelang(what: str) -> bool:
    """Whether fla, which looks for nvcc itself, will take tilelang's kernel in the backward pass.

    Source: fla-core 0.6.0, fla/backends.py.
    """
    if what == KIMI_DELTA:
        from fla.ops.kda.backends import KDATileLangBackend as Backend
    else:
        from fla.ops.common.backends import CommonTileLangBackend as Backend
    return bool(Backend.is_available() and Backend().is_enabled())
