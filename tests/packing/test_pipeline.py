"""Files in, shards out: nothing lost, the same bytes for any number of processes, nothing half-written."""

import dataclasses
import gc
import gzip
import json
import os
import shutil
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import pipeline
from packing.chat import ChatEncoder, ChatOptions, EncodersDiffer, load_tokenizer, proof
from packing.chat.bpe import BpeEncoder, NotEqual
from packing.errors import InputError, OptionError, OutputError, TooManyRejects
from packing.example import Example
from packing.formats import FormatOptions
from packing.pipeline import PackOptions, pack, pack_dataset, pool, preview
from packing.pipeline.store import EXAMPLE, ExampleStore, from_stored, to_stored
from packing.sample import CHATS, TOKENIZER
from packing.shards import open_shards, verify


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TOKENIZER))


@pytest.fixture(scope="module")
def sample():
    return [json.loads(line) for line in CHATS.read_text("utf-8").splitlines()]


def chat(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def write(path, rows):
    """JSON lines; a row that is text stays as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8"
    )
    return str(path)


def contents(folder):
    """The bytes of every file of a shard set that has to be reproducible."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.json"
    }


def nothing_but(folder, *names):
    """Whether a folder holds these entries and no others, hidden ones included."""
    return sorted(entry.name for entry in folder.iterdir()) == sorted(names)


# What is packed


def test_ids_are_those_of_the_chat_template(tmp_path, tokenizer, sample):
    """Each example is apply_chat_template's of the row that examples.parquet names."""
    pack_dataset([str(CHATS)], tokenizer=tokenizer, out=tmp_path / "out", options=PackOptions(capacity=1024))
    shards = open_shards(tmp_path / "out")
    origins = shards.examples().to_pylist()
    assert [origin["line"] for origin in origins] == list(range(1, len(sample) + 1))
    for number, origin in enumerate(origins):
        row = sample[origin["record"]]
        ids = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False)
        assert shards.example(number).input_ids.tolist() == ids


def test_what_is_packed_passes_verification(tmp_path, tokenizer):
    """A set with an eval part, rejects and truncated examples holds every law."""
    write(tmp_path / "bad.jsonl", ["{", *[chat("a", "b")] * 20])
    pack_dataset(
        [str(CHATS), str(tmp_path / "bad.jsonl")],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(capacity=400, overflow="truncate", eval_fraction=0.2),
    )
    verify(tmp_path / "out")


def test_the_report_agrees_with_the_shards(tmp_path, tokenizer):
    """Buffers, examples, tokens and trained tokens are those that can be counted in the files."""
    report = pack_dataset(
        [str(CHATS)],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(capacity=512, eval_fraction=0.1),
    )
    shards = open_shards(tmp_path / "out")
    for part, found in ((shards, report.main), (shards.part("eval"), report.eval)):
        buffers = list(part)
        assert found.buffers == len(buffers)
        assert found.examples == sum(len(buffer.seq_lengths) for buffer in buffers)
        assert found.tokens == sum(map(len, buffers))
        assert found.supervised_tokens == sum(int((buffer.labels >= 0).sum()) for buffer in buffers)
        assert found.lower_bound == -(-found.tokens // 512)
        assert found.fill_rate == found.tokens / (512 * len(buffers))
    assert shards.manifest["accounting"] == report.accounting


@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "first_fit_decreasing", "next_fit"])
def test_every_algorithm_packs_the_same_examples(tmp_path, tokenizer, algorithm):
    """The algorithm decides about buffers, never about examples."""
    pack_dataset(
        [str(CHATS)],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(capacity=2048, algorithm=algorithm),
    )
    shards = open_shards(tmp_path / "out")
    assert sorted(shards.example_ids.tolist()) == list(range(420))


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "json", "save_to_disk"])
def test_every_kind_of_input_gives_the_same_examples(tmp_path, tokenizer, sample, kind):
    """The same rows from another kind of file, read by two workers, are the same examples in order."""
    import datasets

    rows = [{"messages": row["messages"]} for row in sample if "tools" not in row]
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "parquet":
            table.to_parquet(path)
        case "save_to_disk":
            table.save_to_disk(path)
        case "json":
            path.write_text(json.dumps(rows, indent=2))
        case _:
            path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    pack_dataset(path, tokenizer=tokenizer, out=tmp_path / "out", workers=2)
    pack_dataset(write(tmp_path / "rows.jsonl", rows), tokenizer=TOKENIZER, out=tmp_path / "plain")
    found, plain = open_shards(tmp_path / "out"), open_shards(tmp_path / "plain")
    assert len(found.seq_lengths) == len(rows)
    for number in range(len(rows)):
        assert found.example(number) == plain.example(number)


