"""`normalise`: which format a record has, the turns that come of it, and the policies for odd ones."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.errors import OptionError, Reason, RowRejected
from packing.example import Conversation, Note
from packing.formats import MASKS, PAIRS, Format, FormatOptions, _any, _plain, normalise
from packing.messages import CONTROLS, MASKED

Messages = list[tuple[str, str]]


def conversation(record: dict[str, Any], **options: Any) -> Conversation:
    return normalise(record, options=FormatOptions(**options))


def said(record: dict[str, Any], **options: Any) -> Messages:
    """(role, content) of each message."""
    messages = conversation(record, **options).messages
    assert messages is not None
    return [(message["role"], message["content"]) for message in messages]


def rejection(record: dict[str, Any], **options: Any) -> RowRejected:
    with pytest.raises(RowRejected) as caught:
        conversation(record, **options)
    assert len(caught.value.detail) < 600
    return caught.value


def turns(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": turns(*messages)}


QA: Messages = [("user", "q"), ("assistant", "a")]


# Formats


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": turns(*QA)}, QA),
        ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, QA),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, QA),
        ({"conversations": turns(*QA)}, QA),
        ({"conversation": [{"human": "q", "assistant": "a"}]}, QA),
        ({"conversation": [{"user": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}]}, [
            *QA,
            ("user", "r"),
            ("assistant", "b"),
        ]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}, [
            ("system", "s"),
            *QA,
        ]),
        ({"messages": turns(("system", "s"), *QA), "system": "s"}, [("system", "s"), *QA]),
        ({"messages": turns(*QA), "system": ""}, QA),
        ({"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, QA),
        ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"], "name": None}}, QA),
        ({"instruction": "q", "output": "a"}, QA),
        ({"instruction": "q", "response": "a"}, QA),
        ({"instruction": "q", "input": "", "output": "a"}, QA),
        ({"instruction": "q", "input": None, "output": "a"}, QA),
        ({"instruction": "q", "input": " \n", "output": "a"}, QA),
        ({"instruction": "q", "input": "i", "output": "a"}, [("user", "q\n\ni"), ("assistant", "a")]),
        ({"instruction": "q", "context": "i", "response": "a"}, [("user", "q\n\ni"), ("assistant", "a")]),
        ({"instruction": "", "input": "i", "output": "a"}, [("user", "i"), ("assistant", "a")]),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["p", "o"], ["r", "b"]]},
            [("system", "s"), ("user", "p"), ("assistant", "o"), ("user", "r"), ("assistant", "b"), *QA],
        ),
        ({"prompt": "q", "completion": "a"}, QA),
        ({"prompt": "q", "response": "a"}, QA),
        ({"prompt": turns(("system", "s"), ("user", "q")), "completion": turns(("assistant", "a"))}, [
            ("system", "s"),
            *QA,
        ]),
        ({"prompt": "q", "completion": turns(("assistant", "a"), ("user", "r"), ("assistant", "b"))}, [
            *QA,
            ("user", "r"),
            ("assistant", "b"),
        ]),
        ({"question": "q", "answer": "a"}, QA),
        ({"system_prompt": "s", "question": "q", "response": "a"}, [("system", "s"), *QA]),
        ({"system_prompt": "", "question": "q", "response": "a"}, QA),
        ({"query": "q", "response": "a", "history": []}, QA),
        ({"system": "", "query": "q", "response": "a", "history": '[["p", "o"]]'}, [
            ("user", "p"),
            ("assistant", "o"),
            *QA,
        ]),
        # What other columns hold does not matter, nor a format whose columns are null.
        ({"messages": turns(*QA), "conversations": None, "score": 0.5, "id": "1"}, QA),
        ({"messages": None, "conversations": [{"human": "q", "assistant": "a"}], "instruction": None}, QA),
        ({"prompt": "q", "prompt_id": "1", "messages": turns(*QA)}, QA),
        ({"prompt": "q", "chosen": [], "rejected": [], "messages": turns(*QA)}, QA),
        ({"instruction": "q", "input": "", "output": "a", "text": "Below is an instruction…"}, QA),
    ],
)  # fmt: skip
def test_every_format_becomes_messages(record: dict[str, Any], expected: Messages) -> None:
    """With no option, whatever the record's format."""
    assert said(record) == expected


def test_plain_text_is_text() -> None:
    """To the character; it has no turns."""
    assert conversation({"text": " a \n", "meta": {"n": 1}}) == Conversation(text=" a \n")
    assert rejection({"text": " \n"}).reason is Reason.EMPTY_CONVERSATION
    assert rejection({"text": 3}).reason is Reason.BAD_RECORD


