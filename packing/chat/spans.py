"""Which characters of a rendered conversation the assistant said, each turn checked.

A turn's text is taken from where the template printed it, never searched for. The checks that follow
can only refuse. What they let through is explained to the last character:

    [start][lead][answer][end]     a plain turn: start, lead and end are the template's own, from probes
    [start]...calls...[end]        a turn with calls: their names and arguments are in, and the same
                                   conversation with all other texts exchanged renders it unchanged
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from packing.chat.calibrate import Calibration
from packing.chat.dialect import split_think
from packing.chat.probes import is_first
from packing.chat.template import RENDER_ERRORS, ChatTemplate, Piece, Render, ScatteredError
from packing.errors import Reason, RowRejected
from packing.example import Note

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Place = tuple[int, int]


class Turns(NamedTuple):
    """The spans of all assistant turns in order; the turns whose reasoning is not printed; notes."""

    spans: list[Piece]
    dropped: list[int]
    notes: list[Note]


def find_turns(
    render: Render,
    messages: Sequence[Message],
    tools: Tools | None,
    *,
    template: ChatTemplate,
    calibration: Calibration,
) -> Turns:
    """What is said in the assistant's turns.

    Raises:
        RowRejected: a text that the template leaves out, or a turn that can't be located for certain.
    """
    turns = Turns([], [], [])
    try:
        places = render.places(messages)
    except ScatteredError as error:
        raise _uncertain(error.message, "its text stands in several places, or not in their order") from error
    _check_texts(render, places, messages, calibration, turns.notes)
    _check_ambiguous(render, messages, tools, template, calibration)
    if tools:
        _check_tools(render, places, messages, tools, calibration)
    marks = _marks(render, places, messages) if calibration.marked else {}
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not (message["content"].strip() or message.get("reasoning_content") or "tool_calls" in message):
            turns.notes.append(Note.EMPTY_TURN)
            continue
        _Turn(render, places, messages, number, calibration).check(turns, marks.get(number, []))
    if _may_be_foreign(render, places, messages, tools):
        _check_foreign(render, places, messages, template)
    return turns


def _lost(number: int, what: str) -> RowRejected:
    return RowRejected(Reason.TEXT_LOST, f"message {number}: {what} by the chat template")


def _uncertain(number: int, what: str) -> RowRejected:
    return RowRejected(
        Reason.SPAN_UNCERTAIN,
        f"message {number}: {what}; mark what is trained with {{% generation %}} in a template of your own",
    )


def _unrendered(number: int, error: Exception) -> RowRejected:
    what = " ".join(str(error).split())[:100]
    return _uncertain(number, f"the row does not render with other texts ({what})")


def _check_texts(
    render: Render,
    places: Sequence[Place | None],
    messages: Sequence[Message],
    calibration: Calibration,
    notes: list[Note],
) -> None:
    """Text in is text out, but for white space at its ends: no message of the others may vanish."""
    for number, message in enumerate(messages):
        text, role = message["content"].strip(), message["role"]
        if role == "assistant" or not text:
            continue
        place, before = places[number], places[number - 1] if number else None
        if place is not None and _printed(text, render.text[slice(*place)]):
            moved = before is not None and place[0] < before[0]
        elif (role, is_first(messages, number)) in calibration.displaced and any(
            _printed(text, other) for other in _elsewhere(render, places, messages)
        ):
            moved = number > 0 and role == "system"
        else:
            raise _lost(number, f"the {role}'s text is left out or changed")
        if moved:
            notes.append(Note.SYSTEM_MOVED)


def _check_ambiguous(
    render: Render,
    messages: Sequence[Message],
    tools: Tools | None,
    template: ChatTemplate,
    calibration: Calibration,
) -> None:
    """A text that the template has itself, such as a user's "user", is printed beside the template's own.

    Costs a render, of rows with such a text.
    """
    schemas = ""
    if tools and calibration.displaced:
        schemas = "\0".join(leaf for leaf in leaves(tools) if isinstance(leaf, str))
    found = {
        number: text
        for number, message in enumerate(messages)
        if message["role"] != "assistant"
        and (text := message["content"].strip())
        and (
            template.contains(text)
            or text in "system user tool assistant"
            or text in schemas
            or (calibration.displaced and any(text in m["content"] for m in messages if m is not message))
        )
    }
    if not found:
        return
    exchanged = [{**m, "content": "\xa4" * (n + 1)} if n in found else {**m} for n, m in enumerate(messages)]
    try:
        other = template.render(exchanged, tools=tools).text
    except RENDER_ERRORS as error:
        raise _unrendered(min(found), error) from error
    for number, text in found.items():
        wanted = sum(messages[n]["content"].count(text) for n in found)
        if not any(render.text.count(form) - other.count(form) >= wanted for form in _forms(text)):
            raise _lost(number, f"the {messages[number]['role']}'s text is left out or changed")


def _elsewhere(render: Render, places: Sequence[Place | None], messages: Sequence[Message]) -> Iterator[str]:
    """What is printed for no message, and with the others' messages beside their own text."""
    for start, end, number in render.pieces:
        if number < 0:
            yield render.text[start:end]
    for place, message in zip(places, messages, strict=True):
        if place is not None and message["role"] != "assistant":
            yield render.text[slice(*place)].replace(message["content"].strip() or "\0", "\0", 1)