# The same bytes


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Enough rows for several chunks, some of them bad, over two files."""
    folder = tmp_path_factory.mktemp("many")
    rows = CHATS.read_text("utf-8").splitlines()
    write(folder / "a.jsonl", [*rows, "not JSON", *rows[:200], json.dumps({"messages": []})])
    write(folder / "b.jsonl", rows[::-1])
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


AS_REFERENCE = PackOptions(capacity=600, eval_fraction=0.1, seed=3)


@pytest.fixture(scope="module")
def reference(many, tokenizer, tmp_path_factory):
    """What one worker makes of them."""
    out = tmp_path_factory.mktemp("reference") / "out"
    pack_dataset(many, tokenizer=tokenizer, out=out, options=AS_REFERENCE)
    return contents(out)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_bytes_do_not_depend_on_the_workers(tmp_path, many, tokenizer, reference, workers):
    """Any number of processes, and a second run, give every file but run.json byte for byte."""
    pack_dataset(many, tokenizer=tokenizer, out=tmp_path / "out", workers=workers, options=AS_REFERENCE)
    assert contents(tmp_path / "out") == reference
    assert "rejects.jsonl" in reference
    assert "eval/data-00000.arrow" in reference


def test_bytes_do_not_depend_on_how_processes_start(tmp_path, many, tokenizer, reference, monkeypatch):
    """Spawned workers, which share nothing with this process, give the same bytes as forked ones."""
    monkeypatch.setattr(pool, "start_method", lambda: "spawn")
    pack_dataset(many, tokenizer=tokenizer, out=tmp_path / "out", workers=2, options=AS_REFERENCE)
    assert contents(tmp_path / "out") == reference


@pytest.mark.skipif(pool.start_method() != "fork", reason="workers are spawned here")
def test_workers_are_forked_before_there_are_threads(tmp_path, many, tokenizer, monkeypatch):
    """A fork copies one thread, and the locks that others hold for good: the set's writer has none yet."""
    before, plain, seen = threading.active_count(), os.fork, []

    def fork():
        seen.append(threading.active_count() - before)
        return plain()

    monkeypatch.setattr(os, "fork", fork)
    pack_dataset(many, tokenizer=tokenizer, out=tmp_path / "out", workers=2, options=AS_REFERENCE)
    assert seen == [0, 0]


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_do_not_depend_on_the_encoder(tmp_path, many, tokenizer, reference, workers):
    """What the fast encoder makes is what the tokenizer's own makes, and run.json says how much it made."""
    report = pack_dataset(
        many,
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=AS_REFERENCE,
        workers=workers,
        chat=ChatOptions(encoder="tiktoken"),
    )
    assert contents(tmp_path / "out") == reference
    counts = report.encoder["examples"]
    assert counts["tiktoken"] >= report.main.examples + report.eval.examples
    assert counts["both"] > 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["encoder"] == report.encoder


