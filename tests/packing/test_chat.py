"""What is trained: ids are the template's, spans are the assistant's, options narrow them."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from packing.chat import ChatEncoder, ChatOptions, encode_chat, load_tokenizer, tokenizer_digest
from packing.chat.control import Joins
from packing.chat.tokenizer import difference
from packing.errors import InputError, OptionError, Reason, RowRejected, TemplateError
from packing.example import IGNORE_INDEX, Conversation, Note, make_example
from packing.sample import TOKENIZER

T = {path.stem: path.read_text("utf-8") for path in Path(__file__).with_name("templates").glob("*.jinja")}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]
SPECIAL = [
    "<s>",
    "</s>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "<|end|>",
]

THINKING = "{% set answer = not enable_thinking %}" + T["chatml"]
"""A template that reads an argument."""


@pytest.fixture(scope="module")
def tokenizer():
    """The sample's tokenizer with BOS, EOS and the tokens of the test templates."""
    made = load_tokenizer(str(TOKENIZER))
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": SPECIAL[2:]})
    made.add_tokens(["<think>", "</think>"])
    return made


def trained(example, tokenizer):
    return tokenizer.decode(example.input_ids[example.labels != IGNORE_INDEX])


def encode(messages, tokenizer, template, **options):
    return encode_chat(messages, tokenizer, chat_template=T[template], **options)


ALTERNATING = TALK[1:]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", "two<|im_end|>four<|im_end|>"),
        ("hermes", "two<|im_end|>four<|im_end|>"),
        ("marked", "two<|im_end|>four<|im_end|>"),
        ("marked_without_end", "two<|im_end|>four<|im_end|>"),
        ("gemma", "two<end_of_turn>four<end_of_turn>"),
        ("llama", "two<|eot|>four<|eot|>"),
        ("mistral", " two</s> four</s>"),
        ("phi", "two<|end|>four<|end|>"),
        ("qwen3", "two<|im_end|><think>\n\n</think>\n\nfour<|im_end|>"),
        ("qwen35", "two<|im_end|><think>\n\n</think>\n\nfour<|im_end|>"),
        ("keeps_reasoning", "<think>\n\n</think>\n\ntwo<|im_end|><think>\n\n</think>\n\nfour<|im_end|>"),
        ("deepseek", "two</s>four</s>"),
        ("gpt_oss", "<|channel|>final<|message|>two<|end|><|channel|>final<|message|>four<|return|>"),
        ("folds_system", "two<|im_end|>four<|im_end|>"),
        ("by_index", "two<|im_end|>four<|im_end|>"),
        ("by_macro", "two<|im_end|>four<|im_end|>"),
        ("call_ids", "two</s>four</s>"),
    ],
)
def test_answers_and_their_ends_are_trained(tokenizer, template, expected):
    """On apply_chat_template's own ids, each answer and what ends it are trained, and nothing else."""
    example = encode(ALTERNATING, tokenizer, template)
    ids = tokenizer.apply_chat_template(
        ALTERNATING, chat_template=T[template], tokenize=True, return_dict=False
    )
    assert example.input_ids.tolist() == list(ids)
    assert trained(example, tokenizer) == expected
    assert example.input_ids.dtype == example.labels.dtype == np.int32


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", "two<|im_end|>four<|im_end|>five<|im_end|>"),
        ("last", "five<|im_end|>"),
        ("completion", "four<|im_end|>five<|im_end|>"),
    ],
)
def test_train_on_narrows(tokenizer, train_on, expected):
    """`last` is the last turn, `completion` is all that is said behind the last user message."""
    talk = [*TALK, {"role": "assistant", "content": "five"}]
    assert trained(encode(talk, tokenizer, "chatml", train_on=train_on), tokenizer) == expected


def test_train_on_all_trains_every_token_but_the_first(tokenizer):
    """With weights it trains all but the messages that may not be."""
    example = encode(TALK, tokenizer, "chatml", train_on="all")
    assert example.labels.tolist() == [IGNORE_INDEX, *example.input_ids[1:].tolist()]
    narrowed = encode([*TALK[:3], {**TALK[3], "weight": 0}, TALK[4]], tokenizer, "chatml", train_on="all")
    assert "three" not in trained(narrowed, tokenizer)
    assert "one" in trained(narrowed, tokenizer)


