"""The fast encoder gives the ids and masks of the tokenizer's own library, or is not used."""

import functools
import json
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from packing.chat import (
    ChatEncoder,
    ChatOptions,
    EncodersDiffer,
    bpe,
    encode,
    load_tokenizer,
    proof,
    recipe,
)
from packing.chat.tokenizer import digest_of, plain_backend, tokenizer_digest, tokenizer_json
from packing.errors import OptionError, RowRejected
from packing.example import Conversation, Note
from packing.pipeline import PackOptions, pack_dataset
from packing.sample import CHATS, TOKENIZER

T = {path.stem: path.read_text("utf-8") for path in Path(__file__).with_name("templates").glob("*.jinja")}
STATE = json.loads((TOKENIZER / "tokenizer.json").read_text("utf-8"))
PATTERN = STATE["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
BLANKS = r"|\s+(?!\S)|\s+"
SHARED_TOKENIZERS = ("qwen3", "qwen3_5", "llama3_1", "deepseek_v3")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own, so that no verdict of another run is believed."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("PADFREE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def tokenizer():
    """The sample's tokenizer with BOS and EOS, and tokens that are not special."""
    made = load_tokenizer(str(TOKENIZER))
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.fixture(scope="module")
def encoder(tokenizer, cache):
    built, verdict = build(plain_backend(tokenizer))
    assert built is not None, verdict.why_not
    return built


def build(backend):
    text = backend.to_str()
    return proof.build(backend, text=text, digest=digest_of(text))


@pytest.fixture(scope="module", params=SHARED_TOKENIZERS)
def real(request, shared, cache):
    """(the library's tokenizer, the fast encoder) of a real tokenizer."""
    backend = Tokenizer.from_file(str(shared / "tokenizers" / request.param / "tokenizer.json"))
    built, verdict = build(backend)
    assert built is not None, verdict.why_not
    assert not verdict.remembered
    return backend, built


def changed(**parts):
    """The sample's tokenizer.json with other parts."""
    return {**STATE, **parts}


def model(**parts):
    return changed(model={**STATE["model"], **parts})


def added(**flags):
    first, *rest = STATE["added_tokens"]
    return changed(added_tokens=[{**first, **flags}, *rest])


def split(pattern):
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return changed(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [step, STATE["pre_tokenizer"]["pretokenizers"][1]],
        }
    )


def read(state):
    return [recipe.classes(pattern) for pattern in recipe.read_recipe(state).sources]


def agree(backend, encoder, texts):
    """The ids of both, for the texts that the fast one takes; how many those are."""
    taken = [text for text in texts if encoder.takes(text)]
    encoded = encoder.encode(taken)
    for text, first, last in zip(taken, *encoded.bounds(), strict=True):
        assert backend.encode(text, add_special_tokens=False).ids == encoded.ids[first:last].tolist(), text
    return len(taken)


ATOMS = st.sampled_from(
    [
        *proof._ATOMS,
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "im_end|>", "|>", "a" * 300, " " * 300),
        *("<think>", "</think>", "<s>", "</s>", "<｜User｜>", "<｜end▁of▁sentence｜>"),
        *("<|eot_id|>", "<tool_call>"),
    ]
)
TEXTS = st.lists(
    st.one_of(st.lists(ATOMS, max_size=12).map("".join), st.text(max_size=40)),
    max_size=8,
)


@pytest.mark.shared
def test_real_tokenizers_agree_on_any_text(real):
    """For each real tokenizer: proven, and the same ids for arbitrary lists of arbitrary texts."""
    seen = 0

    @given(texts=TEXTS)
    @example(texts=[])
    @example(texts=["", "", "x", ""])
    @settings(max_examples=300)
    def check(texts):
        nonlocal seen
        seen += agree(*real, texts)

    check()
    assert seen > 300  # the test is not vacuous


