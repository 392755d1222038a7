"""Templates: where each message is printed, what ends and begins a turn, and which are refused."""

import datetime
import re
from pathlib import Path

import jinja2
import pytest

from packing.chat.calibrate import calibrate
from packing.chat.template import ChatTemplate
from packing.errors import OptionError, TemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]
T = {path.stem: path.read_text("utf-8") for path in Path(__file__).with_name("templates").glob("*.jinja")}
LOOP, END = "{% for m in messages %}", "{% endfor %}"


def template(source, **more):
    return ChatTemplate(source, **{"name": "T", "special_tokens": SPECIAL, "arguments": {}, **more})


def learn(source, **more):
    return calibrate(template(source, **more), bos="<s>", special=re.compile("</?s>"))


def placed(render):
    return [(message, render.text[start:end]) for start, end, message in render.pieces]


@pytest.mark.parametrize("name", sorted(T.keys() - {"dated"}))
def test_a_traced_render_is_the_plain_one(name):
    """Asking where messages stand changes no letter of what transformers' own compiled template prints."""
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(T[name])
    for prompted in (False, True):
        render = template(T[name]).render(TALK, add_generation_prompt=prompted)
        assert render.text == compiled.render(
            messages=TALK, tools=None, documents=None, add_generation_prompt=prompted, **SPECIAL
        )
        assert "".join(text for _, text in placed(render)) == render.text


def test_each_message_has_its_place():
    """What is printed while a message is at hand is that message's, what is printed for none is nobody's."""
    assert placed(template(T["phi"]).render(TALK[:2])) == [
        (0, "<|user|>\none<|end|>\n"),
        (1, "<|assistant|>\ntwo<|end|>\n"),
        (-1, "</s>"),
    ]


@pytest.mark.parametrize("source", [T["by_index"], T["by_macro"]])
def test_loops_over_numbers_and_macros_have_places(source):
    """`set m = messages[i]` and a macro that gets the message say as much as a loop variable."""
    assert [message for message, _ in placed(template(source).render(TALK))] == [0, 1, 2, 3]


def test_an_inner_loop_gives_the_message_back():
    """Behind a loop over something else, and over other messages, the outer message is at hand again."""
    source = (
        "{% for m in messages %}a{% for x in [1, 2] %}{{ x }}{% endfor %}b"
        "{% for o in messages %}{% if loop.last and m.role == 'user' %}{{ o.content }}{% endif %}{% endfor %}"
        "c"
        "{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}d"
    )
    assert placed(template(source).render(TALK[:2])) == [
        (0, "a12b"),
        (1, "two"),
        (0, "c"),
        (1, "a12bctwo"),
        (-1, "d"),
    ]


def test_a_look_at_another_message_changes_nothing():
    """`set before = messages[i]` within a loop over messages does not make that one the message at hand."""
    source = "{% for m in messages %}{% set before = messages[loop.index0 - 1] %}{{ m.content }}{% endfor %}"
    assert placed(template(source).render(TALK[:2])) == [(0, "one"), (1, "two")]


def test_an_equal_message_is_not_the_same():
    """Two messages with the same text have two places: identity counts, not equality."""
    talk = [{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]
    assert [message for message, _ in placed(template(T["chatml"]).render(talk))] == [0, 1]


def test_generation_marks_are_where_they_are():
    """A span that ends at the very first token ends there, and not at the end of the text (5.17)."""
    render = template(T["headerless"]).render(
        [{"role": "assistant", "content": "A"}, {"role": "user", "content": "no"}]
    )
    assert render.text == "Ano"
    assert [tuple(mark) for mark in render.marked] == [(0, 1, 0)]


@pytest.mark.parametrize(
    "source",
    [
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
        "{{ x }}{% endfor %}",
    ],
)
def test_marks_in_captured_output_are_refused(source):
    """A mark inside a macro or set block has no known place: transformers' own would be wrong."""
    with pytest.raises(TemplateError, match="inside a macro"):
        template(source)


def test_a_template_that_does_not_compile_is_named():
    """The error says whose template, which line and what."""
    with pytest.raises(TemplateError, match=r"T does not compile: line 2: .*endfor"):
        template("a\n{% for m in messages %}")


@pytest.mark.parametrize("source", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_chance_is_refused(source):
    """A template that can't give the same text twice is no basis for reproducible shards."""
    with pytest.raises(TemplateError, match="no two runs"):
        template(source)


def test_a_pinned_date_is_printed():
    """`strftime_now` tells the pinned date; without one it tells the clock's."""
    assert (
        template(T["dated"], date="2024-02-29").render(TALK).text.startswith("Today is 29 February 2024.\n")
    )
    today = datetime.date.today().strftime("%d %B %Y")
    assert template(T["dated"]).render(TALK).text.startswith(f"Today is {today}")
    assert template(T["dated"]).prints_date
    assert not template(T["chatml"]).prints_date


@pytest.mark.parametrize("date", ["today", "2024-02-30", "29.02.2024", ""])
def test_a_date_that_is_none_is_refused(date):
    """The option's error says what a date looks like."""
    with pytest.raises(OptionError, match="YYYY-MM-DD"):
        template(T["dated"], date=date)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "strftime_now", "chat_template"]
)
def test_reserved_arguments_are_refused(name):
    """No argument takes the place of what the render itself passes."""
    with pytest.raises(OptionError, match=name):
        template(T["chatml"], arguments={name: 1})


