"""What a tokenizer.json says, understood to the last setting or refused by name: tiktoken is made of it."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class NotEqual(Exception):
    """tiktoken can't be shown to give this tokenizer's ids; the text says why. Caught before users see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What tiktoken is built from.

    Attributes:
        pattern: Cuts a text into the pieces within which bytes are merged, as tiktoken takes it.
        sources: The patterns of tokenizer.json that it stands for.
        ranks: The bytes of each token that merges can make -> its id, in the order of merging.
        added: The text of each added token -> its id; they are found before all else.
        composed: Texts have to be in normal form C.
        ignore_merges: A piece that is a token is that token, even if no merges lead to it.
        around: What `add_special_tokens` puts before and behind a text.
        vocabulary: One more than the largest id, of all tokens.
    """

    pattern: str
    sources: tuple[str, ...]
    ranks: Mapping[bytes, int]
    added: Mapping[str, int]
    composed: bool
    ignore_merges: bool
    around: tuple[tuple[int, ...], tuple[int, ...]]
    vocabulary: int


def read_recipe(state: Mapping[str, Any]) -> Recipe:
    """The recipe of a tokenizer.

    Args:
        state: Its tokenizer.json.

    Raises:
        NotEqual: something in it that is not known to have no effect, or to be the same in tiktoken.
    """
    model = state["model"]
    _check_model(model)
    composed = _read_normalizer(state["normalizer"])
    sources = tuple(_read_patterns(state["pre_tokenizer"]))
    added = _read_added(state["added_tokens"], composed=composed)
    return Recipe(
        pattern=_one_pattern(sources),
        sources=sources,
        ranks=_read_ranks(model),
        added=added,
        composed=composed,
        ignore_merges=bool(model.get("ignore_merges")),
        around=_read_around(state["post_processor"]),
        vocabulary=1 + max(*model["vocab"].values(), *added.values()),
    )


def without_merges(text: str) -> str:
    """A tokenizer.json as `tokenizers` writes it less its merges, which a proven recipe does not need.

    They are half of it, and three quarters of the time it takes to read. They come last; in any other order
    the text stays whole. Within a token the key's quotes would be escaped.
    """
    before, found, merges = text.partition(',"merges":[')
    return f"{before}}}}}" if found and merges.endswith("]]}}") else text


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise NotEqual(f"its model is {model.get('type')}, not BPE")
    known = {"type", "vocab", "merges", "ignore_merges", "fuse_unk", "unk_token"}
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise NotEqual(f"its model has {name} {model[name]!r}")
        known.add(name)
    if unknown := model.keys() - known:
        raise NotEqual(f"its model has the unknown setting {min(unknown)}")


def _read_normalizer(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether texts are brought to normal form C; else they are left as they are."""
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        parts = [_read_normalizer(part) for part in normalizer["normalizers"]]  # each is looked at
        return any(parts)
    if normalizer["type"] != "NFC":
        raise NotEqual(f"its normalizer is {normalizer['type']}, neither NFC nor none")
    return True


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by where it is not told otherwise."""


def _read_patterns(pre_tokenizer: Mapping[str, Any] | None) -> list[str]:
    """The patterns that split a text one after the other."""
    steps = [pre_tokenizer or {"type": "none"}]
    if steps[0]["type"] == "Sequence":
        steps = list(steps[0]["pretokenizers"])
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise NotEqual(f"its pre-tokenizer ends in {last['type']}, not in ByteLevel without a prefix space")
    patterns = []
    for split in splits:
        regex = split.get("pattern", {}).get("Regex")
        if split["type"] != "Split" or regex is None or split["behavior"] != "Isolated" or split["invert"]:
            raise NotEqual(f"its pre-tokenizer has a {split['type']} that is not known")
        patterns.append(
            regex.replace("\r", r"\r").replace("\n", r"\n")
        )  # DeepSeek has the letters themselves
    if last["use_regex"]:
        patterns.append(_GPT2)
    if not patterns:
        raise NotEqual("its pre-tokenizer does not split texts")
    return patterns


_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


def _one_pattern(sources: tuple[str, ...]) -> str:
    """One pattern that cuts as several do one after the other.

    Raises:
        NotEqual: several that are not known.
    """
    if len(sources) == 1:
        return _grouped(sources[0])
    if sources != _DEEPSEEK:
        raise NotEqual(f"its pre-tokenizer has {len(sources)} patterns that are not known")
    # The third sees only what the first two leave: so its classes are without theirs, and where theirs
    # begin the text ends for it. What none of them matches is a piece as well.
    known = _grouped("|".join(sources))
    taken = r"\p{N}" + sources[1][1:-2]
    for mine, theirs in (
        (r"[^\r\n\p{L}\p{P}\p{S}]?", rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}{taken}]?"),
        (r"[\p{L}\p{M}]+", rf"[[\p{{L}}\p{{M}}]&&[^{taken}]]+"),
        (r"[\p{P}\p{S}]+", rf"[[\p{{P}}\p{{S}}]&&[^{taken}]]+"),
        (r"(?!\S)", rf"(?![^\s{taken}])"),
    ):
        known = known.replace(mine, theirs)
    return rf"{known}|(?:(?!{known})[\s\S])+"


_BLANKS = r"|\s+(?!\S)|\s+"
"""How all known patterns end: a run of blanks but for the last, which begins the next piece."""


def _grouped(pattern: str) -> str:
    """The pattern with what stands before its look-ahead in a group, which says the same.

    tiktoken tries the alternatives of a pattern with a look-ahead one by one, those of a group without one
    all at once: 115 to 130 ns a token in place of 150 to 190.
    """
    if not pattern.endswith(_BLANKS):  # no bracket behind it, so it stands in none
        return pattern
    return f"(?:{pattern.removesuffix(_BLANKS)}){_BLANKS}"


_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTED))
_EXCHANGED = dict.fromkeys(_OTHERS, "\uffff") | {256 + place: chr(byte) for place, byte in enumerate(_OTHERS)}
_LETTER_TO_BYTE = "".join(_EXCHANGED.get(letter, chr(letter)) for letter in range(256 + len(_OTHERS)))
"""Bytes that do not print are letters from U+0100 on, in their order; any other byte is its own letter.

