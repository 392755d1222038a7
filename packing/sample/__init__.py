"""The embedded sample: a few hundred chats and a small tokenizer, for the demo and the tests."""

from __future__ import annotations

from pathlib import Path

CHATS = Path(__file__).with_name("chats.jsonl")
"""JSON lines of `{messages, tools?}`, written by `python -m packing.sample.make`."""

TOKENIZER = Path(__file__).with_name("tokenizer")
"""A byte-level BPE tokenizer with a ChatML template that carries generation marks."""
