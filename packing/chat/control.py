"""Texts that spell control tokens, or could help to put one together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packing.chat.dialect import to_json
from packing.chat.spans import leaves

CONTROL_FORM = re.compile(r"<[|｜][^<>\s]+[|｜]>")


class Joins:
    """Whether a text could be a part of a control token.

    It ends or begins in one, or is within its sign; and where the template itself prints the beginning of
    one, it may be any part.

    Args:
        control: The control tokens.
        printed: The template's own texts.
    """

    def __init__(self, control: Iterable[str], printed: Iterable[str]) -> None:
        tokens = [token for token in control if len(token) > 1]
        self._heads = tuple({token[:n] for token in tokens for n in range(1, len(token))})
        self._tails = tuple({token[n:] for token in tokens for n in range(1, len(token))})
        self._within = {part for token in tokens for part in (token[1:-1], token[2:-2]) if part}
        if any(text.endswith(self._heads) for text in printed):
            self._within |= {
                token[start:end]
                for token in tokens
                for start, end in itertools.combinations(range(len(token)), 2)
            }
        self._signs = sorted({token[0] for token in tokens} | {token[-1] for token in tokens})
        self._length = max(map(len, tokens), default=0)

    def may(self, text: str) -> bool:
        text = text.strip()
        if len(text) <= self._length and text in self._within:  # a long text costs its hash
            return True
        ends = text[: self._length] + text[-self._length :]
        for sign in self._signs:  # one or two letters, which hardly a text has at its ends
            if sign in ends:
                return text.endswith(self._heads) or text.startswith(self._tails)
        return False


def strings(value: Any) -> Iterable[str]:
    """Every key and text of a message or of tools, but the message's own keys and its role."""
    if isinstance(value, dict) and "role" in value:
        if len(value) == 2:
            return (value["content"],)  # most messages; all else costs more than what is done with it
        value = [part for key, part in value.items() if key != "role"]
    return (leaf for leaf in leaves(value) if isinstance(leaf, str))


def exchange(value: Any, names: Mapping[str, str]) -> Any:
    """The value with other names for some of its texts and keys."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, Mapping):
        return {exchange(key, names): exchange(part, names) for key, part in value.items()}
    return [exchange(part, names) for part in value] if isinstance(value, list | tuple) else value


def texts(message: Mapping[str, Any]) -> Sequence[str]:
    """Every text of a message that a template may print, except its role."""
    found = [message["content"]]
    if len(message) > 2:
        found += [
            str(message[key]) for key in ("reasoning_content", "name", "tool_call_id") if key in message
        ]
        if "tool_calls" in message:
            found.append(to_json(message["tool_calls"], "tool_calls"))
    return found
