r"""Byte-level BPE by tiktoken, for tokenizers of which `proof.py` shows that the ids are the same.

tiktoken gives no places in the text, and none are needed: a token of a byte-level BPE is a run of bytes, so
the sums of the tokens' lengths say where each begins, and a mask costs no second tokenization.

    text     <|im_start|>user\nhi<|im_end|>
    ids      151644 872 198 6023 151645
    lengths      12   4   1    2     10
    begins        0  12  16   17     19

A chunk of texts is encoded in one call, joined by a control token; so what follows is arithmetic on arrays.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing.chat.recipe import NotEqual, Recipe, overlap


class Encoded(NamedTuple):
    """Texts encoded in one call.

    Attributes:
        ids: int32[N], those of all texts, each followed by a separator's.
        begins: int64[N], the byte at which each token begins in all that was encoded.
        texts: int64[texts], the byte at which each text begins.
        sizes: int64[texts], the bytes of each text.
    """

    ids: NDArray[np.int32]
    begins: NDArray[np.int64]
    texts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each text its first token and the one behind its last."""
        return self.begins.searchsorted(self.texts), self.begins.searchsorted(self.texts + self.sizes)


class BpeEncoder:
    """Encodes by tiktoken what a tokenizer's own library would encode to the same ids.

    Raises:
        NotEqual: no added token can stand between two texts.
    """

    def __init__(self, recipe: Recipe) -> None:
        import tiktoken

        self._encoding = tiktoken.Encoding(
            "padfree",
            pat_str=recipe.pattern,
            mergeable_ranks=dict(recipe.ranks),
            special_tokens=dict(recipe.added),
        )
        self.around = recipe.around
        self.vocabulary = recipe.vocabulary
        self._added = frozenset(recipe.added)
        self._composed = recipe.composed
        self._separator = _separator(recipe.added)
        self._separator_id = recipe.added[self._separator]
        id_of = {**recipe.ranks, **{text.encode(): n for text, n in recipe.added.items()}}
        self._lengths = np.zeros(recipe.vocabulary, np.int64)
        self._lengths[list(id_of.values())] = list(map(len, id_of))

    def takes(self, text: str) -> bool:
        """Whether the tokenizer's own library would leave the text's letters alone.

        That of a letter younger than Python's tables of Unicode can't be said.
        """
        if not self._composed or text.isascii():
            return True
        return unicodedata.is_normalized("NFC", text) and (
            text.replace("\n", "").isprintable()  # most texts; what is unassigned does not print
            or all(unicodedata.category(letter) != "Cn" for letter in set(text))
        )

    def encode(self, texts: Sequence[str]) -> Encoded | None:
        """The texts, each of which it `takes`; None where tiktoken gives up, as on a million blanks.

        Raises:
            NotEqual: bytes are missing, or a separator is not where it was put.
        """
        joined = self._separator.join([*texts, ""])
        try:
            found = self._encoding.encode_to_numpy(joined, allowed_special=self._added, disallowed_special=())
        except ValueError:
            return None
        sizes = np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], np.int64)
        starts = np.cumsum(sizes + len(self._separator.encode())) - sizes - len(self._separator.encode())
        lengths = self._lengths[found]
        begins = np.cumsum(lengths) - lengths
        ends = starts + sizes
        places = begins.searchsorted(ends)
        if not (
            places.size == 0
            or (
                places[-1] == found.size - 1
                and np.array_equal(begins[places], ends)
                and bool((found[places] == self._separator_id).all())
            )
        ):
            raise NotEqual("its tokens are not the bytes of the text")
        return Encoded(found.view(np.int32), begins, starts, sizes)


def byte_places(text: str, places: Sequence[int]) -> Sequence[int]:
    """The bytes of a text's UTF-8 at which characters begin."""
    if text.isascii():
        return places
    found, last, size = {}, 0, 0
    for place in sorted(set(places)):
        size += len(text[last:place].encode())
        found[place], last = size, place
    return [found[place] for place in places]


def _separator(added: Iterable[str]) -> str:
    """An added token that stays one whatever stands before it."""
    for token in sorted(added):
        if not any(overlap(other, token) for other in added):
            return token
    raise NotEqual("none of its added tokens can stand between two texts")
