"""Whether tiktoken gives a tokenizer's ids: shown once for each tokenizer, and remembered.

    read     tokenizer.json holds nothing that is not understood (`recipe.read_recipe`)
    merges   every token of the vocabulary, by what its own bytes merge to
    classes  every class of letters in the pattern, on every code point but for most of the empty planes
    corpus   texts of all kinds through both, to the last id

And on each run a sample of the user's own rows goes through both (`ChatEncoder.encode_many`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing.atomic import cache_folder
from packing.chat.bpe import BpeEncoder
from packing.chat.recipe import (
    NotEqual,
    Recipe,
    check_order,
    classes,
    pairs,
    read_recipe,
    token_bytes,
    without_merges,
)
from packing.chat.tokenizer import PROBES


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of a tokenizer.

    Attributes:
        why_not: Why tiktoken can't be used, "" if it can.
        dropped: Tokens that merges never make.
        seconds: What it took to find out.
        remembered: An earlier run found out.
    """

    why_not: str
    dropped: Sequence[str] = ()
    seconds: float = 0.0
    remembered: bool = False


def build(backend: Any, *, text: str, digest: str) -> tuple[BpeEncoder | None, Verdict]:
    """The encoder of a tokenizer, None where it is not shown to be equal; and what is known.

    Args:
        backend: A `tokenizers.Tokenizer` without padding and truncation.
        text: All that defines its ids, as JSON.
        digest: Of the text.
    """
    import orjson

    if backend.encode_special_tokens:  # a setting that is in no file
        return None, Verdict(why_not="its added tokens are read as text (split_special_tokens)")
    started = time.perf_counter()
    verdict = _recall(digest)
    if verdict is not None and verdict.why_not:
        return None, verdict
    state = orjson.loads(text if verdict is None else without_merges(text))
    try:
        recipe = read_recipe(state)
        if verdict is None:
            dropped = _prove_merges(state)
            _prove_classes(recipe)
        else:
            dropped = set(verdict.dropped)
        if dropped and not recipe.ignore_merges:
            gone = set(map(token_bytes, dropped))
            recipe = replace(recipe, ranks={data: n for data, n in recipe.ranks.items() if data not in gone})
        encoder = BpeEncoder(recipe)
        if verdict is None:
            _prove_corpus(encoder, recipe, backend, state["model"])
            verdict = Verdict(why_not="", dropped=sorted(dropped), seconds=time.perf_counter() - started)
            _remember(digest, verdict)
    except NotEqual as error:
        verdict = Verdict(why_not=str(error), seconds=time.perf_counter() - started)
        _remember(digest, verdict)
        return None, verdict
    return encoder, verdict


def _prove_merges(state: Mapping[str, Any]) -> set[str]:
    """Both merge alike; the tokens that merging never makes.

    tiktoken merges any two neighbours that make a token, lowest id first; tokenizer.json only those that it
    lists, lowest in the list first, which is the order of the ids. When two neighbours stand there that make
    a token, nothing was merged across their ends, so they are what the token's bytes come to on their own:
    one pair for each token, whatever surrounds it. So of several listed pairs that make the same token, only
    that one ever stands there, and their order in the list does not matter; equal pairs are merged from the
    left by both. And where both first differ, that pair is not listed, so the token's bytes stay two tokens
    on their own. Is there no such token, there is no difference.

    Raises:
        NotEqual: there is one.
    """
    import orjson
    import tokenizers

    check_order(state["model"])
    bare = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
    model = {**state["model"], "ignore_merges": False}
    merger = tokenizers.Tokenizer.from_str(
        orjson.dumps({**state, **bare, "added_tokens": [], "model": model}).decode()
    )
    unmade = set()
    for token, n in model["vocab"].items():
        if token_bytes(token) is None:
            continue
        ids = merger.encode(token, add_special_tokens=False).ids
        if ids != [n]:
            if len(ids) <= 2:
                raise NotEqual(f"its merges do not join the two tokens of {token!r}")
            unmade.add(token)
    return unmade


