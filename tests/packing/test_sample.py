"""The embedded sample is what its script writes, and its tokenizer spells everything."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing.sample import CHATS, TOKENIZER, make


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER)


def test_the_script_writes_the_file_that_ships():
    """chats.jsonl is exactly what the generator gives, so nobody edits it by hand."""
    assert [json.loads(line) for line in CHATS.read_text("utf-8").splitlines()] == list(make.chats())


def test_the_template_is_the_one_that_ships():
    """The tokenizer carries chatml.jinja word for word."""
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text("utf-8"))
    assert config["chat_template"] == TOKENIZER.with_name("chatml.jinja").read_text("utf-8")


def test_the_sample_is_varied():
    """It has tools, system prompts, several turns and more than one script, so the demo shows them."""
    records = [json.loads(line) for line in CHATS.read_text("utf-8").splitlines()]
    assert len(records) >= 300
    assert sum("tools" in record for record in records) >= 50
    assert sum(record["messages"][0]["role"] == "system" for record in records) >= 100
    assert max(len(record["messages"]) for record in records) >= 8
    text = CHATS.read_text("utf-8")
    assert "早" in text
    assert "🍞" in text


@given(text=st.text())
def test_any_text_comes_back(text, tokenizer):
    """All 256 bytes are in the vocabulary: encoding and decoding change nothing."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_control_tokens_are_one_id_each(tokenizer):
    """Turn markers are single tokens, and the end of a turn is the EOS token."""
    assert [tokenizer.convert_tokens_to_ids(token) for token in make.CONTROL_TOKENS] == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>"
