"""Which function computes each layer, bound so that no example sees another; refused where that can't be.

bind(model)                     each layer computed by what honours the boundaries, or a KernelError
describe(model)                 what computes each kind of layer, and where it comes from
with handshake(model, batch):   the first step: each layer really got this batch's boundaries
with_chunk_indices(batch)       saves flash-linear-attention a device sync a batch
proof.isolation(model, …)       replace one example: nothing else moves
"""

from training.kernels.binding import CHOICES, Row, bind, describe, unbind
from training.kernels.contract import KernelError, make_batch, with_chunk_indices
from training.kernels.handshake import check_boundaries, handshake

__all__ = [
    "CHOICES",
    "KernelError",
    "Row",
    "bind",
    "check_boundaries",
    "describe",
    "handshake",
    "make_batch",
    "unbind",
    "with_chunk_indices",
]
