"""One message, one call, one tool: every name they have out there, and what is refused."""

import json
from typing import Any

import pytest

from packing.errors import Reason, RowRejected
from packing.example import Note
from packing.messages import CONTROLS, MASKED, WEIGHTS, clean, read_message, read_tools

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SCHEMA = {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}}


def message(raw: Any, *, roles: dict[str, str] | None = None) -> dict[str, Any]:
    return read_message(raw, where="messages[0]", roles=roles or {}, notes=[])[0]


def notes_of(raw: Any) -> list[str]:
    notes: list[str] = []
    read_message(raw, where="messages[0]", roles={}, notes=notes)
    return notes


def rejection(raw: Any) -> RowRejected:
    with pytest.raises(RowRejected) as caught:
        message(raw)
    assert caught.value.detail.startswith("messages[0]")
    assert len(caught.value.detail) < 200
    return caught.value


@pytest.mark.parametrize(
    ("said", "role"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("human", "user"),
        ("USER", "user"),
        (" Human ", "user"),
        ("prompter", "user"),
        ("assistant", "assistant"),
        ("ASSISTANT", "assistant"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("model", "assistant"),
        ("bot", "assistant"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("ipython", "tool"),
        ("function", "tool"),
        ("tool_response", "tool"),
        ("function-response", "tool"),
        ("Tool Result", "tool"),
    ],
)
def test_roles_have_many_names(said: str, role: str) -> None:
    """Each name that data sets use becomes one of four, whichever spelling of the turn it stands in."""
    assert message({"role": said, "content": "a"}) == {"role": role, "content": "a"}
    assert message({"from": said, "value": "a"}) == {"role": role, "content": "a"}
    assert (Note.ROLE_MAPPED in notes_of({"role": said, "content": "a"})) is (said != role)


@pytest.mark.parametrize("said", ["narrator", "", "users", "assistant2"])
def test_an_unknown_role_is_rejected_unless_it_is_explained(said: str) -> None:
    """A role is never guessed; `roles` says what it stands for, and may overrule a known one."""
    assert rejection({"role": said, "content": "a"}).reason is Reason.UNKNOWN_ROLE
    assert message({"role": said, "content": "a"}, roles={said: "user"})["role"] == "user"
    assert message({"role": "user", "content": "a"}, roles={"user": "assistant"})["role"] == "assistant"


@pytest.mark.parametrize(
    "raw",
    [None, "hi", 3, [], {}, {"content": "a"}, {"role": None, "content": "a"}, {"role": 1, "content": "a"}],
)
def test_what_has_no_role_is_no_message(raw: Any) -> None:
    """A missing role is not taken for any."""
    assert rejection(raw).reason is Reason.BAD_MESSAGE


def test_two_spellings_must_agree() -> None:
    """Role and from, content and value: the same or empty is fine, two different ones are a choice."""
    assert message({"role": "user", "from": "user", "content": "a", "value": "a"})["content"] == "a"
    assert message({"role": "user", "content": "", "value": "a"})["content"] == "a"
    assert message({"role": "user", "content": "a", "value": ""})["content"] == "a"
    assert message({"role": "user", "from": None, "content": "a", "value": None})["content"] == "a"
    assert rejection({"role": "user", "content": "a", "value": "b"}).reason is Reason.BAD_MESSAGE
    assert rejection({"role": "user", "from": "gpt", "content": "a"}).reason is Reason.BAD_MESSAGE


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_no_text_is_the_empty_text(content: dict[str, Any]) -> None:
    """Missing, null and empty content are one, and never the word None."""
    assert message({"role": "assistant", **content, "tool_calls": [CALL]}) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("content", [3, 1.5, True, {"type": "text", "text": "a"}, ["a"], [None], [["a"]]])
def test_content_that_is_not_text_is_rejected(content: Any) -> None:
    """A number is not made text, and a lone part is no list of parts."""
    assert rejection({"role": "user", "content": content}).reason is Reason.BAD_MESSAGE


def test_text_is_kept_to_the_character() -> None:
    """White space, NUL, digits and markup pass through."""
    text = " \n\t007 <|im_end|> \x00 <think>\u2028 "
    assert message({"role": "user", "content": text})["content"] == text


def test_parts_are_joined() -> None:
    """Text parts in either spelling become one text, with nothing between."""
    parts = [
        {"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "value": "lo", "image_url": None},
        {"type": "text", "text": ""},
    ]
    assert message({"role": "user", "content": parts}) == {"role": "user", "content": "hello"}
    assert notes_of({"role": "user", "content": parts}) == [Note.PARTS_JOINED]


def test_parts_hold_reasoning_and_calls() -> None:
    """LLaMA-Factory's parts: reasoning, then text, then calls as JSON text."""
    raw = {
        "role": "assistant",
        "content": [
            {"type": "reasoning", "value": "think"},
            {"type": "text", "value": "say"},
            {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"type": "tool_call", "value": {"name": "f", "arguments": '{"x": 1}'}},
        ],
    }
    assert message(raw) == {
        "role": "assistant",
        "content": "say",
        "reasoning_content": "think",
        "tool_calls": [CALL, CALL],
    }
    thinking = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}],
    }
    assert message(thinking) == {"role": "assistant", "content": "b", "reasoning_content": "a"}


