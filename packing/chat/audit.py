"""Whether training on a tokenizer's chat template is right: each question asked of the template itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from packing.chat.dialect import adapt
from packing.chat.encode import ChatEncoder, ChatOptions, chat_template_of
from packing.chat.probes import find_dialect, place_of
from packing.chat.template import RENDER_ERRORS, ChatTemplate
from packing.errors import RowRejected, TemplateError
from packing.example import Conversation, Example

if TYPE_CHECKING:
    from rich.table import Table

UNPINNED = "2026-01-02"
"""The date that a template is audited with where none is given; `pack` asks for one."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One question, its answer, and whether training would be wrong because of it."""

    question: str
    answer: str
    detail: str = ""
    wrong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found about one template.

    Attributes:
        name: The tokenizer's name.
        findings: In the order of the questions.
        example: A conversation as it would be trained, None where no span can be found.
    """

    name: str
    findings: Sequence[Finding]
    example: Example | None

    @property
    def exit_code(self) -> int:
        """1 where training on the template would be wrong."""
        return int(any(finding.wrong for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """The findings for machines."""
        return {
            "tokenizer": self.name,
            "right": not self.exit_code,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def table(self) -> Table:
        """The findings for people."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_column(overflow="fold")
        for finding in self.findings:
            style = "bold red" if finding.wrong else ""
            table.add_row(finding.question, Text(finding.answer, style), Text(_fit(finding.detail), style))
        return table


def _fit(text: str, *, width: int = 240) -> str:
    """The text in one line of letters that leave the terminal alone."""
    line = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split())
    )
    return line if len(line) <= width else f"{line[: width - 2]} …"


def audit(
    tokenizer: Any,
    *,
    options: ChatOptions | None = None,
    conversations: Iterable[Conversation | RowRejected] = (),
) -> Audit:
    """Asks a template everything that decides whether training on it is right.

    Args:
        tokenizer: A fast tokenizer of transformers.
        options: The template, its arguments and its date; what is trained in the example shown.
        conversations: Real ones to count what becomes of them, rows that are none with them, and to show the
            first that can be used.

    Raises:
        TemplateError: there is no template, or it does not compile.
        OptionError: options that can't be.
    """
    options = options or ChatOptions()
    conversations = list(conversations)
    dated = options if options.template_date is not None else replace(options, template_date=UNPINNED)
    template = chat_template_of(tokenizer, dated, tools=None)
    encoder: ChatEncoder | None = None
    why_not = ""
    try:
        encoder = ChatEncoder(tokenizer, options=dated)
    except TemplateError as error:
        why_not = str(error)
    probe = _Probe(template)
    findings = [
        Finding(question="generation marks", answer=_yes(template.has_generation)),
        _spans(template, why_not),
        probe.prefix_stable(),
        _stop_token(tokenizer, encoder, why_not),
        probe.bos(tokenizer),
        probe.text_before(tokenizer),
        _date(template, options),
        probe.earlier_reasoning(),
        probe.tools(),
        probe.system_role(),
        probe.consecutive_roles(),
        probe.white_space(),
    ]
    example = None
    if encoder is not None:
        tried = conversations or [Conversation(messages=_SHOWN)]
        outcomes = encoder.encode_many([each for each in tried if isinstance(each, Conversation)])
        example = next((outcome[0] for outcome in outcomes if isinstance(outcome, list)), None)
        if conversations:
            findings.append(_data([*outcomes, *(each for each in tried if isinstance(each, RowRejected))]))
    return Audit(name=template.name, findings=findings, example=example)


_SHOWN: Sequence[Message] = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4.", "reasoning_content": "Two and two."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6.", "reasoning_content": "Three and three."},
)


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _spans(template: ChatTemplate, why_not: str) -> Finding:
    if why_not:
        return Finding(question="spans found", answer="no", detail=why_not, wrong=True)
    how = (
        "by the template's own generation marks, each checked"
        if template.has_generation
        else "by where each message is printed; header and end from probes, each turn checked"
    )
    return Finding(question="spans found", answer="yes", detail=how)


