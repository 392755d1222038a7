"""The shared cases on roles and shape, files and formats, and the raw files as people have them.

The kinds that these cases stand for are tested with their own inputs in test_formats, test_messages and
test_sources; here the cases themselves run, from the shared folder.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from packing.errors import InputError, Reason, RowRejected
from packing.example import Conversation, Note
from packing.formats import FormatOptions, normalise
from packing.sources import SourceOptions, open_sources

pytestmark = pytest.mark.shared

Outcome = Conversation | RowRejected


@pytest.fixture(scope="module")
def cases(shared: Path) -> dict[str, Any]:
    """The input of each case by its id."""
    lines = (shared / "cases" / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return {case["id"]: case["input"] for case in map(json.loads, lines)}


def outcome(record: dict[str, Any] | RowRejected, **options: Any) -> Outcome:
    if isinstance(record, RowRejected):
        return record
    try:
        return normalise(record, options=FormatOptions(**options))
    except RowRejected as rejected:
        return rejected


def outcomes(path: Path, **options: Any) -> list[Outcome]:
    (source,) = open_sources([str(path)], options=SourceOptions())
    return [
        outcome(record, **options) for chunk in source.chunks(rows=100) for _, _, record in chunk.records()
    ]


def messages(result: Outcome) -> list[dict[str, Any]]:
    assert isinstance(result, Conversation), result
    assert result.messages is not None
    return [dict(message) for message in result.messages]


def said(result: Outcome) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages(result)]


def reason(result: Outcome) -> Reason:
    assert isinstance(result, RowRejected), result
    return result.reason


def test_tool_arguments_as_text_and_as_object_are_one(cases: dict[str, Any]) -> None:
    """Case tool_args_string_vs_dict: both rows give the same messages."""
    as_object, as_text = (messages(outcome(record)) for record in cases["tool_args_string_vs_dict"])
    assert as_object == as_text
    assert as_object[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_null_and_missing_content_is_no_text(cases: dict[str, Any]) -> None:
    """Cases content_null_with_tool_calls and tool_call_dropped_when_content_empty: never the word None."""
    null, missing, silent = (outcome(record) for record in cases["content_null_with_tool_calls"])
    assert messages(null) == messages(missing)
    assert messages(null)[1]["content"] == ""
    assert reason(silent) is Reason.NOTHING_TO_TRAIN
    empty, null = (outcome(record) for record in cases["tool_call_dropped_when_content_empty"])
    assert messages(empty) == messages(null)
    assert len(messages(empty)[1]["tool_calls"]) == 1


def test_thinking_is_reasoning_content(cases: dict[str, Any]) -> None:
    """Case gptoss_thinking_field: one name for the field; tags in a text stay text."""
    named, tagged = (outcome(record) for record in cases["gptoss_thinking_field"])
    assert [message.get("reasoning_content") for message in messages(named)] == [None, "T1", None, "T2"]
    assert said(tagged)[1] == ("assistant", "<|channel|>final<|message|>hi")


def test_literal_tags_are_text(cases: dict[str, Any]) -> None:
    """Cases think_tag_as_literal_text and special_tokens_in_content: text in is text out."""
    for record in [*cases["think_tag_as_literal_text"], cases["special_tokens_in_content"]]:
        assert messages(outcome(record)) == record["messages"]


def test_turns_in_a_row_follow_the_policy(cases: dict[str, Any]) -> None:
    """Case roles_not_alternating: kept for the template, merged, or rejected; the assistant may begin."""
    users, assistants, greeting = cases["roles_not_alternating"]
    assert messages(outcome(users)) == users["messages"]
    assert said(outcome(users, consecutive="merge")) == [("user", "a\n\nb"), ("assistant", "c")]
    assert said(outcome(assistants, consecutive="merge")) == [("user", "a"), ("assistant", "b\n\nc")]
    assert reason(outcome(users, consecutive="reject")) is Reason.ROLE_ORDER
    assert messages(outcome(greeting, consecutive="reject")) == greeting["messages"]


def test_system_turns_follow_the_policy(cases: dict[str, Any]) -> None:
    """Cases system_not_supported and system_in_the_middle: kept for the template, or folded; never lost."""
    first, middle = cases["system_not_supported"], cases["system_in_the_middle"]
    assert messages(outcome(first)) == first["messages"]
    assert said(outcome(first, system="fold")) == [("user", "be brief\n\nhi"), ("assistant", "hello")]
    assert messages(outcome(middle)) == middle["messages"]
    assert said(outcome(middle, system="fold"))[2] == ("user", "now in French\n\nc")


def test_other_names_of_roles_are_mapped(cases: dict[str, Any]) -> None:
    """Cases unknown_role_dropped and roles_renamed_so_nothing_trains: no message vanishes."""
    developer, upper = (outcome(record) for record in cases["unknown_role_dropped"])
    assert said(developer) == [("system", "rules"), ("user", "a"), ("assistant", "b")]
    assert said(upper) == [("user", "a"), ("assistant", "b")]
    renamed = outcome(cases["roles_renamed_so_nothing_trains"])
    assert said(renamed) == [("user", "hi"), ("assistant", "hello")]
    assert isinstance(renamed, Conversation)
    assert renamed.trainable is None
    assert renamed.notes == (Note.ROLE_MAPPED,)


def test_empty_conversations_are_counted(cases: dict[str, Any]) -> None:
    """Case empty_conversation: each with a reason."""
    assert [reason(outcome(record)) for record in cases["empty_conversation"]] == [
        Reason.EMPTY_CONVERSATION,
        Reason.EMPTY_CONVERSATION,
        Reason.BAD_RECORD,
    ]


def test_empty_turns_follow_the_policy(cases: dict[str, Any]) -> None:
    """Case empty_turn: an empty answer alone is nothing to train, whatever the policy."""
    assert [reason(outcome(record)) for record in cases["empty_turn"]] == [
        Reason.EMPTY_TURN,
        Reason.NOTHING_TO_TRAIN,
        Reason.NOTHING_TO_TRAIN,
    ]
    user, *answers = (outcome(record, empty_turns="mask") for record in cases["empty_turn"])
    assert said(user) == [("user", ""), ("assistant", "x")]
    assert [reason(answer) for answer in answers] == [Reason.NOTHING_TO_TRAIN] * 2


def test_text_parts_are_joined(cases: dict[str, Any]) -> None:
    """Case content_parts_list: one text, with nothing between."""
    assert said(outcome(cases["content_parts_list"])) == [("user", "hello"), ("assistant", "hi")]


def test_a_lone_surrogate_is_rejected_or_replaced(cases: dict[str, Any], tmp_path: Path) -> None:
    """Case lone_surrogate, through a file: the rows around it are read."""
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    rows = [good, cases["lone_surrogate"], good]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, bad, after = outcomes(tmp_path / "a.jsonl")
    assert messages(before) == messages(after) == good["messages"]
    assert reason(bad) is Reason.LONE_SURROGATE
    assert said(outcomes(tmp_path / "a.jsonl", surrogates="replace")[1])[0] == ("user", "bad \ufffd end")


def test_rows_of_mixed_schema_are_read_row_by_row(cases: dict[str, Any], tmp_path: Path) -> None:
    """Case mixed_schema_rows, as lines and as an array: every row is read, none changes another."""
    rows = cases["mixed_schema_rows"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.jsonl", "a.json"):
        assert [said(result) for result in outcomes(tmp_path / name)] == [
            [("user", "a"), ("assistant", "b")]
        ] * 4


def test_compressed_files_are_read_or_named(tmp_path: Path) -> None:
    """Case compressed_input: two members are two rows; a pointer and a cut file say what they are."""
    row = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(row) * 2)
    (tmp_path / "b.jsonl.zst").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(row)[:30])
    assert len([messages(result) for result in outcomes(tmp_path / "a.jsonl.gz")]) == 2
    with pytest.raises(InputError, match=r"b\.jsonl\.zst: is a Git LFS pointer"):
        outcomes(tmp_path / "b.jsonl.zst")
    with pytest.raises(
        InputError, match=r"c\.jsonl\.gz: Truncated compressed stream \(after reading 0 records\)"
    ):
        outcomes(tmp_path / "c.jsonl.gz")


# The raw files: (rows, rejected by reason, rows with each note)
RAW: dict[str, tuple[int, dict[Reason, int], dict[Note, int]]] = {
    "FastChat/dummy_conversation.json": (500, {}, {Note.ROLE_MAPPED: 500}),
    "LLaMA-Factory/alpaca_en_demo.json": (999, {}, {Note.INPUT_JOINED: 412}),
    "LLaMA-Factory/alpaca_zh_demo.json": (1000, {}, {Note.INPUT_JOINED: 139}),
    "LLaMA-Factory/glaive_toolcall_en_demo.json": (
        300,
        {},
        {Note.ROLE_MAPPED: 300, Note.CALL_CONVERTED: 153, Note.TOOLS_CONVERTED: 300},
    ),
    "LLaMA-Factory/identity.json": (91, {}, {}),
    "LLaMA-Factory/reason_tool_use_demo_50.jsonl": (
        50,
        {},
        {
            Note.PARTS_JOINED: 50,
            Note.REASONING_RENAMED: 50,
            Note.CALL_CONVERTED: 31,
            Note.TOOLS_CONVERTED: 50,
        },
    ),
    "LLaMA-Factory/v1_sft_demo.jsonl": (500, {}, {Note.PARTS_JOINED: 500}),
    "axolotl/conversation.json": (1, {}, {Note.ROLE_MAPPED: 1}),
    # Its first answer is empty.
    "axolotl/conversation.missingturns.json": (1, {Reason.EMPTY_TURN: 1}, {}),
    # Two of its answers are empty.
    "codealpaca/code_alpaca_2k.json": (2017, {Reason.NOTHING_TO_TRAIN: 2}, {Note.INPUT_JOINED: 1004}),
    "grade-school-math/test.jsonl": (1319, {}, {}),
    "ms-swift/sharegpt.jsonl": (3, {}, {}),
    "ms-swift/swift_multi.jsonl": (3, {}, {}),
    "ms-swift/swift_single.csv": (3, {}, {}),
    "openai-cookbook/toy_chat_fine_tuning.jsonl": (5, {}, {}),
    "torchtune/chat_tiny.json": (1, {}, {Note.ROLE_MAPPED: 1}),
    "torchtune/instruct_tiny.json": (2, {}, {}),
}


@pytest.mark.parametrize("name", RAW)
def test_a_raw_file_is_read_without_options(shared: Path, name: str) -> None:
    """Every row is accepted, or rejected for what it holds; what was changed is counted."""
    results = outcomes(shared / "data" / "raw" / name)
    rejected = Counter(result.reason for result in results if isinstance(result, RowRejected))
    notes = Counter(note for result in results if isinstance(result, Conversation) for note in result.notes)
    assert (len(results), dict(rejected), dict(notes)) == RAW[name]


def test_all_raw_files_are_tested(shared: Path) -> None:
    """A file that is added needs its counts."""
    raw = shared / "data" / "raw"
    assert {str(path.relative_to(raw)) for path in raw.glob("*/*")} == set(RAW)


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("FastChat/dummy_conversation.json", "fastchat_dummy"),
        ("LLaMA-Factory/alpaca_en_demo.json", "lf_alpaca_en"),
        ("LLaMA-Factory/glaive_toolcall_en_demo.json", "lf_glaive_en"),
        ("LLaMA-Factory/reason_tool_use_demo_50.jsonl", "lf_reason_tool"),
        ("codealpaca/code_alpaca_2k.json", "codealpaca_2k"),
        ("grade-school-math/test.jsonl", "gsm8k_test"),
        ("openai-cookbook/toy_chat_fine_tuning.jsonl", "openai_toy"),
    ],
)
def test_a_raw_file_equals_its_normalised_twin(shared: Path, name: str, twin: str) -> None:
    """Others normalised the same files to {messages, tools}: message for message, tool for tool the same."""
    with gzip.open(shared / "data" / f"{twin}.jsonl.gz", "rt", encoding="utf-8") as file:
        expected = [json.loads(line) for line in file]
    results = outcomes(shared / "data" / "raw" / name)
    assert len(results) == len(expected)
    compared = 0
    for result, record in zip(results, expected, strict=True):
        if isinstance(result, Conversation):
            assert messages(result) == record["messages"]
            assert result.tools == record.get("tools")
            compared += 1
    assert compared == RAW[name][0] - sum(RAW[name][1].values())


def test_loss_weights_reach_the_turns(shared: Path) -> None:
    """LLaMA-Factory's v1 rows weigh the user's turn 0 and the assistant's 1."""
    for result in outcomes(shared / "data" / "raw" / "LLaMA-Factory" / "v1_sft_demo.jsonl"):
        assert isinstance(result, Conversation)
        assert result.trainable == (False, True)


def test_a_csv_s_digits_stay_text(shared: Path) -> None:
    """ms-swift's CSV is all digits and letters; 00000 is a system prompt, and an empty cell none."""
    first, second, _ = outcomes(shared / "data" / "raw" / "ms-swift" / "swift_single.csv")
    assert said(first) == [("system", "00000"), ("user", "11111"), ("assistant", "22222")]
    assert said(second) == [("user", "aaaaa"), ("assistant", "bbbbb")]
