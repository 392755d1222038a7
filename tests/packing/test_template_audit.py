"""The audit says of each template what decides whether training on it is right."""

import io
import json
from pathlib import Path

import pytest

from packing.chat import ChatOptions, audit, load_tokenizer
from packing.errors import OptionError, TemplateError
from packing.example import IGNORE_INDEX, Conversation
from packing.sample import TOKENIZER

T = {path.stem: path.read_text("utf-8") for path in Path(__file__).with_name("templates").glob("*.jinja")}


@pytest.fixture(scope="module")
def tokenizer():
    made = load_tokenizer(str(TOKENIZER))
    made.add_special_tokens(
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "extra_special_tokens": ["<end_of_turn>", "<|eot|>", "<|end|>"],
        }
    )
    return made


@pytest.fixture
def answers(tokenizer):
    """(question -> answer, question -> detail, exit code) of a test template."""

    def answers(name, conversations=(), **options):
        found = audit(
            tokenizer, options=ChatOptions(chat_template=T[name], **options), conversations=conversations
        )
        return (
            {finding.question: finding.answer for finding in found.findings},
            {finding.question: finding.detail for finding in found.findings},
            found.exit_code,
        )

    return answers


@pytest.mark.parametrize(
    ("template", "question", "answer", "detail"),
    [
        ("marked", "generation marks", "yes", ""),
        ("chatml", "generation marks", "no", ""),
        ("marked", "spans found", "yes", "by the template's own"),
        ("chatml", "spans found", "yes", "by where each message is printed"),
        ("chatml", "prefix-stable", "yes", ""),
        ("qwen3", "prefix-stable", "no", "with reasoning"),
        ("chatml", "stop token trained", "yes", "'<|im_end|>' (not '</s>')"),
        ("mistral", "stop token trained", "yes", "'</s>' (the EOS token)"),
        ("gemma", "BOS", "yes", ""),
        ("chatml", "BOS", "no", "prints '<s>' never"),
        ("chatml", "text before the first message", "no", ""),
        ("dated", "text before the first message", "yes", "Today is"),
        ("folds_system", "text before the first message", "yes", "Be good."),
        ("chatml", "today's date printed", "no", ""),
        ("dated", "today's date printed", "yes", "--template-date"),
        ("keeps_reasoning", "earlier reasoning kept", "yes", ""),
        ("qwen3", "earlier reasoning kept", "no", "expand"),
        ("chatml", "earlier reasoning kept", "no", "prints no reasoning"),
        (
            "hermes",
            "tools rendered",
            "schemas, calls (arguments as object), several calls a turn, replies",
            "",
        ),
        (
            "llama",
            "tools rendered",
            "calls (arguments as object), replies",
            "not: schemas, several calls a turn",
        ),
        ("chatml", "tools rendered", "no", ""),
        ("chatml", "system role allowed", "yes", ""),
        ("gemma", "system role allowed", "no", "no system role"),
        ("folds_system", "system role allowed", "yes", "later ones left out: system"),
        ("chatml", "consecutive roles allowed", "yes", ""),
        ("gemma", "consecutive roles allowed", "no", "roles must alternate"),
        ("chatml", "white space trimmed", "no", ""),
        ("gemma", "white space trimmed", "yes", "of users and assistants"),
    ],
)
def test_each_question_is_answered(answers, template, question, answer, detail):
    """Yes, no or what, with the reason."""
    found, details, code = answers(template)
    assert found[question] == answer
    assert detail in details[question]
    assert code == 0


@pytest.mark.parametrize(
    ("template", "question", "detail"),
    [
        ("glm", "spans found", "prints no token that ends"),
        ("glm", "stop token trained", "prints no token that ends"),
        ("headerless", "stop token trained", "prints none"),
        ("gpt_oss", "stop token trained", "ordinary tokens: the template is another tokenizer's"),
    ],
)
def test_where_training_would_be_wrong_the_status_is_1(answers, template, question, detail):
    """No span, no stop token, or a marker that the tokenizer has no token for."""
    found, details, code = answers(template)
    assert found[question] == "no"
    assert detail in details[question]
    assert code == 1