def test_arguments_reach_the_template():
    """`--template-arg` values are variables of the template."""
    assert template("{{ style }}", arguments={"style": "brief"}).render(TALK).text == "brief"


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].role.upper()",
        "messages[0].items() | list",
        "messages[0].keys",
        "messages[0].missing is defined",
        "messages[0].content.format",
        "'{0.__class__}'.format(1)",
        "messages.append",
        "messages[0].update is defined",
        "messages[0].__class__",
        "messages[0].content.__class__",
        "ns.set + (ns.unset | default('-'))",
        "ns.__class__",
        "loop.index0 if loop is defined else 'no loop'",
    ],
)
def test_the_quick_lookup_answers_as_the_sandbox_does(expression):
    """Values, missing names, and what the sandbox forbids come out as from transformers' environment."""
    from transformers.utils import chat_template_utils

    source = f"{{% set ns = namespace(set='x') %}}{{{{ {expression} }}}}" + (
        f"{{% for m in messages %}}{{{{ {expression}, loop.index, loop.last, loop.no }}}}{{% endfor %}}"
    )

    def outcome(render):
        try:
            # Addresses in representations differ from run to run.
            return re.sub("0x[0-9a-f]+", "", render())
        except (jinja2.TemplateError, TypeError) as error:
            return type(error), str(error)

    compiled = chat_template_utils._compile_jinja_template(source)
    mine = template(source)
    for _ in range(2):  # the second time, from what the first has learnt
        assert outcome(lambda: mine.render(TALK).text) == outcome(lambda: compiled.render(messages=TALK))


# Calibration


@pytest.mark.parametrize(
    ("source", "start", "end"),
    [
        (T["chatml"], "<|im_start|>assistant\n", "<|im_end|>"),
        (T["marked"], "<|im_start|>assistant\n", "<|im_end|>"),
        (T["gemma"], "<start_of_turn>model\n", "<end_of_turn>"),
        (T["llama"], "<|header|>assistant<|/header|>\n\n", "<|eot|>"),
        (T["mistral"], "", "</s>"),
        (T["phi"], "<|assistant|>\n", "<|end|>"),
        (T["qwen3"], "<|im_start|>assistant\n", "<|im_end|>"),
        (T["qwen35"], "<|im_start|>assistant\n", "<|im_end|>"),
        (T["deepseek"], "<|Assistant|>", "</s>"),
        (T["by_index"], "<|im_start|>assistant\n", "<|im_end|>"),
        (T["by_macro"], "<|im_start|>assistant\n", "<|im_end|>"),
    ],
)
def test_header_and_end_are_learnt(source, start, end):
    """The header is what the generation prompt prints too, without a think tag that only some turns have."""
    found = learn(source)
    assert found.starts["user", False] == start
    assert found.ends["", False] == found.ends["user", False] == ((end, ""),)


def test_the_last_turn_may_end_otherwise():
    """gpt-oss ends its last turn with another token than the others."""
    ends = learn(T["gpt_oss"]).ends
    assert ends["", False] == (("<|return|>", ""),)
    assert ends["user", False] == (("<|end|>", ""),)