@pytest.mark.parametrize(
    ("parts", "detail"),
    [
        ([{"type": "image_url", "image_url": "x"}], "is of type 'image_url'; only text can be packed"),
        ([{"type": "text", "text": "a"}, {"type": "image"}], "content[1] is of type 'image'"),
        ([{"text": "a"}], "is of type 'None'"),
        ([{"type": "text"}], "is NoneType, not text"),
        ([{"type": "text", "text": 3}], "is int, not text"),
        ([{"type": "text", "text": "a", "value": "b"}], "differ"),
        ([{"type": "text", "text": "a"}, {"type": "reasoning", "value": "b"}], "comes too late"),
        ([{"type": "tool_call", "value": '{"name": "f"}'}, {"type": "text", "text": "a"}], "comes too late"),
        ([{"type": ["text"], "text": "a"}], "only text can be packed"),
    ],
)
def test_parts_that_a_message_can_t_say_are_rejected(parts: list[Any], detail: str) -> None:
    """Other kinds of parts, and an order that the template would change."""
    rejected = rejection({"role": "assistant", "content": parts})
    assert rejected.reason is Reason.BAD_MESSAGE
    assert detail in rejected.detail


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(field: str) -> None:
    """Each family's field becomes reasoning_content; an empty one is none."""
    raw = {"role": "assistant", "content": "a", field: "because"}
    assert message(raw) == {"role": "assistant", "content": "a", "reasoning_content": "because"}
    assert (Note.REASONING_RENAMED in notes_of(raw)) is (field != "reasoning_content")
    assert message({**raw, field: ""}) == {"role": "assistant", "content": "a"}
    assert rejection({**raw, "role": "user"}).reason is Reason.BAD_MESSAGE
    assert rejection({**raw, field: ["because"]}).reason is Reason.BAD_MESSAGE


def test_two_reasonings_are_a_choice() -> None:
    """In two fields, or in a field and a part, unless they say the same."""
    raw = {"role": "assistant", "content": "a", "reasoning": "b", "thinking": "c"}
    assert rejection(raw).reason is Reason.BAD_MESSAGE
    assert message({**raw, "thinking": "b"})["reasoning_content"] == "b"
    parts = [{"type": "reasoning", "value": "b"}]
    assert rejection({"role": "assistant", "content": parts, "thinking": "c"}).reason is Reason.BAD_MESSAGE


@pytest.mark.parametrize(
    "raw",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"x": 1}}]},
        {"role": "assistant", "tool_calls": '[{"name": "f", "arguments": {"x": 1}}]'},
        {"role": "assistant", "tool_calls": ['{"name": "f", "arguments": "{\\"x\\": 1}"}']},
        {"role": "assistant", "tool_calls": {"name": "f", "arguments": {"x": 1}}},
        {"role": "assistant", "tool_calls": [{"index": 0, **CALL}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": None,
            "function_call": {"name": "f", "arguments": {"x": 1}},
        },
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "function_call", "value": {"name": "f", "arguments": {"x": 1}}},
        {"from": "tool_call", "value": '[{"name": "f", "arguments": {"x": 1}}]'},
    ],
)
def test_calls_in_every_form_are_one(raw: dict[str, Any]) -> None:
    """Arguments as text or object, with or without "function", the older field, a role of their own."""
    assert message(raw) == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_calls_in_two_places_are_a_choice() -> None:
    """The older and the newer field side by side: the same call twice, or two; neither is guessed."""
    older = {"name": "f", "arguments": {"x": 1}}
    rejected = rejection({"role": "assistant", "tool_calls": [CALL], "function_call": older})
    assert rejected.reason is Reason.BAD_TOOLS
    parts = [{"type": "tool_call", "value": older}]
    assert rejection({"role": "assistant", "content": parts, "tool_calls": [CALL]}).reason is Reason.BAD_TOOLS