def test_bos_twice_is_wrong(tokenizer):
    """A template that prints BOS twice at the beginning trains on a beginning that no prompt has."""
    found = audit(tokenizer, options=ChatOptions(chat_template="{{ bos_token }}" + T["gemma"]))
    (bos,) = [finding for finding in found.findings if finding.question == "BOS"]
    assert (bos.answer, bos.wrong, found.exit_code) == ("no", True, 1)
    assert "twice" in bos.detail


def test_the_date_is_no_fault_once_it_is_pinned(answers):
    """The audit says to which day."""
    assert answers("dated", template_date="2024-02-29")[1]["today's date printed"] == "pinned to 2024-02-29"


def test_real_conversations_are_counted(answers):
    """How many can be used, why not the others, and what happened to those."""
    said = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    asked = {"role": "user", "content": "a"}
    talks = [
        Conversation(messages=[asked, said]),
        Conversation(messages=[asked, said, asked, said]),
        Conversation(messages=[asked]),
    ]
    found, details, code = answers("qwen3", talks)
    assert found["conversations usable"] == "2 of 3"
    assert details["conversations usable"] == "nothing_to_train: 1, reasoning_dropped_by_template: 1"
    assert code == 0
    assert answers("qwen3", talks[2:])[2] == 1


def test_the_example_shows_what_is_trained(tokenizer):
    """The first usable conversation, or a small one of the audit's own."""
    talk = Conversation(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    for conversations, said in (
        ((), "4.<|im_end|>6.<|im_end|>"),
        ([Conversation(messages=[]), talk], "y<|im_end|>"),
    ):
        example = audit(
            tokenizer, options=ChatOptions(chat_template=T["chatml"]), conversations=conversations
        ).example
        assert tokenizer.decode(example.input_ids[example.labels != IGNORE_INDEX]) == said
    assert audit(tokenizer, options=ChatOptions(chat_template=T["glm"])).example is None


def test_it_prints_and_turns_to_json(tokenizer):
    """A table for people, whose letters leave the terminal alone, and plain JSON for machines."""
    from rich.console import Console

    found = audit(tokenizer, options=ChatOptions(chat_template="\x1b[31m" + T["dated"]))
    out = io.StringIO()
    Console(file=out, width=200).print(found.table())
    assert "stop token trained" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    data = json.loads(json.dumps(found.to_json()))
    assert data["right"] is True
    assert {"question": "generation marks", "answer": "no", "detail": "", "wrong": False} in data["findings"]


def test_what_is_no_template_is_an_error(tokenizer):
    """None at all, or one that does not compile: there is nothing to audit."""
    bare = load_tokenizer(str(TOKENIZER))
    bare.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        audit(bare)
    with pytest.raises(TemplateError, match="does not compile"):
        audit(tokenizer, options=ChatOptions(chat_template="{% for %}"))
    with pytest.raises(OptionError):
        audit(tokenizer, options=ChatOptions(chat_template=T["chatml"], template_args={"messages": 1}))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "template", "code"),
    [
        ("qwen3", None, 0),
        ("qwen3_5", None, 0),
        ("llama3_1", None, 0),
        ("llama3_1", "meta-llama-Llama-3.1-8B-Instruct", 0),
        ("deepseek_v3", "deepseek-ai-DeepSeek-V3.1", 0),
        ("qwen3", "Qwen3-Coder", 0),
        ("qwen3", "GLM-4.6", 1),
        ("qwen3", "google-gemma-2-2b-it", 1),
    ],
)
def test_real_templates(shared, name, template, code):
    """Fitting ones are right; one without an end, and one of another tokenizer, are not."""
    source = (shared / "templates" / f"{template}.jinja").read_text("utf-8") if template else None
    loaded = load_tokenizer(str(shared / "tokenizers" / name))
    assert audit(loaded, options=ChatOptions(chat_template=source)).exit_code == code
