r"""What one template does with an assistant's turn, learnt once from probe conversations.

Each probe's words occur nowhere else, so what stands around them in the render is the template's own:

    <|im_start|>assistant\n <think>\n\n</think>\n\n Quokka7 <|im_end|> \n
    start ----------------- lead -----------------          end ------

The start is what the generation prompt prints as well: a model is given it, and never says it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packing.chat.dialect import Dialect
from packing.chat.probes import Observation, Words, attempt, build, find_dialect, find_displaced, observe_all
from packing.chat.template import ChatTemplate
from packing.errors import TemplateError

TAG = re.compile(r"<[^<>\s]{1,80}>|\[/?[A-Z][A-Z_]+\]")
ENDS_IN_TAG = re.compile(f"(?:{TAG.pattern})$")
THINK = re.compile(r"<[^<>\s]*think[^<>\s]*>|\[/?THINK\]", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What holds for every turn of a template.

    Attributes:
        dialect: How the template wants its messages.
        marked: It has `{% generation %}`, whose spans are used.
        starts: (role before the turn, or "" at the beginning; whether the turn calls tools) -> the text
            that the turn begins with and that is not trained. A missing key: no such turn can be placed.
        headers_begin: The starts, each without a think tag and what follows it, longest first.
        why_not: The same keys -> why not, where a probe showed it.
        ends: (role of the message behind the turn, or "" behind the last; whether the turn calls tools) ->
            the markers that may end it, each with what the turn prints behind it. A missing key: no such
            turn has an end. Empty: no turn has, which only a template with marks of its own may do.
        overhang: The marker stands behind the turn's own text: the next message prints it.
        leads: What may stand between the start and the answer where no reasoning does.
        think: What may stand before and behind reasoning.
        openings: (what a turn with calls says first: "reasoning", "answer" or "call") -> what may stand
            between the start and that.
        headers: (reasoning shown, an answer, how often the header stands in it), of turns with calls.
        markers: Texts that a conversation must not spell, since they make turns.
        renders: What the template prints: "tools", "tool_calls", "parallel_calls", "text_beside_calls",
            "tool_replies", "system", "reasoning" (of the last turn), "earlier_reasoning".
        displaced: (role, whether it is the first of its role), where such a text may be printed elsewhere
            than its message: in front of all, or within another message.
    """

    dialect: Dialect
    marked: bool
    starts: Mapping[tuple[str, bool], str]
    headers_begin: Sequence[str]
    why_not: Mapping[tuple[str, bool], str]
    ends: Mapping[tuple[str, bool], tuple[tuple[str, str], ...]]
    overhang: bool
    leads: frozenset[str]
    think: frozenset[tuple[str, str]]
    openings: Mapping[str, frozenset[str]]
    headers: frozenset[tuple[bool, bool, int]]
    markers: frozenset[str]
    renders: frozenset[str]
    displaced: frozenset[tuple[str, bool]]


def calibrate(template: ChatTemplate, *, bos: str | None, special: re.Pattern[str]) -> Calibration:
    """Learns a template's turns. A few hundred renders, 20 to 300 ms.

    Args:
        template: The template.
        bos: The text of the tokenizer's BOS token.
        special: Matches the tokenizer's special tokens.

    Raises:
        TemplateError: training on this template would be wrong; says why and what to do.
    """
    dialect, renders = find_dialect(template)
    observations = list(observe_all(template, dialect, renders))
    plain = [seen for seen in observations if not seen.calls and seen.previous == "user"]
    if not {"", "user"} <= {seen.next for seen in plain}:
        raise TemplateError(
            f"{template.name} does not print an assistant's answer to a user as text, "
            "each turn at its own place: give a template that does with --chat-template"
        )
    if stray := next((seen for seen in plain if seen.foreign), None):
        raise TemplateError(
            f"{template.name} prints another message's text within the assistant's turn "
            f"({_short(stray.region)}): mark what is trained with {{% generation %}} in an own template"
        )
    observations = [seen for seen in observations if not seen.foreign]
    starts, why_not = _find_starts(observations, bos)
    if not template.has_generation and ("user", False) not in starts:
        raise TemplateError(
            f"{template.name}: {why_not['user', False]}. Mark what is trained with "
            "{% generation %} in a template of your own, and give it with --chat-template"
        )
    ends, overhang = _find_ends(observations, template, bos, special)
    placed = [(seen, starts[seen.key]) for seen in observations if seen.key in starts]
    leads, think = _find_leads(placed)
    if any(seen.calls and seen.answer for seen in observations):
        renders |= {"text_beside_calls"}
    return Calibration(
        dialect=dialect,
        marked=template.has_generation,
        starts=starts,
        headers_begin=sorted({THINK.split(start)[0] for start in starts.values()}, key=len, reverse=True),
        why_not=why_not,
        ends=ends,
        overhang=overhang,
        leads=leads,
        think=think,
        openings=_find_openings(placed),
        headers=_find_headers(placed),
        markers=_find_markers(template, dialect, starts, ends),
        renders=renders,
        displaced=find_displaced(template, dialect),
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:38]} … {text[-38:]}")