def test_a_call_keeps_its_id_and_its_argument_s_types() -> None:
    """Text stays text, whole numbers whole and exact, null null."""
    arguments = (
        '{"zip": "007", "n": 1, "r": 1.0, "big": 123456789012345678901, "none": null, "l": [true], "": {}}'
    )
    raw = {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": arguments}}],
    }
    (call,) = message(raw)["tool_calls"]
    assert call["id"] == "c1"
    expected = {
        "zip": "007",
        "n": 1,
        "r": 1.0,
        "big": 123456789012345678901,
        "none": None,
        "l": [True],
        "": {},
    }
    assert call["function"]["arguments"] == expected
    assert repr(call["function"]["arguments"]) == repr(expected)
    assert notes_of(raw) == [Note.CONTENT_NULL, Note.ARGUMENTS_PARSED]


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])
def test_no_arguments_are_an_empty_object(arguments: dict[str, Any]) -> None:
    """A call of a function that takes nothing."""
    raw = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", **arguments}}]}
    assert message(raw)["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert notes_of(raw) == [Note.ARGUMENTS_EMPTY]


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "f", "arguments": "{'x': 1}"}},
        {"function": {"name": "f", "arguments": '{"x": 1, "x": 2}'}},
        {"function": {"name": "f", "arguments": '{"x": NaN}'}},
        {"function": {"name": "f", "arguments": '"{\\"x\\": 1}"'}},
        {"function": {"name": "f", "arguments": "[1]"}},
        {"function": {"name": "f", "arguments": [1]}},
        {"function": {"name": "f", "arguments": 3}},
        {"function": {"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}},
        {"function": {"arguments": {}}},
        {"function": {"name": "", "arguments": {}}},
        {"function": {"name": 3, "arguments": {}}},
        {"function": "f"},
        {"type": "code_interpreter", "function": {"name": "f"}},
        {},
        None,
        3,
        "f(x=1)",
    ],
)
def test_a_bad_call_is_rejected(call: Any) -> None:
    """No JSON, no object, no name, no function: the arguments are what is trained, so none are repaired."""
    assert rejection({"role": "assistant", "tool_calls": [call]}).reason is Reason.BAD_TOOLS


def test_calls_belong_to_the_assistant() -> None:
    """A user's call would vanish in most templates."""
    assert rejection({"role": "user", "content": "a", "tool_calls": [CALL]}).reason is Reason.BAD_MESSAGE
    assert message({"role": "user", "content": "a", "tool_calls": []}) == {"role": "user", "content": "a"}
    assert rejection({"from": "function_call", "value": "no call"}).reason is Reason.BAD_TOOLS


def test_a_tool_s_reply_keeps_its_name() -> None:
    """The older function role carries the function's name, the newer one the call's id."""
    assert message({"role": "function", "name": "f", "content": "9"}) == {
        "role": "tool",
        "content": "9",
        "name": "f",
    }
    assert message({"role": "tool", "tool_call_id": "c1", "content": "9"}) == {
        "role": "tool",
        "content": "9",
        "tool_call_id": "c1",
    }
    assert rejection({"role": "tool", "tool_call_id": 3, "content": "9"}).reason is Reason.BAD_MESSAGE


@pytest.mark.parametrize("field", WEIGHTS)
def test_weights_are_yes_or_no(field: str) -> None:
    """0, 0.0 and false are no, 1, 1.0 and true yes, null nothing; anything between can't be trained so."""
    raw = {"role": "assistant", "content": "a"}
    for value, meaning in (
        (0, False),
        (0.0, False),
        (False, False),
        (1, True),
        (1.0, True),
        (True, True),
        (None, None),
    ):
        assert read_message({**raw, field: value}, where="m", roles={}, notes=[]) == (raw, meaning)
    for value in (0.5, 2, -1, "0", "false", [0], float("nan")):
        assert rejection({**raw, field: value}).reason is Reason.BAD_WEIGHT


def test_weights_that_can_t_be_followed_are_rejected() -> None:
    """Two that differ, and axolotl's training of parts of a turn."""
    raw = {"role": "assistant", "content": "a"}
    assert rejection({**raw, "weight": 1, "train": 0}).reason is Reason.BAD_WEIGHT
    assert rejection({**raw, "train_detail": [{"begin_offset": 0}]}).reason is Reason.BAD_WEIGHT


@pytest.mark.parametrize("field", sorted({*CONTROLS, "label"} - {*WEIGHTS}))
def test_a_field_that_says_not_to_train_is_never_dropped(field: str) -> None:
    """In a message, a part or a call, what can't be followed rejects its row; "as usual" and null pass."""
    usual = field not in MASKED
    raw = {"role": "assistant", "content": "a"}
    for value in (usual, int(usual), float(usual), str(usual), None, ""):
        assert message({**raw, field: value}) == raw
    for value in (not usual, int(not usual), str(not usual).lower()):
        assert rejection({**raw, field: value}).reason is Reason.BAD_WEIGHT
        assert field in rejection({**raw, field: value}).detail