def test_text_beside_a_conversation_is_its_render() -> None:
    """Data sets often carry the rendered text too: the conversation is read, and that is counted."""
    both = {**chat(*QA), "text": "<|user|>q<|assistant|>a"}
    assert said(both) == QA
    assert conversation(both).notes == (Note.TEXT_COLUMN_IGNORED,)
    assert conversation(both, format="text").text == "<|user|>q<|assistant|>a"
    assert conversation(both, columns={"text": "text"}).text == "<|user|>q<|assistant|>a"


@pytest.mark.parametrize("field", sorted(CONTROLS))
def test_a_record_that_is_not_to_be_trained_is_rejected_by_name(field: str) -> None:
    """Beside any format, whatever its name: false, fractions and masks of some turns; "as usual" passes."""
    usual = field not in MASKED
    pair = {"instruction": "q", "output": "a"}
    for value in (usual, int(usual), str(usual), [usual, usual], np.array([usual]), [], None, ""):
        assert said({**pair, field: value}) == QA
    for record in (pair, chat(*QA), {"text": "a"}, {"prompt": "q", "completion": "a"}):
        for value in (
            not usual,
            int(not usual),
            "False" if usual else "True",
            0.5,
            [usual, not usual],
            {"x": 1},
        ):
            rejected = rejection({**record, field: value})
            assert rejected.reason is Reason.BAD_WEIGHT
            assert f"the record has {field} " in rejected.detail
            assert "drop" in rejected.detail


@pytest.mark.parametrize("field", sorted(CONTROLS - {*MASKS}))
def test_tokens_have_no_weights_beside_labels(field: str) -> None:
    """A tokenized row says by labels or a mask what is trained: more than that rejects it by name."""
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    usual = int(field not in MASKED)
    assert conversation({**row, field: [usual] * 3}).example is not None
    rejected = rejection({**row, field: [usual, 1 - usual, usual]})
    assert rejected.reason is Reason.BAD_WEIGHT
    assert field in rejected.detail


def test_one_message_of_a_tree_is_no_text() -> None:
    """A row with a role and a text is part of a conversation, not all of one."""
    record = {"message_id": "1", "parent_id": None, "role": "prompter", "text": "q"}
    assert rejection(record).reason is Reason.BAD_RECORD
    assert conversation(record, format="text").text == "q"