def _stop_token(tokenizer: Any, encoder: ChatEncoder | None, why_not: str) -> Finding:
    question = "stop token trained"
    if encoder is None:
        return Finding(question=question, answer="no", detail=why_not, wrong=True)
    markers = dict.fromkeys(marker for found in encoder.calibration.ends.values() for marker, _ in found)
    if not markers:
        return Finding(question=question, answer="no", detail="the template prints none", wrong=True)
    details, wrong = [], False
    for marker in markers:
        ids = tokenizer.encode(marker.strip(), add_special_tokens=False)
        if ids[-1] not in tokenizer.added_tokens_decoder:
            wrong = True
            details.append(f"{marker!r} is {len(ids)} ordinary tokens: the template is another tokenizer's")
        else:
            eos = "the EOS token" if ids[-1] == tokenizer.eos_token_id else f"not {tokenizer.eos_token!r}"
            details.append(f"{marker!r} ({eos})")
    return Finding(question=question, answer=_yes(not wrong), detail=", ".join(details), wrong=wrong)


def _date(template: ChatTemplate, options: ChatOptions) -> Finding:
    if not template.prints_date:
        return Finding(question="today's date printed", answer="no")
    pinned = options.template_date
    detail = f"pinned to {pinned}" if pinned else "pack needs --template-date YYYY-MM-DD"
    return Finding(question="today's date printed", answer="yes", detail=detail)


def _data(outcomes: Sequence[list[Example] | RowRejected]) -> Finding:
    rejected = Counter(outcome.reason.value for outcome in outcomes if isinstance(outcome, RowRejected))
    notes = Counter(
        note
        for outcome in outcomes
        if isinstance(outcome, list)
        for note in sorted({note for example in outcome for note in example.notes})
    )
    counts = [f"{name}: {count}" for name, count in (*rejected.most_common(), *notes.most_common())]
    return Finding(
        question="conversations usable",
        answer=f"{len(outcomes) - rejected.total()} of {len(outcomes)}",
        detail=", ".join(counts),
        wrong=rejected.total() == len(outcomes),
    )


