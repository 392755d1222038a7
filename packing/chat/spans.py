"""Which characters of a rendered conversation the assistant said, each turn checked.

A turn's text is taken from where the template printed it, never searched for. The checks that follow
can only refuse; what they let through is explained to the last character:

    [start][lead][answer][end]      a plain turn: start, lead and end are the template's own, as calibrated
    [start][...calls...][end]       a turn with calls: its names and arguments are in, and the same render
                                    with all other messages' texts exchanged leaves it unchanged
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packing.chat.calibrate import Calibration
from packing.chat.messages import split_think
from packing.chat.template import RENDER_ERRORS, ChatTemplate, Render
from packing.errors import Reason, RowRejected

Message = Mapping[str, Any]


class Span(NamedTuple):
    """Characters `start` to `end` of the render, said in message `message`."""

    start: int
    end: int
    message: int


def find_spans(
    render: Render,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    template: ChatTemplate,
    calibration: Calibration,
    notes: list[str],
) -> list[Span]:
    """The trained spans of all assistant turns, in order.

    Raises:
        RowRejected: a text that the template leaves out, or a turn that can't be located for certain.
    """
    regions = _regions(render, messages)
    _check_texts(render, regions, messages, notes)
    if tools:
        _check_tools(render, regions, messages, tools, calibration)
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            region = regions[number]
            if region is None:
                raise _lost(number, "nothing of it is printed")
            spans += _turn(render, region, messages, number, calibration, notes)
    if any("tool_calls" in message for message in messages):
        _check_foreign(render, regions, messages, tools, template)
    return spans


def _lost(number: int, what: str) -> RowRejected:
    return RowRejected(Reason.TEXT_LOST, f"message {number}: {what} by the chat template")


def _uncertain(number: int, what: str) -> RowRejected:
    return RowRejected(
        Reason.SPAN_UNCERTAIN,
        f"message {number}: {what}; mark what is trained with {{% generation %}} in a template of your own",
    )


def _regions(render: Render, messages: Sequence[Message]) -> list[tuple[int, int] | None]:
    """Where each message stands: all that was printed for it, in one place and in the messages' order."""
    regions: list[tuple[int, int] | None] = [None] * len(messages)
    reached = -1
    for piece in render.pieces:
        number = piece.message
        if number < 0 or not render.text[piece.start : piece.end].strip():
            continue
        if number < reached:
            raise _uncertain(number, f"its text stands behind that of message {reached}, or within it")
        reached = number
        before = regions[number]
        regions[number] = (piece.start if before is None else before[0], piece.end)
    return regions


def _check_texts(
    render: Render, regions: Sequence[tuple[int, int] | None], messages: Sequence[Message], notes: list[str]
) -> None:
    """Text in is text out, but for white space at its ends: no message of the others may vanish."""
    for number, message in enumerate(messages):
        text = message["content"].strip()
        if message["role"] == "assistant" or not text:
            continue
        region = regions[number]
        if region is not None and _printed(text, render.text[slice(*region)]):
            continue
        if not any(_printed(text, render.text[p.start : p.end]) for p in render.pieces if p.message < 0):
            # Folded into another message's place, as gemma 3 does with the system text.
            others = [
                render.text[slice(*place)].replace(messages[other]["content"].strip(), "\0", 1)
                for other, place in enumerate(regions)
                if place is not None and messages[other]["role"] != "assistant"
            ]
            if not any(_printed(text, other) for other in others):
                raise _lost(number, f"the {message['role']}'s text is left out or changed")
        if number:
            notes.append("message_moved_by_template")


def _forms(value: Any) -> Iterator[str]:
    """How templates write a text or another JSON value."""
    if isinstance(value, str):
        yield value
        yield json.dumps(value, ensure_ascii=False)[1:-1]
        yield json.dumps(value)[1:-1]
        yield repr(value)[1:-1]
    else:
        yield json.dumps(value)
        yield str(value)


def _printed(value: Any, text: str) -> bool:
    return any(form in text for form in _forms(value))


def _check_tools(
    render: Render,
    regions: Sequence[tuple[int, int] | None],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    calibration: Calibration,
) -> None:
    if "tools" not in calibration.renders:
        raise RowRejected(Reason.TEXT_LOST, "the row has tools, the chat template does not print them")
    said = [regions[number] for number, message in enumerate(messages) if message["role"] == "assistant"]
    end = min((region[0] for region in said if region is not None), default=len(render.text))
    for tool in tools:
        # Before the first answer, or with a later message (Mistral prints them with the last user's).
        name = tool["function"]["name"]
        if name not in render.text[:end] and render.text.count(name) <= _mentions(name, messages):
            raise RowRejected(Reason.TEXT_LOST, f"the chat template does not print the tool {name}")


def _mentions(name: str, messages: Sequence[Message]) -> int:
    return sum(json.dumps(message, ensure_ascii=False, default=str).count(name) for message in messages)


