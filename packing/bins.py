"""The compiled bin-packing algorithms behind `packing.plan`: lengths in, bins of positions out.

Each algorithm has one signature:

    algorithm(lengths int32[n], capacity, seed uint64) -> order int64[n], offsets int64[bins + 1]

and takes lengths that were checked to lie in 1 … capacity. The first call of each compiles it (a few
seconds); numba keeps the result on disk. Importing this module costs 0.3 s, so only `plan.py` does, late.

All randomness is `_draw`, a counter-based generator in whole numbers: the same seed gives the same
plan on every machine and with every version of numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Order = tuple[NDArray[np.int64], NDArray[np.int64]]

_F = TypeVar("_F", bound=Callable[..., Any])
_compiled = cast(Callable[[_F], _F], njit(cache=True))

_U = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)
_DE_BRUIJN = 0x03F79D71B4CB0A89
_BIT_OF = np.zeros(64, np.int64)
for _bit in range(64):
    _BIT_OF[((_DE_BRUIJN << _bit) & (2**64 - 1)) >> 58] = _bit

# The columns of the node table in `best_fit_decreasing`.
_LENGTH, _TIMES, _PARENT, _NEXT, _BINS = range(5)


@_compiled
def _draw(seed: Any, counter: int, below: int) -> Any:
    """A number in 0 … below - 1 (below at most 2**32) from seed and counter alone. Source: splitmix64."""
    z = seed + _GOLDEN * _U(counter)
    z = (z ^ (z >> _U(30))) * _MIX_1
    z = (z ^ (z >> _U(27))) * _MIX_2
    z ^= z >> _U(31)
    return np.int64(((z >> _U(32)) * _U(below)) >> _U(32))


@_compiled
def _shuffle(array: Any, start: int, end: int, seed: Any) -> None:
    """Permutes array[start:end] in place (Fisher and Yates)."""
    for i in range(end - 1, start, -1):
        j = start + _draw(seed, i, i - start + 1)
        array[i], array[j] = array[j], array[i]


@_compiled
def _sort_by_length(lengths: Any, capacity: int, seed: Any) -> Any:
    """Positions by length, those of equal length in seeded order: int32[n], starts int64[capacity + 2]."""
    starts = np.zeros(capacity + 2, np.int64)
    for length in lengths:
        starts[length + 1] += 1
    for length in range(capacity + 1):
        starts[length + 1] += starts[length]
    cursor = starts.copy()
    positions = np.empty(lengths.size, np.int32)
    for i in range(lengths.size):
        length = lengths[i]
        positions[cursor[length]] = i
        cursor[length] += 1
    for length in range(1, capacity + 1):
        _shuffle(positions, starts[length], starts[length + 1], seed)
    return positions, starts


@_compiled
def _lowest_bit(word: Any) -> Any:
    return _BIT_OF[((word & (~word + _U(1))) * _U(_DE_BRUIJN)) >> _U(58)]


@_compiled
def _next_room(words: Any, summary: Any, start: int) -> Any:
    """The smallest room of at least `start` that some bin has, or -1. Bits of `summary` are words in use."""
    bits = words[start >> 6] >> _U(start & 63)
    if bits != 0:
        return start + _lowest_bit(bits)
    word = (start >> 6) + 1
    i = word >> 6
    if i >= summary.size:
        return -1
    bits = summary[i] >> _U(word & 63)
    if bits != 0:
        word += _lowest_bit(bits)
        return word * 64 + _lowest_bit(words[word])
    for j in range(i + 1, summary.size):
        if summary[j] != 0:
            word = j * 64 + _lowest_bit(summary[j])
            return word * 64 + _lowest_bit(words[word])
    return -1


@_compiled
def _push(nodes: Any, used: int, head: Any, words: Any, summary: Any, room: int) -> Any:
    """Puts node `used - 1`, whose other columns are set, first among those with this room."""
    nodes[used - 1, _NEXT] = head[room]
    if head[room] < 0:
        words[room >> 6] |= _U(1) << _U(room & 63)
        summary[room >> 12] |= _U(1) << _U((room >> 6) & 63)
    head[room] = used - 1


@_compiled
def _pop(nodes: Any, head: Any, words: Any, summary: Any, room: int) -> None:
    """Removes the first node among those with this room."""
    head[room] = nodes[head[room], _NEXT]
    if head[room] < 0:
        words[room >> 6] &= ~(_U(1) << _U(room & 63))
        if words[room >> 6] == 0:
            summary[room >> 12] &= ~(_U(1) << _U((room >> 6) & 63))


@_compiled
def best_fit_decreasing(lengths: Any, capacity: int, seed: Any) -> Order:
    """Longest first, each into the fullest bin that still takes it. O(n + capacity).

    Bins with the same contents are one node: (length, times, parent, next of equal room, bins that end
    here). A node's contents are `times` examples of `length` and its parent's. Filling whole nodes at
    once makes the work follow the number of different bins, not of examples; a bitmap of rooms finds
    the fullest bin in a few steps. Then the bins are written out in seeded order, so that shards read
    front to back are not ordered by length.
    """
    positions, cursor = _sort_by_length(lengths, capacity, seed)
    words = np.zeros((capacity >> 6) + 1, np.uint64)
    summary = np.zeros((words.size >> 6) + 1, np.uint64)
    head = np.full(capacity + 1, -1, np.int32)
    nodes = np.empty((1024, 5), np.int32)
    used = 0
    bins = 0
    for length in range(capacity, 0, -1):
        left = cursor[length + 1] - cursor[length]
        while left > 0:
            room = _next_room(words, summary, length)
            parent = -1 if room < 0 else head[room]
            available = left if parent < 0 else nodes[parent, _BINS]
            room = capacity if parent < 0 else room
            # An example leaves its bin the fullest that takes the next, so a bin takes all it can at once.
            times = room // length
            full = min(left // times, available)
            rest = left - full * times if full < available else 0
            taken = full + (1 if rest else 0)
            if parent < 0:
                bins += taken
            else:
                nodes[parent, _BINS] -= taken
                if nodes[parent, _BINS] == 0:
                    _pop(nodes, head, words, summary, room)
            if used + 2 > nodes.shape[0]:
                larger = np.empty((2 * nodes.shape[0], 5), np.int32)
                larger[:used] = nodes[:used]
                nodes = larger
            if full:
                nodes[used, _LENGTH], nodes[used, _TIMES] = length, times
                nodes[used, _PARENT], nodes[used, _BINS] = parent, full
                used += 1
                _push(nodes, used, head, words, summary, room - times * length)
            if rest:
                nodes[used, _LENGTH], nodes[used, _TIMES] = length, rest
                nodes[used, _PARENT], nodes[used, _BINS] = parent, 1
                used += 1
                _push(nodes, used, head, words, summary, room - rest * length)
            left -= full * times + rest
    last = np.empty(bins, np.int32)  # the node that each bin ends in
    i = 0
    for node in range(used):
        for _ in range(nodes[node, _BINS]):
            last[i] = node
            i += 1
    _shuffle(last, 0, bins, seed)
    order = np.empty(lengths.size, np.int64)
    offsets = np.zeros(bins + 1, np.int64)
    at = 0
    for i in range(bins):
        node = last[i]
        while node >= 0:
            length = nodes[node, _LENGTH]
            for _ in range(nodes[node, _TIMES]):
                order[at] = positions[cursor[length]]
                cursor[length] += 1
                at += 1
            node = nodes[node, _PARENT]
        offsets[i + 1] = at
    return order, offsets


@_compiled
def _collect(positions: Any, bin_of: Any, bins: int, seed: Any) -> Order:
    """Order and offsets of bins in seeded order, from the bin of each entry of `positions`."""
    rank = np.arange(bins)
    _shuffle(rank, 0, bins, seed)
    offsets = np.zeros(bins + 1, np.int64)
    for b in bin_of:
        offsets[rank[b] + 1] += 1
    for b in range(bins):
        offsets[b + 1] += offsets[b]
    cursor = offsets.copy()
    order = np.empty(positions.size, np.int64)
    for i in range(positions.size):
        b = rank[bin_of[i]]
        order[cursor[b]] = positions[i]
        cursor[b] += 1
    return order, offsets


@_compiled
def first_fit_decreasing(lengths: Any, capacity: int, seed: Any) -> Order:
    """Longest first, each into the first bin that still takes it. O(n log n).

    A tree over the bins knows the largest room below each node, so the first bin that fits is found on
    one way down.
    """
    positions, _ = _sort_by_length(lengths, capacity, seed)
    positions = positions[::-1]
    leaves = 1
    while leaves < lengths.size:
        leaves *= 2
    rooms = np.full(2 * leaves, capacity, np.int32)
    bin_of = np.empty(lengths.size, np.int32)
    bins = 0
    for i in range(positions.size):
        length = lengths[positions[i]]
        node = 1
        while node < leaves:
            node = 2 * node if rooms[2 * node] >= length else 2 * node + 1
        bin_of[i] = node - leaves
        bins = max(bins, node - leaves + 1)
        rooms[node] -= length
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return _collect(positions, bin_of, bins, seed)


@_compiled
def next_fit(lengths: Any, capacity: int, seed: Any) -> Order:
    """In the given order, each into the last bin or else a new one: what a packer without look-ahead does.

    The seed changes nothing: neither the examples nor the bins are reordered.
    """
    offsets = np.zeros(lengths.size + 1, np.int64)
    bins = 0
    room = 0
    for i in range(lengths.size):
        if lengths[i] > room:
            offsets[bins] = i
            bins += 1
            room = capacity
        room -= lengths[i]
    offsets[bins] = lengths.size
    order = np.arange(lengths.size)
    return order, offsets[: bins + 1].copy()
