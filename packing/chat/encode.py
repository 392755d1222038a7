r"""Conversations to examples: one render, one tokenization, and a mask from the characters' places.

text   <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n
span                                                          ^^^^^^^^^^^^
ids    151644 872 198 ...      151644 77091 198              19841 151645  198
labels   -100 ...                                            19841 151645 -100
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from packing.chat import proof
from packing.chat.bpe import BpeEncoder, Encoded
from packing.chat.calibrate import THINK, Calibration, calibrate
from packing.chat.control import CONTROL_FORM, Joins, exchange, strings, texts
from packing.chat.dialect import adapt, check_tools
from packing.chat.ids import Tokens, around, by_bytes, by_places, difference
from packing.chat.recipe import NotEqual
from packing.chat.spans import check_untrained, find_turns
from packing.chat.template import RENDER_ERRORS, RESERVED_ARGUMENTS, ChatTemplate, Render
from packing.chat.tokenizer import PROBES, any_of, digest_of, plain_backend, tokenizer_digest, tokenizer_json
from packing.errors import OptionError, PadfreeError, Reason, RowRejected, TemplateError, check_choices
from packing.example import Conversation, Example, Note, make_example
from packing.messages import clean, read_message, read_tools

ENCODING_VERSION = 1
"""Raised when the same conversation would give other tokens or another mask than before."""

TrainOn = Literal["assistant", "last", "all", "completion"]

SAMPLE_EVERY = 128
"""One of so many of a call's examples is encoded by both encoders: at a sixth of the speed of the fast one,
that adds a twentieth to the encoding."""

_log = logging.getLogger(__name__)


class EncodersDiffer(PadfreeError):
    """The fast encoder gave other ids than the tokenizer's own library: none that it gave can be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What is trained, and with which template.

    Attributes:
        train_on: "assistant" trains all assistant turns, "last" the last of them, "completion" those
            behind the last user message, "all" every token.
        turns: "whole" gives one example a conversation; "expand" one an assistant turn, with the history
            as the template renders it at that turn, training that turn alone.
        chat_template: A template's text in place of the tokenizer's own.
        template_args: Variables for the template, such as `{"enable_thinking": False}`.
        template_date: The date YYYY-MM-DD that a template that prints today's date is given.
        control_tokens: What happens to a conversation whose text spells a control token.
        encoder: What makes the ids, the same ones: the `tokenizers` library, or `tiktoken`, about six times
            as fast, for tokenizers that are shown to be equal in it; "auto" takes it where they are.
    """

    train_on: TrainOn = "assistant"
    turns: Literal["whole", "expand"] = "whole"
    chat_template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None
    control_tokens: Literal["reject", "allow"] = "reject"
    encoder: Literal["auto", "tokenizers", "tiktoken"] = "auto"

    def __post_init__(self) -> None:
        check_choices(self)
        if self.turns == "expand" and self.train_on == "all":
            raise OptionError("turns expand trains one turn an example: choose another --train-on than all")


@dataclass(slots=True, kw_only=True)
class _Draft:
    """An example before it is tokenized.

    Attributes:
        number: Which conversation of the call it is of.
        notes: What happened so far.
        text: What is tokenized.
        chat: What is rendered; None for plain text.
        render: The render of that.
        spans: The trained characters of a chat.
    """

    number: int
    notes: list[Note]
    text: str = ""
    chat: _Chat | None = None
    render: Render | None = None
    spans: Sequence[tuple[int, int]] = ()


class _Chat(NamedTuple):
    """A conversation to render: `chosen` are the messages to train, `turn` is as in `Example`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    chosen: Sequence[int]
    turn: int
    template: ChatTemplate
    calibration: Calibration