def _turn(
    render: Render,
    region: tuple[int, int],
    messages: Sequence[Message],
    number: int,
    calibration: Calibration,
    notes: list[str],
) -> list[Span]:
    message = messages[number]
    calls = message.get("tool_calls", ())
    following = messages[number + 1]["role"] if number + 1 < len(messages) else ""
    end = _turn_end(render, region, number, following, calibration)
    answer = message["content"]
    if calibration.dialect.think_tags and "think>" in answer:
        answer = split_think(answer, number=number)[1]
    answer, reasoning = answer.strip(), message.get("reasoning_content", "").strip()
    if calibration.marked:
        spans = _marked(render, region, number, end, notes)
        said = "".join(render.text[span.start : span.end] for span in spans)
    else:
        start = _turn_start(render, region, messages, number, calibration)
        spans = [Span(start, end.stop, number)]
        said = render.text[start : end.start]
        if not calls:
            _check_plain(said, answer, reasoning, number, calibration)
    if answer not in said:
        raise _lost(number, "the assistant's text is left out or changed")
    for call in calls:
        _check_call(call, calls, said, number, calibration)
    if not all(text in said for text in (reasoning, message["content"].strip())):
        notes.append("reasoning_dropped_by_template")
    if not calibration.marked:
        shown = (bool(reasoning) and reasoning in said, bool(answer), bool(calls))
        _check_header(render.text[region[0] : end.stop], start - region[0], shown, number, calibration)
    return spans


def _turn_start(
    render: Render,
    region: tuple[int, int],
    messages: Sequence[Message],
    number: int,
    calibration: Calibration,
) -> int:
    before = messages[number - 1]["role"] if number else ""
    key = (before, bool(messages[number].get("tool_calls")))
    if key not in calibration.starts:
        where = f"behind a {before} message" if before else "at the beginning"
        what = "calls tools" if key[1] else "speaks"
        why = calibration.why_not.get(key, "the template does not print such turns")
        raise _uncertain(number, f"an assistant that {what} {where}: {why}")
    start = calibration.starts[key]
    if not render.text.startswith(start, region[0]):
        raise _uncertain(number, f"the turn does not begin with {start!r}")
    return region[0] + len(start)


def _turn_end(
    render: Render, region: tuple[int, int], number: int, following: str, calibration: Calibration
) -> slice:
    """Where the marker that ends the turn stands."""
    if following not in calibration.ends:
        raise _uncertain(number, f"no token ends a turn that a {following} message follows")
    for end in calibration.ends[following]:
        if calibration.overhang:
            if render.text.startswith(end, region[1]):
                return slice(region[1], region[1] + len(end))
        elif (text := render.text[slice(*region)].rstrip()).endswith(end):
            return slice(region[0] + len(text) - len(end), region[0] + len(text))
    raise _uncertain(
        number, f"the turn does not end with {' or '.join(map(repr, calibration.ends[following]))}"
    )


def _check_plain(said: str, answer: str, reasoning: str, number: int, calibration: Calibration) -> None:
    """Start, lead and answer make the whole turn: no other text is in it."""
    said = said.rstrip()
    if not said.endswith(answer):
        raise _lost(number, "the assistant's text is left out or changed")
    lead = said[: len(said) - len(answer)].strip()
    if lead in calibration.leads:
        return
    before, found, behind = lead.partition(reasoning) if reasoning else ("", "", "")
    if not found or (before.strip(), behind.strip()) not in calibration.think:
        raise _uncertain(number, f"what stands before the answer, {lead[:60]!r}, is not known from probes")


def _check_call(
    call: Mapping[str, Any],
    calls: Sequence[Mapping[str, Any]],
    said: str,
    number: int,
    calibration: Calibration,
) -> None:
    function = call["function"]
    name = function["name"]
    if said.count(name) < sum(other["function"]["name"] == name for other in calls):
        raise _lost(number, f"a call of {name} is left out")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        if arguments not in said:
            raise _lost(number, f"the arguments of {name} are left out or changed")
        return
    for leaf in _leaves(arguments):
        if not _printed(leaf, said):
            raise _lost(number, f"{leaf!r} among the arguments of {name} is left out or changed")


def _leaves(value: Any) -> Iterator[Any]:
    """Each key and each value that is no container."""
    if isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _check_header(
    turn: str, header_end: int, shown: tuple[bool, bool, bool], number: int, calibration: Calibration
) -> None:
    header = turn[:header_end].strip()
    if not header:
        return
    if (count := turn.count(header)) != 1 and (*shown, count) not in calibration.headers:
        raise _uncertain(number, f"the turn contains its beginning {header!r} {count} times")


def _marked(render: Render, region: tuple[int, int], number: int, end: slice, notes: list[str]) -> list[Span]:
    """The template's own marks for this turn; one that leaves the end token out is extended to it."""
    spans = [
        Span(mark.start, mark.end, number)
        for mark in render.marked
        if mark.end > mark.start and region[0] <= mark.start < max(region[1], end.stop)
    ]
    if not spans:
        raise _uncertain(number, "the template's {% generation %} marks leave this turn out")
    if spans[-1].end < end.stop:
        if render.text[spans[-1].end : end.start].strip():
            raise _uncertain(
                number, "text stands between the template's {% generation %} mark and the turn's end"
            )
        spans[-1] = spans[-1]._replace(end=end.stop)
        notes.append("generation_mark_extended_to_end_token")
    return spans


def _check_foreign(
    render: Render,
    regions: Sequence[tuple[int, int] | None],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template: ChatTemplate,
) -> None:
    """Exchanges the text of all messages but the assistant's: the assistant's turns must not change."""
    exchanged = [
        message if message["role"] == "assistant" else {**message, "content": f"Quokka {number}"}
        for number, message in enumerate(messages)
    ]
    try:
        other = template.render(exchanged, tools=tools)
    except RENDER_ERRORS as error:
        raise _uncertain(0, f"the row does not render with other texts ({error})") from error
    places = _regions(other, exchanged)
    for number, message in enumerate(messages):
        here, there = regions[number], places[number]
        if message["role"] == "assistant" and (
            here is None or there is None or render.text[slice(*here)] != other.text[slice(*there)]
        ):
            raise _uncertain(number, "the turn depends on other messages' texts")