@pytest.mark.parametrize("field", sorted(CONTROLS))
def test_parts_and_calls_have_no_weight_of_their_own(field: str) -> None:
    """A turn is trained whole: a part or a call that is not to be trained rejects the row."""
    not_trained = field in MASKED
    part = {"type": "text", "text": "a", field: not_trained}
    call = {"function": {"name": "f", "arguments": {}}, field: not_trained}
    for raw in ({"content": [part]}, {"content": "", "tool_calls": [call]}):
        rejected = rejection({"role": "assistant", **raw})
        assert rejected.reason is Reason.BAD_WEIGHT
        assert field in rejected.detail


def test_a_single_call_is_a_call() -> None:
    """`tool_call`, as an object or its text, is not dropped; of a user it is an error, as all calls are."""
    call = {"name": "f", "arguments": {"x": 1}}
    expected = [{"type": "function", "function": call}]
    for value in (call, json.dumps(call)):
        assert message({"role": "assistant", "content": "", "tool_call": value})["tool_calls"] == expected
    assert rejection({"role": "user", "content": "a", "tool_call": call}).reason is Reason.BAD_MESSAGE
    both = {"role": "assistant", "content": "", "tool_call": call, "tool_calls": [call]}
    assert rejection(both).reason is Reason.BAD_TOOLS


def test_fields_that_no_template_reads_are_counted() -> None:
    """They are dropped with a note; what should have been trained on is not dropped."""
    raw = {"role": "user", "content": "a", "timestamp": 3, "refusal": None, "annotations": []}
    assert message(raw) == {"role": "user", "content": "a"}
    assert notes_of(raw) == [Note.FIELDS_IGNORED]
    assert notes_of({"role": "user", "content": "a", "refusal": None, "annotations": []}) == []
    assert rejection({"role": "user", "content": "<image>", "images": ["a.png"]}).reason is Reason.BAD_MESSAGE
    assert rejection({"role": "system", "content": "a", "tools": [SCHEMA]}).reason is Reason.BAD_TOOLS


@pytest.mark.parametrize("value", [None, [], "", " ", "[]", "null", ()])
def test_no_tools_are_none(value: Any) -> None:
    """Null, nothing and empty are one."""
    assert read_tools(value, notes=[]) is None


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "function", "function": SCHEMA}],
        [{"function": SCHEMA}],
        [SCHEMA],
        [{"type": "function", **SCHEMA}],
        '[{"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}}]',
        ['{"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}}'],
    ],
)
def test_tools_in_every_form_are_one(value: Any) -> None:
    """Schemas with or without their wrapping, as objects or as JSON text."""
    assert read_tools(value, notes=[]) == [{"type": "function", "function": SCHEMA}]


@pytest.mark.parametrize(
    "value",
    [
        SCHEMA,
        "search",
        "{}",
        3,
        [3],
        [None],
        [{}],
        [{"type": "retrieval"}],
        [{"function": {"description": "a"}}],
        ["f"],
    ],
)
def test_bad_tools_are_rejected(value: Any) -> None:
    """A tool without a name, or no list of tools."""
    with pytest.raises(RowRejected) as caught:
        read_tools(value, notes=[])
    assert caught.value.reason is Reason.BAD_TOOLS


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("a\ud83d", "a\ufffd"),
        ("\ude00b", "\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    ],
)
def test_lone_surrogates_reject_or_are_replaced(text: str, mended: str) -> None:
    """Wherever they stand, in names too; two halves that met become their character."""
    value = [{"content": "é", "tool_calls": [{"arguments": {text: [text, 1, None, 1.5, True]}}]}]
    with pytest.raises(RowRejected) as caught:
        clean(value, replace=False, notes=[])
    assert caught.value.reason is Reason.LONE_SURROGATE
    notes: list[str] = []
    assert clean(value, replace=True, notes=notes) == [
        {"content": "é", "tool_calls": [{"arguments": {mended: [mended, 1, None, 1.5, True]}}]}
    ]
    assert notes == [Note.SURROGATE_REPLACED]


def test_clean_values_pass_as_they_are() -> None:
    """No copy, no note."""
    value = [{"content": "\U0001f600 é", "x": {"y": [1, 1.5, None, True]}}]
    notes: list[str] = []
    assert clean(value, replace=True, notes=notes) is value
    assert notes == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"a", {1: 2}, {3}, object()])
def test_what_json_can_t_say_is_rejected(value: Any) -> None:
    """Dates and bytes out of tables, and NaN, in tools or arguments: a template could not print them."""
    with pytest.raises(RowRejected) as caught:
        clean([{"arguments": {"x": value}}], replace=True, notes=[])
    assert caught.value.reason is Reason.BAD_TOOLS


def test_deep_nesting_is_rejected() -> None:
    """Deeper than any schema, where recursion in a template would fail."""
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RowRejected, match="nested more than 64 deep"):
        clean([deep], replace=False, notes=[])
