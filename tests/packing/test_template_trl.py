"""Our masks from plain templates beside marks that others wrote: TRL's training templates.

A training template prints the same text as its plain sibling on most rows. On those, what TRL marks and
what we train differ by conventions alone, which `CONVENTIONS` writes down:

- TRL trains white space behind a turn's end, and Qwen 2.5's newline before its text. We do not.
- TRL trains the header of DeepSeek, gpt-oss and Muse Glimmer, and the think tag of Qwen 3.8's generation
  prompt: all of them given to the model, never said. We do not.
- TRL trains the EOS that Phi prints behind the conversation, where <|end|> has ended the turn. We do not.
- Gemma's last call ends with a token that asks for the tool's reply. We train it, TRL does not.
"""

import gzip
import json
import re
from collections import Counter
from importlib import resources

import pytest

from packing.chat import ChatEncoder, load_tokenizer
from packing.chat.calibrate import calibrate
from packing.chat.dialect import adapt
from packing.chat.spans import find_turns
from packing.chat.template import RENDER_ERRORS, ChatTemplate
from packing.errors import RowRejected, TemplateError
from packing.example import IGNORE_INDEX, Conversation
from packing.sample import CHATS

FOLDER = resources.files("trl").joinpath("chat_templates")
PAIRS = sorted(
    entry.name.removesuffix("_training.jinja") for entry in FOLDER.iterdir() if "_training" in entry.name
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL_TOKENS = re.compile(r"</?s>|<\|(call|return|end|eot)\|>|<\|tool_response>")

REFUSED = {
    "glm4moe": "no token that ends",
    "idefics3": "own place",  # takes content parts alone, as do the next two
    "llava_next": "own place",
    "smolvlm": "own place",
}

CONVENTIONS = {  # template -> what TRL trains and we do not; "ours": what we train and TRL does not
    **{name: {"\n"} for name in PAIRS},
    "deepseek_r1_distill": {"<｜Assistant｜>"},
    "deepseekv3": {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"},
    "gptoss": {"<|start|>assistant"},
    "muse_glimmer": {"<|start|>assistant"},
    "phi3": {"\n", "\n</s>"},
    "phi3_5": {"\n", "\n</s>"},
    "qwen3_8": {"\n", "<think>\n"},
}
OURS = {"diffusion_gemma": {"<|tool_response>"}}


def own_rows():
    rows = [json.loads(line) for line in CHATS.read_text("utf-8").splitlines()][::7]
    talk = rows[0]["messages"]
    thoughtful = [{**m, "reasoning_content": "Let me see."} if m["role"] == "assistant" else m for m in talk]
    return [*rows, {"messages": thoughtful}, {"messages": thoughtful[:2]}]


def differences(name, rows):
    """(what we train alone, what TRL marks alone, rows compared) of a plain template and its sibling."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain, training = (FOLDER.joinpath(f"{name}{end}.jinja").read_text("utf-8") for end in ("", "_training"))
    template = ChatTemplate(plain, name=name, special_tokens=SPECIAL, arguments={})
    calibration = calibrate(template, bos="<s>", special=SPECIAL_TOKENS)
    ours, theirs, compared = Counter(), Counter(), 0
    for row in rows:
        try:
            messages = adapt(row["messages"], dialect=calibration.dialect, notes=[])
            tools = row.get("tools") or None
            (text,), (marks,) = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=training,
                return_assistant_tokens_mask=True,
                **SPECIAL,
            )
            render = template.render(messages, tools=tools)
            if render.text != text:
                continue
            turns = find_turns(render, messages, tools, template=template, calibration=calibration)
        except (RowRejected, *RENDER_ERRORS):
            continue
        compared += 1
        here, there = (
            {place for start, end, *_ in spans for place in range(start, end)}
            for spans in (turns.spans, marks)
        )
        ours.update(runs(text, here - there))
        theirs.update(runs(text, there - here))
    return ours, theirs, compared


def runs(text, places):
    """The text of each run of neighbouring places."""
    edges = sorted(place for place in places if place - 1 not in places)
    ends = sorted(place + 1 for place in places if place + 1 not in places)
    return [text[start:end] for start, end in zip(edges, ends, strict=True)]


@pytest.mark.parametrize("name", PAIRS)
def test_masks_agree_with_marks_that_others_wrote(name):
    """On our own conversations, plain and training template train the same, but for named conventions."""
    if name in REFUSED:
        with pytest.raises(TemplateError, match=REFUSED[name]):
            differences(name, [])
        return
    ours, theirs, compared = differences(name, own_rows())
    assert compared >= 10
    assert ours.keys() <= OURS.get(name, set())
    assert theirs.keys() <= CONVENTIONS[name]


MARKS_HEADERS = ("deepseek_r1_distill", "deepseekv3", "gptoss", "muse_glimmer")


@pytest.mark.parametrize("name", MARKS_HEADERS)
def test_marks_that_cover_the_header_are_refused(name):
    """Where TRL's marks train what the model is given, none of its turns is taken as marked."""
    source = FOLDER.joinpath(f"{name}_training.jinja").read_text("utf-8")
    template = ChatTemplate(source, name=name, special_tokens=SPECIAL, arguments={}, date="2026-01-02")
    calibration = calibrate(template, bos="<s>", special=SPECIAL_TOKENS)
    talk = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}]
    messages = adapt(talk, dialect=calibration.dialect, notes=[])
    with pytest.raises(RowRejected, match="covers the turn's header"):
        find_turns(template.render(messages), messages, None, template=template, calibration=calibration)


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in {*REFUSED, *MARKS_HEADERS}])
def test_the_marked_sibling_is_used_as_marked(name):
    """A training template's own marks are our spans: nothing is added but what ends a turn."""
    source = FOLDER.joinpath(f"{name}_training.jinja").read_text("utf-8")
    template = ChatTemplate(source, name=name, special_tokens=SPECIAL, arguments={}, date="2026-01-02")
    calibration = calibrate(template, bos="<s>", special=SPECIAL_TOKENS)
    compared = 0
    for row in own_rows():
        try:
            messages = adapt(row["messages"], dialect=calibration.dialect, notes=[])
            render = template.render(messages, tools=row.get("tools") or None)
            turns = find_turns(
                render, messages, row.get("tools") or None, template=template, calibration=calibration
            )
        except (RowRejected, *RENDER_ERRORS):
            continue
        compared += 1
        marks = [mark for mark in render.marked if mark.end > mark.start]
        for (start, end, _), mark in zip(turns.spans, marks, strict=True):
            assert start == mark.start
            assert render.text[mark.end : end] in {"", *OURS.get(name, ())}
    assert compared >= 10