def _find_starts(
    observations: Sequence[Observation], bos: str | None
) -> tuple[dict[tuple[str, bool], str], dict[tuple[str, bool], str]]:
    """The header of each kind of turn, or why it can't be told."""
    starts: dict[tuple[str, bool], str] = {}
    why_not: dict[tuple[str, bool], str] = {}
    after_user = _prompt(seen for seen in observations if seen.previous == "user") or ""
    for key in sorted({seen.key for seen in observations}):
        group = [seen for seen in observations if seen.key == key]
        shared = _common([seen.region for seen in group])
        own = _prompt(group)
        prompt = after_user if own is None else own
        if not prompt.strip() and starts.get((key[0], False)) == "":
            starts[key] = ""  # plain turns begin without a header here, so all do
            continue
        try:
            if not prompt.strip() and after_user.strip() and after_user in shared:
                # Granite prints its prompt within the loop, so not behind a system text alone; yet what
                # begins with the whole of the prompt begins with the prompt.
                prompt = after_user
            starts[key] = _start(shared, prompt, bos)
            _check_prompts(starts[key], group, bos)
        except ValueError as error:
            starts.pop(key, None)
            why_not[key] = str(error)
    if not all(THINK.search(start) for start in starts.values() if start.strip()):
        # The think tag of the generation prompt is not in every turn: then it is never part of the header.
        starts = {key: THINK.split(start)[0] for key, start in starts.items()}
    headers = tuple({start.strip() for start in starts.values()} - {""})
    for seen in observations:
        body = seen.region.removeprefix(starts.get(seen.key, "")).lstrip()
        if seen.key in starts and headers and body.startswith(headers):
            del starts[seen.key]
            why_not[seen.key] = f"such turns begin in more than one way, one of them {_short(body[:40])}"
    return starts, why_not


def _prompt(group: Iterable[Observation]) -> str | None:
    """What the generation prompts of some probes share; None without any."""
    prompts = [seen.prompt for seen in group if seen.prompt is not None]
    return _whole_tags(_common(prompts)) if prompts else None


def _check_prompts(start: str, group: Iterable[Observation], bos: str | None) -> None:
    """The header is the whole generation prompt, or all of it but the think tag.

    Raises:
        ValueError: a part of the prompt would be trained.
    """
    for seen in group:
        prompt = seen.prompt or ""
        rest = prompt.removeprefix(start.removeprefix(bos or "")).strip()
        if not start.endswith(prompt) and rest and not THINK.match(rest):
            raise ValueError(
                f"its generation prompt is {_short(prompt)}, its turns begin with {_short(start)}"
            )


def _start(shared: str, prompt: str, bos: str | None) -> str:
    """The header: what the turn's constant beginning shares with the generation prompt.

    Raises:
        ValueError: says why it can't be told.
    """
    if prompt.strip() and prompt in shared:
        # What stands before it, such as a default system text or BOS, is not the assistant's either.
        return shared[: shared.index(prompt) + len(prompt)]
    skipped = bos if bos and shared.startswith(bos) else ""
    beginning = shared.removeprefix(skipped)
    start = _whole_tags(_common([beginning, prompt]))
    if think := THINK.search(start):
        start = start[: think.start()]
    if start.strip():
        return skipped + start
    if not _whole_tags(beginning).strip():
        if not prompt.strip():
            return skipped
        raise ValueError(f"its generation prompt {_short(prompt)} is not how its turns begin")
    if not prompt.strip():
        raise ValueError(
            f"it has no generation prompt, so whether {_short(beginning)} is said or given is unknown"
        )
    raise ValueError(f"its turns begin with {_short(beginning)}, its generation prompt is {_short(prompt)}")


def _whole_tags(text: str) -> str:
    """The text without a tag that is cut off at its end."""
    opened = max(text.rfind("<"), text.rfind("["))
    return text[:opened] if opened > max(text.rfind(">"), text.rfind("]")) else text


def _common(texts: Sequence[str]) -> str:
    """The longest beginning that all share: that of the first and the last in order."""
    low, high = (min(texts), max(texts)) if texts else ("", "")
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return "".join(letter for letter, _ in same)