def test_what_is_meant_for_something_else_is_named() -> None:
    """Preference data in a conversation's clothes: bad answers, or all but the answers, would be trained."""
    rated = {"prompt": "q", "completion": "a", "label": False}
    assert rejection(rated).detail == "its label says whether it is good: filter, then choose a --format"
    assert rejection({**chat(*QA), "label": True}).reason is Reason.BAD_RECORD
    assert said(rated, format="prompt_completion") == QA
    for label in (0, 0.0, "False", "false", "0"):  # a CSV file has nothing but text
        assert "its label says" in rejection({**rated, "label": label}).detail
    assert said({**chat(*QA), "label": "code"}) == QA
    assert said({**chat(*QA), "label": 1}) == QA
    pair = {**chat(*QA, ("user", "r")), "chosen": {"role": "assistant", "content": "b"}, "rejected": {}}
    assert "preference pair" in rejection(pair).detail
    assert said({**chat(*QA), "chosen": turns(*QA), "rejected": []}) == QA


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({**chat(*QA), "conversations": turns(*QA)}, "messages or sharegpt"),
        ({**chat(*QA), "prompt": "q", "completion": "a"}, "messages or prompt_completion"),
        ({"question": "q", "answer": "a", "instruction": "q", "output": "a"}, "alpaca or question_answer"),
        ({**chat(*QA), "input_ids": [1], "labels": [1]}, "tokens or messages"),
    ],
)
def test_two_formats_at_once_are_a_choice(record: dict[str, Any], names: str) -> None:
    """None is guessed; --format says which, and so does --column."""
    rejected = rejection(record)
    assert rejected.reason is Reason.BAD_RECORD
    assert rejected.detail == f"may be {names}: choose one with --format"
    for name in names.split(" or "):
        if name != "tokens":
            assert said(record, format=name) == QA
    if "messages" in record:
        assert said(record, columns={"messages": "messages"}) == QA


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": turns(*QA), "conversation": turns(("user", "other"), ("assistant", "a"))},
        {"instruction": "q", "output": "a", "response": "b"},
        {"instruction": "q", "input": "i", "context": "j", "output": "a"},
        {"instruction": "q", "output": "a", "system": "s", "system_prompt": "t"},
        {"messages": turns(("system", "s"), *QA), "system": "t"},
        {"prompt": turns(("user", "q")), "input": "i", "completion": "a"},
    ],
)
def test_two_columns_for_one_thing_are_a_choice(record: dict[str, Any]) -> None:
    """Columns that mean the same but hold different things are not merged and none is dropped."""
    assert rejection(record).reason is Reason.BAD_RECORD


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({}, Reason.BAD_RECORD, "no known format"),
        ({"id": 1}, Reason.BAD_RECORD, "no known format; its columns are 'id'"),
        ({f"c{n}": 1 for n in range(50)}, Reason.BAD_RECORD, "'c7' and 42 more"),
        ({"\ud800\n": 1}, Reason.BAD_RECORD, r"its columns are '\ud800\n'"),
        ({"chosen": turns(*QA), "rejected": turns(*QA)}, Reason.BAD_RECORD, "--column messages=chosen"),
        ({"prompt": "q"}, Reason.BAD_RECORD, "no known format"),
        ({"instruction": "q", "output": None}, Reason.NOTHING_TO_TRAIN, "no assistant turn says anything"),
        ({"messages": []}, Reason.EMPTY_CONVERSATION, "there are no messages"),
        ({"messages": None}, Reason.EMPTY_CONVERSATION, "there are no messages"),
        ({"messages": ""}, Reason.EMPTY_CONVERSATION, "there are no messages"),
        ({"messages": [], "system": "s"}, Reason.EMPTY_CONVERSATION, "there are no messages"),
        ({"messages": "hello"}, Reason.BAD_RECORD, "messages is no JSON"),
        ({"messages": "{'role': 'user'}"}, Reason.BAD_RECORD, "messages is no JSON"),
        ({"messages": 3}, Reason.BAD_RECORD, "messages is of type int, not a list"),
        ({"messages": {"a": 1}}, Reason.BAD_RECORD, "messages is an object"),
        ({"messages": {"role": ["user"], "content": []}}, Reason.BAD_RECORD, "different lengths: [0, 1]"),
        ({"messages": [["q", "a"]]}, Reason.BAD_MESSAGE, "messages[0] is list"),
        (
            {"conversations": [{"from": "x", "value": "q"}]},
            Reason.UNKNOWN_ROLE,
            "conversations[0] has the role 'x'",
        ),
        ({"instruction": 3, "output": "a"}, Reason.BAD_RECORD, "instruction is of type int, not text"),
        ({"question": "q", "answer": 42}, Reason.BAD_RECORD, "answer is of type int, not text"),
        ({"query": "q", "response": "a", "history": [["p"]]}, Reason.BAD_RECORD, "history[0] is not a pair"),
        (
            {"query": "q", "response": "a", "history": [["p", None]]},
            Reason.BAD_RECORD,
            "history[0] is not a pair",
        ),
        ({"query": "q", "response": "a", "history": "p"}, Reason.BAD_RECORD, "history is no JSON"),
        ({"query": "q", "response": "a", "history": 3}, Reason.BAD_RECORD, "history is of type int"),
        ({"prompt": "q", "completion": {"content": "a"}}, Reason.BAD_RECORD, "completion is of type dict"),
        ({**chat(*QA), "images": ["a.png"]}, Reason.BAD_RECORD, "the column images is not empty"),
        ({**chat(*QA), "tools": "search"}, Reason.BAD_TOOLS, "tools is no JSON"),
        ({**chat(*QA), "tools": [{"name": "f"}], "functions": [{"name": "g"}]}, Reason.BAD_TOOLS, "differ"),
        (chat(("user", "\ud83d"), ("assistant", "a")), Reason.LONE_SURROGATE, "half of a surrogate pair"),
        ({"text": "\ud83d"}, Reason.LONE_SURROGATE, "half of a surrogate pair"),
    ],
)
def test_what_is_no_conversation_is_named(record: dict[str, Any], reason: Reason, detail: str) -> None:
    """Each with a reason of the closed list and a detail that says where."""
    rejected = rejection(record)
    assert rejected.reason is reason
    assert detail in rejected.detail


def test_empty_media_columns_do_not_matter() -> None:
    """Data sets of one schema have them everywhere."""
    assert said({**chat(*QA), "images": [], "videos": None}) == QA