@pytest.fixture
def differing(tokenizer, monkeypatch):
    """A fast encoder that was shown to be equal, and gives other bytes in every chunk."""
    ChatEncoder(tokenizer, options=ChatOptions(encoder="tiktoken"))  # shown and remembered before it breaks

    def encode(self, texts):
        raise NotEqual("id 5 is 6")

    monkeypatch.setattr(pack, "FAST_ENCODER_BYTES", 0)
    monkeypatch.setattr(BpeEncoder, "encode", encode)
    monkeypatch.setattr(proof, "remember_difference", lambda digest, what: None)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_wrong_encoder_is_given_up(tmp_path, many, tokenizer, reference, differing, caplog, workers):
    """One difference, and all is packed again by the tokenizer's own library; it is said and recorded."""
    report = pack_dataset(
        many, tokenizer=tokenizer, out=tmp_path / "out", workers=workers, options=AS_REFERENCE
    )
    assert contents(tmp_path / "out") == reference
    assert report.encoder["encoder"] == "tokenizers"
    assert "id 5 is 6" in report.encoder["why"]
    assert "packing again" in caplog.text
    assert set(report.encoder["examples"]) == {"tokenizers"}


def test_a_wrong_encoder_that_was_asked_for_is_an_error(tmp_path, many, tokenizer, differing):
    """Who names an encoder gets it or an error, and no set."""
    with pytest.raises(EncodersDiffer, match="id 5 is 6"):
        pack_dataset(
            many, tokenizer=tokenizer, out=tmp_path / "out", chat=ChatOptions(encoder="tiktoken"), workers=2
        )
    assert nothing_but(tmp_path)


def test_collections_are_seldom_for_a_run_only(tmp_path, many, tokenizer):
    """The collector's threshold and what it looks at are as before, after a run that ends well or badly."""
    before = gc.get_threshold(), gc.get_freeze_count()
    during = set()
    pack_dataset(
        many,
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(capacity=600),
        on_progress=lambda _: during.add(gc.get_threshold()[0]),
    )
    assert during == {pool.OBJECTS_PER_COLLECTION}
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
    with pytest.raises(OutputError):
        pack_dataset(many, tokenizer=tokenizer, out=tmp_path / "out", options=PackOptions(capacity=600))
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_bytes_do_not_depend_on_the_folder(tmp_path, tokenizer, monkeypatch):
    """Where the input lies, where the output does, and from where they are named: none is in the bytes."""
    found = []
    for place in ("here", "there/deeper"):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(CHATS, tmp_path / place / "chats.jsonl")
        pack_dataset(
            [str(tmp_path / place / "chats.jsonl")],
            tokenizer=tokenizer,
            out=tmp_path / place / "out",
            options=PackOptions(capacity=600),
        )
        found.append(contents(tmp_path / place / "out"))
    monkeypatch.chdir(tmp_path / "here")
    pack_dataset(
        ["chats.jsonl"], tokenizer=tokenizer, out="named-from-here", options=PackOptions(capacity=600)
    )
    found.append(contents(tmp_path / "here" / "named-from-here"))
    assert found[0] == found[1] == found[2]


DECISIVE = {"capacity": 601, "seed": 4, "overflow": "truncate", "algorithm": "next_fit", "eval_fraction": 0.1}
"""Another value of each option of packing that decides the bytes."""


@pytest.mark.parametrize(
    "change",
    [
        *({"options": PackOptions(**{"capacity": 600, name: value})} for name, value in DECISIVE.items()),
        {"chat": ChatOptions(train_on="last")},
        {"formats": FormatOptions(trailing_user="reject")},
    ],
    ids=[*DECISIVE, "chat", "formats"],
)
def test_whatever_decides_the_bytes_is_in_the_fingerprint(tmp_path, tokenizer, change):
    """Two sets made with another option never have one fingerprint, even where the buffers are equal."""
    one = write(tmp_path / "one.jsonl", [chat(f"say {i}", "yes") for i in range(40)])
    same = {"tokenizer": tokenizer, "options": PackOptions(capacity=600)}
    pack_dataset([one], out=tmp_path / "a", **same)
    pack_dataset([one], out=tmp_path / "b", **{**same, **change})
    assert open_shards(tmp_path / "a").fingerprint != open_shards(tmp_path / "b").fingerprint


