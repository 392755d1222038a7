"""A conversation's messages in the dialect that one template takes.

What comes in is what `Conversation` promises: content is text, arguments are objects. What has no one
meaning is rejected, never guessed; what is changed is named in the notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packing.errors import Reason, RowRejected
from packing.example import Note

ROLES = ("system", "user", "assistant", "tool")

THINK_TAG = re.compile(r"</?think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one template wants its messages; `calibrate` finds out.

    Attributes:
        reasoning: It prints the field `reasoning_content`, so inline think blocks move there.
        think_tags: It has no such field, but treats think tags in the content as markup.
        aliases: Other fields that it reads, and that reasoning stands in as well (gpt-oss: `thinking`).
        arguments: Whether a call's arguments are an object or JSON text.
        call_ids: It demands ids of nine characters on calls and tool replies (Mistral does).
    """

    reasoning: bool = True
    think_tags: bool = False
    aliases: tuple[str, ...] = ()
    arguments: Literal["object", "text"] = "object"
    call_ids: bool = False


def adapt(
    messages: Sequence[Mapping[str, Any]], *, dialect: Dialect, notes: list[Note]
) -> list[dict[str, Any]]:
    """New message objects, each distinct, in the template's dialect.

    Raises:
        RowRejected: no messages, one that is none, or think tags without one meaning.
    """
    if not messages:
        raise RowRejected(Reason.EMPTY_CONVERSATION, "there are no messages")
    result = [_message(message, number, dialect, notes) for number, message in enumerate(messages)]
    if dialect.call_ids:
        _add_call_ids(result, notes)
    return result


def _message(message: Mapping[str, Any], number: int, dialect: Dialect, notes: list[Note]) -> dict[str, Any]:
    if type(message) is not dict and not isinstance(message, Mapping):  # the latter takes ten times as long
        raise RowRejected(Reason.BAD_MESSAGE, f"message {number} is {type(message).__name__}, not an object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RowRejected(Reason.UNKNOWN_ROLE, f"message {number} has the role {str(role)[:40]!r}")
    if not isinstance(content, str):
        raise RowRejected(
            Reason.BAD_MESSAGE, f"message {number} has content of type {type(content).__name__}, not text"
        )
    result = dict(message)
    if role != "assistant":
        return result
    if not isinstance(result.get("reasoning_content", ""), str):
        raise RowRejected(Reason.BAD_MESSAGE, f"message {number} has reasoning that is not text")
    if calls := result.pop("tool_calls", None):
        if not isinstance(calls, list | tuple):
            raise RowRejected(Reason.BAD_TOOLS, f"message {number} has tool calls that are no list")
        result["tool_calls"] = [_call(call, number, dialect) for call in calls]
    if "think>" in content and (dialect.reasoning or dialect.think_tags):
        _settle_think_tags(result, number, dialect, notes)
    if "reasoning_content" in result:
        result.update(dict.fromkeys(dialect.aliases, result["reasoning_content"]))
    return result


def _settle_think_tags(message: dict[str, Any], number: int, dialect: Dialect, notes: list[Note]) -> None:
    """Moves an inline block to the reasoning; tags that are text are kept from the template's hands."""
    given = message.get("reasoning_content", "")
    block, answer = split_think(message["content"], number=number)
    if block is not None and given:
        raise RowRejected(
            Reason.THINK_TAG,
            f"message {number} has reasoning both in a field and in a think block of its content",
        )
    if dialect.reasoning:
        # The field is set even if empty: with it a template leaves tags in the content alone.
        message["reasoning_content"] = given if block is None else block
        message["content"] = answer
        notes.append(Note.THINK_TEXT if block is None else Note.THINK_BLOCK)


def split_think(content: str, *, number: int) -> tuple[str | None, str]:
    r"""(reasoning, answer) of a content with think tags; reasoning None where all tags are text.

        <think>a</think>b           -> "a", "b"
        <think></think>b            -> "", "b"
        a\n</think>\n\nb            -> "a", "b"     the opening tag was in the prompt
        say <think>x</think> aloud  -> None, all    a pair within a text is text

    Raises:
        RowRejected: a tag without its partner, where it can't be told whether it is markup or text.
    """
    tags = list(THINK_TAG.finditer(content))
    opens = [tag.group() == "<think>" for tag in tags]
    block = answer = None
    if opens[:2] == [True, False] and not content[: tags[0].start()].strip():
        block, answer = content[tags[0].end() : tags[1].start()], content[tags[1].end() :]
        opens = opens[2:]
    elif opens[:1] == [False] and _stands_alone(content, tags[0]):
        block, answer = content[: tags[0].start()], content[tags[0].end() :]
        opens = opens[1:]
    if opens != [True, False] * (len(opens) // 2):
        raise RowRejected(
            Reason.THINK_TAG,
            f"message {number} has a think tag without its partner, which may be markup or text",
        )
    if block is None or answer is None:
        return None, content
    return block.strip(), answer.lstrip("\n")


def _stands_alone(content: str, tag: re.Match[str]) -> bool:
    """Whether a line holds this tag and nothing else."""
    before, behind = content[: tag.start()].rstrip(" \t"), content[tag.end() :].lstrip(" \t\r")
    return before[-1:] in ("", "\n") and behind[:1] in ("", "\n")


def _call(call: Mapping[str, Any], number: int, dialect: Dialect) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not _is_name(function.get("name")):
        raise RowRejected(Reason.BAD_TOOLS, f"message {number} has a tool call without a function name")
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        raise RowRejected(
            Reason.BAD_TOOLS, f"message {number}: the arguments of {function['name']!r} are no object"
        )
    text = to_json(arguments, f"message {number}: the arguments of {function['name']!r}")
    taken = text if dialect.arguments == "text" else arguments
    return {**call, "function": {**function, "arguments": taken}}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip())


def check_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools as JSON text, after a check that each is a schema with a name.

    Raises:
        RowRejected: one is not.
    """
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not _is_name(function.get("name")):
            raise RowRejected(Reason.BAD_TOOLS, f"tool {number} is no function with a name")
    return to_json(tools, "the tools")


def to_json(value: Any, what: str) -> str:
    """The value as JSON text, as templates write it.

    Raises:
        RowRejected: it is no JSON: NaN, infinity, a Python object, or nested too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowRejected(Reason.BAD_TOOLS, f"{what} are no JSON: {error}") from error


def _add_call_ids(messages: Sequence[dict[str, Any]], notes: list[Note]) -> None:
    """Ids of nine characters, counted through the conversation, for calls without; replies without take
    them in the order of the calls.

    Raises:
        RowRejected: a reply names no call that waits for one.
    """
    waiting: list[str] = []
    count = 0
    named = {message.get("tool_call_id") for message in messages}
    for number, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if "id" not in call:
                call["id"] = f"call{count:05d}"
                notes.append(Note.CALL_ID_ADDED)
            waiting.append(call["id"])
            count += 1
        if message["role"] == "tool" and waiting:
            if "tool_call_id" not in message:
                free = [name for name in waiting if name not in named]
                message["tool_call_id"] = (free or waiting)[0]
            if message["tool_call_id"] not in waiting:
                raise RowRejected(
                    Reason.BAD_TOOLS,
                    f"message {number} replies to {str(message['tool_call_id'])[:40]!r}, no call's id",
                )
            waiting.remove(message["tool_call_id"])