def test_tools_come_along() -> None:
    """From either column, in any form; none is None."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert conversation({**chat(*QA), "tools": tools}).tools == tools
    assert conversation({**chat(*QA), "functions": [{"name": "f"}]}).tools == tools
    assert conversation({"instruction": "q", "output": "a", "tools": '[{"name": "f"}]'}).tools == tools
    assert conversation({**chat(*QA), "tools": "[]"}).tools is None


def test_notes_name_each_normalisation_once() -> None:
    """In the order in which they happened."""
    record = {
        "conversations": [
            {"from": "human", "value": [{"type": "text", "text": "q"}]},
            {"from": "gpt", "value": "a"},
        ],
        "tools": "[]",
    }
    assert conversation(record).notes == (Note.ROLE_MAPPED, Note.PARTS_JOINED, Note.TOOLS_CONVERTED)
    assert conversation(chat(*QA)).notes == ()
    assert all(type(note) is Note for note in conversation(record).notes)


# What may be trained


def test_weights_say_what_may_be_trained() -> None:
    """One weight makes the rest explicit; without any there is nothing to say."""
    weighted = [
        {"role": "user", "content": "q", "weight": None},
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "b", "weight": 1},
    ]
    assert conversation({"messages": weighted}).trainable == (True, False, True, True)
    assert conversation(chat(*QA)).trainable is None
    assert (
        conversation({"messages": [{**message, "weight": None} for message in turns(*QA)]}).trainable is None
    )


@pytest.mark.parametrize(
    ("record", "trainable"),
    [
        ({"prompt": "q", "completion": "a"}, (False, True)),
        ({"prompt": "q", "completion": "a", "system": "s"}, (False, False, True)),
        (
            {"prompt": turns(*QA, ("user", "r")), "completion": turns(("assistant", "b"))},
            (False, False, False, True),
        ),
        ({"prompt": turns(*QA, ("user", "r")), "completion": "b"}, (False, False, False, True)),
        ({"prompt": "r", "history": [["q", "a"]], "completion": "b"}, (False, False, False, True)),
        ({"prompt": [{"role": "user", "content": "q", "weight": 1}], "completion": "a"}, (False, True)),
        ({"prompt": "q", "completion": [{"role": "assistant", "content": "a", "weight": 0}]}, (False, False)),
        ({"instruction": "r", "history": [["q", "a"]], "output": "b"}, None),
        ({"question": "q", "answer": "a"}, None),
    ],
)
def test_a_prompt_is_never_trained(record: dict[str, Any], trainable: tuple[bool, ...] | None) -> None:
    """Not even its assistant turns: of prompt and completion, the completion alone may be."""
    assert conversation(record).trainable == trainable


# Options


def test_a_column_by_another_name() -> None:
    """--column overrules what the record would be taken for, and a name that is nowhere is an error."""
    record = {
        "dialog": turns(*QA),
        "text": "x",
        "prompt": "p",
        "completion": "c",
        "functions_json": '[{"name": "f"}]',
    }
    assert said(record, columns={"messages": "dialog"}) == QA
    assert conversation(record, columns={"messages": "dialog", "tools": "functions_json"}).tools is not None
    assert (
        said({"prompt": "a", "completion": "q"}, columns={"prompt": "completion", "completion": "prompt"})
        == QA
    )
    assert said({"problem": "q", "answer": "a"}, columns={"question": "problem"}) == QA
    assert said({"q": "q", "a": "a"}, columns={"instruction": "q", "output": "a"}) == QA
    rejected = rejection(chat(*QA), columns={"messages": "dialog"})
    assert rejected.detail == "no column 'dialog' among 'messages'"


def test_a_column_that_only_some_rows_have() -> None:
    """A renamed column beside the primary one may be missing."""
    columns = {"messages": "dialog", "system": "persona"}
    assert said({"dialog": turns(*QA), "persona": "s"}, columns=columns) == [("system", "s"), *QA]
    assert said({"dialog": turns(*QA)}, columns=columns) == QA


def test_a_format_by_name() -> None:
    """--format takes its own columns alone, and names the record that lacks them."""
    record = {"text": "x", "instruction": "q", "output": "a"}
    assert conversation(record, format="text").text == "x"
    assert said(record, format="alpaca") == QA
    assert rejection(record, format="messages").detail == (
        "not of the format messages; its columns are 'text', 'instruction', 'output'"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"format": "chatml"},
        {"columns": {"dialog": "messages"}},
        {"roles": {"narrator": "narrator"}},
        {"trailing_user": "drop"},
        {"consecutive": "join"},
        {"system": "drop"},
        {"empty_turns": "drop"},
        {"surrogates": "ignore"},
    ],
)
def test_an_option_that_is_none_is_an_error(options: dict[str, Any]) -> None:
    """Before any row is read."""
    with pytest.raises(OptionError):
        FormatOptions(**options)


# Policies


def test_trailing_turns_are_trimmed_or_reject() -> None:
    """Turns after the last assistant turn: of users, tools, systems."""
    record = chat(*QA, ("user", "r"), ("system", "s"), ("user", ""))
    assert said(record) == QA
    assert conversation(record).notes == (Note.TRAILING_TURNS_TRIMMED,)
    rejected = rejection(record, trailing_user="reject")
    assert (rejected.reason, rejected.detail) == (
        Reason.ROLE_ORDER,
        "messages[2]: a user turn with no answer after it",
    )
    assert said(chat(*QA), trailing_user="reject") == QA


@pytest.mark.parametrize(
    "record", [chat(("user", "q")), chat(("system", "s")), {"prompt": "q", "completion": []}]
)
def test_without_an_assistant_there_is_nothing_to_train(record: dict[str, Any]) -> None:
    """No turn of the assistant at all."""
    assert rejection(record).reason is Reason.NOTHING_TO_TRAIN


@pytest.mark.parametrize("blank", ["", " \n", "\t\u3000"])
def test_empty_turns_reject_or_stay_untrained(blank: str) -> None:
    """Of user and assistant; the end marker alone would be what is learned."""
    record = chat(("user", "q"), ("assistant", blank), ("user", "r"), ("assistant", "b"))
    rejected = rejection(record)
    assert (rejected.reason, rejected.detail) == (Reason.EMPTY_TURN, "messages[1]: an empty assistant turn")
    masked = conversation(record, empty_turns="mask")
    assert masked.trainable == (True, False, True, True)
    assert masked.notes == (Note.EMPTY_TURN_MASKED,)
    assert said(record, empty_turns="mask")[1] == ("assistant", blank)
    assert rejection(chat(("user", blank), ("assistant", "a"))).reason is Reason.EMPTY_TURN


@pytest.mark.parametrize("empty_turns", ["reject", "mask"])
def test_an_empty_answer_alone_is_nothing_to_train(empty_turns: str) -> None:
    """Whatever the policy."""
    assert (
        rejection(chat(("user", "q"), ("assistant", " \n")), empty_turns=empty_turns).reason
        is Reason.NOTHING_TO_TRAIN
    )
    assert (
        rejection({"instruction": "q", "output": ""}, empty_turns=empty_turns).reason
        is Reason.NOTHING_TO_TRAIN
    )


def test_turns_that_say_something_else_are_not_empty() -> None:
    """A call or a thought is something said, an empty system prompt or tool reply is no one's silence."""
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]
    assert len(said({"messages": messages})) == 5