@pytest.mark.parametrize(
    ("tail", "marker", "behind"),
    [
        ("<|im_end|>\n", "<|im_end|>", ""),
        ("<|END_RESPONSE|><|END_OF_TURN|>", "<|END_RESPONSE|><|END_OF_TURN|>", ""),
        ("</s>\n\nFeedback: good\n", "</s>", "\n\nFeedback: good"),
        ("<|im_end|>\n<|im_start|>user\n", "<|im_end|>", "\n<|im_start|>user"),
        ("\n### End </s>", "\n### End </s>", ""),
        ("</s><s>", "</s>", ""),
    ],
)
def test_only_the_marker_is_the_end(tail, marker, behind):
    """What the template prints behind the token that stops is known, and not trained."""
    source = T["chatml"].replace(
        "'<|im_end|>\\n'", f"({tail!r} if m.role == 'assistant' else '<|im_end|>\\n')"
    )
    assert learn(source).ends["user", False] == ((marker, behind),)


def test_the_dialect_is_learnt():
    """Fields and forms that a template takes: reasoning, think tags, arguments, calls, tools."""
    hermes, qwen, deepseek, gptoss = (
        learn(s) for s in (T["hermes"], T["qwen3"], T["deepseek"], T["gpt_oss"])
    )
    calls = {"tools", "tool_calls", "parallel_calls", "text_beside_calls", "tool_replies"}
    assert hermes.renders == {"system", *calls}
    assert (hermes.dialect.reasoning, hermes.dialect.think_tags) == (False, False)
    assert qwen.dialect.reasoning
    assert {"reasoning"} == qwen.renders & {"reasoning", "earlier_reasoning"}
    assert (deepseek.dialect.arguments, deepseek.dialect.think_tags) == ("text", True)
    assert "system" not in deepseek.renders
    assert gptoss.dialect.aliases == ("thinking",)
    assert "tool_calls" not in gptoss.renders