def test_a_new_option_is_in_the_fingerprint(tmp_path, tokenizer):
    """Nobody has to remember it: all options are, but for two that are named."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(PackOptions):
        more: int = 5

    one = write(tmp_path / "one.jsonl", [chat("a", "b")])
    pack_dataset([one], tokenizer=tokenizer, out=tmp_path / "out", options=More())
    fingerprint = open_shards(tmp_path / "out").manifest["fingerprint"]
    assert fingerprint["more"] == 5
    assert set(fingerprint) == {"inputs", "formats", "chat", "more", *DECISIVE} - {"capacity"}


def test_the_fingerprint_covers_the_content_of_inputs(tmp_path, tokenizer):
    """Another byte in a file gives another fingerprint, though the tokens are the same."""
    for name, space in (("a", ""), ("b", " ")):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "chats.jsonl", [space + json.dumps(chat("q", "a"))])
        pack_dataset([str(tmp_path / name / "chats.jsonl")], tokenizer=tokenizer, out=tmp_path / name / "out")
    a, b = (open_shards(tmp_path / name / "out") for name in "ab")
    assert a[0].input_ids.tolist() == b[0].input_ids.tolist()
    assert a.fingerprint != b.fingerprint


# Every row

KINDS = {
    "good": (chat("how are you", "fine"), None),
    "long": (chat("count " * 60, "one two"), "too_long"),
    "json": ("{", "bad_json"),
    "column": ({"text_of_it": 3}, "bad_record"),
    "empty": ({"messages": []}, "empty_conversation"),
    "role": ({"messages": [{"role": "nobody", "content": "x"}]}, "unknown_role"),
    "surrogate": (json.dumps(chat("\ud83d", "x")), "lone_surrogate"),
    "control": (chat("<|im_start|>", "x"), "control_token"),
    "untrained": ({"messages": [{"role": "user", "content": "x"}]}, "nothing_to_train"),
}  # fmt: skip


@settings(max_examples=25)
@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=12))
def test_rows_in_are_rows_packed_and_rejected(kinds, tokenizer, tmp_path_factory):
    """Every row is packed, or has one line in rejects.jsonl with its file, line and reason."""
    folder = tmp_path_factory.mktemp("rows")
    file = write(folder / "rows.jsonl", [KINDS[kind][0] for kind in ["good", *kinds]])
    report = pack_dataset(
        [file], tokenizer=tokenizer, out=folder / "out", options=PackOptions(capacity=50, max_rejects=1)
    )
    rows = report.accounting["rows"]
    assert rows["in"] == len(kinds) + 1
    assert rows["in"] == rows["packed"] + sum(rows["rejected"].values())
    shards = open_shards(folder / "out")
    fates = {origin["line"]: None for origin in shards.examples().to_pylist()}
    fates |= {reject["line"]: reject["reason"] for reject in shards.rejects()}
    assert [fates[line] for line in sorted(fates)] == [KINDS[kind][1] for kind in ["good", *kinds]]
    assert len(fates) == len(shards.examples()) + len(shards.rejects())
    assert {reject["input"] for reject in shards.rejects()} <= {"rows.jsonl"}


@settings(max_examples=15)
@given(
    words=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    capacity=st.integers(12, 80),
    overflow=st.sampled_from(["drop", "truncate"]),
    turns=st.sampled_from(["whole", "expand"]),
)
def test_tokens_in_are_tokens_packed_cut_and_rejected(
    words, capacity, overflow, turns, tokenizer, tmp_path_factory
):
    """Every token that was made is packed, cut off, or of a rejected row or turn."""
    folder = tmp_path_factory.mktemp("tokens")
    rows = [chat("a", "b"), *(chat("go " * n, "no " * n, "and", "yes " * n) for n in words)]
    file = write(folder / "rows.jsonl", rows)
    report = pack_dataset(
        [file],
        tokenizer=tokenizer,
        out=folder / "out",
        options=PackOptions(capacity=capacity, overflow=overflow, max_rejects=1),
        chat=ChatOptions(turns=turns),
    )
    made = 0
    for row in rows:
        size = len(row["messages"])
        for end in range(2, size + 1, 2) if turns == "expand" else [size]:
            made += len(tokenizer.apply_chat_template(row["messages"][:end], return_dict=False))
    tokens = report.accounting["tokens"]
    assert tokens["in"] == made
    assert made == tokens["packed"] + tokens["truncated"] + sum(tokens["rejected"].values())
    assert tokens["packed"] == sum(map(len, open_shards(folder / "out")))


def test_a_turn_that_is_too_long_does_not_take_its_row(tmp_path, tokenizer):
    """With turns="expand", the turns that fit are packed; the one that doesn't has a line of its own."""
    file = write(tmp_path / "rows.jsonl", [chat("a", "b", "c", "d " * 80)])
    report = pack_dataset(
        [file],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(capacity=50),
        chat=ChatOptions(turns="expand"),
    )
    assert report.accounting["rows"] == {"in": 1, "packed": 1, "eval": 0, "rejected": {}}
    assert report.accounting["turns_rejected"] == {"too_long": 1}
    (reject,) = open_shards(tmp_path / "out").rejects()
    assert (reject["line"], reject["turn"], reject["reason"]) == (1, 1, "too_long")


