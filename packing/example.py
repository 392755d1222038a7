"""`Conversation`, what the formats give, and `Example`, what the tokenizer makes of it.

record (raw line) -> Conversation (normalised messages) -> Example (ids and labels) -> a buffer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from packing.errors import OptionError, Reason, RowRejected, check_choice

IGNORE_INDEX = -100
"""The label of a token that is not trained; every loss in the field knows it."""

Overflow = Literal["drop", "truncate", "error"]


class Note(StrEnum):
    """What was passed over or changed: the closed list that the report and the manifest count."""

    # In a file, by the line
    BLANK_LINES = "blank_lines"
    BYTE_ORDER_MARK = "byte_order_mark"
    CRLF_LINES = "crlf_lines"

    # As a record became a conversation, by the row that was packed, as all that follow
    ARGUMENTS_EMPTY = "tool_arguments_empty"  # null, missing or "" became {}
    ARGUMENTS_PARSED = "tool_arguments_parsed"  # JSON text became an object
    CALL_CONVERTED = "tool_call_converted"  # function_call, a call as text, or one without "function"
    CONTENT_NULL = "content_null"  # null or missing content became ""
    EMPTY_TURN_MASKED = "empty_turn_masked"  # an empty turn stays and is not trained
    FIELDS_IGNORED = "message_fields_ignored"  # a message had fields that no template reads
    FIRST_LABEL_IGNORED = "first_label_ignored"  # a tokenized example trained its first token
    INPUT_JOINED = "input_joined"  # Alpaca's input follows the instruction and an empty line
    MESSAGES_PARSED = "messages_parsed"  # messages or history were JSON text
    MESSAGES_TRANSPOSED = "messages_transposed"  # an object of lists became a list of objects
    PADDING_LEFT_OUT = "padding_left_out"  # the last sequence of a packed row was padding
    PARTS_JOINED = "content_parts_joined"
    REASONING_RENAMED = "reasoning_renamed"  # reasoning, thinking or a part became reasoning_content
    ROLE_MAPPED = "role_mapped"
    SURROGATE_REPLACED = "surrogate_replaced"
    SYSTEM_FOLDED = "system_folded"
    TEXT_COLUMN_IGNORED = "text_column_ignored"  # text beside a conversation: its render
    TOOLS_CONVERTED = "tools_converted"  # JSON text, or schemas without {"type": "function"} around them
    TRAILING_TURNS_TRIMMED = "trailing_turns_trimmed"
    TURNS_MERGED = "turns_merged"

    # As a conversation became tokens
    CALL_ID_ADDED = "tool_call_id_added"  # the template demands ids, the calls had none
    EMPTY_TURN = "empty_turn_not_trained"  # only an assistant's frame is printed: empty, or all dropped
    MARK_EXTENDED = "generation_mark_extended_to_end_token"
    NO_END = "no_end_token_trained"  # the template marks turns, and prints nothing that ends them
    REASONING_DROPPED = "reasoning_dropped_by_template"  # noted once a turn, counted once a row
    SPACE_CUT = "white_space_behind_eos_cut"  # of plain text
    SYSTEM_MOVED = "system_moved_by_template"  # a later system text stands elsewhere in the render
    THINK_BLOCK = "think_block_moved_to_reasoning"  # an inline block became `reasoning_content`
    THINK_TEXT = "think_tag_kept_as_text"
    TOKEN_ACROSS_END = "token_across_span_end"  # trained
    TOKEN_ACROSS_START = "token_across_span_start"  # not trained

    # As an example entered a bin
    TRUNCATED = "truncated"  # by overflow "truncate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One normalised record: exactly one of `messages`, `text` and `example` is set.

    Attributes:
        messages: Each has `role` (system, user, assistant, tool) and `content` (always text, "" for
            none), and where given `reasoning_content` (text), `tool_calls` (each `{"type":
            "function", "function": {"name": text, "arguments": object}}` and maybe `id`), `name`,
            `tool_call_id`.
        tools: JSON schemas of the functions on offer, or None.
        trainable: For each message whether it may be trained; None means that all may.
            It narrows `--train-on`, never widens it.
        text: Plain text, trained whole and ended by EOS.
        example: A record that came tokenized.
        notes: The normalisations that were applied.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    trainable: Sequence[bool] | None = None
    text: str | None = None
    example: Example | None = None
    notes: Sequence[Note] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # eq would compare arrays and set a hash
class Example:
    """One tokenized, masked conversation; equal to another if ids and labels are.

    Attributes:
        input_ids: int32[L], L at least 1.
        labels: int32[L]: the token itself where it is trained, `IGNORE_INDEX` elsewhere. Models
            shift inside, so `labels[0]` is `IGNORE_INDEX`: with it set, the last token of one
            example would be trained to predict the first of the next.
        turn: The assistant turn that this example trains, from 0, or -1 for a whole conversation. Buffers
            do not carry it: in a shard set it stands in examples.parquet.
        messages: The normalised messages whose render the ids are, where there were messages.
        tools: The tools that were rendered with them.
        notes: What happened on the way, the conversation's notes among them.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    turn: int = -1
    messages: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    notes: Sequence[Note] = field(default=(), repr=False)

    def __len__(self) -> int:
        return int(self.input_ids.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Example):
            return NotImplemented
        return np.array_equal(self.input_ids, other.input_ids) and np.array_equal(self.labels, other.labels)

    __hash__ = None  # type: ignore[assignment]  # arrays can change, so an example is no key

    @property
    def supervised(self) -> int:
        """The number of trained tokens."""
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))


def make_example(
    input_ids: Sequence[int] | NDArray[Any],
    *,
    trained: Sequence[bool] | NDArray[np.bool_],
    notes: Sequence[Note] = (),
) -> Example:
    """An example from ids and a mask; the first token is never trained, whatever the mask says.

    Raises:
        ValueError: ids and mask differ in length, or there are no ids.
    """
    ids = np.asarray(input_ids, dtype=np.int32)
    mask = np.array(trained, dtype=np.bool_)
    if ids.ndim != 1 or ids.size == 0 or ids.shape != mask.shape:
        raise ValueError(f"ids of shape {ids.shape} and a mask of shape {mask.shape} make no example")
    mask[0] = False
    labels = np.where(mask, ids, np.int32(IGNORE_INDEX))
    return Example(input_ids=ids, labels=labels, notes=notes)


def fit(example: Example, *, capacity: int, overflow: Overflow) -> Example:
    """The example as it enters a bin of `capacity` tokens: itself, or a prefix of it.

    Raises:
        RowRejected: too long with `drop`, or nothing left to train.
        OptionError: too long with `error`, or with an overflow that there is not.
    """
    if len(example) > capacity:
        if overflow == "drop":
            raise RowRejected(Reason.TOO_LONG, f"{len(example)} tokens, the capacity is {capacity}")
        if overflow == "error":
            raise OptionError(
                f"an example of {len(example)} tokens does not fit the capacity of {capacity}: "
                "raise --capacity, or choose --overflow drop or truncate"
            )
        check_choice("overflow", overflow, get_args(Overflow))
        example = Example(
            input_ids=example.input_ids[:capacity],
            labels=example.labels[:capacity],
            turn=example.turn,
            messages=example.messages,
            tools=example.tools,
            notes=(*example.notes, Note.TRUNCATED),
        )
    if example.supervised == 0:
        raise RowRejected(Reason.NOTHING_TO_TRAIN, f"none of the {len(example)} tokens is trained")
    return example