def test_turns_in_a_row_are_left_merged_or_rejected() -> None:
    """By default the template decides; merging joins with an empty line; tool replies are never merged."""
    record = chat(("user", "q"), ("user", "r"), ("assistant", "a"), ("assistant", "b"), ("assistant", "c"))
    assert len(said(record)) == 5
    assert said(record, consecutive="merge") == [("user", "q\n\nr"), ("assistant", "a\n\nb\n\nc")]
    assert conversation(record, consecutive="merge").notes == (Note.TURNS_MERGED,)
    rejected = rejection(record, consecutive="reject")
    assert (rejected.reason, rejected.detail) == (
        Reason.ROLE_ORDER,
        "messages[1]: a second user turn in a row",
    )
    tools = chat(("user", "q"), ("assistant", "a"), ("tool", "1"), ("tool", "2"), ("assistant", "b"))
    for policy in ("keep", "merge", "reject"):
        assert len(said(tools, consecutive=policy)) == 5
        assert said(chat(*QA), consecutive=policy) == QA


def test_merging_keeps_calls_and_order() -> None:
    """Text and then calls merge; a text after calls, or a second reasoning, would have to move."""
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    text, thought = {"from": "gpt", "value": "b"}, {"role": "assistant", "content": "c", "reasoning": "d"}
    ask = {"from": "human", "value": "q"}
    merged = conversation({"conversations": [ask, text, call, call]}, consecutive="merge").messages
    assert merged is not None
    assert [len(message.get("tool_calls", ())) for message in merged] == [0, 2]
    assert merged[1]["content"] == "b"
    for pair in ([call, text], [text, thought]):
        rejected = rejection({"conversations": [ask, *pair]}, consecutive="merge")
        assert rejected.reason is Reason.ROLE_ORDER
    assert len(said({"conversations": [ask, thought, text]}, consecutive="merge")) == 2


