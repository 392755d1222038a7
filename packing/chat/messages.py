"""Messages and tools as a template takes them: one form for what people write in several.

Each change is named in the notes that come back, so that the report can count it. What has no one
meaning is rejected, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packing.errors import Reason, RowRejected

ROLES = ("system", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that reasoning goes by, the first is the one that templates read."""

THINK_TAG = re.compile(r"</?think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one template wants its messages; `calibrate` finds out.

    Attributes:
        reasoning: It prints the field `reasoning_content`, so inline think blocks move there.
        think_tags: It treats think tags in the content as markup.
        thinking: It reads the field `thinking` (gpt-oss does), so reasoning stands there as well.
        arguments: Whether a call's arguments are an object or JSON text.
        call_ids: It demands ids of nine characters on calls and tool replies (Mistral does).
    """

    reasoning: bool = True
    think_tags: bool = False
    thinking: bool = False
    arguments: Literal["object", "text"] = "object"
    call_ids: bool = False


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], *, dialect: Dialect
) -> tuple[list[dict[str, Any]], list[str]]:
    """New message objects in the template's dialect, and the notes of what was changed.

    Raises:
        RowRejected: a message that is none, or that has no one meaning.
    """
    if not messages:
        raise RowRejected(Reason.EMPTY_CONVERSATION, "there are no messages")
    notes: list[str] = []
    result = [_message(message, number, dialect, notes) for number, message in enumerate(messages)]
    if dialect.call_ids:
        _add_call_ids(result, notes)
    return result, notes


def _message(message: Mapping[str, Any], number: int, dialect: Dialect, notes: list[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowRejected(Reason.BAD_MESSAGE, f"message {number} is no object but {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise RowRejected(
            Reason.UNKNOWN_ROLE, f"message {number} has role {role!r}, not one of {', '.join(ROLES)}"
        )
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        raise RowRejected(
            Reason.BAD_MESSAGE, f"message {number}: content is {type(content).__name__}, not text"
        )
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = content
    if role != "assistant":
        return result
    if calls := result.pop("tool_calls", None):
        result["tool_calls"] = _calls(calls, number, dialect, notes)
    _set_reasoning(result, number, dialect, notes)
    return result


def _set_reasoning(message: dict[str, Any], number: int, dialect: Dialect, notes: list[str]) -> None:
    """Leaves reasoning in the fields that the template reads, and nowhere else."""
    given = [message.pop(field) for field in REASONING_FIELDS if field in message]
    if any(not isinstance(text, str) for text in given):
        raise RowRejected(Reason.BAD_MESSAGE, f"message {number}: reasoning is not text")
    reasoning = next((text for text in given if text), "")
    if any(text not in ("", reasoning) for text in given):
        raise RowRejected(Reason.BAD_MESSAGE, f"message {number}: two fields with different reasoning")
    explicit = bool(reasoning)
    if (dialect.reasoning or dialect.think_tags) and "think>" in message["content"]:
        inline, answer = split_think(message["content"], number=number)
        if inline is not None and reasoning:
            raise RowRejected(
                Reason.THINK_TAG,
                f"message {number} has reasoning in a field and in a think block of its content",
            )
        if dialect.reasoning:
            # The field is set even if empty: it tells the template to leave tags in the content alone.
            explicit = True
            message["content"] = answer
            reasoning = reasoning if inline is None else inline
            notes.append("think_tag_kept_as_text" if inline is None else "think_block_moved_to_reasoning")
    if explicit:
        message["reasoning_content"] = reasoning
        if dialect.thinking:
            message["thinking"] = reasoning


def split_think(content: str, *, number: int) -> tuple[str | None, str]:
    r"""(reasoning, answer) of a content with think tags; reasoning None where all tags are literal text.

        <think>a</think>b           -> "a", "b"
        a\n</think>\n\nb            -> "a", "b"     the opening tag was in the prompt
        say <think>x</think> aloud  -> None, all    a pair within text is literal
        <think></think>b            -> "", "b"

    Raises:
        RowRejected: a tag without its partner, where it can't be told whether it is markup or text.
    """
    tags = [(match.start(), match.end(), match.group() == "<think>") for match in THINK_TAG.finditer(content)]
    start = end = 0
    if tags and tags[0][2] and not content[: tags[0][0]].strip():
        if len(tags) > 1 and not tags[1][2]:
            start, end = tags[0][1], tags[1][1]
            tags, reasoning = tags[2:], content[start : tags[1][0]]
        else:
            raise RowRejected(Reason.THINK_TAG, f"message {number}: <think> is not closed by </think>")
    elif tags and not tags[0][2] and _alone_on_line(content, *tags[0][:2]):
        end = tags[0][1]
        reasoning = content[: tags[0][0]]
        tags = tags[1:]
    else:
        reasoning = None
    if any(opens != (position % 2 == 0) for position, (_, _, opens) in enumerate(tags)) or len(tags) % 2:
        raise RowRejected(
            Reason.THINK_TAG,
            f"message {number} has a think tag without its partner: markup or text can't be told",
        )
    return (None, content) if reasoning is None else (reasoning.strip(), content[end:].lstrip("\n"))


def _alone_on_line(content: str, start: int, end: int) -> bool:
    before, after = content[:start].rstrip(" \t"), content[end:].lstrip(" \t")
    return before[-1:] in ("", "\n") and after[:1] in ("", "\n")


def _calls(calls: Any, number: int, dialect: Dialect, notes: list[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RowRejected(Reason.BAD_TOOLS, f"message {number}: tool_calls is no list")
    return [_call(call, number, dialect, notes) for call in calls]


def _call(call: Any, number: int, dialect: Dialect, notes: list[str]) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RowRejected(Reason.BAD_TOOLS, f"message {number}: a tool call is no object")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRejected(Reason.BAD_TOOLS, f"message {number}: a tool call has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise RowRejected(
                Reason.BAD_TOOLS,
                f"message {number}: the arguments of {function['name']} are no JSON: {error}",
            ) from error
        notes.append("tool_arguments_parsed")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowRejected(
            Reason.BAD_TOOLS, f"message {number}: the arguments of {function['name']} are no object"
        )
    text = to_json(arguments, f"message {number}: the arguments of {function['name']}")
    result: dict[str, Any] = {} if function is call else {k: v for k, v in call.items() if v is not None}
    result["type"] = "function"
    result["function"] = {
        "name": function["name"],
        "arguments": text if dialect.arguments == "text" else arguments,
    }
    return result


def _add_call_ids(messages: list[dict[str, Any]], notes: list[str]) -> None:
    """Ids of nine characters, counted through the conversation, where calls have none; replies take them
    in the order of the calls.
    """
    waiting: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" not in call:
                call["id"] = f"call{count:05d}"
                notes.append("tool_call_id_added")
            waiting.append(call["id"])
            count += 1
        if message["role"] == "tool" and waiting:
            given = waiting.pop(0)
            message.setdefault("tool_call_id", given)


def take_weights(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[bool] | None]:
    """The messages without `weight` and `train`, and whether each may be trained; None where none says.

    Raises:
        RowRejected: a weight other than 0 and 1, or two that differ.
    """
    bare: list[Mapping[str, Any]] = []
    trainable: list[bool] = []
    weighted = False
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RowRejected(
                Reason.BAD_MESSAGE, f"message {number} is no object but {type(message).__name__}"
            )
        weights = [message[key] for key in ("weight", "train") if message.get(key) is not None]
        for weight in weights:
            if weight not in (0, 1) or weight != weights[0]:
                raise RowRejected(
                    Reason.BAD_WEIGHT, f"message {number} has weight {weight!r}: only 0 and 1 are known"
                )
        weighted = weighted or bool(weights)
        trainable.append(bool(weights[0]) if weights else True)
        bare.append({key: value for key, value in message.items() if key not in ("weight", "train")})
    return bare, trainable if weighted else None


def normalise_tools(tools: Any) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Tools as a list of JSON schemas, or None for null, [] and JSON text of these; and the notes.

    Raises:
        RowRejected: no schemas.
    """
    notes: list[str] = []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise RowRejected(Reason.BAD_TOOLS, f"tools are no JSON: {error}") from error
        notes.append("tools_parsed")
    if not tools:
        return None, notes
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, Sequence):
        raise RowRejected(Reason.BAD_TOOLS, f"tools are {type(tools).__name__}, not a list")
    return [_tool(tool, number, notes) for number, tool in enumerate(tools)], notes


def _tool(tool: Any, number: int, notes: list[str]) -> dict[str, Any]:
    if isinstance(tool, str):
        try:
            tool = json.loads(tool)
        except ValueError as error:
            raise RowRejected(Reason.BAD_TOOLS, f"tool {number} is no JSON: {error}") from error
        notes.append("tools_parsed")
    if not isinstance(tool, Mapping):
        raise RowRejected(Reason.BAD_TOOLS, f"tool {number} is no object")
    if "function" not in tool:
        tool = {"type": "function", "function": tool}
        notes.append("tools_wrapped")
    function = tool["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRejected(Reason.BAD_TOOLS, f"tool {number} has no name")
    to_json(tool, f"tool {number}")
    return {"type": "function", **tool}


def to_json(value: Any, what: str) -> str:
    """The value as JSON text, which templates write it as.

    Raises:
        RowRejected: no JSON: NaN, infinity, or a Python object.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowRejected(Reason.BAD_TOOLS, f"{what} are no JSON: {error}") from error