def test_weights_narrow_and_never_widen(tokenizer):
    """Weight 0 leaves a turn out; weight 1 on a user's turn trains nothing of it."""
    talk = [{**TALK[1], "weight": 1}, {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "train": True}]
    assert trained(encode(talk, tokenizer, "chatml"), tokenizer) == "four<|im_end|>"
    with pytest.raises(RowRejected) as caught:
        encode([TALK[1], {**TALK[2], "weight": 0}], tokenizer, "chatml")
    assert caught.value.reason is Reason.NOTHING_TO_TRAIN
    with pytest.raises(RowRejected) as caught:
        encode([TALK[1], {**TALK[2], "weight": 0.5}], tokenizer, "chatml")
    assert caught.value.reason is Reason.BAD_WEIGHT


def test_as_many_weights_as_messages(tokenizer):
    """Weights for another number of messages are no weights for these."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"]))
    with pytest.raises(RowRejected) as caught:
        encoder.encode(Conversation(messages=TALK, trainable=[True]))
    assert caught.value.reason is Reason.BAD_WEIGHT


# Expand


THOUGHTFUL = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "three and three"},
]


def test_dropped_reasoning_is_counted(tokenizer):
    """A template that prints the last turn's reasoning alone: the others' is gone, and a note says so."""
    example = encode(THOUGHTFUL, tokenizer, "qwen3")
    assert trained(example, tokenizer) == "4<|im_end|><think>\nthree and three\n</think>\n\n6<|im_end|>"
    assert list(example.notes).count(Note.REASONING_DROPPED) == 1
    assert Note.REASONING_DROPPED not in encode(THOUGHTFUL, tokenizer, "keeps_reasoning").notes


def test_expand_trains_each_turn_as_the_model_sees_it(tokenizer):
    """One example a turn, its history as rendered at that turn, its own reasoning in it."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["qwen3"], turns="expand"))
    first, second = encoder.encode(Conversation(messages=THOUGHTFUL))
    assert (first.turn, second.turn) == (0, 1)
    assert trained(first, tokenizer) == "<think>\ntwo and two\n</think>\n\n4<|im_end|>"
    assert trained(second, tokenizer) == "<think>\nthree and three\n</think>\n\n6<|im_end|>"
    for example, length in ((first, 2), (second, 4)):
        ids = tokenizer.apply_chat_template(
            THOUGHTFUL[:length], chat_template=T["qwen3"], tokenize=True, return_dict=False
        )
        assert example.input_ids.tolist() == list(ids)
        assert Note.REASONING_DROPPED not in example.notes


def test_expand_keeps_to_what_may_be_trained(tokenizer):
    """`last`, `completion` and weights choose among the turns, whose numbers stay."""
    for options, trainable, turns in (
        ({}, [True, False, True, True], [1]),
        ({"train_on": "last"}, None, [1]),
        ({"train_on": "completion"}, None, [1]),
    ):
        encoder = ChatEncoder(
            tokenizer, options=ChatOptions(chat_template=T["qwen3"], turns="expand", **options)
        )
        examples = encoder.encode(Conversation(messages=THOUGHTFUL, trainable=trainable))
        assert [example.turn for example in examples] == turns


def test_expand_passes_over_an_empty_turn(tokenizer):
    """A turn in which nothing is said makes no example, and does not cost the others theirs."""
    talk = [TALK[1], {"role": "assistant", "content": " "}, TALK[3], TALK[4]]
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"], turns="expand"))
    (example,) = encoder.encode(Conversation(messages=talk))
    assert example.turn == 1


# Plain text, tokens


@pytest.mark.parametrize("text", ["Roses are red.", "Roses are red.</s>", "Roses are red.</s>\n"])
def test_plain_text_ends_in_eos_once(tokenizer, text):
    """EOS is appended, or was there; all tokens but the first are trained."""
    (example,) = ChatEncoder(tokenizer).encode(Conversation(text=text))
    ids = [*tokenizer.encode("Roses are red.", add_special_tokens=False), tokenizer.eos_token_id]
    assert example.input_ids.tolist() == ids
    assert example.labels.tolist() == [IGNORE_INDEX, *ids[1:]]