def test_merging_never_mixes_trained_with_untrained() -> None:
    """A merged turn has one weight."""
    messages = [*turns(*QA), {"role": "assistant", "content": "b", "train": False}]
    assert rejection({"messages": messages}, consecutive="merge").reason is Reason.ROLE_ORDER
    messages[1]["train"] = False
    messages += turns(("user", "r"), ("assistant", "c"))
    assert conversation({"messages": messages}, consecutive="merge").trainable == (True, False, True, True)


def test_merging_never_mixes_speakers() -> None:
    """Two users with names are two users."""
    messages = [{"role": "user", "content": name, "name": name} for name in ("ann", "bob")]
    messages += turns(("assistant", "a"))
    assert rejection({"messages": messages}, consecutive="merge").reason is Reason.ROLE_ORDER
    messages[1]["name"] = "ann"
    assert said({"messages": messages}, consecutive="merge") == [("user", "ann\n\nbob"), ("assistant", "a")]


def test_system_turns_are_kept_or_folded() -> None:
    """Folded, their text stands before the next user turn's; one with no user turn after it has no place."""
    record = chat(("system", "s"), *QA, ("system", "t"), ("system", ""), ("user", "r"), ("assistant", "b"))
    assert said(record)[0] == ("system", "s")
    assert said(record, system="fold") == [
        ("user", "s\n\nq"),
        ("assistant", "a"),
        ("user", "t\n\nr"),
        ("assistant", "b"),
    ]
    assert conversation(record, system="fold").notes == (Note.SYSTEM_FOLDED,)
    assert said(chat(*QA), system="fold") == QA
    assert (
        rejection(chat(*QA, ("system", "s"), ("assistant", "b")), system="fold").reason is Reason.ROLE_ORDER
    )


def test_folding_keeps_weights_in_step() -> None:
    """A turn less, and the flags of the others are still theirs."""
    messages = [*turns(("system", "s"), ("user", "q")), {"role": "assistant", "content": "a", "weight": 0}]
    messages += turns(("user", "r"), ("assistant", "b"))
    assert conversation({"messages": messages}, system="fold").trainable == (True, False, True, True)


def test_surrogates_are_replaced_on_request() -> None:
    """In text, turns and tools."""
    assert conversation({"text": "a\ud83d"}, surrogates="replace").text == "a\ufffd"
    record = {**chat(("user", "q\udc00"), ("assistant", "a")), "tools": [{"name": "f\ud83d"}]}
    replaced = conversation(record, surrogates="replace")
    assert replaced.messages is not None
    assert replaced.messages[0]["content"] == "q\ufffd"
    assert replaced.tools == [{"type": "function", "function": {"name": "f\ufffd"}}]
    assert replaced.notes == (Note.TOOLS_CONVERTED, Note.SURROGATE_REPLACED)


# Tokenized rows


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"labels": [-100, 6, 7]}, [-100, 6, 7]),
        ({"labels": [5, 6, -100]}, [-100, 6, -100]),
        ({"loss_mask": [0, 1, 0]}, [-100, 6, -100]),
        ({"assistant_masks": [1, 1, 1]}, [-100, 6, 7]),
        ({"completion_mask": [0, 0, 1], "attention_mask": [1, 1, 1]}, [-100, -100, 7]),
        ({"labels": [-100, 6, 7], "assistant_masks": [1, 1, 1]}, [-100, 6, 7]),
        ({"labels": [-100, 6, 7], "position_ids": [0, 1, 2], "seq_lengths": [3]}, [-100, 6, 7]),
        ({"labels": np.array([-100, 6, 7]), "text": "rendered"}, [-100, 6, 7]),
    ],
)
def test_tokenized_rows_are_taken_as_they_are(columns: dict[str, Any], labels: list[int]) -> None:
    """Labels or a mask say what is trained; the first token never is."""
    example = conversation({"input_ids": [5, 6, 7], **columns}).example
    assert example is not None
    assert example.input_ids.tolist() == [5, 6, 7]
    assert example.labels.tolist() == labels


def test_a_trained_first_token_is_counted() -> None:
    """It would be predicted from the example before."""
    assert conversation({"input_ids": [5, 6], "labels": [5, 6]}).notes == (Note.FIRST_LABEL_IGNORED,)
    assert conversation({"input_ids": [5, 6], "labels": [-100, 6]}).notes == ()


