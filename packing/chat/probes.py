"""Probe conversations: what a template prints of each role, of reasoning, calls, replies and tools.

A shape is a word of letters, one a message; A is the probed turn, which says what the probe's kind asks:

    "suctA"  ->  system, user, an assistant that calls, the tool's reply, and the probed turn
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from packing.chat.dialect import Dialect, adapt
from packing.chat.template import RENDER_ERRORS, ChatTemplate, Render, ScatteredError
from packing.errors import RowRejected

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} description",
            "parameters": {
                "type": "object",
                "properties": {"wombat": {"type": "string", "description": "Any wombat"}},
                "required": ["wombat"],
            },
        },
    }
    for name in ("axolotl_lookup", "narwhal_lookup")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One probed turn in its render.

    Attributes:
        previous: Role of the message before it, "" at the beginning.
        next: Role of the message behind it, "" at the end.
        answer: Its text, "" for none.
        reasoning: Its reasoning, "" where none is printed.
        calls: How many tools it calls.
        name: The function that it calls first, "" for none.
        region: All that is printed for it.
        following: All that is printed behind that.
        prompt: What the generation prompt prints behind the messages before it, None if it can't be told.
        foreign: Another message's word is in the region.
    """

    previous: str
    next: str
    answer: str
    reasoning: str
    calls: int
    name: str
    region: str
    following: str
    prompt: str | None
    foreign: bool

    @property
    def key(self) -> tuple[str, bool]:
        """What decides how the turn begins."""
        return (self.previous, self.calls > 0)


class Words:
    """Words that no template contains; the two sets begin with different letters, so that what two probes
    share is the template's own text.
    """

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.count = 0
        self.given: list[str] = []

    def __call__(self) -> str:
        self.count += 1
        self.given.append(f"{self.stem}{self.count}{self.stem[::-1]}")
        return self.given[-1]


# s(ystem), u(ser), a(ssistant), c(all), t(ool reply), and the probed turn.
_PLAIN = (
    *("uA", "uAu", "uAua", "uauA", "uauAua", "uaA", "uAa"),
    *("suA", "suAua", "sA", "sAua", "usA", "uasuA", "uAsua", "A", "Aua"),
    *("uAta", "uctA", "uctAua", "ucttA", "uctctA", "uauctA"),
)
_CALLS = (
    *("uA", "uAta", "uAtaua", "uauAta", "uctAta", "uctA", "uAtta"),
    *("uAua", "uAa", "uaAta", "suAta", "uasuAta"),
)


def build(
    shape: str, words: Words, *, reasoning: bool = False, calls: int = 0, text: bool = True
) -> list[dict[str, Any]]:
    """The messages of a shape; the properties are those of its probed turn."""
    messages: list[dict[str, Any]] = []
    for letter in shape:
        role = {"s": "system", "u": "user", "t": "tool"}.get(letter, "assistant")
        message: dict[str, Any] = {"role": role, "content": words()}
        if letter == "c":
            message |= {"content": "", "tool_calls": [_a_call(words)]}
        if letter == "A":
            if reasoning:
                message["reasoning_content"] = words()
            if calls:
                message["tool_calls"] = [_a_call(words) for _ in range(calls)]
            if not text:
                message["content"] = ""
        messages.append(message)
    return messages


def _a_call(words: Words) -> dict[str, Any]:
    return {"type": "function", "function": {"name": words(), "arguments": {"wombat": words()}}}


def attempt(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], dialect: Dialect, **more: Any
) -> tuple[Render, list[dict[str, Any]]] | None:
    """The render of a probe, None where the template refuses it."""
    try:
        adapted = adapt(messages, dialect=dialect, notes=[])
    except RowRejected:
        return None
    try:
        return template.render(adapted, **more), adapted
    except RENDER_ERRORS:
        return None


def place_of(render: Render, messages: Sequence[Mapping[str, Any]], number: int) -> tuple[int, int] | None:
    """Where a message is printed; None where it is not, or not in one place."""
    try:
        return render.places(messages)[number]
    except ScatteredError:
        return None


def find_dialect(template: ChatTemplate) -> tuple[Dialect, frozenset[str]]:
    """How the template takes reasoning, calls and tools, and what of them it prints (`renders`)."""
    words = Words("Quokka")
    dialect = Dialect(aliases=tuple(sorted({"thinking", "reasoning"} & template.reads)))
    renders = set()

    def shows(messages: Sequence[Mapping[str, Any]], *wanted: str, **more: Any) -> str | None:
        seen = attempt(template, messages, dialect, **more)
        return seen[0].text if seen and all(word in seen[0].text for word in wanted) else None

    for name, shape in (("reasoning", "uA"), ("earlier_reasoning", "uAua")):
        messages = build(shape, words, reasoning=True)
        if shows(messages, messages[1]["reasoning_content"]):
            renders.add(name)
    dialect = replace(
        dialect, reasoning=bool(renders), think_tags=not renders and _cuts_think(template, words)
    )
    messages = build("suA", words)
    if shows(messages, *(m["content"] for m in messages)):
        renders.add("system")
    if (found := _find_call_dialect(template, dialect, words)) is not None:
        dialect = found
        renders.add("tool_calls")
        messages = build("uA", words, calls=2, text=False)
        values = [call["function"]["arguments"]["wombat"] for call in messages[1]["tool_calls"]]
        if shows(messages, *values):
            renders.add("parallel_calls")
        messages = build("ucta", words)
        if shows(messages, messages[2]["content"]):
            renders.add("tool_replies")
    functions: list[Any] = [tool["function"] for tool in TOOLS]
    wanted = [text for function in functions for text in (function["name"], function["description"])]
    if shows(build("uA", words), *wanted, "wombat", tools=TOOLS):
        renders.add("tools")
    return dialect, frozenset(renders)


