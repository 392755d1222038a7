"""What can go wrong, as types: everything a user can cause is a `PadfreeError` of one clear line.

Two kinds matter. A `RowRejected` concerns one row: it is written to `rejects.jsonl` and the run goes
on. Every other `PadfreeError` stops the run; the command prints its one line and exits with 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin, get_type_hints


class Reason(StrEnum):
    """Why a row was rejected: the closed list that `rejects.jsonl`, the table and the manifest use."""

    BAD_ENCODING = "bad_encoding"  # the line is not UTF-8
    BAD_JSON = "bad_json"  # not JSON, cut off, NaN or duplicate keys
    BAD_RECORD = "bad_record"  # JSON, but no known format: a missing or mistyped column
    BAD_MESSAGE = "bad_message"  # a message without role, or with content that is not text
    UNKNOWN_ROLE = "unknown_role"
    ROLE_ORDER = "role_order"  # an order of roles that the policy or the template refuses
    EMPTY_CONVERSATION = "empty_conversation"
    EMPTY_TURN = "empty_turn"
    LONE_SURROGATE = "lone_surrogate"
    CONTROL_TOKEN = "control_token"  # text that spells a control token of the tokenizer
    THINK_TAG = "think_tag"  # a think tag without its partner: markup or text can't be told
    BAD_TOOLS = "bad_tools"  # tools or tool calls that are no valid schema or call
    BAD_WEIGHT = "bad_weight"  # a message weight other than 0 and 1
    BAD_TOKENS = "bad_tokens"  # a tokenized row with ids or labels that can't be
    TEMPLATE_ERROR = "template_error"  # the chat template raised
    TEXT_LOST = "text_lost"  # the template leaves out text, a call or a tool reply
    SPAN_UNCERTAIN = "span_uncertain"  # what the assistant said can't be located for certain
    TOO_LONG = "too_long"  # more tokens than the capacity, with overflow "drop"
    NOTHING_TO_TRAIN = "nothing_to_train"


class PadfreeError(Exception):
    """Base of every error that a user can cause; its text says what, where, and the next step."""


class RowRejected(PadfreeError):
    """One row can't be used. Carries a `Reason` and a detail short enough to act on."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[RowRejected], tuple[Reason, str]]:
        # Worker processes hand rejections back to the parent: the default would lose an argument.
        return (type(self), (self.reason, self.detail))


class OptionError(PadfreeError):
    """An option, or two options together, that can't be."""


class InputError(PadfreeError):
    """An input that can't be read at all: missing, no known kind, damaged, a pointer instead of data."""


class TemplateError(PadfreeError):
    """A tokenizer or chat template on which training would be wrong."""


class TooManyRejects(InputError):
    """More rows were rejected than `--max-rejects` allows, or all, of `rows` that were read."""

    def __init__(self, message: str, *, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


class ShardError(PadfreeError):
    """A shard directory that is damaged, incomplete or of another format version."""


class OutputError(PadfreeError):
    """The output can't be written: it exists already, or the disk refuses."""


class ResumeError(PadfreeError):
    """A loader or trainer state that does not belong to the data, the order or the model at hand."""


def one_line(error: BaseException) -> str:
    """What an error of another library says, for a line of ours; its type where it says nothing.

    Its first line, and the second where the first ends in a colon. Traces and hints are left out.
    """
    said = f"there is no {error}" if isinstance(error, KeyError) else str(error)  # its text is the key alone
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def check_choice(name: str, value: object, known: Iterable[object]) -> None:
    """Checks one option.

    Raises:
        OptionError: the value is none of those known.
    """
    known = list(known)
    if value not in known:
        raise OptionError(f"no {name} {value!r}: choose one of {', '.join(map(str, known))}")


def check_choices(options: Any) -> None:
    """Checks every field of a dataclass whose type is a `Literal`.

    Raises:
        OptionError: names the field whose value is none of its type's.
    """
    for name, hint in get_type_hints(type(options)).items():
        if get_origin(hint) is Literal:
            check_choice(name, getattr(options, name), get_args(hint))