@pytest.mark.parametrize(
    ("columns", "detail"),
    [
        ({}, "neither labels nor a mask"),
        ({"attention_mask": [1, 1, 1]}, "neither labels nor a mask"),
        ({"labels": [6, 7, -100]}, "labels[0] is 6, neither -100 nor input_ids[0] (5)"),
        ({"labels": [-100, 6]}, "2 labels for 3 input_ids"),
        ({"labels": [-100, 6, None]}, "labels is not a list of whole numbers"),
        ({"labels": [-100, 6, 7.0]}, "labels is not a list of whole numbers"),
        ({"labels": [-100, -1, 7]}, "labels[1] is -1"),
        ({"labels": "x"}, "labels is not a list of whole numbers"),
        ({"labels": 3}, "labels is not a list of whole numbers"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask holds more than 0 and 1"),
        ({"loss_mask": [0.0, 0.5, 1.0]}, "loss_mask is not a list of whole numbers"),
        ({"labels": [-100, 6, 7], "loss_mask": [0, 1, 0]}, "labels and loss_mask train different tokens"),
        ({"labels": [-100, 6, -100], "attention_mask": [1, 1, 0]}, "take the padding off"),
        ({"labels": [-100, 6, 7], "position_ids": [0, 1, 0]}, "packed already"),
        ({"labels": [-100, 6, 7], "seq_lengths": [2, 1]}, "packed already"),
        ({"labels": [-100, 6, 7], "seq_lengths": 3}, "seq_lengths is not a list"),
        (
            {"input_ids": [5, -1, 7], "labels": [-100, -100, 7]},
            "input_ids is not a list of whole numbers from 0",
        ),
        ({"input_ids": [5, 2**31, 7], "labels": [-100, -100, 7]}, "from 0 to 2**31 - 1"),
        ({"input_ids": [5, 2**70, 7], "labels": [-100, -100, 7]}, "whole numbers below 2**31"),
        ({"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [True, 6, 7], "labels": [-100, 6, 7]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": "567", "labels": [-100, 6, 7]}, "input_ids is not a list of whole numbers"),
        (
            {"input_ids": np.array([5.0, 6.0, 7.0]), "labels": [-100, 6, 7]},
            "input_ids is not a list of whole numbers",
        ),
    ],
)
def test_tokens_that_can_t_be_are_rejected(columns: dict[str, Any], detail: str) -> None:
    """Shifted labels, padding, whole buffers, numbers that are no ids: nothing is repaired."""
    rejected = rejection({"input_ids": [5, 6, 7], **columns})
    assert rejected.reason is Reason.BAD_TOKENS
    assert detail in rejected.detail


def test_no_tokens_are_an_empty_conversation() -> None:
    """An empty segment would break the kernels."""
    assert rejection({"input_ids": [], "labels": []}).reason is Reason.EMPTY_CONVERSATION


# Any record

KEYS = """role from content value type text name arguments function id weight train tool_calls function_call
    reasoning human assistant thinking images parameters"""
TEXTS = "user assistant gpt human system tool function_call hi text é {} null [] reasoning tool_call function"
COLUMNS = """messages conversations conversation instruction input output prompt completion text query
    response history system tools functions input_ids labels loss_mask question answer position_ids
    seq_lengths attention_mask images chosen id"""

WORDS = st.sampled_from(
    [*TEXTS.split(), "", " ", "\ud83d", '{"name": "f"}', '[{"role": "user", "content": "hi"}]']
)
SCALARS = st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS.split()) | WORDS, inner, max_size=4)
    ),
    max_leaves=20,
)
TURN = {
    "role": WORDS,
    "from": WORDS,
    "content": VALUES,
    "value": VALUES,
    "tool_calls": VALUES,
    "name": SCALARS,
}
TURN |= {"weight": SCALARS, "train": st.booleans(), "reasoning": WORDS, "function_call": VALUES}
TURNS = st.lists(st.fixed_dictionaries({}, optional=TURN) | VALUES, max_size=5)
COLUMN_NAMES = st.sampled_from(COLUMNS.split())
OPTIONS = st.builds(
    FormatOptions,
    format=st.sampled_from(["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens"]),
    columns=st.just({})
    | st.dictionaries(st.sampled_from(["messages", "text", "tools"]), COLUMN_NAMES, max_size=2),
    trailing_user=st.sampled_from(["trim", "reject"]),
    consecutive=st.sampled_from(["keep", "merge", "reject"]),
    system=st.sampled_from(["keep", "fold"]),
    empty_turns=st.sampled_from(["reject", "mask"]),
    surrogates=st.sampled_from(["reject", "replace"]),
)


