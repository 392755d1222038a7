"""The command: what it prints, how it exits, and that no user ever sees a traceback."""

import contextlib
import gzip
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packing import cli
from packing.atomic import new_file
from packing.buffer import build_buffer
from packing.example import make_example
from packing.pipeline import PackOptions, pack_dataset, pool
from packing.sample import CHATS, TOKENIZER
from packing.shards import ShardWriter, open_shards

COMMAND = [sys.executable, "-c", "import sys; from packing.cli import main; sys.exit(main())"]


@pytest.fixture
def padfree(capsys):
    """Runs the command in this process: (exit status, stdout, stderr)."""

    def run(*words):
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            status = cli.main([str(word) for word in words])
            return status, *capsys.readouterr()
        pytest.fail("the command left by SystemExit")

    return run


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A shard set of the sample with one rejected row and an eval part; tests only read it."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "chats.jsonl").write_text(CHATS.read_text("utf-8") + "no JSON\n", "utf-8")
    pack_dataset(
        [str(folder / "chats.jsonl")],
        tokenizer=str(TOKENIZER),
        out=folder / "out",
        options=PackOptions(capacity=1024, eval_fraction=0.1),
    )
    return folder / "out"


def pack_words(file, out, *more):
    return ("pack", file, "--tokenizer", TOKENIZER, "--out", out, *more)


def is_one_line(err):
    return err.startswith("padfree: ") and err.count("\n") == 1 and err.endswith("\n")


GOOD = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})


# The way from chats to shards and back


def test_pack_prints_where_every_row_went(padfree, tmp_path):
    """The table has rows, tokens, trained tokens, reasons, buffers, fill rate and speed; the exit is 0."""
    (tmp_path / "chats.jsonl").write_text(f"{GOOD}\n" * 19 + "{\n\n\n", "utf-8")
    status, out, err = padfree(*pack_words(tmp_path / "chats.jsonl", tmp_path / "out", "--capacity", 64))
    assert (status, err) == (0, "")
    for words in (
        ["in", "20"],
        ["packed", "19"],
        ["rejected:", "bad_json", "1"],
        ["buffers", "64 tokens"],
        ["fill rate", "%"],
        ["a buffer"],
        ["passed over", "blank_lines: 2 lines"],
        ["tokens/s"],
        ["encoder", "tokenizers", "19 by tokenizers"],
        ["rejects.jsonl"],
    ):
        assert any(all(word in line for word in words) for line in out.splitlines()), words


def test_json_is_one_object_and_nothing_else(padfree, tmp_path, packed):
    """pack, its dry run, stats and verify print one JSON object on stdout, and nothing on stderr."""
    for words in (
        pack_words(CHATS, tmp_path / "out", "--json", "--workers", 2),
        ("pack", CHATS, "--tokenizer", TOKENIZER, "--dry-run", 5, "--json"),
        ("stats", packed, "--json"),
        ("verify", packed, "--json"),
    ):
        status, out, err = padfree(*words)
        assert (status, err) == (0, "")
        assert isinstance(json.loads(out), dict)


def test_stats_agree_with_pack(padfree, tmp_path):
    """What stats reads from the files is what pack reported when it wrote them."""
    _, out, _ = padfree(*pack_words(CHATS, tmp_path / "out", "--eval-fraction", 0.2, "--json"))
    packed = json.loads(out)
    _, out, _ = padfree("stats", tmp_path / "out", "--json")
    found = json.loads(out)
    assert found["accounting"] == packed["accounting"]
    for part in ("main", "eval"):
        assert {name: found[part][name] for name in packed[part]} == packed[part]


def test_stats_show_lengths(padfree, packed):
    """The spread of tokens an example and of examples a buffer is in the table."""
    status, out, _ = padfree("stats", packed)
    assert status == 0
    lengths = open_shards(packed).seq_lengths
    assert f"max {lengths.max()}" in out