def _forms(value: Any) -> tuple[str, ...]:
    """How templates write a text or another JSON value: as it is, or within quotes of some language."""
    if isinstance(value, str):
        if _UNESCAPED.fullmatch(value):
            return (value,)  # they all are this
        escaped = json.dumps(value, ensure_ascii=False)[1:-1]
        return (
            value,
            escaped,
            escaped.replace('\\"', '"').replace("'", "\\'"),
            json.dumps(value)[1:-1],
            repr(value)[1:-1],
        )
    return (json.dumps(value), str(value))


# What no language writes in another way within quotes.
_UNESCAPED = re.compile(r"[ !#-&(-\[\]-~]*")


def _printed(value: Any, text: str) -> bool:
    return (isinstance(value, str) and value in text) or any(form in text for form in _forms(value))


def _count(word: str, text: str) -> int:
    """How often a word stands in a text on its own: "f" is not in "function"."""
    count, place = 0, text.find(word) if word else -1
    starts, ends = _is_letter(word[:1]), _is_letter(word[-1:])
    while place >= 0:
        end = place + len(word)
        inside = (starts and _is_letter(text[place - 1 : place])) or (
            ends and _is_letter(text[end : end + 1])
        )
        count += not inside
        place = text.find(word, place + 1 if inside else end)
    return count