A text, since `translate` reads that twice as fast as a dict; what is in no alphabet is no byte.
"""


def token_bytes(token: str) -> bytes | None:
    """The bytes of a token of the vocabulary, None where it is not made of bytes."""
    try:
        return token.translate(_LETTER_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _read_ranks(model: Mapping[str, Any]) -> dict[bytes, int]:
    """The bytes of each token that is made of bytes, and its id.

    Raises:
        NotEqual: a byte without a token.
    """
    ranks = {data: n for token, n in model["vocab"].items() if (data := token_bytes(token)) is not None}
    if lacking := sum(bytes([byte]) not in ranks for byte in range(256)):
        raise NotEqual(f"its vocabulary lacks {lacking} of the 256 bytes")
    return ranks


def pairs(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The pairs that are merged, in order."""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def check_order(model: Mapping[str, Any]) -> None:
    """Merges come in the order of the ids that they make, by which tiktoken merges.

    Raises:
        NotEqual: they do not.
    """
    last = -1
    for left, right in pairs(model):
        made = model["vocab"].get(left + right, -1)
        if made < last:
            raise NotEqual(f"its merges are not in the order of their ids at {left + right!r}")
        last = made


def _read_added(tokens: Iterable[Mapping[str, Any]], *, composed: bool) -> dict[str, int]:
    """The added tokens.

    Raises:
        NotEqual: one with a flag that tiktoken has not, or two that could compete for a text.
    """
    early: dict[str, int] = {}
    late: dict[str, int] = {}
    for token in tokens:
        text: str = token["content"]
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise NotEqual(f"its added token {text!r} has the flag {flag}")
        if token["normalized"] and composed and not unicodedata.is_normalized("NFC", text):
            raise NotEqual(f"its added token {text!r} is changed by its normalizer")
        (late if token["normalized"] else early)[text] = token["id"]
    added = early | late
    if not added or not all(added):
        raise NotEqual("it has no added tokens, or an empty one")
    for text, other in itertools.pairwise(sorted(added)):
        if other.startswith(text):
            raise NotEqual(f"its added tokens {text!r} and {other!r} begin alike")
    # Those that are not normalized are taken out of the whole text first.
    for text in late:
        if crossing := [other for other in early if overlap(text, other)]:
            raise NotEqual(f"its added tokens {text!r} and {crossing[0]!r} can overlap")
    return added


def _read_around(processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a post-processor puts before and behind a text."""
    if processor is None or processor["type"] == "ByteLevel":
        return (), ()
    if processor["type"] == "Sequence":
        parts = [found for part in processor["processors"] if (found := _read_around(part)) != ((), ())]
        if len(parts) > 1:
            raise NotEqual("its post-processor adds tokens more than once")
        return parts[0] if parts else ((), ())
    if processor["type"] != "TemplateProcessing":
        raise NotEqual(f"its post-processor is {processor['type']}, which is not known")
    around: tuple[list[int], list[int]] = ([], [])
    behind = False
    for item in processor["single"]:
        if "SpecialToken" in item:
            around[behind].extend(processor["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        elif behind:
            raise NotEqual("its post-processor repeats the text")
        else:
            behind = True
    return tuple(around[0]), tuple(around[1])


_CLASS = re.compile(r"\[(?:\\.|[^\[\]\\&]|&(?!&))+\]|\\p\{\w+\}|\\[sS]")
_ANY_CASE = re.compile(r"\(\?i:([a-z'|]+)\)")
_SYNTAX = re.compile(r"(?:\\[rn]|\(\?[!:=]|[()|+*?]|\{\d+(?:,\d*)?\}|[ '\w/])*")


def classes(pattern: str) -> set[str]:
    r"""The classes of letters in a pattern, such as `\p{L}`.

    Raises:
        NotEqual: the pattern has something that is not known to mean the same to both.
    """
    letters = {
        f"(?i:{letter})" for group in _ANY_CASE.findall(pattern) for letter in group if letter.isalpha()
    }
    rest = _ANY_CASE.sub("", pattern)
    if odd := _SYNTAX.sub("", _CLASS.sub("", rest)):
        raise NotEqual(f"its pattern has {odd[:20]!r}, which is not known")
    return letters.union(_CLASS.findall(rest))


def overlap(first: str, second: str) -> bool:
    """Whether the second can begin within the first, behind its beginning."""
    return any(
        second.startswith(first[place:]) or first.startswith(second, place) for place in range(1, len(first))
    )
