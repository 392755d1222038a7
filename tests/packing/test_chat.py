"""What is trained: ids are the template's, spans are the assistant's, options narrow them."""

import pytest
from packing.chat import ChatEncoder, ChatOptions, encode_chat, load_tokenizer
from packing.errors import RowRejected
from packing.example import IGNORE_INDEX, Conversation
from packing.sample import TOKENIZER

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]
PLAIN_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TOKENIZER))


def trained(example, tokenizer):
    return tokenizer.decode(example.input_ids[example.labels != IGNORE_INDEX])


@pytest.mark.parametrize("template", [None, PLAIN_CHATML])
def test_answers_and_their_ends_are_trained(tokenizer, template):
    """With marks and without, exactly each answer and its end token is trained, on apply_chat_template's ids."""
    example = encode_chat(TALK, tokenizer, chat_template=template)
    ids = tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=True, return_dict=False)
    assert example.input_ids.tolist() == list(ids)
    assert trained(example, tokenizer) == "two<|im_end|>four<|im_end|>"


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("last", "four<|im_end|>"),
        ("completion", "four<|im_end|>"),
        ("assistant", "two<|im_end|>four<|im_end|>"),
    ],
)
def test_train_on_narrows(tokenizer, train_on, expected):
    """`train_on` chooses among the assistant's turns."""
    assert trained(encode_chat(TALK, tokenizer, train_on=train_on), tokenizer) == expected


def test_many_are_as_one_by_one(tokenizer):
    """A batch gives what its conversations give alone, rejections in their places."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions())
    talks = [Conversation(messages=TALK), Conversation(messages=TALK[:2]), Conversation(messages=TALK[1:3])]
    many = encoder.encode_many(talks)
    assert isinstance(many[1], RowRejected)
    assert many[0] == encoder.encode(talks[0])
    assert many[2] == encoder.encode(talks[2])