def _is_letter(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def _check_tools(
    render: Render,
    places: Sequence[Place | None],
    messages: Sequence[Message],
    tools: Tools,
    calibration: Calibration,
) -> None:
    if "tools" not in calibration.renders:
        raise RowRejected(Reason.TEXT_LOST, "the row has tools, and the chat template does not print tools")
    elsewhere = list(_elsewhere(render, places, messages))
    for tool in tools:
        name = tool["function"]["name"]
        if not any(_count(name, place) for place in elsewhere):
            raise RowRejected(Reason.TEXT_LOST, f"the chat template does not print the tool {name!r}")


def _marks(
    render: Render, places: Sequence[Place | None], messages: Sequence[Message]
) -> dict[int, list[Piece]]:
    """The template's `{% generation %}` spans by message. One behind all messages is the last turn's."""
    marks: dict[int, list[Piece]] = {}
    for mark in render.marked:
        start, end, number = mark
        if end == start:
            continue
        if number < 0:
            before = [n for n, place in enumerate(places) if place is not None and place[1] <= start]
            number = before[-1] if before else 0
        if messages[number]["role"] != "assistant":
            raise _uncertain(
                number, f"the template marks text of the {messages[number]['role']} as generated"
            )
        for other, place in enumerate(places):
            if other != number and place is not None and start < place[1] and place[0] < end:
                raise _uncertain(number, "the template marks another message's text as generated with it")
        marks.setdefault(number, []).append(mark if number == mark.message else mark._replace(message=number))
    return marks


class _Turn:
    """One assistant message in its render."""

    def __init__(
        self,
        render: Render,
        places: Sequence[Place | None],
        messages: Sequence[Message],
        number: int,
        calibration: Calibration,
    ) -> None:
        place = places[number]
        if place is None:
            raise _lost(number, "the assistant's turn is left out")
        message = messages[number]
        self.text = render.text
        self.place = place
        self.number = number
        self.content: str = message["content"].strip()
        self.before = messages[number - 1]["role"] if number else ""
        self.following = messages[number + 1]["role"] if number + 1 < len(messages) else ""
        self.calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
        self.reasoning: str = message.get("reasoning_content", "").strip()
        self.calibration = calibration

    def check(self, turns: Turns, marks: list[Piece]) -> None:
        """Adds the turn's spans, each checked."""
        if self.calls:
            self._check_support()
        end = self._end()
        if self.calibration.marked or end is None:
            spans = self._extend(marks, end, turns.notes)
            said = "".join([self.text[start:stop] for start, stop, _ in spans])
        else:
            start = self._start()
            spans = [Piece(start, end[1], self.number)]
            said = self.text[start : end[0]]
        answer = self._answer(said)
        shown = self._shows_reasoning(said, answer)
        if self.calls:
            self._check_calls(said, answer, shown)
            if not self.calibration.marked:
                self._check_header(spans[0], answer, shown)
        elif not self.calibration.marked:
            self._check_lead(said, answer, shown)
        if (self.reasoning and not shown) or answer != self.content:
            turns.dropped.append(self.number)
        if answer or shown or self.calls:
            turns.spans.extend(spans)
        else:
            turns.notes.append(Note.EMPTY_TURN)

    def _start(self) -> int:
        """Where the header ends."""
        key = (self.before, bool(self.calls))
        if key not in self.calibration.starts:
            where = f"behind a {self.before} message" if self.before else "at the beginning"
            what = "calls tools" if self.calls else "speaks"
            why = self.calibration.why_not.get(key, "no probe of such a turn is printed")
            raise _uncertain(self.number, f"an assistant that {what} {where}: {why}")
        start = self.calibration.starts[key]
        if not self.text.startswith(start, self.place[0]):
            raise _uncertain(self.number, f"the turn does not begin with {start!r}")
        return self.place[0] + len(start)

    def _header_end(self) -> int:
        """Where the longest known header ends that the turn begins with, a think tag in it left out."""
        begin = self.place[0]
        for header in self.calibration.headers_begin:
            if self.text.startswith(header, begin):
                return begin + len(header)
        return begin

    def _end(self) -> Place | None:
        """Where the marker that ends the turn stands; None where the template has none at all."""
        if not self.calibration.ends:
            return None
        begin, stop = self.place
        ends = self.calibration.ends.get((self.following, bool(self.calls)))
        if ends is None:
            what = "calls tools" if self.calls else "speaks"
            where = f"before a {self.following} message" if self.following else "at the end"
            raise _uncertain(self.number, f"no token ends the turn of an assistant that {what} {where}")
        text = self.text[begin:stop].rstrip()
        for marker, behind in ends:
            if self.calibration.overhang:
                if self.text.startswith(marker, stop):
                    return (stop, stop + len(marker))
            elif text.endswith(marker + behind):
                end = begin + len(text) - len(behind)
                return (end - len(marker), end)
        wanted = " or ".join(repr(marker) for marker, _ in ends)
        raise _uncertain(self.number, f"the turn does not end with {wanted}")

    def _extend(self, marks: list[Piece], end: Place | None, notes: list[Note]) -> list[Piece]:
        """The template's own marks; where they leave the end marker out, they are extended to it."""
        if not marks:
            raise _uncertain(self.number, "the template's {% generation %} marks leave this turn out")
        first, last = marks[0], marks[-1]
        if self.text[first.start : self._header_end()].strip():
            raise _uncertain(self.number, "the {% generation %} mark covers the turn's header")
        if end is not None and self.text[end[1] : min(last.end, self.place[1])].strip():
            raise _uncertain(self.number, "the {% generation %} mark goes on behind the turn's end")
        if end is None:
            notes.append(Note.NO_END)
            return marks
        if last.end >= end[1]:
            return marks
        if self.text[last.end : end[0]].strip():
            raise _uncertain(self.number, "text stands between the {% generation %} mark and the turn's end")
        notes.append(Note.MARK_EXTENDED)
        return [*marks[:-1], last._replace(end=end[1])]

    def _answer(self, said: str) -> str:
        """What of the content is printed: all, or all but the think block that the template cuts."""
        content = self.content
        if content in said:
            return content
        if self.calibration.dialect.think_tags and "think>" in content:
            answer = split_think(content, number=self.number)[1].strip()
            if answer in said:
                return answer
        raise _lost(self.number, "the assistant's text is left out or changed")

    def _shows_reasoning(self, said: str, answer: str) -> bool:
        """Whether the reasoning stands where probes showed it, not somewhere by chance."""
        if not self.reasoning:
            return False
        if self.calibration.marked:
            return self.reasoning in said.replace(answer or "\0", "\0")
        before = {before for before, _ in self.calibration.think} | self.calibration.openings["reasoning"]
        return any(_begins(said, opening, self.reasoning) for opening in before)

    def _check_lead(self, said: str, answer: str, shown: bool) -> None:
        """Start, lead and answer make the whole turn: no other text is in it."""
        lead = said.strip().removesuffix(answer).strip()
        if shown:
            known = any(
                lead.startswith(before)
                and lead.endswith(behind)
                and lead[len(before) : len(lead) - len(behind)].strip() == self.reasoning
                for before, behind in self.calibration.think
            )
        else:
            known = lead in self.calibration.leads
        if not known:
            raise _uncertain(self.number, f"what stands beside the answer, {lead[:60]!r}, no probe shows")

    def _check_header(self, span: Piece, answer: str, shown: bool) -> None:
        """The header does not come again within a turn with calls, but where every such turn has it so."""
        header = self.text[self.place[0] : span.start].strip()
        count = self.text.count(header, self.place[0], span.end) if header else 1
        if count != 1 and (shown, bool(answer), count) not in self.calibration.headers:
            raise _uncertain(self.number, f"the turn contains its beginning {header!r} {count} times")

    def _check_support(self) -> None:
        """What no probe of the template printed is not looked for in the row: it might be there by chance."""
        renders = self.calibration.renders
        if "tool_calls" not in renders:
            raise _lost(self.number, "tool calls are left out")
        if len(self.calls) > 1 and "parallel_calls" not in renders:
            raise _lost(self.number, "all calls but one are left out")
        if self.content and "text_beside_calls" not in renders:
            raise _lost(self.number, "the assistant's text beside a call is left out")

    def _check_calls(self, said: str, answer: str, shown: bool) -> None:
        """Each call is printed, and nothing else stands in front of what is said."""
        parts: list[tuple[str, ...]] = [(text,) for text in (answer, self.reasoning if shown else "") if text]
        for call in self.calls:
            function = call["function"]
            parts.append((function["name"],))
            parts += map(_forms, leaves(function["arguments"]))
        for call in self.calls:
            self._check_call(call, said, parts)
        first = self.calls[0]["function"]["name"]
        texts = {"reasoning": self.reasoning if shown else "", "answer": answer, "call": first}
        if not self.calibration.marked and not any(
            _begins(said, opening, text)
            for what, text in texts.items()
            if text
            for opening in self.calibration.openings[what]
        ):
            raise _uncertain(
                self.number, f"its turn with calls begins {said.strip()[:60]!r}, as no probe does"
            )

    def _check_call(self, call: Mapping[str, Any], said: str, texts: Sequence[tuple[str, ...]]) -> None:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if _count(name, said) < sum(other["function"]["name"] == name for other in self.calls):
            raise _lost(self.number, f"a call of {name!r} is left out")
        for leaf in [arguments] if isinstance(arguments, str) else leaves(arguments):
            if leaf != "" and not self._says(leaf, said, texts):
                raise _lost(self.number, f"{str(leaf)[:60]!r} in a call of {name!r} is left out or changed")

    def _says(self, leaf: Any, said: str, texts: Sequence[tuple[str, ...]]) -> bool:
        """Whether a key or value is printed as often as all of the turn's own texts together have it.

        Each text is printed once, at a place of its own, so one that is left out makes the count too small.
        """
        return any(
            _count(form, said)
            >= max(1, sum(_count(form, forms[kind] if kind < len(forms) else forms[-1]) for forms in texts))
            for kind, form in enumerate(_forms(leaf))
        )


def _begins(said: str, opening: str, text: str) -> bool:
    """Whether what is said begins with an opening and a text, white space between them aside."""
    begun = said.strip()
    return begun.startswith(opening) and begun[len(opening) :].lstrip().startswith(text)


def leaves(value: Any) -> Iterator[Any]:
    """Each key, and each value that is no container."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        # Asked by name first: the abstract classes take ten times as long, and nearly all are of these.
        if kind is str:
            yield value
        elif kind is dict or isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif kind is list or (isinstance(value, Sequence) and not isinstance(value, str)):
            waiting += value
        else:
            yield value


def _may_be_foreign(
    render: Render, places: Sequence[Place | None], messages: Sequence[Message], tools: Tools | None
) -> bool:
    """Whether a turn with calls contains what another message or a tool says, by chance or not."""
    turns = [message for message in messages if "tool_calls" in message]
    if not turns:
        return False
    called = {call["function"]["name"] for message in turns for call in message["tool_calls"]}
    foreign = [message["content"] for message in messages if message["role"] != "assistant"]
    for tool in tools or ():
        function = tool["function"]
        foreign += [function["name"]] if function["name"] not in called else []
        foreign += [text] if isinstance(text := function.get("description"), str) else []
    runs = {max(_PLAIN_RUN.findall(text, 0, 400), key=len, default="") for text in foreign if text.strip()}
    said = [
        render.text[slice(*place)]
        for place, message in zip(places, messages, strict=True)
        if place is not None and "tool_calls" in message
    ]
    return any(run in text for run in runs for text in said)


# What no template would write in another way.
_PLAIN_RUN = re.compile(r"[^\\\"'\n\t\r<>&]+")


def _check_foreign(
    render: Render, places: Sequence[Place | None], messages: Sequence[Message], template: ChatTemplate
) -> None:
    """With all texts but the assistant's exchanged, and no tools, the assistant's turns are the same."""
    exchanged = [
        message if message["role"] == "assistant" else {**message, "content": f"Quokka {number}"}
        for number, message in enumerate(messages)
    ]
    try:
        other = template.render(exchanged)
        others = other.places(exchanged)
    except RENDER_ERRORS as error:
        raise _unrendered(0, error) from error
    for number, message in enumerate(messages):
        here, there = places[number], others[number]
        if message["role"] != "assistant" or (here is None and there is None):
            continue
        if here is None or there is None or render.text[slice(*here)] != other.text[slice(*there)]:
            raise _uncertain(number, "the turn depends on other messages' texts")


def check_untrained(
    render: Render,
    messages: Sequence[Message],
    tools: Tools | None,
    chosen: Sequence[int],
    *,
    template: ChatTemplate,
) -> None:
    """With the texts of all other messages exchanged, what is printed for the chosen ones is the same.

    Where a template prints a text apart from its message, as with a system text in the user's turn, the
    pieces do not say whose it is. Costs a render, of rows with some messages to train and some not.

    Raises:
        RowRejected: a text that may not be trained is, or may be, within one that is.
    """
    others = {number for number in range(len(messages)) if number not in chosen}
    if not others:
        return
    exchanged = [
        {key: _exchange(key, value, number) for key, value in message.items()}
        if number in others
        else {**message}
        for number, message in enumerate(messages)
    ]
    try:
        other = template.render(exchanged, tools=tools)
    except RENDER_ERRORS as error:
        raise _unrendered(min(others), error) from error
    here, there = (
        ["".join(text.text[p.start : p.end] for p in text.pieces if p.message == n) for n in chosen]
        for text in (render, other)
    )
    if here != there:
        raise _uncertain(min(others), "a text that may not be trained is printed within one that is")


def _exchange(key: str, value: Any, number: int) -> Any:
    """Another text for a message's own, empty if that is."""
    is_text = isinstance(value, str) and value.strip() and key not in ("role", "name", "tool_call_id")
    return f"Quokka {number}" if is_text else value
