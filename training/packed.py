"""All of `packing` that training uses, but for its errors and `atomic.writing`, which are in `errors`."""

from packing import boundaries
from packing.buffer import PackedBuffer
from packing.example import IGNORE_INDEX
from packing.hub import local_only
from packing.loader import LoadedBuffer, PackedDataLoader, collate
from packing.shards import misfits, open_shards, turning

__all__ = [
    "IGNORE_INDEX",
    "LoadedBuffer",
    "PackedBuffer",
    "PackedDataLoader",
    "boundaries",
    "collate",
    "local_only",
    "misfits",
    "open_shards",
    "turning",
]