def _cuts_think(template: ChatTemplate, words: Words) -> bool:
    """Whether a think block in the content is lost, in the last turn or an earlier one."""
    for shape in ("uA", "uAua"):
        messages = build(shape, words)
        messages[1]["content"] = f"<think>\n{words()}\n</think>\n\n{words()}"
        seen = attempt(template, messages, Dialect(reasoning=False))
        if seen and words.given[-2] not in seen[0].text:
            return True
    return False


def _find_call_dialect(template: ChatTemplate, dialect: Dialect, words: Words) -> Dialect | None:
    forms: tuple[Literal["object", "text"], ...] = ("object", "text")
    for call_ids, arguments in itertools.product((False, True), forms):
        candidate = replace(dialect, arguments=arguments, call_ids=call_ids)
        messages = build("uAta", words, calls=1, text=False)
        called = messages[1]["tool_calls"][0]["function"]
        if (seen := attempt(template, messages, candidate)) is None:
            continue
        region = place_of(*seen, 1)
        text = seen[0].text[slice(*region)] if region else ""
        # A quote behind a backslash: JSON text that was written as JSON once more.
        if (
            all(word in text for word in (called["name"], "wombat", called["arguments"]["wombat"]))
            and '\\"' not in text
        ):
            return candidate
    return None


def observe_all(template: ChatTemplate, dialect: Dialect, renders: frozenset[str]) -> Iterator[Observation]:
    kinds: list[tuple[Sequence[str], dict[str, Any]]] = [
        (_PLAIN, {}),
        (_PLAIN, {"reasoning": True}),
    ]
    if "tool_calls" in renders:
        kinds += [
            (_CALLS, {"calls": calls, "text": text, "reasoning": reasoning})
            for calls in ((1, 2) if "parallel_calls" in renders else (1,))
            for text in (False, True)
            for reasoning in (False, True)
        ]
    for (shapes, kind), stem in itertools.product(kinds, ("Quokka", "zebu")):
        for shape in shapes:
            words = Words(stem)
            seen = _observe(template, dialect, shape, words, kind)
            if seen is not None:
                yield seen


def _observe(
    template: ChatTemplate, dialect: Dialect, shape: str, words: Words, kind: Mapping[str, Any]
) -> Observation | None:
    messages = build(shape, words, **kind)
    probed = shape.index("A")
    if (seen := attempt(template, messages, dialect)) is None or (region := place_of(*seen, probed)) is None:
        return None
    render, adapted = seen
    text = render.text[slice(*region)]
    message = messages[probed]
    own = [message["content"], message.get("reasoning_content", "")]
    for call in message.get("tool_calls", ()):
        own += [call["function"]["name"], call["function"]["arguments"]["wombat"]]
    if any(word not in text for word in (own[0], *own[2:])):
        return None
    return Observation(
        previous=messages[probed - 1]["role"] if probed else "",
        next=messages[probed + 1]["role"] if probed + 1 < len(messages) else "",
        answer=own[0],
        reasoning=own[1] if own[1] in text else "",
        calls=kind.get("calls", 0),
        name=own[2] if kind.get("calls") else "",
        region=text,
        following=render.text[region[1] :],
        prompt=_generation_prompt(template, adapted[:probed]),
        foreign=any(word in text for word in words.given if word not in own),
    )


def _generation_prompt(template: ChatTemplate, history: Sequence[Mapping[str, Any]]) -> str | None:
    """What the template prints behind the history to make the model speak; None where it can't be told."""
    if not history:
        return None
    try:
        without = template.render(history)
        prompted = template.render(history, add_generation_prompt=True).text
    except RENDER_ERRORS:
        return None
    # Not what the text has more than without the prompt: a template may print BOS or EOS in its place.
    end = max((p.end for p in without.pieces if p.message == len(history) - 1), default=len(without.text))
    return prompted[end:] if prompted[:end] == without.text[:end] else None


def find_displaced(template: ChatTemplate, dialect: Dialect) -> frozenset[tuple[str, bool]]:
    displaced = set()
    for shape, tools in itertools.product(("uaua", "suaua", "uasuaua", "suasua"), (None, TOOLS)):
        words = Words("Quokka")
        messages = build(shape, words)
        if (seen := attempt(template, messages, dialect, tools=tools)) is None:
            continue
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                continue
            place = place_of(*seen, number)
            own = seen[0].text[slice(*place)] if place else ""
            if message["content"] in seen[0].text and message["content"] not in own:
                displaced.add((message["role"], is_first(messages, number)))
    return frozenset(displaced)


def is_first(messages: Sequence[Mapping[str, Any]], number: int) -> bool:
    """Whether a message is the first of its role."""
    return all(other["role"] != messages[number]["role"] for other in messages[:number])
