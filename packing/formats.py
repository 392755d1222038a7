"""Records to conversations: every format that people train on, one function out.

    {"conversations": [{"from": "human", "value": "hi"}, …]}  ->  Conversation(messages=[{"role": "user", …}, …])

A record becomes a `Conversation` or a `RowRejected`; what was changed on the way is in its notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packing.errors import Reason, RowRejected
from packing.example import Conversation
from packing.strict_json import loads


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """How records are read.

    Attributes:
        format: The one format of all records, or "auto": each record's own.
        columns: Where a column has another name: {"messages": "dialog"}.
    """

    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    trailing_user: Literal["trim", "reject"] = "trim"
    consecutive: Literal["keep", "merge", "reject"] = "keep"
    system: Literal["keep", "fold", "reject"] = "keep"
    surrogates: Literal["reject", "replace"] = "reject"


def normalise(record: Mapping[str, Any], *, options: FormatOptions) -> Conversation:
    """The conversation in one record.

    Raises:
        RowRejected: no known format, or something in it that can't be trained on.
    """
    column = options.columns.get("messages", "messages")
    if column not in record:
        raise RowRejected(Reason.BAD_RECORD, f"no known format in the columns {', '.join(record)}"[:200])
    messages = record[column]
    if not messages:
        raise RowRejected(Reason.EMPTY_CONVERSATION, f"{column} is empty")
    out: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowRejected(Reason.BAD_MESSAGE, f"message {number} has no role")
        if message["role"] not in ("system", "user", "assistant", "tool"):
            raise RowRejected(Reason.UNKNOWN_ROLE, f"message {number} has the role {message['role']!r}")
        content = message.get("content")
        if content is None:
            content = ""
        if not isinstance(content, str):
            raise RowRejected(Reason.BAD_MESSAGE, f"message {number} has content that is not text")
        clean = {k: v for k, v in message.items() if v is not None}
        clean["content"] = content
        out.append(clean)
    tools = record.get("tools") or None
    if isinstance(tools, str):
        tools = loads(tools)
    return Conversation(messages=out, tools=tools or None)