@given(texts=TEXTS)
@settings(max_examples=200)
def test_the_sample_tokenizer_agrees_on_any_text(tokenizer, encoder, texts):
    """The same for the tokenizer that every machine has."""
    assert agree(plain_backend(tokenizer), encoder, texts) == len(texts)  # no normalizer, so it takes all


@pytest.mark.shared
def test_texts_that_a_normalizer_changes_are_left_to_the_library(shared):
    """With NFC in tokenizer.json: decomposed text is not taken, nor a letter that Python does not know."""
    state = json.loads((shared / "tokenizers" / "qwen3" / "tokenizer.json").read_text("utf-8"))
    built = bpe.BpeEncoder(recipe.read_recipe(state))
    assert built.takes("é caf\u00e9 中文 <|im_end|>")
    assert not built.takes("e\u0301")
    assert not built.takes("<|im_end|>\u0338")
    assert not built.takes("\u0378")  # never assigned so far


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "state",
    [
        split(O200K),
        changed(
            pre_tokenizer={
                "type": "ByteLevel",
                "add_prefix_space": False,
                "use_regex": True,
                "trim_offsets": True,
            }
        ),
    ],
    ids=["gpt-oss", "gpt-2"],
)
def test_other_known_patterns_are_proven_too(state):
    """The patterns of gpt-oss and of GPT-2, with the sample's vocabulary."""
    backend = Tokenizer.from_str(json.dumps(state))
    built, verdict = build(backend)
    assert built is not None, verdict.why_not
    assert agree(backend, built, ["It's HELLO'S fooBar 12345 // \r\n\n  x", "ÄB'll é"]) == 2