class ChatEncoder:
    """Makes examples of conversations with one tokenizer and one set of options.

    Pickling sends the tokenizer and the options; the template is learnt again on the other side, which
    takes 20 to 300 ms. Not safe to share between threads.

    Args:
        tokenizer: A fast tokenizer of transformers.

    Raises:
        TemplateError: training on the tokenizer's chat template would be wrong. A tokenizer without a
            template is refused at the first conversation with messages only.
        OptionError: a template argument or date that can't be.
    """

    def __init__(self, tokenizer: Any, *, options: ChatOptions | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or ChatOptions()
        self._backend = plain_backend(tokenizer)
        self._bpe: BpeEncoder | None = None
        self._verdict: proof.Verdict | None = None
        self._counts: Counter[str] = Counter()
        special = {n: token for n, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = any_of(token.content for token in special.values())
        self._special_ids = list(special)
        # Looked for behind the normalizer, a special token can come of text that does not spell it.
        normalizer = self._backend.normalizer
        self._forgeable = (
            normalizer is not None
            and any(token.normalized for token in special.values())
            and any(normalizer.normalize_str(text) != text for text in PROBES)
        )
        self._trims = any(
            self._backend.encode(text, add_special_tokens=False).char_to_token(place) is None
            for text in PROBES
            for place, letter in enumerate(text)
            if letter.isspace()
        )
        self._chats: dict[str, tuple[ChatTemplate, Calibration]] = {}
        self._with_tools = self._without_tools = ""
        if self.options.chat_template is not None or tokenizer.chat_template is not None:
            self._without_tools = self._learn(tools=None)
            self._with_tools = self._learn(tools=[{}])
            _check_arguments(self.options.template_args, [template for template, _ in self._chats.values()])
        markers = {marker for _, calibration in self._chats.values() for marker in calibration.markers}
        control = {*markers, *(token.content for token in special.values())}
        sources = "".join(self._chats)
        # Tokens that only look like text: those of a control token's form, and for what comes from outside
        # those that the template prints, but for the think tags, which have rules of their own.
        added = {t.content for t in tokenizer.added_tokens_decoder.values() if not t.special}
        control |= {text for text in added if CONTROL_FORM.fullmatch(text)}
        outside = {t for t in added if t in sources and t.startswith("<") and not THINK.fullmatch(t)}
        self._control = any_of(control)
        self._outside = any_of(control | outside)
        self._joins = Joins(
            control, {text for template, _ in self._chats.values() for text in template.printed}
        )
        if self.options.encoder == "tiktoken":
            self.prepare()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.tokenizer, self.options, self._bpe is not None))

    @property
    def calibration(self) -> Calibration:
        """What was learnt of the template for conversations without tools."""
        return self._chats[self._without_tools][1]

    def _learn(self, *, tools: Sequence[Any] | None) -> str:
        source = _template_source(self.tokenizer, self.options, tools=tools)
        if source not in self._chats:  # mostly one for both, and to compile it takes 30 ms
            template = chat_template_of(self.tokenizer, self.options, tools=tools)
            if template.prints_date and self.options.template_date is None:
                raise TemplateError(
                    f"{template.name} prints today's date, so another day gives other tokens: "
                    "pin it with --template-date YYYY-MM-DD"
                )
            calibration = calibrate(template, bos=self.tokenizer.bos_token, special=self._special)
            self._chats[source] = (template, calibration)
            self._compare(template, calibration)
            if calibration.marked:
                _check_marks(template, calibration)
        return source

    def _compare(self, template: ChatTemplate, calibration: Calibration) -> None:
        """Renders and encodes as this version of transformers does, or refuses to."""
        if template.prints_date:
            return  # pinned here, today's there
        asked: dict[str, Any] = {"role": "user", "content": "What is 2 + 2?"}
        said: dict[str, Any] = {"role": "assistant", "content": " It's 4. ", "reasoning_content": "2 + 2\n"}
        messages = adapt([asked, said, asked, said], dialect=calibration.dialect, notes=[])
        theirs = self.tokenizer.apply_chat_template(
            messages,
            chat_template=template.source,
            tokenize=True,
            return_dict=False,
            **self.options.template_args,
        )
        ours = self._backend.encode(template.render(messages).text, add_special_tokens=False).ids
        if list(theirs) != ours:
            raise TemplateError(
                f"{template.name} gives other ids through the tokenizer's own apply_chat_template, "
                "which does more than the template and tokenizer.json say"
            )

    def encode(self, conversation: Conversation) -> list[Example]:
        """The examples of one conversation: one, or with turns="expand" one a trained turn.

        Raises:
            RowRejected: the conversation can't be used, and why.
            TemplateError: it has messages, and the tokenizer has no chat template.
        """
        (result,) = self.encode_many([conversation])
        if isinstance(result, RowRejected):
            raise result
        return result

    def prepare(self) -> None:
        """Chooses the encoder; until then it is the tokenizer's own library.

        The first time for a tokenizer some seconds, later half a second: to be called where thousands of
        conversations follow, and before processes that share it.

        Raises:
            OptionError: tiktoken was asked for, and is not shown to give this tokenizer's ids.
        """
        if self.options.encoder == "tokenizers" or self._bpe is not None:
            return
        text = tokenizer_json(self.tokenizer)
        self.digest = digest_of(text)
        self._bpe, self._verdict = proof.build(plain_backend(self.tokenizer), text=text, digest=self.digest)
        if self._bpe is not None:
            return
        name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        why = f"tiktoken is not shown to give the ids of {name}: {self._verdict.why_not}"
        if self.options.encoder == "tiktoken":
            raise OptionError(f"--encoder tiktoken: {why}; choose auto or tokenizers")
        _log.warning("%s; encoding by tokenizers, at a sixth of the speed", why)

    @functools.cached_property
    def digest(self) -> str:
        """Of all that defines the ids of the tokenizer."""
        return tokenizer_digest(self.tokenizer)

    @functools.cached_property
    def vocabulary(self) -> int:
        """One more than the largest id, which is not how many there are where ids have gaps."""
        if self._bpe is not None:
            return self._bpe.vocabulary
        ids: Iterable[int] = self.tokenizer.get_vocab().values()  # takes 0.1 s for 150,000
        return 1 + max(ids)

    def encoder_report(self) -> dict[str, Any]:
        """Which encoder is used, and why, for the records of a run."""
        if self._verdict is None:
            why = "asked for" if self.options.encoder == "tokenizers" else "not prepared: few conversations"
            return {"encoder": "tokenizers", "why": why}
        return {
            "encoder": "tokenizers" if self._bpe is None else "tiktoken",
            "why": self._verdict.why_not or "shown to be equal for this tokenizer",
            "probe_seconds": round(self._verdict.seconds, 3),
            "probe_remembered": self._verdict.remembered,
            "sample_every": SAMPLE_EVERY,
        }

    def take_counts(self) -> Counter[str]:
        """How many examples went which way, since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def encode_many(
        self, conversations: Sequence[Conversation], *, lap: Callable[[str], None] = lambda stage: None
    ) -> list[list[Example] | RowRejected]:
        """For each conversation its examples, or why it can't be used; with one call of the tokenizer.

        Args:
            conversations: Some hundred make the best use of a call.
            lap: Called with the name of each stage when that is done.

        Raises:
            TemplateError: a conversation has messages, and the tokenizer has no chat template.
            EncodersDiffer: a sample of the fast encoder's examples is not what the other gives.
        """
        self._backend = plain_backend(self.tokenizer)
        results: list[list[Example] | RowRejected] = [[] for _ in conversations]
        drafts: list[_Draft] = []
        # Each step for all before the next: one conversation after the other costs a fifth more, since
        # templates and checks drive each other out of the processor's caches.
        for number, conversation in enumerate(conversations):
            try:
                self._draft(conversation, number, drafts, results)
            except RowRejected as rejection:
                results[number] = rejection
        lap("checks")
        _each(drafts, _render, results)
        lap("render")
        _each(drafts, self._check_render, results)
        lap("checks")
        _each(drafts, self._find_spans, results)
        lap("mask")
        drafts = [d for d in drafts if isinstance(results[d.number], list) and (d.chat is None or d.spans)]
        for draft, tokens in zip(drafts, self._encode(drafts, lap), strict=True):
            if isinstance(result := results[draft.number], list):
                try:
                    result.append(self._finish(draft, tokens))
                except RowRejected as rejection:
                    results[draft.number] = rejection
        for number, result in enumerate(results):
            if isinstance(result, list) and not result:
                results[number] = RowRejected(
                    Reason.NOTHING_TO_TRAIN, "nothing is said in the turns to train"
                )
        lap("mask")
        return results

    def _encode(self, drafts: Sequence[_Draft], lap: Callable[[str], None]) -> list[Tokens | RowRejected]:
        """The drafts' tokens: by the fast encoder where it can, and a sample of those by both.

        Raises:
            EncodersDiffer: the sample differs.
        """
        quick = [n for n, draft in enumerate(drafts) if self._bpe is not None and self._bpe.takes(draft.text)]
        made: dict[int, Tokens | RowRejected] = {}
        if quick and not self._backend.encode_special_tokens:
            assert self._bpe is not None
            try:
                encoded = self._bpe.encode([drafts[n].text for n in quick])
            except NotEqual as error:
                raise self._differ(str(error), remember=True) from error
            lap("tokenize")
            if encoded is not None:
                made.update(zip(quick, self._by_bytes(encoded, [drafts[n] for n in quick]), strict=True))
                lap("mask")
        sample = list(made)[::SAMPLE_EVERY]
        rest = [n for n in range(len(drafts)) if n not in made]
        known = self._by_reference([drafts[n] for n in (*sample, *rest)])
        for n, tokens in zip(sample, known, strict=False):
            if what := difference(made[n], tokens):
                raise self._differ(f"other {what} for {drafts[n].text[:60]!r}", remember=what == "ids")
        self._counts += Counter(tiktoken=len(made), tokenizers=len(rest), both=len(sample))
        made.update(zip(rest, known[len(sample) :], strict=True))
        lap("tokenize")
        return [made[n] for n in range(len(drafts))]

    def _by_bytes(self, encoded: Encoded, drafts: Sequence[_Draft]) -> list[Tokens]:
        """The tokens of drafts that the fast encoder has encoded."""
        assert self._bpe is not None
        made = by_bytes(encoded, [draft.text for draft in drafts], [draft.spans for draft in drafts])
        return [
            around(tokens, self._bpe.around) if draft.chat is None else tokens
            for draft, tokens in zip(drafts, made, strict=True)
        ]

    def _differ(self, what: str, *, remember: bool) -> EncodersDiffer:
        """The error; other ids are the tokenizer's fault and remembered, another mask would be ours."""
        if remember:
            proof.remember_difference(self.digest, what=what)
        return EncodersDiffer(
            f"tiktoken and tokenizers differ on a row of this run ({what}), so what was encoded before can't "
            "be trusted: run again with --encoder tokenizers"
        )

    def _by_reference(self, drafts: Sequence[_Draft]) -> list[Tokens | RowRejected]:
        """By the tokenizer's own library."""
        made: dict[int, Tokens | RowRejected] = {}
        for is_plain in (False, True):
            batch = [n for n, draft in enumerate(drafts) if (draft.chat is None) == is_plain]
            texts = [drafts[n].text for n in batch]
            for n, encoding in zip(
                batch, self._backend.encode_batch(texts, add_special_tokens=is_plain), strict=True
            ):
                made[n] = self._place(drafts[n], encoding)
        return [made[n] for n in range(len(drafts))]

    def _place(self, draft: _Draft, encoding: Any) -> Tokens | RowRejected:
        """The tokens of an encoding, those within the draft's spans trained."""
        ids = np.array(encoding.ids, np.int32)
        if (
            self._forgeable
            and draft.chat is not None
            and np.isin(ids, self._special_ids).sum() != len(self._special.findall(draft.text))
        ):
            return RowRejected(
                Reason.CONTROL_TOKEN, "the tokenizer's normalizer makes a control token of text that is none"
            )
        return by_places(encoding, ids, draft.spans, length=len(draft.text), trimmed=self._trims)

    def fingerprint(self) -> dict[str, Any]:
        """All that decides which tokens a conversation gives; the same in every process."""
        options = asdict(self.options)
        del options["encoder"]  # gives the same tokens, whichever it is
        return {
            "encoding_version": ENCODING_VERSION,
            "tokenizer": self.digest,
            "vocabulary": self.vocabulary,
            "special_tokens": {
                key: str(value) for key, value in sorted(self.tokenizer.special_tokens_map.items())
            },
            **options,
            "chat_template": sorted(self._chats),
            "template_args": dict(sorted(self.options.template_args.items())),
        }

    def _check_ids(self, example: Example) -> Example:
        size = self.vocabulary
        low, high = int(example.input_ids.min()), int(example.input_ids.max())
        if low < 0 or high >= size:
            raise RowRejected(
                Reason.BAD_TOKENS, f"id {low if low < 0 else high} is not in the tokenizer's {size} tokens"
            )
        return example

    def _draft(
        self, conversation: Conversation, number: int, drafts: list[_Draft], results: list[Any]
    ) -> None:
        """Adds the conversation's drafts, or its examples if it came with them."""
        if conversation.example is not None:
            results[number].append(self._check_ids(conversation.example))
        elif conversation.text is not None:
            text = self._check_plain(conversation.text)
            notes = [*conversation.notes, *([Note.SPACE_CUT] if text != conversation.text else [])]
            drafts.append(_Draft(number=number, notes=notes, text=text))
        else:
            drafts += self._draft_chat(conversation, number)

    def _draft_chat(self, conversation: Conversation, number: int) -> list[_Draft]:
        if not self._chats:
            name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
            raise TemplateError(
                f"the tokenizer {name} has no chat template: give one with --chat-template FILE"
            )
        tools = conversation.tools or None
        template, calibration = self._chats[self._with_tools if tools else self._without_tools]
        notes = list(conversation.notes)
        messages = adapt(conversation.messages or (), dialect=calibration.dialect, notes=notes)
        self._check_texts(messages, tools)
        chosen = self._choose(messages, conversation.trainable)
        parts: list[tuple[Sequence[dict[str, Any]], Sequence[int], int]] = [(messages, chosen, -1)]
        if self.options.turns == "expand":
            turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            parts = [(messages[: place + 1], [place], turns.index(place)) for place in chosen]
        return [
            _Draft(
                number=number,
                notes=notes.copy(),
                chat=_Chat(part, tools, trained, turn, template, calibration),
            )
            for part, trained, turn in parts
        ]

    def _check_render(self, draft: _Draft) -> None:
        if draft.chat is None:
            return
        _check_unicode(draft.text)
        if self.options.control_tokens == "reject":
            self._check_joins(draft)

    def _find_spans(self, draft: _Draft) -> None:
        if draft.chat is None or draft.render is None:
            return
        render = draft.render
        messages, tools, chosen, _, template, calibration = draft.chat
        turns = find_turns(render, messages, tools, template=template, calibration=calibration)
        if self.options.train_on == "all":
            draft.spans = [
                (start, end)
                for start, end, message in render.pieces
                if message in chosen or len(chosen) == len(messages)
            ]
            check_untrained(render, messages, tools, chosen, template=template)
            dropped = turns.dropped
        else:
            draft.spans = [(start, end) for start, end, message in turns.spans if message in chosen]
            dropped = [number for number in turns.dropped if number in chosen]
        draft.notes += turns.notes
        draft.notes += [Note.REASONING_DROPPED] * len(dropped)

    def _check_texts(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        tools_text = check_tools(tools) if tools else ""
        if self.options.control_tokens == "allow":
            return
        for number, message in enumerate(messages):
            control = self._outside if message["role"] in ("user", "tool") else self._control
            for text in texts(message):
                if found := control.search(text):
                    raise RowRejected(
                        Reason.CONTROL_TOKEN, f"message {number} spells the control token {found.group()!r}"
                    )
        if found := self._outside.search(tools_text):
            raise RowRejected(Reason.CONTROL_TOKEN, f"the tools spell the control token {found.group()!r}")

    def _check_joins(self, draft: _Draft) -> None:
        """No control token is put together from texts and what stands beside them.

        With the texts exchanged that could be a part of one, as many are printed. Costs a render, of rows
        with such a text.
        """
        assert draft.chat is not None
        messages, tools = draft.chat.messages, draft.chat.tools
        parts = {text for message in messages for text in strings(message) if self._joins.may(text)}
        if tools:
            parts.update(text for text in strings(tools) if self._joins.may(text))
        if not parts:
            return
        names = {text: "\xa4" * (n + 1) for n, text in enumerate(sorted(parts))}
        try:
            other = draft.chat.template.render(
                [{**exchange(message, names), "role": message["role"]} for message in messages],
                tools=exchange(tools, names),
            )
        except RENDER_ERRORS:
            other = None
        if other is None or len(self._control.findall(other.text)) != len(self._control.findall(draft.text)):
            raise RowRejected(
                Reason.CONTROL_TOKEN,
                f"{min(parts)[:40]!r} and what the chat template prints beside it may make a control token",
            )

    def _choose(self, messages: Sequence[Mapping[str, Any]], trainable: Sequence[bool] | None) -> list[int]:
        """The numbers of the messages to train."""
        if trainable is not None and len(trainable) != len(messages):
            raise RowRejected(Reason.BAD_WEIGHT, f"{len(trainable)} weights for {len(messages)} messages")
        said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self.options.train_on == "last":
            said = said[-1:]
        elif self.options.train_on == "completion":
            asked = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
            said = [number for number in said if number > asked]
        elif self.options.train_on == "all":
            said = list(range(len(messages)))
        chosen = [number for number in said if trainable is None or trainable[number]]
        if not chosen:
            raise RowRejected(Reason.NOTHING_TO_TRAIN, f"none of {len(messages)} messages is trained")
        return chosen

    def _check_plain(self, text: str) -> str:
        """Plain text without white space behind an EOS that it ends in."""
        eos = self.tokenizer.eos_token
        if eos is None:
            raise TemplateError(
                f"the tokenizer {self.tokenizer.name_or_path} has no EOS token to end plain text with"
            )
        if not text.strip():
            raise RowRejected(Reason.EMPTY_CONVERSATION, "the text is empty")
        _check_unicode(text)
        if text.rstrip().endswith(eos):
            text = text.rstrip()
        found = self._control.search(text.removesuffix(eos))
        if found and self.options.control_tokens == "reject":
            raise RowRejected(Reason.CONTROL_TOKEN, f"the text spells the control token {found.group()!r}")
        return text

    def _finish(self, draft: _Draft, tokens: Tokens | RowRejected) -> Example:
        if isinstance(tokens, RowRejected):
            raise tokens
        if draft.chat is None:
            return self._finish_text(draft, tokens)
        if tokens.supervised <= 0:
            raise RowRejected(Reason.NOTHING_TO_TRAIN, f"none of the {tokens.ids.size} tokens is trained")
        return Example(
            input_ids=tokens.ids,
            labels=tokens.labels,
            turn=draft.chat.turn,
            messages=draft.chat.messages,
            tools=draft.chat.tools,
            notes=[*draft.notes, *tokens.notes],
        )

    def _finish_text(self, draft: _Draft, tokens: Tokens) -> Example:
        ids = tokens.ids.tolist()
        eos, bos = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        if len(ids) > 1 and ids[0] == ids[1] == bos:
            del ids[0]
        while len(ids) > 1 and ids[-1] == ids[-2] == eos:
            del ids[-1]
        if ids[-1:] != [eos]:
            ids.append(eos)
        if len(ids) < 2:
            raise RowRejected(Reason.NOTHING_TO_TRAIN, "the text is one token")
        return make_example(ids, trained=np.ones(len(ids), np.bool_), notes=draft.notes)


def _render(draft: _Draft) -> None:
    if draft.chat is None:
        return
    try:
        draft.render = draft.chat.template.render(draft.chat.messages, tools=draft.chat.tools)
    except RENDER_ERRORS as error:
        raise RowRejected(Reason.TEMPLATE_ERROR, f"the chat template raises: {_short(error)}") from error
    draft.text = draft.render.text


def _each(drafts: Sequence[_Draft], step: Callable[[_Draft], object], results: list[Any]) -> None:
    """Takes a step of each draft whose conversation is not rejected yet; a rejection becomes its result."""
    for draft in drafts:
        if isinstance(results[draft.number], list):
            try:
                step(draft)
            except RowRejected as rejection:
                results[draft.number] = rejection


def _template_source(tokenizer: Any, options: ChatOptions, *, tools: Sequence[Any] | None) -> str:
    try:
        source: str = tokenizer.get_chat_template(options.chat_template, tools)
    except ValueError as error:
        of = tokenizer.name_or_path or type(tokenizer).__name__
        raise TemplateError(
            f"the tokenizer {of} has no chat template for such rows: give one with --chat-template FILE"
        ) from error
    return source


def chat_template_of(tokenizer: Any, options: ChatOptions, *, tools: Sequence[Any] | None) -> ChatTemplate:
    """The template that `apply_chat_template` would use: the options', or the tokenizer's for such a row.

    Raises:
        TemplateError: there is none, or it does not compile.
        OptionError: a template argument or date that can't be.
    """
    of = tokenizer.name_or_path or type(tokenizer).__name__
    return ChatTemplate(
        _template_source(tokenizer, options, tools=tools),
        name=f"the chat template of {of}"
        if options.chat_template is None
        else f"the chat template given for {of}",
        special_tokens=tokenizer.special_tokens_map,
        arguments=options.template_args,
        date=options.template_date,
    )


def _check_arguments(arguments: Iterable[str], templates: Sequence[ChatTemplate]) -> None:
    """Each argument is read somewhere: one that is misspelt would change nothing, silently.

    Raises:
        OptionError: names it and the nearest name that a template reads.
    """
    read = frozenset().union(*(template.variables for template in templates))
    for name in arguments:
        if name not in read:
            free = sorted(read - RESERVED_ARGUMENTS)
            near = difflib.get_close_matches(name, free, n=1)
            hint = f"did you mean {near[0]}?" if near else f"names it may read: {', '.join(free) or 'none'}"
            raise OptionError(f"--template-arg {name}: {templates[0].name} never reads it; {hint}")


def _check_marks(template: ChatTemplate, calibration: Calibration) -> None:
    """Finds the turns of the plainest conversation, which any template of marks has to allow.

    Raises:
        TemplateError: the marks cover other text than the assistant's.
    """
    talk = [{"role": role, "content": f"Okapi{n}"} for n, role in enumerate(("user", "assistant") * 2)]
    for length in (4, 3):
        messages = adapt(talk[:length], dialect=calibration.dialect, notes=[])
        try:
            find_turns(template.render(messages), messages, None, template=template, calibration=calibration)
        except RENDER_ERRORS:
            continue
        except RowRejected as rejection:
            raise TemplateError(f"{template.name}, in a plain talk: {rejection.detail}") from rejection


def _rebuild(tokenizer: Any, options: ChatOptions, prepared: bool) -> ChatEncoder:
    encoder = ChatEncoder(tokenizer, options=options)
    if prepared:
        encoder.prepare()
    return encoder


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowRejected(
            Reason.LONE_SURROGATE, f"half a surrogate pair, \\u{ord(text[error.start]):04x}, is no text"
        ) from error


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    tools: Any = None,
    train_on: TrainOn = "assistant",
    chat_template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    template_date: str | None = None,
    control_tokens: Literal["reject", "allow"] = "reject",
) -> Example:
    """One conversation to one example; the options are those of `ChatOptions`.

    Messages may carry `weight` or `train`, 0 or 1: whether the message may be trained.

    Raises:
        RowRejected: the conversation can't be used, and why.
        TemplateError: training on the tokenizer's chat template would be wrong.
        OptionError: options that can't be.
    """
    encoder = _encoder(
        tokenizer,
        tokenizer_state=(str(tokenizer.chat_template), len(tokenizer), str(tokenizer.special_tokens_map)),
        train_on=train_on,
        chat_template=chat_template,
        template_args=json.dumps(dict(template_args or {})),
        template_date=template_date,
        control_tokens=control_tokens,
    )
    notes: list[Note] = []
    read = [
        read_message(message, where=f"messages[{number}]", roles={}, notes=notes)
        for number, message in enumerate(messages or ())
    ]
    conversation = Conversation(
        messages=[clean(message, replace=False, notes=notes) for message, _ in read],
        tools=clean(read_tools(tools, notes=notes), replace=False, notes=notes),
        trainable=[weight is not False for _, weight in read],
        notes=notes,
    )
    (example,) = encoder.encode(conversation)
    return example


@functools.lru_cache(maxsize=4)
def _encoder(tokenizer: Any, *, tokenizer_state: Any, template_args: str, **options: Any) -> ChatEncoder:
    """Learning a template takes 20 to 300 ms: kept for the next call with the same tokenizer and options."""
    return ChatEncoder(tokenizer, options=ChatOptions(template_args=json.loads(template_args), **options))
