"""What became of every row and token: nothing is lost unsaid.

    rows in   = packed + eval + rejected by reason
    tokens in = packed + eval + truncated + rejected by reason

Tokens are counted from the moment a row has them: a row that is no JSON has none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packing.example import Note
from packing.pipeline.rows import EncodedChunk, Reject
from packing.shards import most_first

EXAMPLES_OF_REJECTS = 3
"""How many rejects the error of a run with too many of them quotes."""


@dataclass(kw_only=True)
class Accounting:
    """Running counts over the chunks; "packed" means in the main part, "eval" in the eval part.

    Attributes:
        rows: All that were read.
        rows_rejected: By reason.
        turns_rejected: By reason: turns that are missing in rows that are packed (`--turns expand`).
        tokens_rejected: By reason, of rows and turns.
        truncated: Tokens cut off by overflow "truncate".
        notes: For each normalisation, the packed rows that it changed.
        input_notes: Lines of the input by what was passed over: blank lines, line ends, byte order marks.
        encoders: How many examples each encoder saw.
        first_rejects: The first few, for an error's text.
        seconds: Time by stage, summed over the workers.
    """

    rows: int = 0
    rows_held_out: int = 0
    examples: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    supervised: Counter[str] = field(default_factory=Counter)
    rows_rejected: Counter[str] = field(default_factory=Counter)
    turns_rejected: Counter[str] = field(default_factory=Counter)
    tokens_rejected: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    notes: Counter[Note] = field(default_factory=Counter)
    input_notes: Counter[Note] = field(default_factory=Counter)
    encoders: Counter[str] = field(default_factory=Counter)
    first_rejects: list[Reject] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def rejected(self) -> int:
        return self.rows_rejected.total()

    def add(self, chunk: EncodedChunk) -> None:
        self.rows += chunk.rows
        self.rows_held_out += chunk.rows_held_out
        self.truncated += chunk.cut
        self.notes += chunk.notes
        self.input_notes.update(chunk.input_notes)
        self.encoders.update(chunk.encoders)
        for stage, seconds in chunk.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        for part, held_out in (("packed", False), ("eval", True)):
            examples = chunk.examples[chunk.examples["held_out"] == held_out]
            self.examples[part] += int(examples.size)
            self.tokens[part] += int(examples["length"].sum(dtype=np.int64))
            self.supervised[part] += int(examples["supervised"].sum(dtype=np.int64))
        for reject in chunk.rejects:
            (self.rows_rejected if reject.turn < 0 else self.turns_rejected)[reject.reason] += 1
            if reject.tokens:
                self.tokens_rejected[reject.reason] += reject.tokens
        self.first_rejects += chunk.rejects[: EXAMPLES_OF_REJECTS - len(self.first_rejects)]

    def as_json(self) -> dict[str, Any]:
        """For the manifest of the main part and for `--json`."""
        packed = self.rows - self.rows_held_out - self.rejected
        return {
            "rows": {
                "in": self.rows,
                "packed": packed,
                "eval": self.rows_held_out,
                "rejected": most_first(self.rows_rejected),
            },
            "turns_rejected": most_first(self.turns_rejected),
            "examples": {"packed": self.examples["packed"], "eval": self.examples["eval"]},
            "tokens": {
                "in": self.tokens.total() + self.truncated + self.tokens_rejected.total(),
                "packed": self.tokens["packed"],
                "eval": self.tokens["eval"],
                "truncated": self.truncated,
                "rejected": most_first(self.tokens_rejected),
            },
            "supervised_tokens": {"packed": self.supervised["packed"], "eval": self.supervised["eval"]},
            "normalised_rows": most_first(self.notes),
            "input_notes": most_first(self.input_notes),
        }

    def eval_as_json(self) -> dict[str, Any]:
        """For the manifest of the eval part, as if its rows had been all."""
        return {
            "rows": {"in": self.rows_held_out, "packed": self.rows_held_out, "rejected": {}},
            "examples": {"packed": self.examples["eval"]},
            "tokens": {"in": self.tokens["eval"], "packed": self.tokens["eval"], "rejected": {}},
            "supervised_tokens": {"packed": self.supervised["eval"]},
        }
