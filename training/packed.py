"""All of `packing` that training uses, in one place: no other file here imports it."""

from packing import atomic, boundaries
from packing.buffer import PackedBuffer
from packing.errors import (
    InputError,
    OptionError,
    OutputError,
    PadfreeError,
    ResumeError,
    ShardError,
    one_line,
)
from packing.example import IGNORE_INDEX
from packing.loader import LoadedBuffer, PackedDataLoader, collate
from packing.shards import open_shards

__all__ = [
    "IGNORE_INDEX",
    "InputError",
    "LoadedBuffer",
    "OptionError",
    "OutputError",
    "PackedBuffer",
    "PackedDataLoader",
    "PadfreeError",
    "ResumeError",
    "ShardError",
    "atomic",
    "boundaries",
    "collate",
    "one_line",
    "open_shards",
]
