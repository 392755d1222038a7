"""Records to conversations: which format a record has, its turns in order, what is done about odd ones.

    {"question": "2+2?", "answer": "4"}
        -> Conversation(messages=[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])

A record becomes a `Conversation` or a `RowRejected`. No message vanishes: each one comes out, is named
in a note, or rejects its row. What one message may look like is `messages.py`'s concern.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from packing.boundaries import position_ids
from packing.errors import OptionError, Reason, RowRejected, check_choice, check_choices
from packing.example import IGNORE_INDEX, Conversation, Example, Note, make_example
from packing.messages import (
    CONTROLS,
    MEDIA,
    check_controls,
    clean,
    has_surrogate,
    only,
    parse,
    read_message,
    read_tools,
    truth,
)

Format = Literal[
    "auto",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "question_answer",
    "query_response",
    "text",
    "tokens",
]

CHATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations", "conversation"),
}
"""Formats of one list of turns, and the names of its column. Both take either's spelling of a turn."""

PAIRS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "alpaca": ("instruction", ("output", "response")),
    "prompt_completion": ("prompt", ("completion", "response")),
    "question_answer": ("question", ("answer", "response")),
    "query_response": ("query", ("response",)),
}
"""Formats of one prompt and one answer: the prompt's column and the names of the answer's."""

PRIMARY: Mapping[str, str] = {
    **{column: name for name, columns in CHATS.items() for column in columns},
    **{prompt: name for name, (prompt, _) in PAIRS.items()},
    "text": "text",
    "input_ids": "tokens",
}
"""The column that stands for a format: renaming one with --column decides for its format."""

SYSTEMS = ("system", "system_prompt")
INPUTS = ("input", "context")
TOOLS = ("tools", "functions")
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")
TOKEN_COLUMNS = ("labels", "attention_mask", "position_ids", "seq_lengths", *MASKS)

COLUMNS = frozenset(
    (*PRIMARY, *(answer for _, answers in PAIRS.values() for answer in answers), "history")
).union(SYSTEMS, INPUTS, TOOLS, TOKEN_COLUMNS)
"""Every column that a format reads."""

TRANSPOSED = {"role", "from", "content", "value"}