def check(result: Conversation) -> None:
    """What the rest of the package relies on."""
    assert [result.messages is None, result.text is None, result.example is None].count(False) == 1
    assert all(note in set(Note) for note in result.notes)
    if result.messages is None:
        return
    assert result.trainable is None or len(result.trainable) == len(result.messages)
    assert result.messages[-1]["role"] == "assistant"
    for message in result.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str)
        message["content"].encode()
        assert None not in message.values()
        for call in message.get("tool_calls", ()):
            assert call["type"] == "function"
            assert isinstance(call["function"]["arguments"], dict)
    for tool in result.tools or ():
        assert isinstance(tool["function"]["name"], str)


@settings(max_examples=400)
@given(record=st.dictionaries(COLUMN_NAMES, VALUES | TURNS, max_size=4), options=OPTIONS)
def test_any_record_is_a_conversation_or_a_rejection(record: dict[str, Any], options: FormatOptions) -> None:
    """Nothing else comes out, and what comes out holds what it promises; the record is left as it was."""
    before = repr(record)
    try:
        check(normalise(record, options=options))
    except RowRejected as rejected:
        rejected.detail.encode()
    assert repr(record) == before


@settings(max_examples=200)
@given(
    messages=st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(min_size=1, max_size=5)),
        max_size=8,
    ),
    spelling=st.sampled_from([("role", "content"), ("from", "value")]),
    consecutive=st.sampled_from(["keep", "merge"]),
    system=st.sampled_from(["keep", "fold"]),
)
def test_no_text_vanishes(
    messages: Messages, spelling: tuple[str, str], consecutive: Any, system: Any
) -> None:
    """Each accepted row's text is all there and in order, but for the turns that a note says were trimmed."""
    keys = spelling
    record = {"conversations": [dict(zip(keys, turn, strict=True)) for turn in messages]}
    try:
        result = normalise(record, options=FormatOptions(consecutive=consecutive, system=system))
    except RowRejected:
        return
    end = max(n for n, (role, _) in enumerate(messages, 1) if role == "assistant")
    assert (Note.TRAILING_TURNS_TRIMMED in result.notes) is (end < len(messages))
    assert result.messages is not None
    kept = "\n\n".join(message["content"] for message in result.messages)
    assert kept == "\n\n".join(content for _, content in messages[:end])


ODD = {
    "role": st.sampled_from(["human", "developer", "x", "user", "system", 1, None]),
    "content": st.sampled_from(["", " \n", "\u3000", "\ud83d", None, 3]),
    "name": st.sampled_from(["n", None]),
}


@settings(max_examples=400)
@given(
    roles=st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=3),
    change=st.sampled_from(list(ODD)).flatmap(
        lambda key: st.tuples(st.integers(0, 3), st.just(key), ODD[key])
    ),
    more=st.sampled_from([{}, {"label": False}, {"images": [1]}, {"weight": 0}])
    | st.dictionaries(COLUMN_NAMES, VALUES, max_size=1),
    options=st.just(FormatOptions()) | OPTIONS,
)
def test_plain_messages_are_read_as_all_others_are(
    roles: list[str], change: tuple[int, str, Any], more: Any, options: FormatOptions
) -> None:
    """The short way for plain messages says what the long way says, or leaves the record to it."""
    messages: list[dict[str, Any]] = turns(
        *((role, f" ä{n}\n") for n, role in enumerate([*roles, "assistant"]))
    )
    place, key, value = change
    if place < len(messages):
        messages[place][key] = value
    record = {"messages": messages, **more}
    plain = _plain(record, options)
    assert plain is None or plain == _any(record, options)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "sharegpt"},
        {"columns": {"messages": "other"}},
        {"roles": {"user": "system"}},
        {"consecutive": "merge"},
        {"system": "fold"},
    ],
    ids=str,
)
def test_options_reach_plain_messages(options: dict[str, Any]) -> None:
    """What an option changes or refuses of plain messages is changed or refused, short way or not."""
    record = chat(("system", "s"), ("user", "q"), ("user", "r"), ("assistant", "a"))
    plain = conversation(record)
    try:
        assert conversation(record, **options) != plain
    except RowRejected:
        return


def test_plain_messages_take_the_short_way() -> None:
    """The commonest record is plain, with a column that no format reads and white space around texts."""
    assert _plain({**chat(*QA, ("user", " ä "), ("assistant", "b\n")), "id": 7}, FormatOptions()) is not None


def test_the_formats_of_the_options_are_all_there() -> None:
    """A pair that is added can be chosen by name."""
    assert set(PAIRS) <= set(Format.__args__)