def _code_points() -> str:
    """Every code point of the planes that hold letters, and one of 64 of the empty and private ones."""
    full = itertools.chain(range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))
    thin = itertools.chain(range(0x40000, 0xE0000, 64), range(0xF0000, 0x110000, 64))
    return "".join(map(chr, itertools.chain(full, thin, (0x10FFFF,))))


def _prove_classes(recipe: Recipe) -> None:
    """Each class has the same letters for both.

    Raises:
        NotEqual: one has not.
    """
    for pattern in sorted(set().union(*map(classes, recipe.sources))):
        if odd := _odd_letters(pattern):
            raise NotEqual(f"{pattern} is not the same to both: U+{odd[0]:04X}, one of {len(odd)}")


@functools.cache
def _odd_letters(pattern: str) -> Sequence[int]:
    """The code points that are in a class for one of the two only."""
    import tiktoken
    import tokenizers

    letters = _code_points()
    bytes_ = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=bytes_, special_tokens={})
    found = encoding.encode_to_numpy(letters, disallowed_special=()).astype(np.uint8).tobytes().decode()
    remover = tokenizers.normalizers.Replace(tokenizers.Regex(pattern), "")
    ours, theirs = np.zeros((2, 0x110000), np.bool_)
    ours[_points(found)] = True
    theirs[_points(letters)] = True
    theirs[_points(remover.normalize_str(letters))] = False
    return list(np.flatnonzero(ours != theirs).tolist())


def _points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _prove_corpus(encoder: BpeEncoder, recipe: Recipe, backend: Any, model: Mapping[str, Any]) -> None:
    """Texts of all kinds give the same ids.

    Raises:
        NotEqual: one does not, or most can't be compared.
    """
    texts = list(
        itertools.chain(
            _corpus(recipe, added=sorted(t.content for t in backend.get_added_tokens_decoder().values())),
            _crossings(model),
        )
    )
    taken = [text for text in map(_compose, texts) if encoder.takes(text)]
    if len(taken) < 0.9 * len(texts):
        raise NotEqual(f"only {len(taken)} of {len(texts)} probe texts are its kind of text")
    for start in range(0, len(taken), 256):
        some = taken[start : start + 256]
        if (encoded := encoder.encode(some)) is None:
            raise NotEqual("it gives up on a probe text")
        for text, first, last in zip(some, *encoded.bounds(), strict=True):
            if backend.encode(text, add_special_tokens=False).ids != encoded.ids[first:last].tolist():
                raise NotEqual(f"other ids for {text[:60]!r}")
    before, behind = encoder.around
    for text in PROBES:
        ids = backend.encode(text, add_special_tokens=False).ids
        if backend.encode(text, add_special_tokens=True).ids != [*before, *ids, *behind]:
            raise NotEqual("its post-processor puts other tokens around a text")


_ATOMS = (
    *(
        "the",
        " a",
        "Straße",
        "naïve",
        "İ",
        "ſ",
        "K",
        "don't",
        "'S",
        "'ſ",
        "’s",
        "1",
        "23",
        "4567",
        "½",
        "٣",
        "ⅷ",
    ),
    *(
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u200d",
        "\u2028",
        "\x85",
        "\x0b",
    ),
    *(
        ".",
        ",",
        "...",
        "!?",
        "=",
        "==",
        "/",
        "\\",
        "_",
        "-",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        "|",
        "'",
        '"',
    ),
    *(
        "中文",
        "日本語の",
        "カタカナ",
        "한국어",
        "हिन्दी",
        "ไทย",
        "עברית",
        "العربية",
        "é",
        "👩‍👩‍👧",
        "🏳️",
        "\U0001f600",
    ),
    *("\x00", "\x1b", "\x7f", "\ufeff", "\ufffd", "\ue000", "$", "€", "∑", "~", "`", "^"),
    *(
        "def f(x):\n    return",
        " {\n\t\t",
        "};\n",
        "http://a.b/c?d=e",
        "&amp;",
        "<b>",
        "</b>",
        "0x1F",
        "1e-5",
        "#",
    ),
)


