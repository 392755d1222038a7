"""padfree's data side: chat files become packed, masked buffers that carry their boundaries.

    files --sources--> records --formats--> Conversation --chat--> Example
          --plan--> bins --buffer--> PackedBuffer --shards--> directory --loader--> batch

The names below are the public ones; what needs torch is in `packing.loader`. They are imported when
first used, so that `import packing` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packing.buffer import PackedBuffer, build_buffer, unpack
    from packing.chat import ChatEncoder, ChatOptions, encode_chat, load_tokenizer
    from packing.errors import PadfreeError, Reason, RowRejected
    from packing.example import IGNORE_INDEX, Conversation, Example
    from packing.formats import FormatOptions
    from packing.pipeline import PackOptions, pack_dataset
    from packing.plan import Plan, plan_bins
    from packing.shards import ShardSet, ShardWriter, open_shards
    from packing.sources import SourceOptions

__all__ = [
    "ChatEncoder",
    "ChatOptions",
    "Conversation",
    "Example",
    "FormatOptions",
    "IGNORE_INDEX",
    "PackOptions",
    "PackedBuffer",
    "PadfreeError",
    "Plan",
    "Reason",
    "RowRejected",
    "ShardSet",
    "ShardWriter",
    "SourceOptions",
    "build_buffer",
    "encode_chat",
    "load_tokenizer",
    "open_shards",
    "pack_dataset",
    "plan_bins",
    "unpack",
]

_HOME = {
    "buffer": ["PackedBuffer", "build_buffer", "unpack"],
    "chat": ["ChatEncoder", "ChatOptions", "encode_chat", "load_tokenizer"],
    "errors": ["PadfreeError", "Reason", "RowRejected"],
    "example": ["IGNORE_INDEX", "Conversation", "Example"],
    "formats": ["FormatOptions"],
    "pipeline": ["PackOptions", "pack_dataset"],
    "plan": ["Plan", "plan_bins"],
    "shards": ["ShardSet", "ShardWriter", "open_shards"],
    "sources": ["SourceOptions"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"packing.{module}"), name)
    raise AttributeError(f"module 'packing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