def test_normalisations_are_counted_by_row(tmp_path, tokenizer):
    """What was changed on the way is in the accounting, once a row."""
    rows = [chat("a", "b", "left over"), chat("a", "b", "c", "d", "left over"), chat("a", "b")]
    report = pack_dataset([write(tmp_path / "rows.jsonl", rows)], tokenizer=tokenizer, out=tmp_path / "out")
    assert set(report.accounting["normalised_rows"].values()) == {2}


def test_lines_passed_over_are_no_rows(tmp_path, tokenizer):
    """Blank lines are counted by themselves, in lines: no row was normalised."""
    file = write(tmp_path / "rows.jsonl", [chat("a", "b"), "", "", chat("a", "c")])
    accounting = pack_dataset([file], tokenizer=tokenizer, out=tmp_path / "out").accounting
    assert accounting["normalised_rows"] == {}
    assert accounting["input_notes"] == {"blank_lines": 2}


def test_a_detail_is_one_short_line_of_valid_text(tmp_path, tokenizer):
    """A reject can quote a row of any size and content without breaking rejects.jsonl."""
    nasty = {"messages": [{"role": "x\n\ud800" + "y" * 5000, "content": "z"}]}
    pack_dataset(
        [write(tmp_path / "rows.jsonl", [nasty, chat("a", "b")])],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(max_rejects=0.5),
    )
    (line,) = (tmp_path / "out" / "rejects.jsonl").read_bytes().splitlines()
    detail = json.loads(line)["detail"]
    assert len(detail) <= 300
    assert detail.isprintable()
    detail.encode()


# Too many rejects


@pytest.mark.parametrize(("bad", "stops"), [(29, False), (30, True)])
def test_the_fraction_of_rejects_is_exact(tmp_path, tokenizer, bad, stops):
    """29 of 100 rows are 0.29 of them, though 0.29 * 100 is less than 29 in floating point."""
    file = write(tmp_path / "rows.jsonl", ["{"] * bad + [chat("a", "b")] * (100 - bad))

    def run():
        return pack_dataset(
            [file], tokenizer=tokenizer, out=tmp_path / "out", options=PackOptions(max_rejects=0.29)
        )

    if not stops:
        assert run().accounting["rows"]["rejected"] == {"bad_json": bad}
        return
    with pytest.raises(TooManyRejects, match=r"30 of 100 rows .*bad_json 30.*rows\.jsonl:1 bad_json"):
        run()
    assert nothing_but(tmp_path, "rows.jsonl")