def test_plain_text_has_bos_once_where_the_tokenizer_adds_one(tokenizer):
    """A tokenizer that adds BOS and EOS by itself, and text that brings them, make one of each."""
    from tokenizers.processors import TemplateProcessing

    adding = pickle.loads(pickle.dumps(tokenizer))
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in ("<s>", "</s>")],
    )
    encoder = ChatEncoder(adding, options=ChatOptions(control_tokens="allow"))
    for text in ("Roses", "<s>Roses", "Roses</s>", "<s>Roses</s>"):
        (example,) = encoder.encode(Conversation(text=text))
        assert adding.decode(example.input_ids) == "<s>Roses</s>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" \n", Reason.EMPTY_CONVERSATION),
        ("a</s>b", Reason.CONTROL_TOKEN),
        ("a</s></s>", Reason.CONTROL_TOKEN),
        ("\ud83d", Reason.LONE_SURROGATE),
        ("</s>", Reason.NOTHING_TO_TRAIN),
    ],
)
def test_bad_plain_text_is_rejected(tokenizer, text, reason):
    """Empty text, a control token within, half a surrogate pair, and EOS alone."""
    with pytest.raises(RowRejected) as caught:
        ChatEncoder(tokenizer).encode(Conversation(text=text))
    assert caught.value.reason is reason


def test_tokens_pass_through_if_the_tokenizer_has_them(tokenizer):
    """A record that came tokenized is itself, with ids of this tokenizer."""
    encoder = ChatEncoder(tokenizer)
    size = len(tokenizer)
    example = make_example([1, size - 1], trained=[False, True])
    assert encoder.encode(Conversation(example=example)) == [example]
    for ids in ([1, size], [-1, 1]):
        with pytest.raises(RowRejected) as caught:
            encoder.encode(Conversation(example=make_example(ids, trained=[False, True])))
        assert caught.value.reason is Reason.BAD_TOKENS


# Tokens across a span's borders


@pytest.fixture(scope="module")
def merging(tokenizer):
    """The tokenizer with tokens that reach across a header's or a marker's end."""
    made = pickle.loads(pickle.dumps(tokenizer))
    made.add_tokens(["\n\n", ">\n"])
    return made


def test_a_token_across_the_start_is_not_trained(merging):
    """An answer that begins with a newline shares a token with the header's: the token is context."""
    example = encode([TALK[1], {"role": "assistant", "content": "\nfour"}], merging, "chatml")
    assert merging.convert_tokens_to_ids("\n\n") in example.input_ids
    assert trained(example, merging) == "four<|im_end|>"
    assert list(example.notes) == [Note.TOKEN_ACROSS_START]


def test_a_token_across_the_end_is_trained(merging):
    """A marker that shares its last token with the white space behind it: without it nothing would stop."""
    source = T["chatml"].replace("<|im_end|>\\n", "<end>\\n")
    example = encode_chat(ALTERNATING, merging, chat_template=source)
    assert trained(example, merging) == "two<end>\nfour<end>\n"
    assert list(example.notes) == [Note.TOKEN_ACROSS_END] * 2


def test_white_space_that_offsets_leave_out_belongs_to_its_token(tokenizer):
    """A tokenizer may report " two" as the letters alone: the token still begins before the span."""
    from tokenizers.processors import ByteLevel

    source = T["mistral"].replace("[/INST]'", "[/INST] '").replace("' ' + m.content", "m.content")
    texts = []
    for trim in (False, True):
        trimming = pickle.loads(pickle.dumps(tokenizer))
        trimming.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
        example = encode_chat(ALTERNATING, trimming, chat_template=source)
        texts.append(trained(example, trimming))
        assert list(example.notes) == [Note.TOKEN_ACROSS_START] * 2
    assert texts == ["</s>our</s>"] * 2  # of " two" all, of " f" + "our" the first


# Batches, processes, identity


def test_many_are_as_one_by_one(tokenizer):
    """A batch gives what its conversations give alone, rejections in their places."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"]))
    talks = [
        Conversation(messages=TALK),
        Conversation(messages=TALK[:2]),
        Conversation(text="plain"),
        Conversation(messages=TALK[1:3]),
        Conversation(example=make_example([1, 2], trained=[True, True])),
    ]
    many = encoder.encode_many(talks)
    assert isinstance(many[1], RowRejected)
    for number in (0, 2, 3, 4):
        assert many[number] == encoder.encode(talks[number])
    assert encoder.encode_many([]) == []


def test_an_encoder_can_be_sent_to_a_process(tokenizer):
    """Pickled and back, it encodes the same and has the same fingerprint."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["qwen3"], train_on="last"))
    other = pickle.loads(pickle.dumps(encoder))
    assert other.encode(Conversation(messages=TALK)) == encoder.encode(Conversation(messages=TALK))
    assert other.fingerprint() == encoder.fingerprint()


