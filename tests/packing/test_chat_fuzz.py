"""Any conversation under any template: a checked example or a typed error, nothing else."""

import itertools
import json
import re
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from packing.chat import ChatEncoder, ChatOptions, encode_chat, load_tokenizer
from packing.chat.calibrate import calibrate
from packing.chat.dialect import adapt
from packing.chat.spans import find_turns
from packing.chat.template import RENDER_ERRORS, ChatTemplate
from packing.errors import RowRejected
from packing.example import IGNORE_INDEX, Conversation, Note
from packing.messages import read_message, read_tools
from packing.sample import TOKENIZER

OWN = {path.stem: path.read_text("utf-8") for path in Path(__file__).with_name("templates").glob("*.jinja")}
FOLDER = resources.files("trl").joinpath("chat_templates")
PAIRED = (
    *("qwen3", "qwen3_5_think", "qwen2_5", "llama3", "gemma", "phi3_5", "nemotron_3_nano", "cohere2"),
    *("deepseekv3", "lfm2_v2", "qwen3_vl"),
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
GIVEN = {"\n", "\n</s>", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>"}
"""What TRL's marks hold beyond ours: white space, Phi's last EOS, DeepSeek's headers."""


@pytest.fixture(scope="module")
def tokenizer():
    made = load_tokenizer(str(TOKENIZER))
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    made.add_tokens(["<think>", "</think>", "<tool_call>"])
    return made


WORDS = st.sampled_from(
    [
        *(
            "hi",
            "one two",
            "x",
            "",
            " ",
            "\n",
            "  indented\n",
            "12.50",
            "None",
            "null",
            "user",
            "assistant",
            "think",
        ),
        *("<think>a</think>b", "<think>", "</think>", "a\n</think>\nb", "<think>\n\n</think>\n\nc"),
        *("<tool_call>{}</tool_call>", "<tool_response>\nx\n</tool_response>", "{{ messages }}", "{% raw %}"),
        *("<|im_end|>", "</s>", "<s>", "<|im_start|>assistant\n", "User:", "[INST]", "\\n\\\"'", '"quoted"'),
        *(
            "日本語",
            "שלום",
            "👩‍👩‍👧",
            "e\u0301",
            "\u0338",
            "\u200b",
            "\ufeff",
            "\x00",
            "\x1c",
            "\u2028",
            "ﬁ",
            "\ud83d",
        ),
    ]
)
TEXT = st.one_of(
    WORDS,
    st.lists(WORDS, max_size=4).map("".join),
    st.text(max_size=12),
    st.text(st.characters(codec="utf-8"), max_size=30),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
NAMES = st.sampled_from(["f", "get_weather", "f", "", "名"])


def as_call(name, arguments, as_text, bare):
    call = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
    return call if bare else {"type": "function", "function": call}


CALLS = st.builds(as_call, NAMES, st.dictionaries(TEXT, VALUES, max_size=3), st.booleans(), st.booleans())


@st.composite
def message(draw, role):
    made = {"role": role, "content": draw(TEXT if draw(st.integers(0, 9)) else st.none() | VALUES)}
    if role == "assistant" and draw(st.integers(0, 3)) == 0:
        made[draw(st.sampled_from(["reasoning_content", "thinking"]))] = draw(TEXT)
    if role == "assistant" and draw(st.integers(0, 3)) == 0:
        made["tool_calls"] = draw(st.lists(CALLS, max_size=3) | st.none())
    if draw(st.integers(0, 9)) == 0:
        made["weight"] = draw(st.sampled_from([0, 1, 1.0, None, 2, "1"]))
    return made


@st.composite
def conversation(draw):
    shape = draw(
        st.sampled_from(
            ["ua", "uaua", "sua", "suaua", "uata", "uattaua", "a", "u", "", "uaa", "uua", "uasua", "au"]
        )
        | st.text("usat", max_size=6)
    )
    roles = {"u": "user", "s": "system", "a": "assistant", "t": "tool"}
    messages = [draw(message(roles[letter])) for letter in shape]
    if messages and draw(st.integers(0, 19)) == 0:
        messages[0]["role"] = draw(st.sampled_from(["developer", "", None, 3, "tool", "gpt"]))
    return messages


TOOLS = st.one_of(
    st.none(),
    st.just([]),
    st.lists(st.builds(lambda name: {"type": "function", "function": {"name": name}}, NAMES), max_size=2),
    VALUES,
)

ENCODERS = {}


def outcome(call, *args, **options):
    """What comes of it, a rejection included; anything else raises."""
    try:
        return call(*args, **options)
    except RowRejected as rejected:
        return rejected


def read(messages):
    """Messages as `Conversation` has them."""
    return [read_message(m, where=f"messages[{n}]", roles={}, notes=[])[0] for n, m in enumerate(messages)]


@given(
    conversation(), TOOLS, st.sampled_from(sorted(OWN.keys() - {"glm"})), st.sampled_from(["reject", "allow"])
)
@settings(max_examples=200)
def test_every_outcome_is_an_example_or_a_rejection(tokenizer, messages, tools, name, control):
    """Ids are apply_chat_template's of the recorded messages, labels are ids or -100, some are trained."""
    date = "2024-02-29" if name == "dated" else None
    example = outcome(
        encode_chat,
        messages,
        tokenizer,
        tools=tools,
        chat_template=OWN[name],
        template_date=date,
        control_tokens=control,
    )
    if isinstance(example, RowRejected):
        assert example.detail
        assert "\n" not in example.detail
        return
    if date is None:  # else it is today's there
        ids = tokenizer.apply_chat_template(
            example.messages, tools=example.tools, chat_template=OWN[name], tokenize=True, return_dict=False
        )
        assert example.input_ids.tolist() == list(ids)
    trained = example.labels != IGNORE_INDEX
    assert trained.any()
    assert not trained[0]
    assert (example.labels[trained] == example.input_ids[trained]).all()


@given(conversation(), st.sampled_from(["chatml", "hermes", "gemma", "marked", "keeps_reasoning", "phi"]))
@settings(max_examples=100)
def test_whole_and_expanded_train_the_same_turns(tokenizer, messages, name):
    """Where no turn's text depends on what follows, expanding trains what the whole conversation trains."""
    encoders = [
        ENCODERS.setdefault(
            (name, turns), ChatEncoder(tokenizer, options=ChatOptions(chat_template=OWN[name], turns=turns))
        )
        for turns in ("whole", "expand")
    ]
    talk = outcome(read, messages)
    if isinstance(talk, RowRejected):
        return
    whole, expanded = (encoder.encode_many([Conversation(messages=talk)])[0] for encoder in encoders)
    if isinstance(whole, RowRejected):
        return
    assert isinstance(expanded, list)
    said = [example.labels[example.labels != IGNORE_INDEX].tolist() for example in expanded]
    assert list(itertools.chain(*said)) == whole[0].labels[whole[0].labels != IGNORE_INDEX].tolist()


def pair(name):
    if name not in ENCODERS:
        plain, training = (
            FOLDER.joinpath(f"{name}{end}.jinja").read_text("utf-8") for end in ("", "_training")
        )
        template = ChatTemplate(plain, name=name, special_tokens=SPECIAL, arguments={})
        calibration = calibrate(template, bos="<s>", special=re.compile("</?s>"))
        ENCODERS[name] = template, calibration, training
    return ENCODERS[name]


@given(conversation(), TOOLS, st.sampled_from(PAIRED))
@settings(max_examples=200)
def test_no_character_is_trained_that_others_do_not_mark(messages, tools, name):
    """Where TRL's training template prints the same text, its marks hold what we train and little more."""
    template, calibration, training = pair(name)
    try:
        talk = adapt(read(messages), dialect=calibration.dialect, notes=[])
        schemas = read_tools(tools, notes=[])
        render = template.render(talk, tools=schemas)
        turns = find_turns(render, talk, schemas, template=template, calibration=calibration)
        (text,), (marks,) = render_jinja_template(
            conversations=[talk],
            tools=schemas,
            chat_template=training,
            return_assistant_tokens_mask=True,
            **SPECIAL,
        )
    except (RowRejected, *RENDER_ERRORS):
        return
    if text != render.text:
        return
    event(f"compared: {name}")
    ours, theirs = (
        {place for start, end, *_ in spans for place in range(start, end)} for spans in (turns.spans, marks)
    )
    assert ours <= theirs, "".join(text[place] for place in sorted(ours - theirs))
    if Note.EMPTY_TURN in turns.notes:
        return
    rest = theirs - ours
    starts = sorted(place for place in rest if place - 1 not in rest)
    ends = sorted(place + 1 for place in rest if place + 1 not in rest)
    assert {text[start:end] for start, end in zip(starts, ends, strict=True)} <= GIVEN