def test_nothing_to_pack_is_an_error(tmp_path, tokenizer):
    """All rows rejected, or none there: there is no empty shard set, however many rejects are allowed."""
    for rows, message in ((["{", "["], "nothing to pack"), ([""], "no rows")):
        file = write(tmp_path / "rows.jsonl", rows)
        with pytest.raises(InputError, match=message):
            pack_dataset(
                [file], tokenizer=tokenizer, out=tmp_path / "out", options=PackOptions(max_rejects=1)
            )
        assert nothing_but(tmp_path, "rows.jsonl")


def test_too_long_with_error_names_the_line(tmp_path, tokenizer):
    """overflow="error" says which row of which file, and leaves nothing behind."""
    file = write(tmp_path / "rows.jsonl", [chat("a", "b"), chat("a " * 90, "b")])
    with pytest.raises(OptionError, match=r"rows\.jsonl:2: an example of \d+ tokens"):
        pack_dataset(
            [file],
            tokenizer=tokenizer,
            out=tmp_path / "out",
            options=PackOptions(capacity=64, overflow="error"),
            workers=2,
        )
    assert nothing_but(tmp_path, "rows.jsonl")


def test_a_file_that_ends_too_early_leaves_nothing(tmp_path, tokenizer):
    """An input that turns out damaged half-way stops the run, and what was written is removed."""
    whole = gzip.compress("".join(json.dumps(chat(str(i), "b")) + "\n" for i in range(9000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-2000])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz"):
        pack_dataset([str(tmp_path / "cut.jsonl.gz")], tokenizer=tokenizer, out=tmp_path / "out", workers=2)
    assert nothing_but(tmp_path, "cut.jsonl.gz")


def test_an_output_that_exists_is_kept(tmp_path, tokenizer):
    """Without force it is an error; with force and a failing run, the old set is still whole."""
    good = write(tmp_path / "good.jsonl", [chat("a", "b")])
    bad = write(tmp_path / "bad.jsonl", ["{"])
    pack_dataset([good], tokenizer=tokenizer, out=tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(OutputError, match="exists"):
        pack_dataset([good], tokenizer=tokenizer, out=tmp_path / "out")
    with pytest.raises(TooManyRejects):
        pack_dataset([bad], tokenizer=tokenizer, out=tmp_path / "out", force=True)
    assert contents(tmp_path / "out") == before
    assert nothing_but(tmp_path, "good.jsonl", "bad.jsonl", "out")


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": 0},
        {"capacity": 2**24 + 1},
        {"overflow": "Drop"},
        {"algorithm": "best_fit"},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": True},
        {"seed": 1.5},
        {"capacity": 512.0},
        {"eval_fraction": "0.1"},
        {"max_rejects": None},
        {"eval_fraction": 1.0},
        {"eval_fraction": -0.1},
        {"eval_fraction": float("nan")},
        {"max_rejects": 1.5},
        {"max_rejects": float("nan")},
    ],
    ids=str,
)
def test_options_that_can_not_be(wrong):
    """Each is refused by name, by the options themselves: nothing was read or written yet."""
    (value,) = wrong.values()
    with pytest.raises(OptionError, match=str(value).replace("+", r"\+")):
        PackOptions(**wrong)


def test_no_workers_can_not_be(tmp_path, tokenizer):
    """It is refused before anything is read or written."""
    with pytest.raises(OptionError, match="0 workers"):
        pack_dataset(["missing.jsonl"], tokenizer=tokenizer, out=tmp_path / "out", workers=0)
    assert nothing_but(tmp_path)