def test_the_fingerprint_is_stable_and_covers_all(tokenizer):
    """Calls with padding do not change it; tokenizer, template, arguments and options do."""
    base = ChatEncoder(tokenizer).fingerprint()
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert ChatEncoder(tokenizer).fingerprint() == base
    assert json.loads(json.dumps(base)) == base
    others = [
        ChatEncoder(tokenizer, options=ChatOptions(**options)).fingerprint()
        for options in (
            {"chat_template": T["chatml"]},
            {"chat_template": THINKING},
            {"chat_template": THINKING, "template_args": {"enable_thinking": False}},
            {"template_date": "2024-02-29"},
            {"train_on": "last"},
            {"turns": "expand"},
            {"control_tokens": "allow"},
        )
    ]
    larger = pickle.loads(pickle.dumps(tokenizer))
    larger.add_tokens(["wombat"])
    others.append(ChatEncoder(larger).fingerprint())
    assert len({json.dumps(each, sort_keys=True) for each in [base, *others]}) == 9


def test_the_digest_is_the_same_in_another_process():
    """No address, no hash seed, no order of a set is in it."""
    code = (
        "from packing.chat import load_tokenizer, tokenizer_digest; from packing.sample import TOKENIZER; "
        "print(tokenizer_digest(load_tokenizer(str(TOKENIZER))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tokenizer_digest(load_tokenizer(str(TOKENIZER)))


def test_the_digest_is_not_changed_by_a_call(tokenizer):
    """Padding and truncation stay in the tokenizer behind a call, and define no ids."""
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer_digest(tokenizer) == before


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hello", Reason.BAD_MESSAGE),
        ({"role": "assistant", "content": None}, Reason.BAD_MESSAGE),
        ({"role": "assistant", "content": "x", "reasoning_content": 7}, Reason.BAD_MESSAGE),
        ({"role": "assistant", "content": "x", "tool_calls": {"name": "f"}}, Reason.BAD_TOOLS),
        ({"role": "assistant", "content": "x", "tool_calls": ["f"]}, Reason.BAD_TOOLS),
        ({"role": "assistant", "content": "x", "tool_calls": 7}, Reason.BAD_TOOLS),
        ({"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": ""}}]}, Reason.BAD_TOOLS),
        (
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
            Reason.BAD_TOOLS,
        ),
        (
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"function": {"name": "f", "arguments": {"x": float("nan")}}}],
            },
            Reason.BAD_TOOLS,
        ),
        ({"role": "bot", "content": "x"}, Reason.UNKNOWN_ROLE),
    ],
)
def test_a_conversation_that_breaks_its_promise_is_rejected(tokenizer, message, reason):
    """`Conversation` promises text and objects: what is none is named, whoever made it."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["hermes"]))
    with pytest.raises(RowRejected) as caught:
        encoder.encode(Conversation(messages=[TALK[1], message]))
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    "tools",
    [["f"], [{"name": "f"}], [{"function": {"name": ""}}], [{"function": {"name": "f", "x": float("inf")}}]],
)
def test_tools_that_are_none_are_rejected(tokenizer, tools):
    """A tool is a function with a name, in JSON."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["hermes"]))
    with pytest.raises(RowRejected) as caught:
        encoder.encode(Conversation(messages=TALK, tools=tools))
    assert caught.value.reason is Reason.BAD_TOOLS


def test_a_call_of_the_tokenizer_leaves_no_padding_behind(tokenizer):
    """Padding and truncation that a user's call left in the tokenizer do not reach the examples."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"]))
    before = encoder.encode(Conversation(messages=TALK))
    tokenizer(["a", "a b c"], padding="max_length", truncation=True, max_length=4)
    assert encoder.encode(Conversation(messages=TALK)) == before


# Options and tokenizers that can't be


@pytest.mark.parametrize(
    "options",
    [
        {"train_on": "user"},
        {"turns": "half"},
        {"control_tokens": "maybe"},
        {"turns": "expand", "train_on": "all"},
    ],
)
def test_options_that_can_not_be_are_refused(options):
    """Unknown values, and expand with all tokens, which would train the history again and again."""
    with pytest.raises(OptionError):
        ChatOptions(**options)


def test_a_tokenizer_without_a_template_takes_plain_text_alone(tokenizer):
    """Text and tokens need no template; the first conversation with messages names what is missing."""
    bare = pickle.loads(pickle.dumps(tokenizer))
    bare.chat_template = None
    encoder = ChatEncoder(bare)
    assert len(encoder.encode(Conversation(text="Roses are red."))) == 1
    with pytest.raises(TemplateError, match=r"no chat template.*--chat-template"):
        encoder.encode(Conversation(messages=TALK))


def test_a_tokenizer_without_eos_takes_no_plain_text(tokenizer):
    """Text that can't end would teach the model never to stop."""
    bare = pickle.loads(pickle.dumps(tokenizer))
    bare.eos_token = None
    with pytest.raises(TemplateError, match="EOS"):
        ChatEncoder(bare).encode(Conversation(text="Roses are red."))