def test_options_reach_the_tokens(padfree, tmp_path):
    """Flags of every kind end in the manifest: choices, pairs, JSON values, dates, files."""
    (tmp_path / "own.jinja").write_text(
        "{% set same = flag == word %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "rows.jsonl").write_text(GOOD.replace("messages", "dialog") + "\n", "utf-8")
    status, _, err = padfree(
        *pack_words(tmp_path / "rows.jsonl", tmp_path / "out"),
        *("--column", "messages=dialog", "--train-on", "last", "--turns", "expand", "--overflow", "truncate"),
        *("--template-arg", "flag=false", "--template-arg", "word=yes", "--template-date", "2024-07-26"),
        *(
            "--chat-template",
            tmp_path / "own.jinja",
            "--trailing-user",
            "reject",
            "--control-tokens",
            "allow",
        ),
        *("--algorithm", "next_fit", "--seed", 7),
    )
    assert (status, err) == (0, "")
    fingerprint = open_shards(tmp_path / "out").manifest["fingerprint"]
    assert fingerprint["chat"]["template_args"] == {"flag": False, "word": "yes"}
    assert fingerprint["chat"]["template_date"] == "2024-07-26"
    assert fingerprint["chat"]["chat_template"] == [(tmp_path / "own.jinja").read_text()]
    assert (fingerprint["chat"]["train_on"], fingerprint["chat"]["turns"]) == ("last", "expand")
    assert fingerprint["chat"]["control_tokens"] == "allow"
    assert fingerprint["formats"]["columns"] == {"messages": "dialog"}
    assert fingerprint["formats"]["trailing_user"] == "reject"
    assert (fingerprint["overflow"], fingerprint["algorithm"], fingerprint["seed"]) == (
        "truncate",
        "next_fit",
        7,
    )


def test_unpack_and_pack_are_inverse(padfree, tmp_path, packed):
    """The examples come out in input order with their origin, and packing them gives the same ones again."""
    status, _, err = padfree("unpack", packed, "--out", tmp_path / "examples.jsonl")
    assert (status, err) == (0, "")
    lines = [json.loads(line) for line in (tmp_path / "examples.jsonl").read_text().splitlines()]
    before = open_shards(packed)
    assert [line["example"] for line in lines] == list(range(len(before.seq_lengths)))
    assert {line["input"] for line in lines} == {"chats.jsonl"}
    assert padfree(*pack_words(tmp_path / "examples.jsonl", tmp_path / "again", "--capacity", 2000))[0] == 0
    after = open_shards(tmp_path / "again")
    assert len(after.seq_lengths) == len(lines)
    assert all(
        after.example(n).labels.tolist() == before.example(n).labels.tolist() for n in range(len(lines))
    )


def test_two_unpack_to_one_file_do_not_mix(padfree, tmp_path, packed):
    """While one writes, another is refused and leaves it alone; what stands there in the end is whole."""
    target = tmp_path / "examples.jsonl"
    with new_file(target, force=False) as file:
        file.write(b"first\n")
        status, _, err = padfree("unpack", packed, "--out", target)
        assert (status, is_one_line(err)) == (2, True)
        assert "another process is writing" in err
    assert target.read_bytes() == b"first\n"
    assert os.listdir(tmp_path) == [target.name]


def test_unpack_names_what_can_be_no_file(padfree, tmp_path, packed):
    """A folder that is missing, or stands where the file should: one line, and nothing is made."""
    (tmp_path / "folder").mkdir()
    for place, says in ("no/x", "no such directory"), ("folder", "is a folder"):
        status, _, err = padfree("unpack", packed, "--out", tmp_path / place, "--force")
        assert (status, is_one_line(err)) == (2, True)
        assert says in err
    assert os.listdir(tmp_path) == ["folder"]


def test_unpack_keeps_a_file_that_exists(padfree, tmp_path, packed):
    """It is an error without --force."""
    (tmp_path / "examples.jsonl").write_text("mine")
    status, out, err = padfree("unpack", packed, "--out", tmp_path / "examples.jsonl")
    assert (status, out) == (2, "")
    assert is_one_line(err)
    assert (tmp_path / "examples.jsonl").read_text() == "mine"
    assert padfree("unpack", packed, "--out", tmp_path / "examples.jsonl", "--force")[0] == 0


def test_a_dry_run_shows_and_writes_nothing(padfree, tmp_path, monkeypatch):
    """Counts, rejected rows with their reason, and the trained text of the first example."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(f'{{"messages": []}}\n{GOOD}\n{GOOD}\n')
    status, out, err = padfree(
        "pack", "rows.jsonl", "--tokenizer", TOKENIZER, "--dry-run", 2, "--max-rejects", 0.5
    )
    assert (status, err) == (0, "")
    assert "rows.jsonl:1 empty_conversation" in out
    assert "⟦a<|im_end|>⟧" in out
    assert os.listdir() == ["rows.jsonl"]


STAGES = ["start", "read", "normalise", "render", "tokenize", "mask", "checks", "plan", "write"]


def test_bench_shows_every_stage(padfree):
    """The seconds of all stages add up to the run's, each has its share, and nothing stays behind."""
    status, out, err = padfree("bench", CHATS, "--tokenizer", TOKENIZER)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.endswith("%")]
    assert [row[0] for row in rows] == STAGES
    assert abs(sum(float(row[-1][:-1]) for row in rows) - 100) < 1
    assert "tokens/s in one process" in out
    assert "the limit: " in out


def test_bench_gives_figures(padfree):
    """As JSON: every stage took some time, the limit is the longest, and the rows and tokens are pack's."""
    status, out, _ = padfree("bench", CHATS, "--tokenizer", TOKENIZER, "--json")
    found = json.loads(out)
    assert status == 0
    assert list(found["seconds"]) == list(found["share"]) == STAGES
    assert min(found["seconds"].values()) > 0
    assert found["limit"] == max(found["seconds"], key=found["seconds"].get)
    assert sum(found["seconds"].values()) == pytest.approx(found["total"], rel=0.02)
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["total"])
    assert 0 < found["shared"] < 1
    assert found["encoder"]["examples"]