def test_seeds_at_both_ends_work(tmp_path, tokenizer):
    """0 and 2**64 - 1 are seeds."""
    for seed in (0, 2**64 - 1):
        out = tmp_path / str(seed)
        pack_dataset(
            [str(CHATS)], tokenizer=tokenizer, out=out, options=PackOptions(seed=seed, eval_fraction=0.1)
        )
        verify(out)


# The eval part


@pytest.mark.parametrize("turns", ["whole", "expand"])
def test_duplicates_are_never_split(tmp_path, tokenizer, sample, turns):
    """Equal conversations, in whatever format, go to one part, and both parts together are all of them."""
    small = [row for row in sample if "tools" not in row][:120]
    roles = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [
        {"conversations": [{"from": roles[m["role"]], "value": m["content"]} for m in row["messages"]]}
        for row in small
    ]
    file = write(tmp_path / "rows.jsonl", small + sharegpt)
    pack_dataset(
        [file],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(capacity=4096, eval_fraction=0.3),
        chat=ChatOptions(turns=turns),
    )
    shards = open_shards(tmp_path / "out")
    main, held_out = (
        {origin["record"] for origin in part.examples().to_pylist()} for part in (shards, shards.part("eval"))
    )
    assert main | held_out == set(range(240))
    assert not main & held_out
    assert {record % 120 for record in main}.isdisjoint(record % 120 for record in held_out)
    assert 15 < len(held_out) / 2 < 60  # 36 expected of 120


def test_the_seed_chooses_the_eval_part(tmp_path, tokenizer):
    """Another seed holds out other conversations."""
    chosen = []
    for seed in (0, 1):
        pack_dataset(
            [str(CHATS)],
            tokenizer=tokenizer,
            out=tmp_path / str(seed),
            options=PackOptions(seed=seed, eval_fraction=0.2),
        )
        part = open_shards(tmp_path / str(seed)).part("eval")
        chosen.append({origin["record"] for origin in part.examples().to_pylist()})
    assert chosen[0] != chosen[1]


def test_an_eval_part_needs_something_in_it(tmp_path, tokenizer):
    """A fraction that leaves one of the parts empty is an error, not an empty shard set."""
    file = write(tmp_path / "rows.jsonl", [chat("a", "b")] * 5)
    for fraction, part in ((1e-9, "evaluation"), (0.999999999, "training")):
        with pytest.raises(OptionError, match=f"none of the 5 rows for {part}"):
            pack_dataset(
                [file], tokenizer=tokenizer, out=tmp_path / "out", options=PackOptions(eval_fraction=fraction)
            )
    assert nothing_but(tmp_path, "rows.jsonl")


def test_the_eval_part_accounts_for_itself(tmp_path, tokenizer):
    """Both manifests add up, and rows in = packed + eval + rejected in the main one."""
    pack_dataset(
        [str(CHATS)],
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(eval_fraction=0.2, capacity=600),
    )
    shards = open_shards(tmp_path / "out")
    rows = shards.manifest["accounting"]["rows"]
    assert rows["in"] == rows["packed"] + rows["eval"] + sum(rows["rejected"].values())
    inner = shards.part("eval").manifest["accounting"]
    assert inner["rows"]["in"] == inner["rows"]["packed"] == rows["eval"]
    assert inner["tokens"]["packed"] == sum(map(len, shards.part("eval")))


# Previews


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_a_preview_counts_what_packing_counts(tmp_path, tokenizer, many, fraction):
    """With all rows in it, a preview has the accounting of the run and its two parts, and writes nothing."""
    options = PackOptions(capacity=600, eval_fraction=fraction)
    found = preview(many, tokenizer=tokenizer, rows=10_000, options=options)
    assert nothing_but(tmp_path)
    report = pack_dataset(many, tokenizer=tokenizer, out=tmp_path / "out", options=options)
    assert dict(found.accounting) == report.accounting
    assert (found.main, found.eval) == (report.main, report.eval)
    assert (found.eval is not None) == bool(fraction)
    shards = open_shards(tmp_path / "out")
    assert list(found.rejects) == shards.rejects()
    assert found.example == shards.example(0)


