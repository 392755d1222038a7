r"""One message, one tool call, one tool: whatever it is called out there, what it is called from here on.

    {"from": "function_call", "value": '{"name": "f", "arguments": "{\"x\": 1}"}'}
        -> {"role": "assistant", "content": "", "tool_calls": [
               {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}

Which messages a record has, and what may follow what, is `formats.py`'s concern.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packing.errors import Reason, RowRejected
from packing.example import Note
from packing.strict_json import loads

ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "chatbot", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "ipython", "function"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "function_response"), "tool"),
}
"""What roles are called (in lower case, with `_` for `-` and blanks) and what they become."""

CALL_ROLES = ("function_call", "tool_call")
"""Roles whose text is the JSON of a call, or of a list of calls."""

REASONING = ("reasoning_content", "reasoning", "thinking")
WEIGHTS = ("weight", "loss_weight", "train", "training", "loss", "trainable", "loss_mask", "loss_scale")
MASKED = ("masked", "prompt_mask", "train_on_input", "train_on_inputs", "train_on_prompt")
CONTROLS = frozenset(WEIGHTS).union(
    ("assistant_mask", "assistant_masks", "completion_mask", "mask", "weights", "loss_weights"),
    ("token_weights", "sample_weight", "kto_tag", "is_correct"),
    MASKED,
)
"""Fields that say what is trained. As usual is 1 or true, and for those in `MASKED` 0 or false."""

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
SPELLINGS = {"role", "from", "content", "value"}
CALLS = ("tool_calls", "tool_call", "function_call")
KNOWN = SPELLINGS.union(("name", "tool_call_id"), CALLS, REASONING, WEIGHTS)

TRUTHS = {
    **dict.fromkeys(("1", "1.0", "true", "yes"), True),
    **dict.fromkeys(("0", "0.0", "false", "no"), False),
}
"""Yes and no in the words of a CSV file."""


MAX_DEPTH = 64
"""Tools and arguments nested deeper are rejected: none are, and templates recurse on them."""


def only(fields: Mapping[str, Any], names: Iterable[str], *, reason: Reason, where: str = "") -> Any:
    """The value under one of several names for the same thing; None where there is none.

    Raises:
        RowRejected: two of the names hold different values; none and "" differ from nothing.
    """
    said: str | None = None
    for name in names:
        value = fields.get(name)
        if value is None or said is None or value == fields[said]:
            said = said if value is None or said is not None else name
        elif fields[said] == "":
            said = name
        elif value != "":
            place = f"{where}: " if where else ""
            raise RowRejected(reason, f"{place}{said} and {name} differ: which one holds?")
    return None if said is None else fields[said]


def parse(text: str, *, reason: Reason, where: str) -> Any:
    """JSON text within a record.

    Raises:
        RowRejected: it is no JSON.
    """
    try:
        return loads(text)
    except RowRejected as rejected:
        raise RowRejected(reason, f"{where} is no JSON: {rejected.detail}") from None


def read_message(
    raw: Any, *, where: str, roles: Mapping[str, str], notes: list[Note]
) -> tuple[dict[str, Any], bool | None]:
    """The message as `Conversation` has it, and its weight as a truth value, None without one.

    Args:
        raw: What the record holds.
        where: Its place in the record, for details: "messages[3]".
        roles: Roles to know besides `ROLES`.
        notes: Gets the normalisations.

    Raises:
        RowRejected: no or an unknown role, content that is not text, bad calls, a bad weight.
    """
    if not isinstance(raw, dict):
        raise RowRejected(Reason.BAD_MESSAGE, f"{where} is {type(raw).__name__}, not a message")
    said = only(raw, ("role", "from"), reason=Reason.BAD_MESSAGE, where=where)
    role, holds_calls = _role(said, where, roles, notes)
    content = only(raw, ("content", "value"), reason=Reason.BAD_MESSAGE, where=where)
    if type(content) is str and not holds_calls and raw.keys() <= SPELLINGS:
        return {"role": role, "content": content}, None  # most messages, at a quarter of the time
    if ignored := raw.keys() - KNOWN:
        _check_ignored(raw, ignored, where, notes)
    reasoning = only(raw, REASONING, reason=Reason.BAD_MESSAGE, where=where)
    given = [_as_calls(raw.get("tool_calls"), where, notes)]
    if raw.get("function_call") is not None:
        notes.append(Note.CALL_CONVERTED)
        given.append([raw["function_call"]])
    if raw.get("tool_call"):
        notes.append(Note.CALL_CONVERTED)
        given.append(_as_calls(raw["tool_call"], where, notes))
    if holds_calls:
        given.append(_as_calls(content, where, notes))
        content = ""
    elif content is None:
        notes.append(Note.CONTENT_NULL)
        content = ""
    elif isinstance(content, list | tuple):
        content, thought, calls = _parts(content, where, notes)
        given.append(calls)
        if reasoning and thought:
            raise RowRejected(Reason.BAD_MESSAGE, f"{where} has reasoning both in a part and in a field")
        reasoning = reasoning or thought
    if not isinstance(content, str):
        kind = type(content).__name__
        raise RowRejected(Reason.BAD_MESSAGE, f"{where} has content of type {kind}, not text")
    message: dict[str, Any] = {"role": role, "content": content}
    if reasoning:
        message["reasoning_content"] = _own_text(reasoning, f"{where}: reasoning")
        if raw.get("reasoning_content") is None:
            notes.append(Note.REASONING_RENAMED)
    if several := [calls for calls in given if calls]:
        if len(several) > 1:
            raise RowRejected(Reason.BAD_TOOLS, f"{where} has calls in two places: which ones hold?")
        message["tool_calls"] = [
            _call(c, f"{where}.tool_calls[{n}]", notes) for n, c in enumerate(several[0])
        ]
    if role != "assistant" and len(message) > 2:
        raise RowRejected(Reason.BAD_MESSAGE, f"{where} has reasoning or tool calls, but is a {role} turn")
    for name in ("name", "tool_call_id"):
        if raw.get(name) is not None:
            message[name] = _own_text(raw[name], f"{where}: {name}")
    return message, _weight(raw, where)


def _role(said: Any, where: str, roles: Mapping[str, str], notes: list[Note]) -> tuple[str, bool]:
    """(the role, whether the content holds calls)."""
    if not isinstance(said, str):
        raise RowRejected(Reason.BAD_MESSAGE, f"{where} has no role")
    if said in roles:
        notes.append(Note.ROLE_MAPPED)
        return roles[said], False
    key = said if said in ROLES else said.strip().lower().replace("-", "_").replace(" ", "_")
    if key not in ROLES:
        raise RowRejected(Reason.UNKNOWN_ROLE, f"{where} has the role {said[:40]!r}")
    if ROLES[key] != said:
        notes.append(Note.ROLE_MAPPED)
    return ROLES[key], key in CALL_ROLES


def _check_ignored(raw: Mapping[str, Any], ignored: set[str], where: str, notes: list[Note]) -> None:
    """Fields that no template reads are dropped with a note, unless they hold what should be trained on."""
    filled = {name for name in ignored if raw[name] not in (None, "", [], {})}
    if media := filled.intersection(MEDIA):
        raise RowRejected(Reason.BAD_MESSAGE, f"{where} has {min(media)}; only text can be packed")
    if "tools" in filled:
        raise RowRejected(Reason.BAD_TOOLS, f"{where} has tools; they belong beside the messages")
    if "train_detail" in filled:
        raise RowRejected(
            Reason.BAD_WEIGHT, f"{where} has train_detail; a turn is trained whole or not at all"
        )
    check_controls({name: raw[name] for name in raw if name in filled}, where=where)
    if truth(raw.get("label")) is False:
        raise RowRejected(
            Reason.BAD_WEIGHT, f"{where} has the label {raw['label']!r}: drop the row or the field"
        )
    if filled:
        notes.append(Note.FIELDS_IGNORED)


def truth(value: Any) -> bool | None:
    """Yes or no, as a truth value, a number or a word; None for all else."""
    if isinstance(value, str):
        return TRUTHS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def check_controls(fields: Mapping[str, Any], *, where: str, but: Iterable[str] = ()) -> None:
    """Fields that say what is trained are no ornament: they say "as usual", or nobody can follow them here.

    Args:
        fields: A record's, a part's or a call's; of a message those that `read_message` does not follow.
        where: What they belong to, for details: "messages[3]".
        but: Fields that are read elsewhere.

    Raises:
        RowRejected: a value, or a value in a list, that is neither null nor "as usual".
    """
    if CONTROLS.isdisjoint(fields):
        return
    for name in (name for name in fields if name in CONTROLS and name not in but):
        value = fields[name].tolist() if hasattr(fields[name], "tolist") else fields[name]
        usual = name not in MASKED
        items = value if isinstance(value, list | tuple) else [value]
        if not all(item is None or item == "" or truth(item) is usual for item in items):
            raise RowRejected(
                Reason.BAD_WEIGHT,
                f"{where} has {name} {repr(value)[:40]}, which can't be followed: drop such rows, "
                f"or the column {name} to train them as usual",
            )


def _own_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowRejected(Reason.BAD_MESSAGE, f"{where} is {type(value).__name__}, not text")
    return value


def _parts(parts: Sequence[Any], where: str, notes: list[Note]) -> tuple[str, str, list[Any]]:
    """(text, reasoning, calls) of content given in parts: in this order alone a message can say it."""
    kinds = {"reasoning": 0, "thinking": 0, "text": 1, "tool_call": 2}
    texts: tuple[list[str], list[str]] = ([], [])
    calls: list[Any] = []
    last = 0
    for number, part in enumerate(parts):
        place = f"{where}.content[{number}]"
        said = part.get("type") if isinstance(part, dict) else type(part).__name__
        kind = kinds.get(said) if isinstance(said, str) else None
        if kind is None or not isinstance(part, dict):
            raise RowRejected(
                Reason.BAD_MESSAGE, f"{place} is of type {str(said)[:40]!r}; only text can be packed"
            )
        if kind < last:
            raise RowRejected(Reason.BAD_MESSAGE, f"{place}: {said} comes too late; a template would move it")
        last = kind
        check_controls(part, where=place)
        value = only(part, ("value", "text", *REASONING), reason=Reason.BAD_MESSAGE, where=place)
        if kind == 2:
            calls += _as_calls(value, place, notes)
        else:
            texts[kind].append(_own_text(value, place))
    notes.append(Note.PARTS_JOINED)
    return "".join(texts[1]), "".join(texts[0]), calls


def _as_calls(value: Any, where: str, notes: list[Note]) -> list[Any]:
    """A list of calls from none, one or several, as JSON or as its text."""
    if isinstance(value, str) and value.strip():
        value = parse(value, reason=Reason.BAD_TOOLS, where=f"{where}: the call")
        notes.append(Note.CALL_CONVERTED)
    if not value:
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list | tuple):
        raise RowRejected(Reason.BAD_TOOLS, f"{where}: a call is an object, not {type(value).__name__}")
    return list(value)


def _call(raw: Any, where: str, notes: list[Note]) -> dict[str, Any]:
    """`{"type": "function", "function": {"name": text, "arguments": object}}`, and the id if there is one."""
    if isinstance(raw, str):
        raw = parse(raw, reason=Reason.BAD_TOOLS, where=where)
        notes.append(Note.CALL_CONVERTED)
    function, rest = _function(raw, where)
    if function is raw:
        notes.append(Note.CALL_CONVERTED)
    arguments = only(function, ("arguments", "parameters"), reason=Reason.BAD_TOOLS, where=where)
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse(arguments, reason=Reason.BAD_TOOLS, where=f"{where}: arguments")
        notes.append(Note.ARGUMENTS_PARSED)
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
        notes.append(Note.ARGUMENTS_EMPTY)
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise RowRejected(Reason.BAD_TOOLS, f"{where}: arguments are of type {kind}, not an object")
    if any(raw[name] is not None for name in rest - {"id", "index"}):
        notes.append(Note.FIELDS_IGNORED)
    check_controls(raw, where=where)
    call: dict[str, Any] = {"type": "function"}
    if raw.get("id") is not None:
        call["id"] = _own_text(raw["id"], f"{where}: id")
    return call | {"function": {"name": function["name"], "arguments": dict(arguments)}}


def _function(raw: Any, where: str) -> tuple[Mapping[str, Any], set[str]]:
    """(the part of a call or tool that has its name, the outer keys that are not understood)."""
    if not isinstance(raw, dict):
        raise RowRejected(Reason.BAD_TOOLS, f"{where} is {type(raw).__name__}, not an object")
    if raw.get("type") not in (None, "function"):
        raise RowRejected(Reason.BAD_TOOLS, f"{where} is of type {str(raw['type'])[:40]!r}, not a function")
    function = raw.get("function")
    if function is None:
        function = raw
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRejected(Reason.BAD_TOOLS, f"{where} has no function name")
    known = {"type", "function"} if function is not raw else {"type", "name", "arguments", "parameters"}
    return function, raw.keys() - known


def read_tools(value: Any, *, notes: list[Note]) -> list[dict[str, Any]] | None:
    """The tools on offer as `{"type": "function", "function": schema}`; None for null, [] and "".

    Raises:
        RowRejected: no JSON, no list, or a tool without a name.
    """
    if isinstance(value, str):
        value = parse(value, reason=Reason.BAD_TOOLS, where="tools") if value.strip() else None
        notes.append(Note.TOOLS_CONVERTED)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise RowRejected(Reason.BAD_TOOLS, f"tools are of type {type(value).__name__}, not a list")
    return [_tool(tool, f"tools[{number}]", notes) for number, tool in enumerate(value)] or None


def _tool(raw: Any, where: str, notes: list[Note]) -> dict[str, Any]:
    if isinstance(raw, str):
        raw = parse(raw, reason=Reason.BAD_TOOLS, where=where)
        notes.append(Note.TOOLS_CONVERTED)
    function, _ = _function(raw, where)
    if function is not raw:
        return {"type": "function", **raw}
    notes.append(Note.TOOLS_CONVERTED)
    return {"type": "function", "function": {name: value for name, value in raw.items() if name != "type"}}


def _weight(raw: Mapping[str, Any], where: str) -> bool | None:
    if raw.keys().isdisjoint(WEIGHTS):
        return None
    weight = only(raw, WEIGHTS, reason=Reason.BAD_WEIGHT, where=where)
    if weight is None:
        return None
    if not isinstance(weight, bool | int | float) or weight not in (0, 1):
        raise RowRejected(
            Reason.BAD_WEIGHT, f"{where} has the weight {str(weight)[:40]!r}; it must be 0 or 1"
        )
    return bool(weight)


def clean(value: Any, *, replace: bool, notes: list[Note]) -> Any:
    """The value itself, where JSON in UTF-8 can say it.

    Args:
        value: Text, messages or tools.
        replace: Makes each surrogate without its other half U+FFFD, instead of rejecting the row.
        notes: Gets the normalisations.

    Raises:
        RowRejected: a lone surrogate, or tools and arguments that are no JSON or nested too deeply.
    """
    if not _has_surrogate(value):
        return value
    if not replace:
        raise RowRejected(Reason.LONE_SURROGATE, "text has half of a surrogate pair, which is no character")
    notes.append(Note.SURROGATE_REPLACED)
    return _mended(value)


def has_surrogate(text: str) -> bool:
    """Whether half of a surrogate pair is in a text. Encoding finds it in half the time of a pattern."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _has_surrogate(value: Any) -> bool:
    """Level by level and without recursion: half the time of the check for everything else in a record."""
    found = False
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                found = found or has_surrogate(item)
            elif kind is dict and all(type(key) is str for key in item):
                below.extend(item)
                below.extend(item.values())
            elif kind is list:
                below.extend(item)
            elif not (item is None or kind is bool or kind is int or (kind is float and math.isfinite(item))):
                raise RowRejected(Reason.BAD_TOOLS, f"tools or arguments hold {str(item)[:40]!r}: no JSON")
        if not below:
            return found
        level = below
    raise RowRejected(Reason.BAD_TOOLS, f"tools or arguments are nested more than {MAX_DEPTH} deep")


def _mended(value: Any) -> Any:
    if isinstance(value, str):  # UTF-16 joins the halves that belong together
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value
