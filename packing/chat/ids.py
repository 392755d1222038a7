"""A text's tokens and which of them are trained, from the places that its encoder gives.

Of `tokenizers` that is a place for each token, asked for one by one; of `bpe` the byte at which it begins.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing.chat.bpe import Encoded, byte_places
from packing.errors import RowRejected
from packing.example import IGNORE_INDEX, Note


class Tokens(NamedTuple):
    """What a text is encoded to: int32[L] ids and labels, how many are trained, and notes.

    Plain text has its labels still to come.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    supervised: int
    notes: Sequence[Note]


def by_bytes(
    encoded: Encoded, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
) -> list[Tokens]:
    """The tokens of each text, those within its spans trained: for all texts at once.

    A token across a span's start is not trained, one across its end is, as in `token_at`.
    """
    places: list[int] = []
    for text, own_spans in zip(texts, spans, strict=True):
        places += byte_places(text, [place for span in own_spans for place in span])
    counts = [2 * len(own_spans) for own_spans in spans]
    bytes_ = np.array(places, np.int64) + np.repeat(encoded.texts, counts)
    tokens = encoded.begins.searchsorted(bytes_)
    across = encoded.begins[tokens] != bytes_
    size = encoded.ids.size + 1
    opened = np.bincount(tokens[::2], minlength=size) - np.bincount(tokens[1::2], minlength=size)
    trained = np.cumsum(opened)[:-1] > 0
    firsts, lasts = encoded.bounds()
    trained[firsts] = False
    labels = np.where(trained, encoded.ids, np.int32(IGNORE_INDEX))
    before = np.concatenate([[0], np.cumsum(trained)])
    supervised = (before[lasts] - before[firsts]).tolist()
    made = []
    ends = np.cumsum(counts).tolist()
    odd = set(np.repeat(np.arange(len(texts)), counts)[across].tolist())
    for n, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
        notes = _across(across[ends[n] - counts[n] : ends[n]].tolist()) if n in odd else ()
        made.append(Tokens(encoded.ids[first:last], labels[first:last], supervised[n], notes))
    return made


def around(tokens: Tokens, ids: tuple[Sequence[int], Sequence[int]]) -> Tokens:
    """The tokens of a plain text with others before and behind them."""
    before, behind = ids
    whole = np.concatenate([before, tokens.ids, behind]).astype(np.int32)
    return tokens._replace(ids=whole, labels=np.full(whole.size, IGNORE_INDEX, np.int32))


def _across(across: Sequence[bool]) -> list[Note]:
    """The notes for the starts and ends of spans, in turn."""
    kinds = itertools.cycle((Note.TOKEN_ACROSS_START, Note.TOKEN_ACROSS_END))
    return [note for note, is_across in zip(kinds, across, strict=False) if is_across]


def difference(made: Tokens | RowRejected, known: Tokens | RowRejected) -> str:
    """What of an example differs from what is known of it, "" for nothing."""
    if isinstance(made, RowRejected) or isinstance(known, RowRejected):
        return "outcome"
    if not np.array_equal(made.ids, known.ids):
        return "ids"
    if made.supervised == 0 == known.supervised:
        return ""  # plain text has no mask yet
    if not np.array_equal(made.labels, known.labels):
        return "mask"
    return "" if list(made.notes) == list(known.notes) else "notes"


def by_places(
    encoding: Any, ids: NDArray[np.int32], spans: Sequence[tuple[int, int]], *, length: int, trimmed: bool
) -> Tokens:
    """The tokens of an encoding of `tokenizers`, those within the spans trained.

    Args:
        encoding: Of the text.
        ids: Its ids.
        spans: The trained characters.
        length: Of the text, in characters.
        trimmed: As in `token_at`.
    """
    labels = np.full(ids.size, IGNORE_INDEX, np.int32)
    notes = []
    for start, end in spans:
        first, across_start = token_at(encoding, start, length, trimmed=trimmed)
        last, across_end = token_at(encoding, end, length, trimmed=trimmed)
        labels[first:last] = ids[first:last]
        notes += [Note.TOKEN_ACROSS_START] * across_start + [Note.TOKEN_ACROSS_END] * across_end
    labels[:1] = IGNORE_INDEX
    return Tokens(ids, labels, int(np.count_nonzero(labels != IGNORE_INDEX)), notes)


def token_at(encoding: Any, place: int, length: int, *, trimmed: bool) -> tuple[int, bool]:
    """The first token that begins at character `place` or behind it, and whether one lies across it.

    So a token across a span's start is not trained, since the model is given a part of it; one across
    its end is. Asks for single characters: the list of all offsets costs a tenth of the encoding.

    Args:
        encoding: Of `tokenizers`.
        place: From 0 to `length`.
        length: Of the text, in characters.
        trimmed: Offsets may leave out the white space that a token begins with.
    """
    if place == length:
        return len(encoding), False
    token = encoding.char_to_token(place)
    if token is None:
        token = bisect_left(encoding.offsets, place, key=lambda offset: offset[0])
    elif encoding.token_to_chars(token)[0] < place:
        while token < len(encoding) and encoding.token_to_chars(token)[0] < place:
            token += 1
        return token, True
    across = False
    while trimmed and token < len(encoding) and _begin(encoding, token) < place:
        across = encoding.token_to_chars(token)[1] > place
        token += 1
    return token, across


def _begin(encoding: Any, token: int) -> int:
    """Where a token begins whose place leaves out the spaces that it begins with."""
    text: str = encoding.tokens[token]
    begin: int = encoding.token_to_chars(token)[0]
    return begin - len(text) + len(text.lstrip("Ġ"))