def test_what_precedes_a_look_ahead_is_grouped():
    """The alternatives before it are in one group, which tiktoken tries at once; other patterns stay."""
    assert recipe.read_recipe(STATE).pattern == rf"(?:{PATTERN.removesuffix(BLANKS)}){BLANKS}"
    other = r"\p{L}+|\s+|[^\s\p{L}]+"
    assert recipe.read_recipe(split(other)).pattern == other


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (changed(normalizer={"type": "Lowercase"}), "normalizer is Lowercase"),
        (
            changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}),
            "NFKC",
        ),
        (changed(pre_tokenizer=None), "ends in none"),
        (changed(pre_tokenizer={"type": "Metaspace"}), "ends in Metaspace"),
        (split(r"(?<=a)b|\s+"), "pattern has"),
        (split(r"[\p{L}&&[^a]]+|\s+|[^\s]"), "pattern has"),
        (model(dropout=0.1), "dropout"),
        (model(byte_fallback=True), "byte_fallback"),
        (model(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (model(type="Unigram"), "not BPE"),
        (model(surprise=1), "surprise"),
        (added(lstrip=True), "lstrip"),
        (added(rstrip=True), "rstrip"),
        (added(single_word=True), "single_word"),
        (changed(added_tokens=[]), "no added tokens"),
        (changed(post_processor={"type": "BertProcessing"}), "BertProcessing"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(state, why):
    """A setting, flag or pattern that is not known to be the same in tiktoken ends it there."""
    read(STATE)  # as it is, it is understood
    with pytest.raises(recipe.NotEqual, match=why):
        read(state)


def test_a_byte_without_a_token_is_refused():
    """A vocabulary that can't spell every text has unknown tokens, which tiktoken has not."""
    vocabulary = {token: n for token, n in STATE["model"]["vocab"].items() if token != "Ā"}  # byte 0
    with pytest.raises(recipe.NotEqual, match="lacks 1 of the 256 bytes"):
        recipe.read_recipe(model(vocab=vocabulary))


def test_added_tokens_that_compete_are_refused():
    """One that begins another, and one found late that reaches into one found early."""
    first = STATE["added_tokens"][0]
    for text, normalized, why in (("<|im_start|>x", False, "begin alike"), ("a<|im", True, "can overlap")):
        more = {**first, "id": 9000, "content": text, "normalized": normalized}
        with pytest.raises(recipe.NotEqual, match=why):
            recipe.read_recipe(changed(added_tokens=[*STATE["added_tokens"], more]))


def test_a_wrong_merge_is_refused():
    """Without a pair in its list, two neighbours stay apart that tiktoken would merge: the token is named."""
    *merges, last = STATE["model"]["merges"]
    backend = Tokenizer.from_str(json.dumps(model(merges=merges)))
    built, verdict = build(backend)
    assert built is None
    assert verdict.why_not == f"its merges do not join the two tokens of {''.join(last)!r}"


def test_a_token_that_merging_never_makes_is_left_out(monkeypatch):
    """One in the vocabulary alone stays out of what tiktoken merges, unless a whole piece may be a token."""
    monkeypatch.setattr(proof, "_prove_corpus", lambda *args: None)  # it takes a second
    more = {**STATE["model"]["vocab"], "zqzqzq": 5000}
    for whole in (False, True):
        backend = Tokenizer.from_str(json.dumps(model(vocab=more, ignore_merges=whole)))
        built, verdict = build(backend)
        assert "zqzqzq" in verdict.dropped
        assert agree(backend, built, ["zqzqzq", "x zqzqzq zqzqzqz"]) == 2
        assert (5000 in built.encode(["zqzqzq"]).ids.tolist()) is whole


def test_split_special_tokens_is_no_verdict(tokenizer, encoder):
    """That setting is the caller's, not the tokenizer's: refused while it holds, nothing is remembered."""
    backend = plain_backend(tokenizer)
    backend.encode_special_tokens = True
    assert "split_special_tokens" in build(backend)[1].why_not
    backend.encode_special_tokens = False
    assert build(backend)[0] is not None


def test_merges_of_another_order_are_seen(cache):
    """Ids exchanged between two merges, so that tiktoken would take the later one first: refused."""
    vocabulary = dict(STATE["model"]["vocab"])
    one, other = ("".join(STATE["model"]["merges"][n]) for n in (0, 40))
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    backend = Tokenizer.from_str(json.dumps(model(vocab=vocabulary)))
    built, verdict = build(backend)
    assert built is None
    assert "not in the order" in verdict.why_not


@pytest.mark.parametrize(
    ("attribute", "broken"),
    [
        ("pattern", lambda recipe: recipe.pattern.replace(r" ?\p{L}+", r"\p{L}+")),
        ("ranks", lambda recipe: {**recipe.ranks, b" t": recipe.ranks[b" a"], b" a": recipe.ranks[b" t"]}),
        ("added", lambda recipe: dict(list(recipe.added.items())[:-1])),
        ("around", lambda recipe: ((1,), ())),
    ],
)
def test_the_corpus_sees_what_reading_overlooks(monkeypatch, attribute, broken):
    """A recipe that is wrong in one part gives other ids for some probe text."""

    def misread(state):
        right = recipe.read_recipe(state)
        return proof.replace(right, **{attribute: broken(right)})

    monkeypatch.setattr(proof, "read_recipe", misread)
    monkeypatch.setattr(proof, "_prove_classes", lambda recipe: None)  # it takes two seconds
    backend = Tokenizer.from_str(json.dumps(STATE))
    built, verdict = proof.build(backend, text=backend.to_str(), digest=f"broken {attribute}")
    assert built is None
    assert "other" in verdict.why_not, verdict


def test_classes_of_letters_are_compared(monkeypatch):
    """A class that the two would read differently is seen: here one of them is handed another."""
    import tokenizers

    letters = recipe.read_recipe(split(r"\p{Lu}+"))
    proof._prove_classes(letters)
    proof._odd_letters.cache_clear()
    monkeypatch.setattr(tokenizers, "Regex", lambda pattern: pattern)  # a text in place of a pattern
    with pytest.raises(recipe.NotEqual, match="not the same to both: U\\+0041"):
        proof._prove_classes(letters)
    proof._odd_letters.cache_clear()


TALK = [
    {"role": "user", "content": "one é 中文"},
    {"role": "assistant", "content": "two 👩‍👩‍👧"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "\n four é"},
]


def outcomes(encoder, conversations):
    return [
        (outcome.reason, outcome.detail)
        if isinstance(outcome, RowRejected)
        else [(e.input_ids.tolist(), e.labels.tolist(), list(e.notes), e.turn) for e in outcome]
        for outcome in encoder.encode_many(conversations)
    ]


@pytest.fixture(scope="module")
def pair(tokenizer, cache):
    """The two encoders of one template and options, made once."""

    @functools.cache
    def make(**options):
        return [
            ChatEncoder(tokenizer, options=ChatOptions(encoder=which, **options))
            for which in ("tokenizers", "tiktoken")
        ]

    return make


@given(
    contents=st.lists(st.lists(ATOMS, min_size=1, max_size=6).map("".join), min_size=2, max_size=6),
    template=st.sampled_from(["chatml", "marked", "llama"]),
    options=st.sampled_from([{}, {"turns": "expand"}, {"train_on": "all"}, {"train_on": "last"}]),
    control=st.sampled_from(["reject", "allow"]),
)
@settings(max_examples=80)
def test_masks_agree_on_any_conversation(pair, contents, template, options, control):
    """Ids, labels, notes, turns and reasons of rejection are those that the library's places give."""
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)
    ]
    conversations = [
        Conversation(messages=messages),
        Conversation(text=contents[0]),
        Conversation(messages=TALK),
        Conversation(messages=messages[:2]),
    ]
    slow, fast = pair(chat_template=T[template], control_tokens=control, **options)
    assert outcomes(slow, conversations) == outcomes(fast, conversations)


def test_a_token_across_a_span_is_noted_alike(pair):
    """A template whose mark cuts through a word: the same labels and notes from bytes as from places."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant th"
        "{% generation %}e{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}<|im_start|>user {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    slow, fast = pair(chat_template=template)
    known = outcomes(slow, [Conversation(messages=TALK[:2])])
    assert known == outcomes(fast, [Conversation(messages=TALK[:2])])
    assert Note.TOKEN_ACROSS_START in known[0][0][2]


def test_shard_sets_are_the_same_bytes(tmp_path):
    """`pack` with either encoder writes every file but run.json alike."""
    outs = [tmp_path / which for which in ("tokenizers", "tiktoken")]
    for out in outs:
        chat = ChatOptions(encoder=out.name)
        pack_dataset(CHATS, tokenizer=TOKENIZER, out=out, options=PackOptions(capacity=1024), chat=chat)
    names = sorted(path.name for path in outs[0].iterdir())
    assert len(names) > 4
    for name in names:
        if name != "run.json":
            assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes(), name
    assert json.loads((outs[1] / "run.json").read_text())["encoder"]["encoder"] == "tiktoken"


def test_auto_falls_back_with_a_warning(tokenizer, caplog, monkeypatch):
    """Not shown to be equal: the library encodes, one line says why, and the report as well."""
    monkeypatch.setattr(
        proof, "build", lambda backend, **more: (None, proof.Verdict(why_not="it has whiskers"))
    )
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"]))
    assert encoder.encoder_report()["why"].startswith("not prepared")
    with caplog.at_level(logging.WARNING):
        encoder.prepare()
    assert "it has whiskers" in caplog.text
    assert encoder.encoder_report()["encoder"] == "tokenizers"
    assert encoder.encoder_report()["why"] == "it has whiskers"
    assert isinstance(encoder.encode_many([Conversation(messages=TALK)])[0], list)
    assert encoder.take_counts() == {"tokenizers": 1}
    with pytest.raises(OptionError, match=r"--encoder tiktoken: .*whiskers"):
        ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"], encoder="tiktoken"))


def test_other_ids_for_a_users_row_stop_the_encoder(monkeypatch, cache):
    """The sample sees a wrong id; the error says so, and this tokenizer is never encoded so again."""
    monkeypatch.setattr(proof, "_prove_corpus", lambda *args: None)  # it takes a second
    options = ChatOptions(chat_template=T["chatml"], encoder="tiktoken")
    made = load_tokenizer(str(TOKENIZER))
    made.add_tokens(["<a token of its own>"])
    encoder = ChatEncoder(made, options=options)
    assert encoder.encoder_report()["encoder"] == "tiktoken"
    encoding = encoder._bpe._encoding
    one, other = encoding.encode("e")[0], encoding.encode("a")[0]

    class Wrong:
        def encode_to_numpy(self, text, **more):
            ids = encoding.encode_to_numpy(text, **more)
            return np.where(ids == one, np.uint32(other), ids)  # the same length, so the bytes add up

    encoder._bpe._encoding = Wrong()
    with pytest.raises(EncodersDiffer, match="other ids for"):
        encoder.encode_many([Conversation(messages=[{**m, "content": "e"} for m in TALK])])
    with pytest.raises(OptionError, match="other ids for"):
        ChatEncoder(made, options=options)


def test_another_mask_is_named_and_not_remembered(tokenizer, monkeypatch):
    """A mask that differs is no fault of the tokenizer's: the run stops, the next may try again."""
    options = ChatOptions(chat_template=T["chatml"], encoder="tiktoken")
    encoder = ChatEncoder(tokenizer, options=options)
    mask = encode.by_bytes

    def shifted(*args):
        return [tokens._replace(labels=np.roll(tokens.labels, 1)) for tokens in mask(*args)]

    monkeypatch.setattr(encode, "by_bytes", shifted)
    with pytest.raises(EncodersDiffer, match="other mask for"):
        encoder.encode_many([Conversation(messages=TALK)])
    assert ChatEncoder(tokenizer, options=options).encoder_report()["encoder"] == "tiktoken"


def test_missing_bytes_stop_the_encoder(encoder):
    """Bytes that a pattern drops make the tokens shorter than the text: noticed without a second encoding."""
    import tiktoken

    broken = bpe.BpeEncoder.__new__(bpe.BpeEncoder)
    broken.__dict__.update(encoder.__dict__)
    broken._encoding = tiktoken.Encoding(
        "gaps",
        pat_str=r"\p{L}+",
        mergeable_ranks=encoder._encoding._mergeable_ranks,
        special_tokens=encoder._encoding._special_tokens,
    )
    assert broken.encode(["abc"]) is not None
    with pytest.raises(recipe.NotEqual, match="not the bytes"):
        broken.encode(["abc 1"])


def test_what_tiktoken_gives_up_on_goes_to_the_library(tokenizer):
    """A million blanks are too many for its regex: such a call is encoded by the library, and counted."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"], encoder="tiktoken"))
    blanks = [{"role": "user", "content": f"x{' ' * 1_000_000}y"}, TALK[1]]
    (made,) = encoder.encode_many([Conversation(messages=blanks)])
    assert len(made) == 1
    assert encoder.take_counts() == {"tokenizers": 1}


def test_counts_say_which_way_examples_went(tokenizer):
    """So many by each, and so many by both; then they begin anew."""
    encoder = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"], encoder="tiktoken"))
    encoder.encode_many([Conversation(messages=TALK)] * 300)
    assert encoder.take_counts() == {"tiktoken": 300, "both": 3}
    assert encoder.take_counts() == {}


def test_the_choice_travels_to_other_processes(tokenizer):
    """A pickled encoder that was prepared is prepared on the other side; the fingerprint knows no encoder."""
    prepared = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"]))
    plain = prepared.fingerprint()
    prepared.prepare()
    arrived = pickle.loads(pickle.dumps(prepared))
    assert arrived.encoder_report()["encoder"] == "tiktoken"
    assert prepared.fingerprint() == plain
    slow = ChatEncoder(tokenizer, options=ChatOptions(chat_template=T["chatml"], encoder="tokenizers"))
    assert slow.fingerprint() == plain


def test_a_verdict_is_remembered_until_anything_changes(tokenizer, encoder, monkeypatch, tmp_path):
    """The second time it is read from disk; with another library, or if the file is cut off, found anew."""
    backend = plain_backend(tokenizer)
    assert build(backend)[1].remembered  # by the fixture
    monkeypatch.setattr(proof, "_prove_classes", lambda recipe: None)  # these two take seconds
    monkeypatch.setattr(proof, "_prove_corpus", lambda *args: None)
    file = proof._file(tokenizer_digest(tokenizer))
    whole = file.read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace('"dropped": [', '"dropped": ["Ġthe", '), "null"):
        assert damaged != whole
        file.write_text(damaged)
        assert not build(backend)[1].remembered
    assert build(backend)[1].remembered
    with monkeypatch.context() as patch:
        patch.setattr(proof, "version", lambda package: "0.0.1")
        assert not build(backend)[1].remembered
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    assert build(backend)[0] is not None  # what can't be kept is found out again


def test_a_recipe_needs_no_merges(tokenizer):
    """Without its merges a tokenizer.json gives the same recipe, whatever its tokens spell."""
    texts = [tokenizer_json(tokenizer)]
    state = json.loads(texts[0])
    state["model"]["vocab"][',"merges":[["a","b"]]}}'] = len(state["model"]["vocab"]) + 1000
    texts.append(json.dumps(state, separators=(",", ":"), ensure_ascii=False))
    for text in texts:
        cut = recipe.without_merges(text)
        assert len(cut) < len(text)
        assert recipe.read_recipe(json.loads(cut)) == recipe.read_recipe(json.loads(text))
    model = state.pop("model")
    for other in ({"model": model, **state}, {**state, "model": {"merges": [], **model}}):
        whole = json.dumps(other, separators=(",", ":"))
        assert json.loads(recipe.without_merges(whole)) == other


def test_no_damaged_verdict_is_believed(cache):
    """Any flipped bit of the file, or another tokenizer's file under its name, is as if it were not there."""
    verdict = proof.Verdict(why_not="it has whiskers", dropped=["a", "Ġb"], seconds=1.25)
    proof._remember("flipped", verdict)
    file = proof._file("flipped")
    whole = file.read_bytes()
    known = proof.replace(verdict, remembered=True)
    assert proof._recall("flipped") == known
    lost = 0
    for place in range(len(whole)):
        for bit in (1, 4):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            found = proof._recall("flipped")
            assert found in (None, known)  # of a blank between two values nothing depends
            lost += found is None
    assert lost > len(whole)
    proof._file("other").write_bytes(whole)
    assert proof._recall("other") is None


def test_a_user_without_a_home_is_served(monkeypatch):
    """No $HOME and a user id that no passwd file knows: nothing is remembered, and encoding goes on."""
    for name in ("PADFREE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError
    monkeypatch.setattr(proof, "_prove_classes", lambda recipe: None)  # these two take seconds
    monkeypatch.setattr(proof, "_prove_corpus", lambda *args: None)
    for _ in range(2):
        built, verdict = build(Tokenizer.from_str(json.dumps(STATE)))
        assert built is not None
        assert not verdict.remembered


def test_many_writers_leave_one_whole_verdict(cache):
    """Whoever reads while others write finds a whole verdict or none."""
    verdict = proof.Verdict(why_not="", dropped=["x" * 1000] * 100)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            writes = [pool.submit(proof._remember, "many", verdict) for _ in range(20)]
            assert proof._recall("many") in (None, proof.replace(verdict, remembered=True))
            for write in writes:
                write.result()
    assert proof._recall("many").dropped == verdict.dropped
    assert not list(cache.glob("tmp*"))  # and nothing beside it