REFUSED = {
    "no end": (T["glm"], "prints no token that ends a turn"),
    "no end but a full stop": (
        LOOP
        + "{{ m.role + ': ' + m.content + '.\\n' }}"
        + END
        + "{% if add_generation_prompt %}assistant: {% endif %}",
        "prints no token that ends a turn",
    ),
    "no end of the last turn": (
        T["chatml"].replace(
            "'<|im_end|>\\n'", "('' if loop.last and m.role == 'assistant' else '<|im_end|>\\n')"
        ),
        "no token that ends the last turn",
    ),
    "no generation prompt": (T["chatml"].split("{% if add_gen")[0], "said or given is unknown"),
    "another generation prompt": (
        T["chatml"].replace("'<|im_start|>assistant\\n'", "'<|bot|>Sure: '"),
        "its generation prompt is '<|bot|>Sure: '",
    ),
    "a longer generation prompt": (
        T["chatml"].replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\nSure: '"),
        "its generation prompt is",
    ),
    "turns are numbered": (
        LOOP
        + "{{ 'Turn ' + loop.index | string + ' ' + m.role + ':' + m.content + '</s>' }}"
        + END
        + "{% if add_generation_prompt %}Turn {{ messages | length + 1 }} assistant:{% endif %}",
        "its generation prompt is",
    ),
    "the question within the answer": (
        LOOP
        + "{% if m.role == 'assistant' %}{{ messages[loop.index0 - 1].content + '|' + m.content + '</s>' }}"
        "{% else %}{{ m.content }}{% endif %}" + END,
        "another message's text within the assistant's turn",
    ),
    "all at once": (
        "{% set ns = namespace(text='') %}"
        + LOOP
        + "{% set ns.text = ns.text + m.content + '</s>' %}"
        + END
        + "{{ ns.text }}",
        "each turn at its own place",
    ),
    "one message late": (
        "{% set ns = namespace(late='') %}"
        + LOOP
        + "{{ ns.late }}{% set ns.late = m.role + m.content + '</s>' %}"
        + END
        + "{{ ns.late }}",
        "each turn at its own place",
    ),
    "content parts alone": (
        LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}</s>" + END,
        "each turn at its own place",
    ),
    "no assistant": (LOOP + "{% if m.role == 'user' %}{{ m.content }}</s>{% endif %}" + END, "own place"),
    "backwards": (
        T["chatml"].replace("in messages", "in messages[::-1]", 1),
        "each turn at its own place",
    ),
    "it raises": ("{{ raise_exception('never') }}", "own place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_certain_is_refused(name):
    """A template on which training would be wrong is named with the reason, when it is learnt."""
    source, why = REFUSED[name]
    with pytest.raises(TemplateError, match=re.escape(why)) as caught:
        learn(source)
    assert "T" in str(caught.value)
    assert any(way in str(caught.value) for way in ("--chat-template", "{% generation %}"))


def test_an_end_that_the_next_message_prints_is_the_end():
    """A marker in the next message's place, and behind the last, ends the turn all the same."""
    source = (
        LOOP
        + "{% if not loop.first %}{{ '</s>' }}{% endif %}{{ '[' + m.role + ']' + m.content }}"
        + END
        + "</s>"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = learn(source)
    assert found.overhang
    assert found.ends["", False] == (("</s>", ""),)


def test_a_tag_that_closes_a_call_ends_no_turn():
    """A template that forgets the end token behind a call: </tool_call> would not stop the model."""
    forgetful = T["hermes"].replace(
        "{{- '<|im_end|>\\n' }}", "{{- '' if m.tool_calls else '<|im_end|>\\n' }}"
    )
    found = learn(forgetful)
    assert ("", False) in found.ends
    assert ("", True) not in found.ends
    early = forgetful.replace("{{- '<tool_call>' +", "{{- '</s><tool_call>' +")
    assert early != forgetful
    assert ("", True) not in learn(early).ends
    closed = learn(
        T["hermes"].replace("{{- '<|im_end|>\\n' }}", "{{- '</s>' if m.tool_calls else '<|im_end|>\\n' }}")
    )
    assert closed.ends["", True] == (("</s>", ""),)


def test_markers_are_tags_or_whole_headers():
    """What a conversation must not spell: tags around messages, or the words where there are no tags."""
    assert learn(T["gemma"]).markers == {"<start_of_turn>", "<end_of_turn>"}
    worded = LOOP + "{{ m.role + ':' + m.content + '</s>' }}" + END
    worded += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert learn(worded).markers == {"system:", "user:", "assistant:", "</s>"}
    assert "<think>" not in learn(T["keeps_reasoning"]).markers


def test_a_think_tag_of_some_turns_is_no_header():
    """Where only turns behind a tool have the prompt's think tag, the header of all ends before it."""
    source = (
        T["qwen3"]
        .replace("(loop.last or thought)", "loop.previtem.role == 'tool'")
        .replace(
            "{{ '<|im_start|>assistant\\n' }}{% endif %}",
            "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
        )
    )
    assert set(learn(source).starts.values()) == {"<|im_start|>assistant\n"}


def test_turns_that_begin_in_two_ways_are_refused():
    """Without a prompt behind tools, a header that only some of the turns there have would be trained."""
    source = (
        "{% for m in messages %}"
        "{% if m.role != 'assistant' %}{{ '[' + m.role + ']' + m.content }}"
        "{% else %}{% set before = loop.previtem %}"
        "{% if not (before and before.role == 'tool' and loop.index0 < 4) %}[assistant]{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<c>' + c.function | tojson + '</c>' }}"
        "{% endfor %}"
        "</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}[assistant]{% endif %}"
    )
    found = learn(source)
    assert found.starts["user", False] == "[assistant]"
    assert ("tool", False) not in found.starts
    assert "in more than one way" in found.why_not["tool", False]


def test_arguments_that_would_be_quoted_twice_are_no_dialect():
    """A template that refuses objects and writes text as JSON once more takes no calls at all."""
    source = T["hermes"].replace(
        "({'name': call.function.name,",
        "({'name': raise_exception('text!') if call.function.arguments is mapping else call.function.name,",
    )
    assert "tool_calls" not in learn(source).renders
    assert "tool_calls" in learn(T["deepseek"]).renders


def test_reasoning_goes_by_the_names_that_the_template_reads():
    """`thinking` and `reasoning` are filled where the template reads them, and nowhere else."""
    source = T["gpt_oss"].replace("m.thinking", "m.reasoning")
    assert learn(source).dialect.aliases == ("reasoning",)
    assert learn(T["qwen3"]).dialect.aliases == ()


def test_a_prompt_printed_within_the_loop_is_known_behind_a_system_text():
    """Granite prints its prompt within the loop, which a system text alone does not enter."""
    source = (
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% if rest is not sameas messages %}{{ '[system]' + messages[0].content + '</s>' }}{% endif %}"
        "{% for m in rest %}{{ '[' + m.role + ']' + m.content + '</s>' }}"
        "{% if loop.last and add_generation_prompt %}[assistant]{% endif %}{% endfor %}"
    )
    assert learn(source).starts["system", False] == "[assistant]"