def _find_ends(
    observations: Sequence[Observation], template: ChatTemplate, bos: str | None, special: re.Pattern[str]
) -> tuple[dict[tuple[str, bool], tuple[tuple[str, str], ...]], bool]:
    """The markers that end a turn, by what follows it; and whether the next message prints them."""
    ends: dict[tuple[str, bool], set[tuple[str, str]]] = {}
    plain = [seen for seen in observations if not seen.calls]
    for seen in plain:
        tail = seen.region[seen.region.rindex(seen.answer) + len(seen.answer) :]
        ends.setdefault((seen.next, False), set()).add(_marker(tail, bos, special))
    none = ("", "")
    if all(found == {none} for found in ends.values()):
        shared, _ = _marker(_whole_tags(_common([seen.following for seen in plain])), bos, special)
        if shared:
            return {(seen.next, seen.calls > 0): ((shared, ""),) for seen in observations}, True
    lacking = [following for following in ("user", "") if none in ends[following, False]]
    if lacking and template.has_generation:
        return {}, False
    if lacking:
        which = "a turn that the user answers" if lacking[0] else "the last turn"
        raise TemplateError(
            f"{template.name} prints no token that ends {which}: a model trained so "
            "would not learn to stop. Give a template that prints one with --chat-template"
        )
    for seen in observations:
        if seen.calls:
            known = ends.get((seen.next, False), set()) - {none}
            ends.setdefault((seen.next, True), set()).add(_end_of_call(seen.region.rstrip(), known, special))
    return {
        kind: tuple(sorted(found, key=lambda pair: -len("".join(pair))))
        for kind, found in ends.items()
        if none not in found
    }, False


def _end_of_call(turn: str, known: Iterable[tuple[str, str]], special: re.Pattern[str]) -> tuple[str, str]:
    """What ends a turn with calls: a marker that ends others, or a special token of its own.

    A tag that is no special token, such as </tool_call>, closes the call and not the turn.
    """
    for marker, behind in known:
        if turn.endswith(marker + behind):
            return marker, behind
    tokens = list(special.finditer(turn))
    return (tokens[-1].group(), "") if tokens and tokens[-1].end() == len(turn) else ("", "")


def _marker(tail: str, bos: str | None, special: re.Pattern[str]) -> tuple[str, str]:
    r"""What ends a turn, and what stands behind that, from the text behind an answer.

    <|im_end|>\n                           -> "<|im_end|>", ""
    <|END_RESPONSE|><|END_OF_TURN|>        -> both, since both have to be said
    </s>\n<s>                              -> "</s>", "\n<s>"
    .                                      -> "", "": not a token of its own, so nothing that stops
    """
    tail = tail.rstrip()
    if bos and tail.endswith(bos) and tail != bos:
        tail = tail.removesuffix(bos).rstrip()
    run = re.compile(f"(?:{TAG.pattern}|{special.pattern})+").search(tail)
    return (tail[: run.end()], tail[run.end() :]) if run else ("", "")


def _find_leads(
    placed: Sequence[tuple[Observation, str]],
) -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
    """What stands between the start and the answer of plain turns, without reasoning and around it."""
    leads, think = set(), set()
    for seen, start in placed:
        if not seen.calls:
            lead = seen.region[len(start) : seen.region.rindex(seen.answer)]
            if seen.reasoning:
                before, _, behind = lead.partition(seen.reasoning)
                think.add((before.strip(), behind.strip()))
            else:
                leads.add(lead.strip())
    return frozenset(leads), frozenset(think)


def _find_headers(placed: Sequence[tuple[Observation, str]]) -> frozenset[tuple[bool, bool, int]]:
    """How often the header stands in turns with calls.

    A model that goes on behind an end of its own, as gpt-oss does, says the header again. Behind anything
    else a second one is the template's mistake.
    """
    headers = set()
    for seen, start in placed:
        if seen.calls and (header := start.strip()):
            between = seen.region.split(header)[1:-1]
            if all(ENDS_IN_TAG.search(text.rstrip()) for text in between):
                headers.add((bool(seen.reasoning), bool(seen.answer), len(between) + 1))
    return frozenset(headers)


def _find_openings(placed: Sequence[tuple[Observation, str]]) -> dict[str, frozenset[str]]:
    """What stands between the start and what a turn with calls says first."""
    openings: dict[str, set[str]] = {"reasoning": set(), "answer": set(), "call": set()}
    for seen, start in placed:
        if seen.calls:
            said = seen.region[len(start) :]
            texts = {"reasoning": seen.reasoning, "answer": seen.answer, "call": seen.name}
            place, first = min((said.index(text), what) for what, text in texts.items() if text)
            openings[first].add(said[:place].strip())
    return {first: frozenset(found) for first, found in openings.items()}


def _find_markers(
    template: ChatTemplate,
    dialect: Dialect,
    starts: Mapping[tuple[str, bool], str],
    ends: Mapping[tuple[str, bool], tuple[tuple[str, str], ...]],
) -> frozenset[str]:
    """The tags around messages; what stands before or behind one without any tag is a marker itself."""
    around = [*starts.values(), *(marker for found in ends.values() for marker, _ in found)]
    for shape in ("uaua", "suaua"):
        words = Words("Quokka")
        if seen := attempt(template, build(shape, words), dialect):
            for start, end, message in seen[0].pieces:
                if message >= 0:
                    around += seen[0].text[start:end].split(words.given[message])
    tags = {tag for text in around for tag in TAG.findall(text) if not THINK.fullmatch(tag)}
    return frozenset(tags.union(text.strip() for text in around if not TAG.search(text)) - {""})