def _corpus(recipe: Recipe, *, added: Sequence[str]) -> Iterator[str]:
    yield from PROBES
    yield ""
    letters = [
        letter
        for letter in _code_points()
        if unicodedata.is_normalized("NFC", letter) and unicodedata.category(letter) != "Cn"
    ]
    for start in range(0, len(letters), 1024):
        for between in (" ", "7"):
            yield between.join(letters[start : start + 1024])
    for unit in ("a", " ", "\n", "\r\n", "0", "=", "ab", "é", "中", "\t ", " \n", "'s", "!a", "👩‍👧", "\x00"):
        for count in (2, 3, 50, 5000):
            yield unit * count
            yield f"x{unit * count}x"
            yield f" {unit * count} "
    random_ = random.Random(0)
    for token in added:
        for pattern in ("{0}", "a{0}b", " {0} ", "\n{0}\n\n", "{0}{0}", "{0}\u0301", "e{0}́", "{1}{0}{2}"):
            place = random_.randrange(1, len(token)) if len(token) > 1 else 1
            yield pattern.format(token, token[:place], token[place:])
    ranks = random_.sample(list(recipe.ranks), min(len(recipe.ranks), 20_000))
    words = [data.decode() for data in ranks if _is_text(data)]
    for kinds in (
        (_ATOMS, 8_000),
        ((*_ATOMS, *random_.sample(added, min(len(added), 30))), 4_000),
        (words, 5_000),
    ):
        for _ in range(kinds[1]):
            yield "".join(random_.choices(kinds[0], k=random_.randint(1, 25)))


def _crossings(model: Mapping[str, Any]) -> Iterator[str]:
    """Texts in which two pairs that make the same token overlap, such as "   ", " ", "   "."""
    made: dict[str, dict[str, str]] = {}
    for left, right in pairs(model):
        made.setdefault(left + right, {})[left] = right
    for token, rights in made.items():
        for right in rights.values():
            if right in rights and (data := token_bytes(token + rights[right])) and _is_text(data):
                yield data.decode()


def _compose(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _is_text(data: bytes) -> bool:
    with contextlib.suppress(UnicodeDecodeError):
        return bool(data.decode())
    return False


# What was found out, kept between runs.


def _file(digest: str) -> Path:
    """Another code, library or table of Unicode has another file: their verdicts say nothing of these."""
    of = hashlib.sha256(digest.encode())
    for module in ("recipe.py", "bpe.py", "proof.py"):
        of.update(Path(__file__).with_name(module).read_bytes())
    of.update(
        json.dumps(
            [version("tiktoken"), version("tokenizers"), unicodedata.unidata_version, sys.version]
        ).encode()
    )
    return cache_folder() / f"encoder-{of.hexdigest()[:32]}.json"


def _seal(said: Any, *, name: str) -> str:
    """Of what a file says, and of its name: no flipped bit and no other tokenizer's file is believed."""
    return hashlib.sha256(f"{name} {json.dumps(said, sort_keys=True)}".encode()).hexdigest()


def _recall(digest: str) -> Verdict | None:
    file = _file(digest)
    try:
        kept = json.loads(file.read_text("utf-8"))
        said, seal = kept["verdict"], kept["digest"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not there, cut off, or not ours
    return replace(Verdict(**said), remembered=True) if seal == _seal(said, name=file.name) else None


def _remember(digest: str, verdict: Verdict) -> None:
    """Best effort: a home that can't be written, or none, costs the next run the same seconds again."""
    file = _file(digest)
    said = {
        "why_not": verdict.why_not,
        "dropped": list(verdict.dropped),
        "seconds": verdict.seconds,
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
            json.dump({"verdict": said, "digest": _seal(said, name=file.name)}, new)
        os.replace(new.name, file)


def remember_difference(digest: str, *, what: str) -> None:
    """A user's row was encoded to other ids: never again for this tokenizer."""
    _remember(digest, Verdict(why_not=what))