_PLAIN_ROLES = ("user", "assistant", "system", "tool")
_MEANT = COLUMNS.union(MEDIA, CONTROLS, TRANSPOSED, ("label", "chosen", "rejected")) - {"messages"}
"""Columns beside messages that make a record more than plain, or something else."""


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """How records are read. The defaults never change what a turn says.

    Attributes:
        format: The one format of all records; "auto" finds each record's own.
        columns: Other names of columns, `{"messages": "dialog"}`; overrules the detection.
        roles: Further roles, `{"narrator": "system"}`.
        trailing_user: Turns after the last assistant turn lead to nothing that is trained: they are
            trimmed, or reject their row.
        consecutive: Two user, assistant or system turns in a row: "keep" leaves them to the template,
            which may refuse them; "merge" joins their texts with an empty line between.
        system: "keep" leaves system turns to the template; "fold" puts their text before that of the
            user turn that follows, for templates that can't take one.
        empty_turns: An empty user or assistant turn rejects its row; with "mask" it stays and is not
            trained.
        surrogates: A lone surrogate, which is no character, rejects its row or becomes U+FFFD.

    Raises:
        OptionError: a value that is none of these.
    """

    format: Format = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    trailing_user: Literal["trim", "reject"] = "trim"
    consecutive: Literal["keep", "merge", "reject"] = "keep"
    system: Literal["keep", "fold"] = "keep"
    empty_turns: Literal["reject", "mask"] = "reject"
    surrogates: Literal["reject", "replace"] = "reject"

    def __post_init__(self) -> None:
        check_choices(self)
        for column in self.columns:
            if column not in COLUMNS:
                raise OptionError(f"no format reads a column {column!r}; known: {', '.join(sorted(COLUMNS))}")
        for name, role in self.roles.items():
            check_choice(f"meaning of the role {name!r}", role, _PLAIN_ROLES)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether nothing here changes or refuses what plain messages say."""
        return (
            self.format in ("auto", "messages")
            and not self.columns
            and not self.roles
            and self.consecutive == "keep"
            and self.system == "keep"
        )


class _Turn(NamedTuple):
    where: str  # its place in the record: "messages[3]"
    message: dict[str, Any]
    trainable: bool | None  # None where the record does not say


def normalise(record: Mapping[str, Any], *, options: FormatOptions) -> Conversation:
    """The conversation in one record.

    Raises:
        RowRejected: no known format or more than one, or something in it that can't be trained on.
    """
    return _plain(record, options) or _any(record, options)


def _plain(record: Mapping[str, Any], options: FormatOptions) -> Conversation | None:
    """What `_any` says of a record of plain messages, at a fifth of its time; None for other records.

    Most rows of most files are such: messages with a role and a text, each role by its own name, none of the
    texts empty, the last one the assistant's, and no other column that means something.
    """
    if "messages" not in record or not _MEANT.isdisjoint(record) or not options.plain:
        return None
    messages = record["messages"]
    if type(messages) is not list or not messages:
        return None
    found = []
    role = None
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if role not in _PLAIN_ROLES or type(content) is not str or not content or content.isspace():
            return None
        if has_surrogate(content):
            return None
        found.append({"role": role, "content": content})
    return Conversation(messages=found) if role == "assistant" else None


def _any(record: Mapping[str, Any], options: FormatOptions) -> Conversation:
    notes: list[Note] = []
    replace = options.surrogates == "replace"
    columns = _renamed(record, options)
    name = _detect(columns, options, notes)
    if media := [column for column in MEDIA if columns.get(column)]:
        raise RowRejected(Reason.BAD_RECORD, f"the column {media[0]} is not empty; only text can be packed")
    check_controls(columns, where="the record", but=MASKS if name == "tokens" else ())
    if name == "tokens":
        return Conversation(example=_tokens(columns, notes), notes=tuple(notes))
    if name == "text":
        text = _text(columns, ("text",))
        if not text.strip():
            raise RowRejected(Reason.EMPTY_CONVERSATION, "the text is empty")
        return Conversation(text=clean(text, replace=replace, notes=notes), notes=tuple(notes))
    turns: list[_Turn] = []
    for where, raw, trainable in _raw_turns(name, columns, notes):
        message, weight = read_message(raw, where=where, roles=options.roles, notes=notes)
        turns.append(_Turn(where, message, weight if trainable is None or weight is False else trainable))
    turns = _one_system(turns)
    if columns.get("chosen") is not None and turns[-1].message["role"] != "assistant":
        raise RowRejected(
            Reason.BAD_RECORD, "a preference pair: the last answer is in chosen and in rejected"
        )
    turns = _trim(turns, options, notes)
    turns = _mask_empty(turns, options, notes)
    turns = _fold_system(turns, options, notes)
    turns = _merge(turns, options, notes)
    tools = read_tools(only(columns, TOOLS, reason=Reason.BAD_TOOLS), notes=notes)
    narrowed = any(turn.trainable is not None for turn in turns)
    return Conversation(
        messages=clean([turn.message for turn in turns], replace=replace, notes=notes),
        tools=clean(tools, replace=replace, notes=notes),
        trainable=tuple(turn.trainable is not False for turn in turns) if narrowed else None,
        notes=tuple(dict.fromkeys(notes)),
    )


# Which format a record has


def _renamed(record: Mapping[str, Any], options: FormatOptions) -> Mapping[str, Any]:
    """The record under the column names that the formats know."""
    if not options.columns:
        return record
    taken = set(options.columns.values())
    if taken.isdisjoint(record):
        raise RowRejected(Reason.BAD_RECORD, f"no column {_names(taken)} among {_names(record)}")
    rest = {column: value for column, value in record.items() if column not in taken}
    return rest | {known: record.get(column) for known, column in options.columns.items()}


def _detect(columns: Mapping[str, Any], options: FormatOptions, notes: list[Note]) -> str:
    """The format whose columns the record has."""
    filled = frozenset([column for column, value in columns.items() if value is not None])
    found = list(_formats(filled) or _formats(frozenset(columns)))  # null messages are empty, not unknown
    if chosen := {PRIMARY[column] for column in options.columns if column in PRIMARY}:
        found = [name for name in found if name in chosen]
    if options.format != "auto":
        found = [name for name in found if name == options.format]
    elif not chosen:
        _check_meaning(found, filled, columns)
    if len(found) == 2 and found[1] == "text":
        notes.append(Note.TEXT_COLUMN_IGNORED)
        return found[0]
    if len(found) > 1:
        raise RowRejected(Reason.BAD_RECORD, f"may be {' or '.join(found)}: choose one with --format")
    if not found:
        wanted = "no known format" if options.format == "auto" else f"not of the format {options.format}"
        if "chosen" in filled:
            wanted = "a preference pair (--column messages=chosen trains on one side)"
        raise RowRejected(Reason.BAD_RECORD, f"{wanted}; its columns are {_names(columns)}")
    return found[0]


def _check_meaning(found: list[str], filled: frozenset[str], columns: Mapping[str, Any]) -> None:
    """Rejects what looks like a format and is meant for something else; naming the format overrules it."""
    if found == ["text"] and not filled.isdisjoint(("role", "from")):
        raise RowRejected(
            Reason.BAD_RECORD, "one message of a conversation: group them into a messages column"
        )
    if isinstance(label := columns.get("label"), bool) or truth(label) is False:
        raise RowRejected(
            Reason.BAD_RECORD, "its label says whether it is good: filter, then choose a --format"
        )


@functools.lru_cache  # rows share few sets of columns, and this took a tenth of the time for a row
def _formats(columns: frozenset[str]) -> tuple[str, ...]:
    """The formats that `columns` suffice for, text last."""
    return (
        *(["tokens"] if "input_ids" in columns else []),
        *(name for name, names in CHATS.items() if not columns.isdisjoint(names)),
        *(
            n
            for n, (prompt, answers) in PAIRS.items()
            if prompt in columns and not columns.isdisjoint(answers)
        ),
        *(["text"] if "text" in columns else []),
    )


def _names(columns: Iterable[str]) -> str:
    """Column names for a detail: quoted, since any character can be in one, and not too many."""
    quoted = [repr(str(column)[:40]) for column in columns]
    return ", ".join(quoted[:8]) + (f" and {len(quoted) - 8} more" if len(quoted) > 8 else "")


# The turns of each format, as the record has them

_RawTurn = tuple[str, Any, bool | None]  # (where it stands, the message, whether it may be trained)


def _raw_turns(name: str, columns: Mapping[str, Any], notes: list[Note]) -> Iterator[_RawTurn]:
    if system := _text(columns, SYSTEMS):
        yield "system", {"role": "system", "content": system}, False if name == "prompt_completion" else None
    if name in PAIRS:
        yield from _pair_turns(name, columns, notes)
        return
    value = only(columns, CHATS[name], reason=Reason.BAD_RECORD)
    where = next((column for column in CHATS[name] if columns.get(column) is value), name)
    yield from _chat_turns(value, where, notes)


def _chat_turns(value: Any, where: str, notes: list[Note]) -> Iterator[_RawTurn]:
    if isinstance(value, str):
        value = parse(value, reason=Reason.BAD_RECORD, where=where) if value.strip() else None
        notes.append(Note.MESSAGES_PARSED)
    if isinstance(value, dict):
        value = _transposed(value, where)
        notes.append(Note.MESSAGES_TRANSPOSED)
    if value is None:
        return
    if not isinstance(value, list | tuple):
        raise RowRejected(
            Reason.BAD_RECORD, f"{where} is of type {type(value).__name__}, not a list of messages"
        )
    for number, item in enumerate(value):
        place = f"{where}[{number}]"
        if isinstance(item, dict) and item.keys() in ({"human", "assistant"}, {"user", "assistant"}):
            asks = "human" if "human" in item else "user"  # ms-swift: one object a round
            yield place, {"role": "user", "content": item[asks]}, None
            yield place, {"role": "assistant", "content": item["assistant"]}, None
        else:
            yield place, item, None


def _transposed(columns: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A list of objects from an object of lists, as older versions of `datasets` store it."""
    lists = {name: values for name, values in columns.items() if values is not None}
    if lists.keys().isdisjoint(TRANSPOSED) or not all(isinstance(v, list | tuple) for v in lists.values()):
        raise RowRejected(Reason.BAD_RECORD, f"{where} is an object, not a list of messages")
    if len(lengths := {len(values) for values in lists.values()}) > 1:
        raise RowRejected(Reason.BAD_RECORD, f"{where} has lists of different lengths: {sorted(lengths)}")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _pair_turns(name: str, columns: Mapping[str, Any], notes: list[Note]) -> Iterator[_RawTurn]:
    ask, answers = PAIRS[name]
    prompt = columns.get(ask)
    answer = only(columns, answers, reason=Reason.BAD_RECORD)
    # A completion alone is what prompt/completion data is about, whatever its prompt holds.
    apart = name == "prompt_completion"
    for number, (user, assistant) in enumerate(_history(columns.get("history"), notes)):
        yield f"history[{number}]", {"role": "user", "content": user}, False if apart else None
        yield f"history[{number}]", {"role": "assistant", "content": assistant}, False if apart else None
    context = _text(columns, INPUTS)
    if apart and isinstance(prompt, list | tuple):
        if context:
            raise RowRejected(
                Reason.BAD_RECORD, "a prompt of messages and an input: where does the input belong?"
            )
        yield from ((where, raw, False) for where, raw, _ in _chat_turns(prompt, ask, notes))
    else:
        prompt = _text(columns, (ask,))
        if context.strip():
            notes.append(Note.INPUT_JOINED)
            prompt = f"{prompt}\n\n{context}" if prompt else context
        yield ask, {"role": "user", "content": prompt}, False if apart else None
    if apart and isinstance(answer, list | tuple):
        yield from ((where, raw, True) for where, raw, _ in _chat_turns(answer, "completion", notes))
    else:
        yield answers[0], {"role": "assistant", "content": _text(columns, answers)}, True if apart else None