def test_bench_takes_no_compiler_for_a_stage():
    """Before the clock runs, numba is imported and the algorithm that will plan is compiled."""
    code = """
import sys
from packing import cli, pipeline
def looked(*_, **__):
    bins = sys.modules.get("packing.bins")
    print(bool(bins and bins._best_fit.signatures))
    raise KeyboardInterrupt
pipeline.pack_dataset = looked
cli.main(["bench", *sys.argv[1:]])
"""
    command = [sys.executable, "-c", code, str(CHATS), "--tokenizer", str(TOKENIZER)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


def test_template_says_whether_training_is_right(padfree, tmp_path):
    """The audit is a table with the trained text of a conversation, or JSON; exit 1 where it is wrong."""
    status, out, err = padfree("template", TOKENIZER)
    assert (status, err) == (0, "")
    assert "generation marks" in out
    assert "⟦4.<|im_end|>⟧" in out
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n{{\n{GOOD}\n")
    status, out, _ = padfree("template", TOKENIZER, "--data", tmp_path / "rows.jsonl")
    assert status == 0
    assert "2 of 3" in out
    assert "bad_json: 1" in out
    assert "⟦a<|im_end|>⟧" in out
    status, out, _ = padfree("template", TOKENIZER, "--json")
    assert json.loads(out)["right"] is True
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    status, out, _ = padfree("template", TOKENIZER, "--chat-template", tmp_path / "own.jinja", "--json")
    assert status == 1
    assert json.loads(out)["right"] is False


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        (f'{GOOD}\n{{\n\xff\n{{"messages": []}}\n', 0, ("1 of 4", "bad_json: 1", "bad_encoding: 1", "empty")),
        ("{\n3\n", 1, ("0 of 2", "bad_json: 1", "bad_record: 1")),
        ("\n", 2, ("there are no rows in rows.jsonl",)),
    ],
)
def test_template_counts_every_row_of_one_s_own(padfree, tmp_path, monkeypatch, rows, status, said):
    """Rows that are no conversation are counted by reason with those that the template refuses."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(rows, "latin-1")
    found, out, err = padfree("template", TOKENIZER, "--data", "rows.jsonl")
    assert found == status
    assert all(words in out + err for words in said), out


def test_shards_of_another_writer_can_be_looked_at(padfree, tmp_path):
    """A set that somebody made with ShardWriter has neither our accounts nor our origins: no error."""
    buffer = build_buffer([make_example([5, 6, 7], trained=[0, 1, 1]), make_example([8, 9], trained=[0, 1])])
    with ShardWriter(tmp_path / "out", capacity=8, fingerprint={"mine": 1}) as writer:
        writer.write(buffer)
        writer.finish({"all": 2})
    status, out, err = padfree("stats", tmp_path / "out")
    assert (status, err) == (0, "")
    assert "62.50%" in out
    status, out, err = padfree("inspect", tmp_path / "out", "--tokenizer", TOKENIZER, "--buffer", 0)
    assert (status, err) == (0, "")
    assert "example 1 · 2 tokens, 1 trained" in out
    status, out, err = padfree("inspect", tmp_path / "out")
    assert status == 2
    assert "give it as --tokenizer" in err


# What a person looks at


def test_inspect_marks_exactly_the_trained_text(padfree, packed):
    """Without colour, what stands between the marks is what the labels train, for every example."""
    from packing.chat import load_tokenizer

    tokenizer = load_tokenizer(str(TOKENIZER))
    shards = open_shards(packed)
    for number in range(0, len(shards.seq_lengths), 60):
        status, out, _ = padfree("inspect", packed, "--example", number)
        assert status == 0
        labels = shards.example(number).labels
        text = out.split("──")[-1]
        marked = "".join(piece.split("⟧")[0] for piece in text.split("⟦")[1:])
        assert marked == tokenizer.decode(labels[labels >= 0])


def test_inspect_shows_the_ids(padfree, packed):
    """With --ids the line below an example's text is its token ids, the trained ones between the marks."""
    example = open_shards(packed).example(100)
    _, plain, _ = padfree("inspect", packed, "--example", 100)
    status, out, _ = padfree("inspect", packed, "--example", 100, "--ids")
    assert status == 0
    assert out.startswith(plain)
    line = out.removeprefix(plain).strip()
    assert line.replace("⟦", "").replace("⟧", "") == " ".join(map(str, example.input_ids.tolist()))
    trained = [int(word) for part in line.split("⟦")[1:] for word in part.split("⟧")[0].split()]
    assert trained == [label for label in example.labels.tolist() if label >= 0]
    _, out, _ = padfree("inspect", packed, "--buffer", 3, "--ids")
    for number in open_shards(packed)[3].example_ids.tolist():
        ids = open_shards(packed).example(number).input_ids
        assert " ".join(map(str, ids.tolist())) in out.replace("⟦", "").replace("⟧", "")


def test_inspect_names_the_source_line(padfree, packed):
    """The line that an example is said to be from holds its text."""
    lines = (packed.parent / "chats.jsonl").read_text("utf-8").splitlines()
    for number in (0, 100, 300):
        _, out, _ = padfree("inspect", packed, "--example", number)
        place = out.split("chats.jsonl:")[1].split(" ")[0]
        for message in json.loads(lines[int(place) - 1])["messages"]:
            assert message["content"] in out.replace("⟦", "").replace("⟧", "")


def test_inspect_a_buffer_shows_its_examples(padfree, packed):
    """Each example of the buffer has its line in the layout and its text below."""
    buffer = open_shards(packed)[3]
    _, out, _ = padfree("inspect", packed, "--buffer", 3)
    for number in buffer.example_ids.tolist():
        assert out.count(f"example {number} ·") == 2


def test_inspect_in_colour(packed):
    """On a terminal the trained text is coloured and has no marks."""
    from rich.console import Console

    from packing import report
    from packing.chat import load_tokenizer

    console = Console(force_terminal=True, color_system="standard", width=500)
    tokenizer = load_tokenizer(str(TOKENIZER))
    with console.capture() as capture:
        console.print(report.marked(open_shards(packed).example(0), tokenizer=tokenizer, colour=True))
    assert "\x1b[1;32m" in capture.get()
    assert "⟦" not in capture.get()


def test_text_can_not_steer_the_terminal():
    """Escape sequences in somebody's data are shown, never sent."""
    from packing.report import visible

    assert visible("a\x1b[2Jb\tc\nd\x7f\x9b\u202e") == "a␛[2Jb\tc\nd␡\ufffd\ufffd"
    assert visible("👩\u200d👧 עברית") == "👩\u200d👧 עברית"


@pytest.mark.parametrize("option", ["--buffer", "--example"])
@pytest.mark.parametrize("number", ["-1", "99999999"])
def test_inspect_a_number_that_is_not_there(padfree, packed, option, number):
    """It is one line that says so."""
    status, out, err = padfree("inspect", packed, f"{option}={number}")
    assert (status, out) == (2, "") or (status == 2 and "trained" in out)
    assert is_one_line(err)


def test_inspect_refuses_another_tokenizer(padfree, packed, tmp_path):
    """Text decoded with other tokens would be nonsense, so it is an error."""
    other = copy_tokenizer(tmp_path / "other")
    state = json.loads((other / "tokenizer.json").read_text("utf-8"))
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "never"
    (other / "tokenizer.json").write_text(json.dumps(state), "utf-8")
    status, _, err = padfree("inspect", packed, "--tokenizer", other)
    assert status == 2
    assert is_one_line(err)
    assert "not the tokenizer" in err


def test_inspect_says_how_to_name_a_tokenizer_that_moved(padfree, tmp_path):
    """The path in run.json leads nowhere any more: the line names it and the option."""
    before = copy_tokenizer(tmp_path / "before")
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n")
    pack_dataset(
        [str(tmp_path / "rows.jsonl")],
        tokenizer=str(before),
        out=tmp_path / "out",
        options=PackOptions(capacity=64),
    )
    before.rename(tmp_path / "after")
    status, _, err = padfree("inspect", tmp_path / "out")
    assert status == 2
    assert is_one_line(err)
    assert f"{before}: no such folder" in err
    assert "give where it lies now with --tokenizer" in err
    assert padfree("inspect", tmp_path / "out", "--tokenizer", tmp_path / "after")[0] == 0


def copy_tokenizer(folder, **changes):
    folder.mkdir()
    for file in TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    return folder


# Bad input

BAD_ROWS = {
    "an unreadable line": (GOOD.encode().replace(b"q", b"\xff"), "bad_encoding"),
    "no JSON": (b"{", "bad_json"),
    "a missing column": (b'{"dialog_of_mine": []}', "bad_record"),
    "an empty conversation": (b'{"messages": []}', "empty_conversation"),
    "a lone surrogate": (GOOD.replace('"q"', '"\\ud83d"').encode(), "lone_surrogate"),
    "longer than the buffer": (GOOD.replace('"q"', f'"{"long " * 200}"').encode(), "too_long"),
    "nothing to train": (b'{"messages": [{"role": "user", "content": "q"}]}', "nothing_to_train"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_rejected_and_the_run_goes_on(padfree, tmp_path, kind):
    """Among good rows it costs one line in rejects.jsonl, with file, line and reason."""
    raw, reason = BAD_ROWS[kind]
    (tmp_path / "rows.jsonl").write_bytes(f"{GOOD}\n".encode() * 20 + raw + b"\n" + f"{GOOD}\n".encode() * 20)
    status, _, err = padfree(*pack_words(tmp_path / "rows.jsonl", tmp_path / "out", "--capacity", 100))
    assert (status, err) == (0, "")
    (reject,) = open_shards(tmp_path / "out").rejects()
    assert (reject["input"], reject["line"], reject["reason"]) == ("rows.jsonl", 21, reason)


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_too_many_bad_rows_stop_the_run(padfree, tmp_path, kind):
    """Past --max-rejects it is one line with counts and the first row, exit 2, and nothing is left."""
    raw, reason = BAD_ROWS[kind]
    (tmp_path / "rows.jsonl").write_bytes(raw + b"\n" + f"{GOOD}\n".encode() * 3)
    status, out, err = padfree(*pack_words(tmp_path / "rows.jsonl", tmp_path / "out", "--capacity", 100))
    assert (status, out) == (2, "")
    assert is_one_line(err)
    assert "1 of 4 rows" in err
    assert f"rows.jsonl:1 {reason}" in err
    assert os.listdir(tmp_path) == ["rows.jsonl"]


@pytest.mark.parametrize(("good", "allowed"), [(3, 0.1), (0, 1)], ids=["too many", "all"])
@pytest.mark.parametrize("verb", ["pack", "bench"])
def test_too_many_bad_rows_name_a_command_that_shows_them(padfree, tmp_path, verb, good, allowed):
    """The line ends in a command that can be pasted, with the run's own options; it lists them all."""
    rows = tmp_path / "my rows.jsonl"
    rows.write_text(f"{GOOD}\n" * good + "{\n" * 6, "utf-8")
    more = ("--out", tmp_path / "out") if verb == "pack" else ()
    words = (rows, "--tokenizer", TOKENIZER, "--capacity", 64, "--max-rejects", allowed, *more)
    status, _, err = padfree(verb, *words)
    assert status == 2
    assert is_one_line(err)
    command = shlex.split(err.partition("see more with: ")[2].removesuffix(" (--json has all)\n"))
    assert command[:2] == ["padfree", "pack"]
    assert command[-2:] == ["--dry-run", str(good + 6)]
    refusal = err.partition("; see more with: ")[0]
    status, out, err = padfree(*command[1:])
    assert (status, err.strip()) == (2, refusal)
    assert out.count("rows.jsonl:") == 6
    assert "64 tokens" in out
    assert len(json.loads(padfree(*command[1:], "--json")[1])["rejects"]) == 6


@pytest.mark.parametrize("force", [False, True])
def test_a_dry_run_refuses_what_the_run_would(padfree, tmp_path, force):
    """What stops pack, an output that may not be replaced or rows: its line and exit."""
    (tmp_path / "there").mkdir()
    files = {"some": f"{GOOD}\n{{\n", "all": "{\n", "none": "\n", "good": f"{GOOD}\n"}
    for name, rows in files.items():
        (tmp_path / name).write_text(rows)
        words = pack_words(tmp_path / name, tmp_path / ("there" if name == "good" else "out"))
        words = (*words, "--max-rejects", 1 if name == "all" else 0.1, *(["--force"] if force else []))
        status, _, err = padfree(*words)
        assert status == 2
        found, _, said = padfree(*words, "--dry-run", 5)
        assert (found, said.strip()) == (status, err.partition("; see more with: ")[0].strip()), name
    (tmp_path / "three").write_text("".join(GOOD.replace('"q"', f'"{n}"') + "\n" for n in range(3)))
    for options in (("--eval-fraction", 1e-9), ("--eval-fraction", 1 - 1e-9), ("--workers", 0)):
        words = pack_words(tmp_path / "three", tmp_path / "new", *options)
        status, _, err = padfree(*words)
        assert status == 2
        found, _, said = padfree(*words, "--dry-run", 5)
        assert (found, said) == (status, err), options
        assert padfree(*words, "--dry-run", 3)[0] == 2
        if "--workers" not in options:  # of the first two rows none may be held out, and of others some
            assert padfree(*words, "--dry-run", 2)[0] == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    words = pack_words(tmp_path / "good", tmp_path / "out", "--dry-run", 5)
    assert padfree(*words)[0] == 2
    assert padfree(*words, "--force")[0] == 0


def test_pack_says_what_it_counts(padfree, tmp_path):
    """The time leaves out the loading, and the encoder also saw what was too long: both are said."""
    long = GOOD.replace('"q"', f'"{"long " * 200}"')
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n" * 19 + long + "\n", "utf-8")
    _, out, _ = padfree(*pack_words(tmp_path / "rows.jsonl", tmp_path / "out", "--capacity", 64))
    assert "later rejects included: 20 by tokenizers" in out
    assert "s without loading libraries and tokenizer" in out


def bad_inputs(folder):
    """Name -> the words of a command that can't work, and what its line has to say."""
    good = folder / "good.jsonl"
    good.write_text(GOOD + "\n")
    out = folder / "out"
    (folder / "there").mkdir()
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(f"{GOOD}\n".encode() * 5000)[:-30])
    (folder / "data.json").write_text("this is no JSON")
    (folder / "empty.jsonl").write_text("")
    (folder / "lfs.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    untaught = copy_tokenizer(folder / "untaught", chat_template=None)
    broken = copy_tokenizer(folder / "broken")
    (broken / "tokenizer.json").write_text("{")
    (folder / "latin.jinja").write_bytes(b"\xe9")
    return {
        "capacity 0": (pack_words(good, out, "--capacity", 0), "capacity of 0"),
        "capacity no number": (pack_words(good, out, "--capacity", "8k"), "--capacity"),
        "output exists": (pack_words(good, folder / "there"), "exists"),
        "output exists, no shard set": (pack_words(good, folder / "there", "--force"), "no shard set"),
        "no output": (("pack", good, "--tokenizer", TOKENIZER), "--out"),
        "no tokenizer": (("pack", good, "--out", out), "--tokenizer"),
        "no template": (
            (*pack_words(good, out)[:2], "--tokenizer", untaught, "--out", out),
            "--chat-template",
        ),
        "broken tokenizer": ((*pack_words(good, out)[:2], "--tokenizer", broken, "--out", out), "broken"),
        "wrong tokenizer path": (
            (*pack_words(good, out)[:2], "--tokenizer", folder / "no", "--out", out),
            "no",
        ),
        "missing file": (pack_words(folder / "missing.jsonl", out), "missing.jsonl"),
        "file that is no JSON": (pack_words(folder / "data.json", out), "data.json"),
        "empty file": (pack_words(folder / "empty.jsonl", out), "empty"),
        "cut archive": (pack_words(folder / "cut.jsonl.gz", out), "cut.jsonl.gz"),
        "pointer": (pack_words(folder / "lfs.parquet", out), "LFS"),
        "unknown option": (pack_words(good, out, "--packign"), "--packign"),
        "shortened option": (pack_words(good, out, "--cap", 5), "--cap"),
        "unknown choice": (pack_words(good, out, "--overflow", "cut"), "overflow"),
        "bad pair": (pack_words(good, out, "--column", "messages"), "NAME=VALUE"),
        "unknown column": (pack_words(good, out, "--column", "mesages=x"), "mesages"),
        "missing template file": (pack_words(good, out, "--chat-template", folder / "no.jinja"), "no.jinja"),
        "template file in Latin-1": (
            pack_words(good, out, "--chat-template", folder / "latin.jinja"),
            "latin.jinja",
        ),
        "bad date": (pack_words(good, out, "--template-date", "yesterday"), "yesterday"),
        "bad seed": (pack_words(good, out, "--seed", -1), "seed"),
        "bad fraction": (pack_words(good, out, "--eval-fraction", 1), "fraction"),
        "no workers": (pack_words(good, out, "--workers", 0), "workers"),
        "dry run of nothing": (("pack", good, "--tokenizer", TOKENIZER, "--dry-run", 0), "0"),
        "output below a file": (pack_words(good, good / "out"), "good.jsonl"),
        "unknown verb": (("pakc",), "pakc"),
        "stats of nothing": (("stats", folder / "no"), "no such directory"),
        "stats of no shard set": (("stats", folder / "there"), "manifest.json"),
        "verify nothing": (("verify", folder / "no"), "no such directory"),
        "unpack nothing": (("unpack", folder / "no", "--out", out), "no such directory"),
        "unpack to nowhere": (("unpack", folder / "no"), "--out"),
        "inspect nothing": (("inspect", folder / "no"), "no such directory"),
        "both": (("inspect", folder / "no", "--buffer", 1, "--example", 1), "not allowed"),
    }


BAD_INPUTS = [
    "capacity 0", "capacity no number", "output exists", "output exists, no shard set", "no output",
    "no tokenizer", "no template", "broken tokenizer", "wrong tokenizer path", "missing file",
    "file that is no JSON", "empty file", "cut archive", "pointer", "unknown option", "shortened option",
    "unknown choice", "bad pair", "unknown column", "missing template file", "template file in Latin-1",
    "bad date", "bad seed", "bad fraction", "no workers", "dry run of nothing", "output below a file",
    "unknown verb", "stats of nothing", "stats of no shard set", "verify nothing", "unpack nothing",
    "unpack to nowhere", "inspect nothing", "both",
]  # fmt: skip


@pytest.mark.parametrize("kind", BAD_INPUTS)
def test_bad_input_is_one_line_and_exit_2(padfree, tmp_path, kind):
    """What a user can cause costs one line on stderr, nothing on stdout, and nothing is left behind."""
    inputs = bad_inputs(tmp_path)
    assert sorted(inputs) == sorted(BAD_INPUTS)
    before = sorted(os.listdir(tmp_path))
    words, says = inputs[kind]
    status, out, err = padfree(*words)
    assert (status, out) == (2, "")
    assert is_one_line(err), err
    assert says in err
    assert sorted(os.listdir(tmp_path)) == before


def damage(kind, folder):
    """Damages a shard set; returns the file that a message has to name."""
    manifest, data = folder / "manifest.json", folder / "data-00000.arrow"
    if kind == "flipped byte":
        raw = bytearray(data.read_bytes())
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
        return data
    if kind == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
        return data
    if kind == "missing file":
        data.unlink()
        return data
    if kind == "another version":
        manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 99'))
        return manifest
    if kind == "edited manifest":
        manifest.write_text(manifest.read_text().replace('"capacity": 1024', '"capacity": 1025'))
        return manifest
    eval_data = folder / "eval" / "data-00000.arrow"
    eval_data.write_bytes(eval_data.read_bytes()[:-1] + b"x")
    return eval_data


@pytest.mark.parametrize(
    "kind", ["flipped byte", "truncated", "missing file", "another version", "edited manifest", "eval part"]
)
def test_a_damaged_shard_set(padfree, tmp_path, packed, kind):
    """Verify exits with 1 and names the file; what reads the set exits with 2; each says it in one line."""
    subprocess.run(["cp", "-r", packed, tmp_path / "out"], check=True)
    place = damage(kind, tmp_path / "out")
    status, out, err = padfree("verify", tmp_path / "out")
    assert (status, out) == (1, "")
    assert is_one_line(err)
    assert str(place) in err
    status, out, err = padfree("verify", tmp_path / "out", "--json")
    assert status == 1
    assert str(place) in json.loads(out)["fault"]
    for verb in (("stats",), ("inspect",), ("unpack",)):
        if kind == "eval part" and verb != ("stats",):
            continue  # they do not read it
        more = ("--out", tmp_path / "x.jsonl") if verb == ("unpack",) else ()
        status, out, err = padfree(*verb, tmp_path / "out", *more)
        assert status == 2
        assert is_one_line(err)
        assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line(padfree, tmp_path, monkeypatch, workers):
    """When the disk takes no more, in a worker too, the run says so and leaves nothing."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("packing.pipeline.store.os.pwrite", full)
    status, out, err = padfree(*pack_words(CHATS, tmp_path / "out", "--workers", workers))
    assert (status, out) == (2, "")
    assert is_one_line(err)
    assert "No space left" in err
    assert os.listdir(tmp_path) == []


# Ends


@pytest.fixture(scope="module")
def long_input(tmp_path_factory):
    """Minutes of rows, to be still at work when the test kills it, on a machine that stalls too."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "0.jsonl").write_bytes(CHATS.read_bytes() * 100)
    for number in range(1, 40):
        os.link(folder / "0.jsonl", folder / f"{number}.jsonl")
    return folder


def test_the_module_is_the_command():
    """`python -m packing.cli` runs and gives the exit status, as `padfree` does."""
    found = subprocess.run(
        [sys.executable, "-m", "packing.cli", "verify", "no-such-folder"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr.startswith("padfree: no-such-folder: no such directory")


def descendants(process):
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, *, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "group", "status", "says"),
    [
        (signal.SIGKILL, False, -9, ""),
        (signal.SIGTERM, False, 143, "padfree: asked to stop (SIGTERM)\n"),
        (signal.SIGTERM, True, 143, "padfree: asked to stop (SIGTERM)\n"),
        (signal.SIGINT, True, 130, "padfree: interrupted\n"),  # as a terminal does
    ],
    ids=["SIGKILL", "SIGTERM", "SIGTERM to all", "Ctrl-C"],
)
def test_a_run_that_is_killed_leaves_nothing_that_looks_whole(
    tmp_path, long_input, number, group, status, says
):
    """Killed half-way, pack leaves no output and no worker; asked politely, nothing; the next run works."""
    words = [str(word) for word in pack_words(long_input, tmp_path / "out", "--workers", 2)]
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for(lambda: list(tmp_path.glob(".out*")) and len(descendants(process.pid)) >= 2)
        workers = descendants(process.pid)
        time.sleep(0.5)
        assert process.poll() is None, "the input is too short for this test"
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status
    assert (out, err) == ("", says)
    assert not (tmp_path / "out").exists()
    wait_for(lambda: not any(map(alive, workers)), seconds=20)
    if number != signal.SIGKILL:
        assert os.listdir(tmp_path) == []
    assert cli.main([str(word) for word in pack_words(CHATS, tmp_path / "out", "--workers", 1)]) == 0
    assert os.listdir(tmp_path) == ["out"]


def test_the_temporary_folder_is_left_as_it_was(tmp_path, long_input):
    """By each verb that works with files, and by bench when Ctrl-C comes amid its work; workers included."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = os.environ | {"TMPDIR": str(temporary)}

    def start(*words):
        return subprocess.Popen(
            [*COMMAND, *map(str, words)], stdout=subprocess.DEVNULL, env=env, start_new_session=True
        )

    shards = tmp_path / "shards"
    for words in (
        pack_words(CHATS, shards, "--capacity", 1024, "--workers", 2),
        ("verify", shards),
        ("unpack", shards, "--out", tmp_path / "examples.jsonl"),
        ("template", TOKENIZER),
        ("bench", CHATS, "--tokenizer", TOKENIZER),
    ):
        assert start(*words).wait(timeout=120) == 0, words
        assert os.listdir(temporary) == [], words
    process = start("bench", long_input, "--tokenizer", TOKENIZER)
    try:
        wait_for(lambda: list(temporary.rglob("rejects.jsonl")))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGTERM, 143, "padfree: asked to stop (SIGTERM)\n"),
        (signal.SIGINT, 130, "padfree: interrupted\n"),
    ],
)
def test_what_a_signal_brings_about_is_not_taken_for_a_fault(
    padfree, tmp_path, monkeypatch, number, status, says
):
    """Workers that died of the signal too, or a compiler broken off by it: the line names the signal."""
    from packing import pipeline

    for consequence in (pool.WorkerDied("for lack of memory"), RuntimeError("no compiled object yet")):

        def broken_off(*_, consequence=consequence, **__):
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            except KeyboardInterrupt:
                raise consequence from None

        monkeypatch.setattr(pipeline, "pack_dataset", broken_off)
        assert padfree(*pack_words(CHATS, tmp_path / "out")) == (status, "", says)


def test_an_ignored_ctrl_c_stays_ignored():
    """A command that a script starts in the background is not ended by a Ctrl-C at the terminal."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli._unwound_by_signals():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_unpack_that_is_stopped_leaves_nothing(packed, tmp_path):
    """SIGTERM amid the writing: no part of the file stays beside its name."""
    code = (
        "import os, signal, sys; from packing import cli, report; "
        "report.unpacked = lambda _: (os.kill(os.getpid(), signal.SIGTERM) or b'' for _ in range(9)); "
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "unpack", str(packed), "--out", str(tmp_path / "file")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (143, "padfree: asked to stop (SIGTERM)\n")
    assert os.listdir(tmp_path) == []


def test_a_closed_pipe_is_quiet(packed):
    """`padfree inspect DIR | head -1` prints one line and no complaint."""
    process = subprocess.Popen(
        [*COMMAND, "unpack", str(packed), "--out", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


# Start


def test_help_lists_every_verb(padfree):
    """The summary of each verb is in the help, and each verb has its own."""
    status, out, _ = padfree("--help")
    assert status == 0
    for verb in cli.VERBS:
        assert f"  {verb} " in out


def test_without_words_the_help_is_shown(padfree):
    """`padfree` alone is a question."""
    assert padfree() == padfree("--help")


@pytest.mark.parametrize("verb", ["pack", "stats", "inspect", "verify", "unpack", "template", "bench"])
def test_each_verb_has_help(verb, capsys):
    """`padfree VERB --help` exits with 0 and shows the verb's options."""
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0
    assert f"padfree {verb}" in capsys.readouterr().out


def test_every_option_of_pack_has_help(capsys):
    """No option without a word on what it does."""
    for action in cli._packing_parser("pack")._actions:
        assert action.help, action.option_strings


def test_help_shows_pairs_as_they_are_typed(capsys):
    """Each example of NAME=VALUE in the help is one that the parser takes, and none is a Python mapping."""
    parser = cli._packing_parser("pack")
    for flag, shown, value in (
        ("--role", "narrator=system", "system"),
        ("--column", "messages=dialog", "dialog"),
        ("--template-arg", "enable_thinking=false", False),
    ):
        (action,) = (action for action in parser._actions if flag in action.option_strings)
        assert shown in action.help
        assert "{" not in action.help
        words = ["in.jsonl", "--tokenizer", "t", flag, shown]
        assert getattr(parser.parse_args(words), action.dest) == {shown.split("=")[0]: value}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        *(("True", True), ("False", False), ("FALSE", False), ("None", None), ("true", True), ("3", 3)),
        *(('{"a": [1]}', {"a": [1]}), ('"False"', "False"), ("yes", "yes"), ("[INST]", "[INST]"), ("", "")),
    ],
)
def test_a_template_argument_means_what_it_says(typed, read):
    """Python's True, False and None are no texts, which would be true; JSON is JSON, the rest is text."""
    assert cli._json_pair(f"flag={typed}") == ("flag", read)


@pytest.mark.parametrize("typed", ["{'a': 1}", "['a']", "(1, 2)", '[True, "a"]'])
def test_a_python_list_is_no_text(padfree, typed):
    """A list or mapping that is no JSON is refused: as a text, the template would go over its letters."""
    status, _, err = padfree(*pack_words(CHATS, "out", "--template-arg", f"flag={typed}"))
    assert status == 2
    assert is_one_line(err)
    assert "as JSON" in err


def test_help_imports_nothing_heavy():
    """`padfree --help` starts without numpy, rich, torch, transformers and datasets."""
    code = (
        "import sys; from packing.cli import main; main(['--help']); "
        "print(sorted({'numpy', 'rich', 'torch', 'transformers', 'datasets', 'numba'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def loaded_by(call, words):
    """Whether transformers finds torch after a call of `main`, and what that imported of torch and pandas."""
    code = (
        f"import sys; from packing.cli import main; assert {call} == 0; "
        "loaded = {'torch', 'pandas'} & set(sys.modules); "
        "from transformers.utils import is_torch_available; import torch; "
        "print(is_torch_available(), loaded)"
    )
    command = [sys.executable, "-c", code, *map(str, words)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[-1]


@pytest.mark.parametrize("verb", ["pack", "dry run", "bench", "inspect", "template"])
def test_the_command_loads_no_torch(tmp_path, packed, verb):
    """No verb with a tokenizer loads torch, nor pandas but where pyarrow does to read a Parquet file."""
    words = {
        "pack": pack_words(CHATS, tmp_path / "out"),
        "dry run": ("pack", CHATS, "--tokenizer", TOKENIZER, "--dry-run", 5),
        "bench": ("bench", CHATS, "--tokenizer", TOKENIZER),
        "inspect": ("inspect", packed, "--example", 0),
        "template": ("template", TOKENIZER),
    }
    loaded = "{'pandas'}" if verb == "inspect" else "set()"
    assert loaded_by("main()", words[verb]) == f"False {loaded}"


def test_a_process_that_goes_on_keeps_its_torch(tmp_path):
    """Called from Python with words, the command hides no torch from what is imported then or later."""
    assert loaded_by("main(sys.argv[1:])", pack_words(CHATS, tmp_path / "out")) == "True {'torch'}"


@pytest.mark.parametrize(
    "words",
    [
        pack_words(CHATS, "out", "--capacity", 0),
        pack_words(CHATS, "out", "--capacity", 0, "--dry-run", 1),
        ("bench", CHATS, "--tokenizer", TOKENIZER, "--capacity", 0),
        ("template", TOKENIZER, "--turns", "expand", "--train-on", "all"),
    ],
    ids=["pack", "dry run", "bench", "template"],
)
def test_a_wrong_option_waits_for_no_import(padfree, monkeypatch, words):
    """It is told before the second that the import of transformers takes."""
    monkeypatch.setattr(cli, "_leave_out_torch", lambda: pytest.fail("imports transformers"))
    status, _, err = padfree(*words)
    assert status == 2
    assert is_one_line(err)


def test_verbs_of_the_training_side_are_there():
    """A verb that lives in another package has a module of that name with a `main`."""
    for module in cli.MODULES.values():
        assert callable(importlib.import_module(module).main)


def test_import_takes_over_packed_rows(padfree, tmp_path):
    """`import` makes a verified set of rows that another tool packed, and prints its counts."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "seq_lengths": [2, 2]}\n')
    status, out, _ = padfree("import", rows, "--out", tmp_path / "set", "--json")
    assert status == 0
    assert json.loads(out)["main"]["examples"] == 2
    assert padfree("verify", tmp_path / "set")[0] == 0