# Real data


def real_rows(shared, *, step):
    """Every `step`-th row of each file, and all rows of the small ones, which have tools and reasoning."""
    for path in sorted((shared / "data").glob("*.jsonl.gz")):
        with gzip.open(path) as lines:
            rows = [json.loads(line) for line in lines]
        yield from rows if len(rows) <= 100 else rows[::step]


@pytest.mark.shared
@pytest.mark.parametrize("name", [name for name in PAIRS if name not in REFUSED])
def test_masks_agree_on_real_data(shared, name):
    """The same on real conversations with tools, reasoning, Chinese, code."""
    ours, theirs, compared = differences(name, real_rows(shared, step=5))
    assert compared >= 500
    assert ours.keys() <= OURS.get(name, set())
    assert theirs.keys() <= CONVENTIONS[name]


TOKENIZERS = {  # its own template beside the sibling that prints the same
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5_think",
    "llama3_1": "llama3",
    "deepseek_v3": "deepseekv3",
}


@pytest.mark.shared
@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_masks_agree_on_real_data(shared, name):
    """With each tokenizer's own template, token by token, ids and masks are those of TRL's template."""
    tokenizer = load_tokenizer(str(shared / "tokenizers" / name))
    training = FOLDER.joinpath(f"{TOKENIZERS[name]}_training.jinja").read_text("utf-8")
    encoder = ChatEncoder(tokenizer)
    rows = list(real_rows(shared, step=40))
    results = encoder.encode_many([Conversation(messages=r["messages"], tools=r.get("tools")) for r in rows])
    compared = 0
    for result in results:
        if isinstance(result, RowRejected):
            continue
        (example,) = result
        ids = tokenizer.apply_chat_template(
            example.messages, tools=example.tools, tokenize=True, return_dict=False
        )
        assert example.input_ids.tolist() == list(ids)
        try:
            theirs = tokenizer.apply_chat_template(
                example.messages,
                tools=example.tools,
                chat_template=training,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except RENDER_ERRORS:
            continue
        if theirs["input_ids"] != list(ids):
            continue
        compared += 1
        mine = example.labels != IGNORE_INDEX
        for place, (a, b) in enumerate(zip(mine.tolist(), theirs["assistant_masks"], strict=True)):
            if a != bool(b):
                token = tokenizer.decode([ids[place]])
                assert not a, f"we train {token!r}, TRL does not"
                assert token.strip() == "" or token in "".join(CONVENTIONS[TOKENIZERS[name]])
    assert compared >= 50


SIXTEEN = [
    *("ByteDance-Seed-OSS", "HuggingFaceTB-SmolLM3-3B", "Kimi-K2-Instruct", "Qwen-Qwen2.5-7B-Instruct"),
    *("Mistral-Small-3.2-24B-Instruct-2506", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen-Qwen3-0.6B"),
    *("Qwen3-Coder", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1", "google-gemma-2-2b-it"),
    *("ibm-granite-granite-3.3-2B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"),
    *("meta-llama-Llama-3.3-70B-Instruct", "microsoft-Phi-3.5-mini-instruct"),
]


@pytest.mark.shared
def test_the_sixteenth_template_is_refused(shared):
    """GLM-4.6 ends turns with nothing but the next one's header."""
    source = (shared / "templates" / "GLM-4.6.jinja").read_text("utf-8")
    template = ChatTemplate(source, name="GLM-4.6", special_tokens=SPECIAL, arguments={})
    with pytest.raises(TemplateError, match=r"GLM-4\.6 prints no token that ends"):
        calibrate(template, bos="<s>", special=SPECIAL_TOKENS)


@pytest.mark.shared
@pytest.mark.parametrize("name", SIXTEEN)
def test_turns_are_where_prefix_renders_have_them(shared, name):
    """Another way, which shares nothing with ours: a turn begins where the prompt for it ends.

    The prompt is the render of what came before, with the generation prompt; the turn ends, but for white
    space and an EOS of the conversation, where the render of the messages up to it does.
    """
    source = (shared / "templates" / f"{name}.jinja").read_text("utf-8")
    template = ChatTemplate(source, name=name, special_tokens=SPECIAL, arguments={}, date="2026-01-02")
    calibration = calibrate(template, bos="<s>", special=SPECIAL_TOKENS)
    compared = 0
    for row in real_rows(shared, step=30):
        tools = row.get("tools") or None
        try:
            messages = adapt(row["messages"], dialect=calibration.dialect, notes=[])
            render = template.render(messages, tools=tools)
            turns = find_turns(render, messages, tools, template=template, calibration=calibration)
        except (RowRejected, *RENDER_ERRORS):
            continue
        for start, end, number in turns.spans:
            try:
                prompt = template.render(messages[:number], tools=tools, add_generation_prompt=True).text
                upto = template.render(messages[: number + 1], tools=tools).text
            except RENDER_ERRORS:
                continue
            if number and render.text.startswith(prompt):
                # The think tag of a prompt that only some turns begin with is trained.
                assert render.text[start : len(prompt)] in ("", "<think>\n")
                compared += 1
            if render.text.startswith(upto):
                assert render.text[end : len(upto)].strip() in ("", "</s>")
                compared += 1
    assert compared >= 100