def _history(value: Any, notes: list[Note]) -> list[tuple[str, str]]:
    """Earlier rounds, `[["question", "answer"], ...]`."""
    if isinstance(value, str):
        value = parse(value, reason=Reason.BAD_RECORD, where="history") if value.strip() else None
        notes.append(Note.MESSAGES_PARSED)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise RowRejected(Reason.BAD_RECORD, f"history is of type {type(value).__name__}, not a list")
    for number, turn in enumerate(value):
        if not isinstance(turn, list | tuple) or [type(text) for text in turn] != [str, str]:
            raise RowRejected(Reason.BAD_RECORD, f"history[{number}] is not a pair of two texts")
    return [(turn[0], turn[1]) for turn in value]


def _text(columns: Mapping[str, Any], names: Sequence[str]) -> str:
    value = only(columns, names, reason=Reason.BAD_RECORD)
    if value is not None and not isinstance(value, str):
        raise RowRejected(Reason.BAD_RECORD, f"{names[0]} is of type {type(value).__name__}, not text")
    return value or ""


# Policies: what is done about odd turns


def _one_system(turns: list[_Turn]) -> list[_Turn]:
    """A system prompt in its own column and again in the messages is one."""
    if not turns or (len(turns) == 1 and turns[0].where == "system"):
        raise RowRejected(Reason.EMPTY_CONVERSATION, "there are no messages")
    first, second = turns[0], turns[1] if len(turns) > 1 else turns[0]
    if first.where != "system" or second.message["role"] != "system":
        return turns
    if first.message["content"] != second.message["content"]:
        raise RowRejected(Reason.BAD_RECORD, f"two system prompts: in its own column and in {second.where}")
    return turns[1:]


