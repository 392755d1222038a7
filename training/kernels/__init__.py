"""Which function computes each layer, bound so that no example sees another; refused where that can't be."""

from training.kernels.binding import bind
from training.kernels.contract import KernelError

__all__ = ["KernelError", "bind"]