def test_a_template_for_tools_beside_another(tokenizer):
    """A tokenizer with two templates uses the one for tools where a row has tools."""
    two = pickle.loads(pickle.dumps(tokenizer))
    two.chat_template = {"default": T["phi"], "tool_use": T["hermes"]}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ]
    assert trained(encode_chat(ALTERNATING, two), two) == "two<|end|>four<|end|>"
    assert trained(encode_chat(ALTERNATING, two, tools=tools), two) == "two<|im_end|>four<|im_end|>"


def test_a_tokenizer_that_does_more_than_its_template_is_refused(tokenizer):
    """Ids have to be those of apply_chat_template: where it is overridden, they could not be."""

    class Adding(type(tokenizer)):
        def apply_chat_template(self, *args, **kwargs):
            return [*super().apply_chat_template(*args, **kwargs), 7]

    adding = pickle.loads(pickle.dumps(tokenizer))
    adding.__class__ = Adding
    with pytest.raises(TemplateError, match="apply_chat_template"):
        ChatEncoder(adding, options=ChatOptions(chat_template=T["chatml"]))


def test_an_argument_that_no_template_reads_is_refused(tokenizer):
    """A misspelt name is an error with the nearest one; a name read in a macro or for tools alone is not."""

    def make(template, name):
        changed = pickle.loads(pickle.dumps(tokenizer))
        changed.chat_template = template
        ChatEncoder(changed, options=ChatOptions(template_args={name: False}))

    with pytest.raises(OptionError, match=r"enable_thinkin: .*did you mean enable_thinking\?"):
        make(THINKING, "enable_thinkin")
    with pytest.raises(OptionError, match=r"flag: .*names it may read: none"):
        make(T["chatml"], "flag")
    make(THINKING, "enable_thinking")
    make(f"{{% macro end() %}}{THINKING}{{% endmacro %}}{T['chatml']}", "enable_thinking")
    make({"default": T["chatml"], "tool_use": THINKING}, "enable_thinking")


def test_a_missing_tokenizer_is_one_line(tmp_path):
    """Nothing there, and a folder without a tokenizer: an input error that names it."""
    for name in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match=str(name)) as caught:
            load_tokenizer(str(name))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nope", "/nope: no such folder$"),
        ("~/nope", "~/nope: no such folder$"),
        ("there/mdoel", "there/mdoel: no such folder$"),
        ("a/b/c", "a/b/c: no such folder$"),
        ("one.json", "one.json is a file"),
        ("a b", "no such folder, and no name that the hub can have"),
        ("there", "the folder there holds no tokenizer"),
        ("config", "the folder config holds no tokenizer"),
    ],
)
def test_a_path_to_no_tokenizer_says_so(tmp_path, monkeypatch, name, says):
    """A path to nothing, to a file, or to a folder without vocabulary is told in our words."""
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("config").mkdir()
    Path("config", "config.json").write_text(
        '{"model_type": "qwen3"}'
    )  # transformers makes an empty one of it
    Path("one.json").write_text("{}")
    with pytest.raises(InputError, match=says):
        load_tokenizer(name)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda state: "{}", r"tokenizer\.json is no whole tokenizer: Model missing"),
        (lambda state: "[]", r"tokenizer\.json is no whole tokenizer: .*sequence"),
        (lambda state: json.dumps(state)[:900], r"tokenizer\.json is no whole tokenizer: EOF"),
        (lambda state: without(state, "model"), r"tokenizer\.json is no whole tokenizer: Model missing"),
        (lambda state: without(state, "model", "vocab"), r"tokenizer\.json is .*: Missing vocab/merges"),
        (lambda state: without(state, "added_tokens", 0, "id"), r"tokenizer\.json is .*: missing field `id`"),
        (lambda state: without(state, "added_tokens"), r"in tokenizer\.json .* there is no 'added_tokens'"),
    ],
    ids=["empty", "list", "cut", "model", "vocab", "id", "added_tokens"],
)
def test_a_tokenizer_file_that_lacks_a_part_is_named(tmp_path, spoil, says):
    """A tokenizer.json that is cut off or lacks a key: an input error with the file and what is missing."""
    folder = shutil.copytree(TOKENIZER, tmp_path / "mine")
    state = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    (folder / "tokenizer.json").write_text(spoil(state), "utf-8")
    with pytest.raises(InputError, match=says) as caught:
        load_tokenizer(str(folder))
    assert str(folder) in str(caught.value)