def test_a_preview_reads_some_rows_of_each_input(tokenizer, many):
    """Five rows of each of two files are ten rows."""
    assert preview(many, tokenizer=tokenizer, rows=5).accounting["rows"]["in"] == 10


def test_a_preview_reads_no_row_more(tmp_path, tokenizer, monkeypatch):
    """Where long rows make chunks short, a preview still ends with the row that was asked for."""
    file = write(tmp_path / "rows.jsonl", [chat("a", "b")] * 9)
    monkeypatch.setattr("packing.chunks.CHUNK_BYTES", 3 * len(json.dumps(chat("a", "b")) + "\n"))
    for rows, read in ((5, 5), (6, 6), (7, 7), (20, 9)):
        assert preview([file], tokenizer=tokenizer, rows=rows).accounting["rows"]["in"] == read


# The store


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
def test_the_store_gives_back_what_it_took(lengths, data, tmp_path_factory):
    """Any choice of examples in any order comes back as one buffer, token by token."""
    examples = []
    for number, length in enumerate(lengths):
        ids = np.arange(length, dtype=np.int32) + 100 * number
        labels = np.where(np.arange(length) % 2 == 1, ids, -100).astype(np.int32)
        examples.append(Example(input_ids=ids, labels=labels))
    chosen = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    with ExampleStore(tmp_path_factory.getbasetemp()) as store:
        for number, example in enumerate(examples):
            row = np.zeros(1, EXAMPLE)
            row["length"], row["held_out"] = len(example), number % 3 == 2
            store.append(row, start=store.tokens.write(to_stored(example.input_ids, example.labels)))
        for held_out in (False, True):
            part = [example for number, example in enumerate(examples) if (number % 3 == 2) == held_out]
            numbers = np.array([n for n in chosen if n < len(part)], np.int64)
            if numbers.size:
                buffer = store.part(held_out=held_out).buffer(numbers)
                wanted = [part[n] for n in numbers]
                assert buffer.input_ids.tolist() == [i for example in wanted for i in example.input_ids]
                assert buffer.labels.tolist() == [i for example in wanted for i in example.labels]
                assert buffer.example_ids.tolist() == numbers.tolist()


def test_stored_tokens_come_back():
    """from_stored is the inverse of to_stored, for the smallest and largest ids, trained or not."""
    ids = np.array([0, 0, 7, 2**31 - 1, 2**31 - 1], np.int32)
    labels = np.array([-100, 0, 7, 2**31 - 1, -100], np.int32)
    back = from_stored(to_stored(ids, labels))
    assert [array.tolist() for array in back] == [ids.tolist(), labels.tolist()]
    assert [array.dtype for array in back] == [np.int32, np.int32]


def test_progress_is_reported(tmp_path, tokenizer, many):
    """The rows grow to all of them, then buffers are written of a known total."""
    seen = []
    report = pack_dataset(
        many,
        tokenizer=tokenizer,
        out=tmp_path / "out",
        options=PackOptions(capacity=600),
        on_progress=seen.append,
        workers=2,
    )
    reading = [at.done for at in seen if at.stage == "reading"]
    assert reading == sorted(reading)
    assert reading[-1] == report.accounting["rows"]["in"]
    assert {at.total for at in seen if at.stage == "writing"} == {report.main.buffers}


def test_reports_are_plain_data(tmp_path, tokenizer):
    """A report goes to JSON and back unchanged."""
    report = pack_dataset([str(CHATS)], tokenizer=tokenizer, out=tmp_path / "out")
    plain = dataclasses.asdict(report)
    assert json.loads(json.dumps(plain)) == plain
    assert pipeline.PackReport(**{**plain, "main": report.main, "eval": None}) == report