def _trim(turns: list[_Turn], options: FormatOptions, notes: list[Note]) -> list[_Turn]:
    """Ends the conversation with its last assistant turn."""
    end = len(turns)
    while end and turns[end - 1].message["role"] != "assistant":
        end -= 1
    if end == 0:
        raise RowRejected(Reason.NOTHING_TO_TRAIN, f"none of the {len(turns)} turns is the assistant's")
    if end < len(turns):
        if options.trailing_user == "reject":
            role = turns[end].message["role"]
            raise RowRejected(Reason.ROLE_ORDER, f"{turns[end].where}: a {role} turn with no answer after it")
        notes.append(Note.TRAILING_TURNS_TRIMMED)
    return turns[:end]


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Nobody said anything: system turns and tools may, users and assistants not."""
    return (
        message["role"] in ("user", "assistant")
        and not message["content"].strip()
        and "tool_calls" not in message
        and not message.get("reasoning_content", "").strip()
    )


def _mask_empty(turns: list[_Turn], options: FormatOptions, notes: list[Note]) -> list[_Turn]:
    empty = [turn for turn in turns if _is_empty(turn.message)]
    if not empty:
        return turns
    if all(_is_empty(turn.message) for turn in turns if turn.message["role"] == "assistant"):
        raise RowRejected(Reason.NOTHING_TO_TRAIN, f"{empty[-1].where}: no assistant turn says anything")
    if options.empty_turns == "reject":
        raise RowRejected(Reason.EMPTY_TURN, f"{empty[0].where}: an empty {empty[0].message['role']} turn")
    notes.append(Note.EMPTY_TURN_MASKED)
    return [_Turn(t.where, t.message, False) if t in empty else t for t in turns]


def _fold_system(turns: list[_Turn], options: FormatOptions, notes: list[Note]) -> list[_Turn]:
    """Puts the text of system turns before that of the user turn that follows."""
    if options.system == "keep" or not any(turn.message["role"] == "system" for turn in turns):
        return turns
    folded: list[_Turn] = []
    waiting: list[str] = []
    for turn in turns:
        if turn.message["role"] == "system":
            waiting.append(turn.message["content"])
            continue
        if any(waiting):
            if turn.message["role"] != "user":
                role = turn.message["role"]
                raise RowRejected(
                    Reason.ROLE_ORDER, f"{turn.where}: a {role} turn follows a system turn to fold"
                )
            text = _joined((*waiting, turn.message["content"]))
            turn = _Turn(turn.where, {**turn.message, "content": text}, turn.trainable)
        folded.append(turn)
        waiting = []
    notes.append(Note.SYSTEM_FOLDED)
    return folded


def _merge(turns: list[_Turn], options: FormatOptions, notes: list[Note]) -> list[_Turn]:
    """Joins neighbours of one role; tool replies in a row answer calls in a row and are no neighbours."""
    roles = [turn.message["role"] for turn in turns]
    if options.consecutive == "keep" or not any(a == b != "tool" for a, b in pairwise(roles)):
        return turns
    merged: list[_Turn] = []
    for turn in turns:
        if not merged or merged[-1].message["role"] != turn.message["role"] or turn.message["role"] == "tool":
            merged.append(turn)
        elif options.consecutive == "reject":
            role = turn.message["role"]
            raise RowRejected(Reason.ROLE_ORDER, f"{turn.where}: a second {role} turn in a row")
        else:
            merged[-1] = _merged(merged[-1], turn)
    notes.append(Note.TURNS_MERGED)
    return merged


def _merged(first: _Turn, second: _Turn) -> _Turn:
    """One turn of two, where that keeps the order of what was said: reasoning, text, calls."""
    a, b = first.message, second.message
    moved = "reasoning_content" in b or ("tool_calls" in a and b["content"])
    if moved or first.trainable != second.trainable or a.get("name") != b.get("name"):
        raise RowRejected(
            Reason.ROLE_ORDER, f"{second.where}: a {b['role']} turn that can't be merged with the last"
        )
    message = {**a, "content": _joined((a["content"], b["content"]))}
    if calls := [*a.get("tool_calls", ()), *b.get("tool_calls", ())]:
        message["tool_calls"] = calls
    return _Turn(first.where, message, first.trainable)


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)


# Records that come tokenized


def _tokens(columns: Mapping[str, Any], notes: list[Note]) -> Example:
    """The ids as they are; what is trained comes from labels or from a mask. Labels are not shifted.

    Whether the ids are in the vocabulary is for whoever holds the tokenizer to say.
    """
    ids = _whole_numbers(columns["input_ids"], "input_ids", length=None)
    if ids.size == 0:
        raise RowRejected(Reason.EMPTY_CONVERSATION, "input_ids is empty")
    arrays = {
        name: _whole_numbers(columns[name], name, length=None if name == "seq_lengths" else ids.size)
        for name in TOKEN_COLUMNS
        if columns.get(name) is not None
    }
    if "position_ids" in arrays and not np.array_equal(arrays["position_ids"], position_ids([ids.size])):
        raise RowRejected(
            Reason.BAD_TOKENS, "position_ids do not count 0, 1, 2, …: padded, or packed already"
        )
    if "seq_lengths" in arrays and arrays["seq_lengths"].tolist() != [ids.size]:
        raise RowRejected(
            Reason.BAD_TOKENS, "seq_lengths of several examples: packed already (padfree unpack)"
        )
    if "attention_mask" in arrays and not arrays["attention_mask"].all():
        raise RowRejected(Reason.BAD_TOKENS, "attention_mask has zeros: take the padding off")
    trained = _trained(ids, arrays)
    if trained[0]:
        notes.append(Note.FIRST_LABEL_IGNORED)
    return make_example(ids, trained=trained)


def _trained(ids: np.ndarray[Any, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """bool[L]: what all of labels and masks agree to train."""
    said: dict[str, np.ndarray[Any, Any]] = {}
    if "labels" in arrays:
        said["labels"] = arrays["labels"] != IGNORE_INDEX
        if (wrong := np.flatnonzero(said["labels"] & (arrays["labels"] != ids))).size:
            at = int(wrong[0])
            raise RowRejected(
                Reason.BAD_TOKENS,
                f"labels[{at}] is {arrays['labels'][at]}, neither -100 nor input_ids[{at}] ({ids[at]})",
            )
    for name in MASKS:
        if name in arrays:
            said[name] = arrays[name] == 1
            if not (said[name] | (arrays[name] == 0)).all():
                raise RowRejected(Reason.BAD_TOKENS, f"{name} holds more than 0 and 1")
    if not said:
        raise RowRejected(
            Reason.BAD_TOKENS, f"neither labels nor a mask ({', '.join(MASKS)}): what is trained?"
        )
    (first, trained), *others = said.items()
    for name, mask in others:
        if not np.array_equal(mask[1:], trained[1:]):
            raise RowRejected(Reason.BAD_TOKENS, f"{first} and {name} train different tokens")
    return trained


def _whole_numbers(value: Any, name: str, *, length: int | None) -> np.ndarray[Any, Any]:
    """int64[L] from a list of whole numbers, each -100 or what an int32 can hold."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple) and not set(map(type, value)) <= {int}:
        raise RowRejected(Reason.BAD_TOKENS, f"{name} is not a list of whole numbers")
    try:
        array = np.asarray(value, dtype=np.int64) if len(value) else np.zeros(0, np.int64)
    except (OverflowError, TypeError, ValueError):
        raise RowRejected(Reason.BAD_TOKENS, f"{name} is not a list of whole numbers below 2**31") from None
    lowest = IGNORE_INDEX if name == "labels" else 0
    if array.ndim != 1 or (array.size and not lowest <= int(array.min()) <= int(array.max()) < 2**31):
        raise RowRejected(
            Reason.BAD_TOKENS, f"{name} is not a list of whole numbers from {lowest} to 2**31 - 1"
        )
    if length is not None and array.size != length:
        raise RowRejected(Reason.BAD_TOKENS, f"{array.size} {name} for {length} input_ids")
    return array