def without(state, *path):
    part = state
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return json.dumps(state)


def test_a_hub_out_of_reach_is_asked_once(tmp_path, monkeypatch):
    """A misspelt folder's name that is in no cache costs one question, and is not handed to the loading."""
    import huggingface_hub
    import transformers
    from huggingface_hub.errors import HTTPError

    asked = []

    def out_of_reach(name, **_):
        asked.append(name)
        raise HTTPError("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "model_info", out_of_reach)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    words = (
        r"^the tokenizer mdoel: no such folder, and the hub can't be reached \(Name or service not known\)$"
    )
    with pytest.raises(InputError, match=words):
        load_tokenizer("mdoel")
    assert asked == ["mdoel"]


def test_a_tokenizer_is_loaded_as_its_file_says(tmp_path, monkeypatch):
    """Where AutoTokenizer rebuilds one that loses spaces, the file's own is loaded; else it is refused."""
    import transformers

    load_tokenizer(str(TOKENIZER)).save_pretrained(tmp_path)

    def rebuilt(*_args, **_kwargs):
        from tokenizers import pre_tokenizers

        other = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        other.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return other

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", rebuilt)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.decode(loaded.encode("two words")) == "two words"
    broken = rebuilt()
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", lambda *_a, **_k: broken)
    with pytest.raises(TemplateError, match=r"other ids than its tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_loses_letters_is_refused(tmp_path):
    """Without its byte-level pre-tokenizer, letters and spaces would leave every text without a trace."""
    load_tokenizer(str(TOKENIZER)).save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    del state["pre_tokenizer"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(TemplateError, match=r"gives no token for '.*你好"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("encoder", ["tokenizers", "tiktoken"])
def test_the_vocabulary_reaches_to_the_largest_id(tmp_path, encoder):
    """Where ids have gaps, how many tokens there are says nothing of the ids that shards may hold."""
    load_tokenizer(str(TOKENIZER)).save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    state["model"]["vocab"]["e"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    encoder = ChatEncoder(load_tokenizer(str(tmp_path)), options=ChatOptions(encoder=encoder))
    assert encoder.fingerprint()["vocabulary"] == 5001
    (row,) = encoder.encode_many(
        [Conversation(example=make_example(np.array([1, 5000]), trained=np.ones(2, bool)))]
    )
    assert row[0].input_ids.tolist() == [1, 5000]


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""The one pattern that transformers' Qwen2Tokenizer knows, whatever the file says."""


def changed_tokenizer(folder, *, pattern=QWEN2, config=None, merges=True, **first):
    """The sample's tokenizer as one of Qwen's kind, with other parts; the folder, and what the file says."""
    state = json.loads((TOKENIZER / "tokenizer.json").read_text("utf-8"))
    state["normalizer"] = {"type": "NFC"}
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    state["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": not merges}
    state["model"]["vocab"] |= {"zqzqzq": 5000, "'ss": 5001, "12": 5002}
    state["model"]["merges"] = [["'s", "s"], ["1", "2"], *state["model"]["merges"], ["'", "s"]]
    state["model"]["vocab"].setdefault("'s", 5003)
    state["added_tokens"][0] |= first
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text("utf-8")) | (config or {})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, Tokenizer.from_file(str(folder / "tokenizer.json"))


def alike(loaded, reference):
    texts = ["it'ss e\u0301 it's zqzqzq", "zqzqzq", "a <|endoftext|>b\n\n <|im_end|>  c 123!?\n"]
    return [loaded.encode(text, add_special_tokens=False) for text in texts] == [
        reference.encode(text, add_special_tokens=False).ids for text in texts
    ]


@pytest.mark.parametrize(
    "parts",
    [
        {"pattern": QWEN2.replace("(?i:'s|", "(?i:'ss|'s|")},
        {"pattern": QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")},
        {"merges": False},
    ],
    ids=["a contraction", "digits", "whole words"],
)
def test_a_tokenizer_that_is_built_anew_with_other_parts_is_loaded_from_its_file(tmp_path, parts):
    """AutoTokenizer's class has a pattern and a model of its own: seen without a text that shows it."""
    from transformers import AutoTokenizer

    folder, reference = changed_tokenizer(tmp_path, config={"tokenizer_class": "Qwen2Tokenizer"}, **parts)
    rebuilt = AutoTokenizer.from_pretrained(folder)
    assert difference(rebuilt, reference)
    assert not alike(rebuilt, reference)
    assert alike(load_tokenizer(str(folder)), reference)


def test_a_tokenizer_that_is_built_anew_with_equal_parts_is_taken(tmp_path):
    """Written otherwise, but for the same ids: the class that AutoTokenizer chooses stays."""
    folder, reference = changed_tokenizer(tmp_path, config={"tokenizer_class": "Qwen2Tokenizer"})
    state = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    state["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    state["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] ^= True
    (folder / "tokenizer.json").write_text(json.dumps(state))
    loaded = load_tokenizer(str(folder))
    assert type(loaded).__name__ == "Qwen2Tokenizer"
    assert alike(loaded, reference)


def test_a_flag_that_two_files_give_otherwise_is_refused(tmp_path):
    """tokenizer_config.json takes a flag from a token that tokenizer.json gives it; one it adds is fine."""
    token = {"content": "<|endoftext|>", "lstrip": False, "rstrip": False, "single_word": False}
    token |= {"normalized": False, "special": True}
    more = token | {"content": "<more>"}
    folder, _ = changed_tokenizer(tmp_path, config={"added_tokens_decoder": {"0": token, "6000": more}})
    assert len(load_tokenizer(str(folder)).encode("<more>")) == 1
    folder, _ = changed_tokenizer(tmp_path, config={"added_tokens_decoder": {"0": token}}, lstrip=True)
    with pytest.raises(TemplateError, match=r"its added token '<\|endoftext\|>'"):
        load_tokenizer(str(folder))


@pytest.mark.shared
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])  # of the shared ones, those with a class
def test_real_tokenizers_load_as_their_files_say(shared, name):
    """Nothing of them is taken for a difference but deepseek_v3's on transformers 5.17, which is one."""
    folder = shared / "tokenizers" / name
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(str(folder))
    assert difference(loaded, reference) == ""
    assert (type(loaded).__name__ == "Qwen2Tokenizer") is (name == "qwen3")


def test_the_fingerprint_names_the_vocabulary(tokenizer):
    """The trainer compares the model's vocabulary with it."""
    assert ChatEncoder(tokenizer).fingerprint()["vocabulary"] == len(tokenizer)


def test_white_space_that_an_answer_begins_with_is_trained(tokenizer):
    """Where offsets leave out a token's spaces too, an answer's first newline is no part of the header."""
    from tokenizers.processors import ByteLevel

    source = (
        T["chatml"]
        .replace("['role'] + '\\n'", "['role'] + ' '")
        .replace("nt\\n' }}{% endif", "nt ' }}{% endif")
    )
    assert source.count("\\n") == 1
    talk = [TALK[1], {"role": "assistant", "content": "\n\ntwo"}]
    texts = []
    for trim in (False, True):
        trimming = pickle.loads(pickle.dumps(tokenizer))
        trimming.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
        texts.append(trained(encode_chat(talk, trimming, chat_template=source), trimming))
    assert texts[0] == texts[1]
    assert texts[1].endswith("\n\ntwo<|im_end|>")


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("so we write <|en", True),  # begins one
        ("nd|> and go on", True),  # ends one
        ("|end|", True),  # is within its signs
        ("<|en" + "d" * 40, False),
        ("a < b and c > d", False),
        ("no sign at all", False),
    ],
)
def test_a_text_that_could_be_a_part_of_a_control_token(text, may):
    """Its end, its beginning or all of it is a part of one, white space around it aside."""
    assert Joins({"<|end|>"}, {"Assistant: "}).may(f"\n{text} ") == may