class _Probe:
    """Small conversations rendered with one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.dialect, self.renders = find_dialect(template)

    def render(self, *messages: Message, tools: Sequence[Message] | None = None) -> str:
        """The text.

        Raises:
            RENDER_ERRORS: the template refuses.
        """
        return self.template.render(adapt(messages, dialect=self.dialect, notes=[]), tools=tools).text

    def allows(self, *messages: Message) -> str:
        """Why the template refuses the messages, "" where it prints every text of theirs."""
        try:
            text = self.render(*messages)
        except RENDER_ERRORS as error:
            return f"refused: {' '.join(str(error).split())[:120]}"
        lost = [message["role"] for message in messages if message["content"] not in text]
        return f"left out: {', '.join(lost)}" if lost else ""

    def prefix_stable(self) -> Finding:
        question = "prefix-stable"
        talk = [_said("user", 1), _said("assistant", 2), _said("user", 3), _said("assistant", 4)]
        thought = [{**m, "reasoning_content": "Okapi"} if m["role"] == "assistant" else m for m in talk]
        call = {"type": "function", "function": {"name": "okapi", "arguments": {"a": "b"}}}
        called = [talk[0], {**talk[1], "content": "", "tool_calls": [call]}, _said("tool", 5), talk[3]]
        kinds = {"plain": talk, "with reasoning": thought}
        if "tool_calls" in self.renders:
            kinds["with calls"] = called
        unstable = []
        for kind, messages in kinds.items():
            try:
                texts = [self.render(*messages[:length]) for length in range(2, len(messages) + 1)]
            except RENDER_ERRORS:
                continue
            if not all(self._goes_on(texts[0], text) for text in texts[1:]):
                unstable.append(kind)
        detail = f"earlier turns are printed otherwise later: {', '.join(unstable)}" if unstable else ""
        return Finding(question=question, answer=_yes(not unstable), detail=detail)

    def _goes_on(self, shorter: str, longer: str) -> bool:
        """Whether a conversation's text begins with that of its first turns, but for an EOS at the end."""
        end = shorter.rindex("Okapi2") + len("Okapi2") if "Okapi2" in shorter else len(shorter.rstrip())
        return longer.startswith(shorter[:end])

    def bos(self, tokenizer: Any) -> Finding:
        question = "BOS"
        if tokenizer.bos_token is None:
            return Finding(question=question, answer="no", detail="the tokenizer has none")
        try:
            text = self.render(_said("user", 1), _said("assistant", 2))
        except RENDER_ERRORS:
            return Finding(question=question, answer="unknown", detail="the template refuses a plain turn")
        first = tokenizer.encode(text, add_special_tokens=False)[:2]
        count = first.count(tokenizer.bos_token_id)
        detail = (
            ""
            if count == 1
            else f"the template prints {tokenizer.bos_token!r} {'twice' if count else 'never'}"
        )
        return Finding(question=question, answer=_yes(count == 1), detail=detail, wrong=count == 2)

    def text_before(self, tokenizer: Any) -> Finding:
        """What stands before the first user's text and not before the second's."""
        question = "text before the first message"
        talk = [_said("user", 1), _said("assistant", 2), _said("user", 3)]
        try:
            messages = adapt(talk, dialect=self.dialect, notes=[])
            render = self.template.render(messages)
        except RENDER_ERRORS:
            return Finding(question=question, answer="unknown", detail="the template refuses a plain turn")
        place = place_of(render, messages, 2)
        header = render.text[place[0] : place[1]].partition("Okapi3")[0] if place else ""
        before = render.text.partition("Okapi1")[0].removesuffix(header)
        before = before.removeprefix(tokenizer.bos_token or "").strip()
        return Finding(question=question, answer=_yes(bool(before)), detail=before)

    def earlier_reasoning(self) -> Finding:
        question = "earlier reasoning kept"
        if "earlier_reasoning" in self.renders:
            return Finding(question=question, answer="yes")
        detail = "of the last turns alone; --turns expand trains each turn with its own"
        if "reasoning" not in self.renders:
            detail = "the template prints no reasoning"
        return Finding(question=question, answer="no", detail=detail)

    def tools(self) -> Finding:
        known = {
            "tools": "schemas",
            "tool_calls": f"calls (arguments as {self.dialect.arguments})",
            "parallel_calls": "several calls a turn",
            "tool_replies": "replies",
        }
        printed = [words for name, words in known.items() if name in self.renders]
        lost = [words for name, words in known.items() if name not in self.renders]
        detail = f"not: {', '.join(lost)}" if lost and printed else ""
        return Finding(question="tools rendered", answer=", ".join(printed) or "no", detail=detail)

    def system_role(self) -> Finding:
        first = self.allows(_said("system", 1), _said("user", 2), _said("assistant", 3))
        later = self.allows(
            _said("user", 1),
            _said("assistant", 2),
            _said("system", 3),
            _said("user", 4),
            _said("assistant", 5),
        )
        detail = first or (f"later ones {later}" if later else "")
        return Finding(question="system role allowed", answer=_yes(not first), detail=detail)

    def consecutive_roles(self) -> Finding:
        users = self.allows(_said("user", 1), _said("user", 2), _said("assistant", 3))
        turns = self.allows(_said("user", 1), _said("assistant", 2), _said("assistant", 3))
        details = [f"{who} {why}" for who, why in (("users", users), ("assistants", turns)) if why]
        return Finding(
            question="consecutive roles allowed", answer=_yes(not details), detail="; ".join(details)
        )

    def white_space(self) -> Finding:
        question = "white space trimmed"
        kept = []
        for message in (
            {"role": "user", "content": "  Okapi1\n\n"},
            {"role": "assistant", "content": "  Okapi2\n\n"},
        ):
            other = _said("assistant" if message["role"] == "user" else "user", 3)
            messages = [message, other] if message["role"] == "user" else [other, message]
            try:
                kept.append(message["content"] in self.render(*messages))
            except RENDER_ERRORS:
                return Finding(
                    question=question, answer="unknown", detail="the template refuses a plain turn"
                )
        of = [who for who, whole in zip(("users", "assistants"), kept, strict=True) if not whole]
        return Finding(
            question=question, answer=_yes(bool(of)), detail=f"of {' and '.join(of)}" if of else ""
        )


def _said(role: str, number: int) -> dict[str, Any]:
    return {"role": role, "content": f"Okapi{number}"}
