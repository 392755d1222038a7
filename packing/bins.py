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
_compiled = cast(Callable[[_F], _F], njit(cache=True, error_model="numpy"))

_U = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)
_DE_BRUIJN = 0x03F79D71B4CB0A89
_BIT_OF = np.zeros(
    64, np.int64
)  # a lone bit times the De Bruijn number tells in its top six bits which it was
for _bit in range(64):
    _BIT_OF[((_DE_BRUIJN << _bit) & (2**64 - 1)) >> 58] = _bit

_BLOCK = 256  # examples that keep their order in `_sort_by_length`; 1 would miss the cache each time

_PART = 2**18  # examples that `swap_search` looks at together

# Rows of the node table in `best_fit_decreasing`.
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
def _sort_by_length(lengths: Any, starts: Any, positions: Any, blocks: Any, seed: Any) -> None:
    """Counting sort of the positions, shortest first, those of equal length in seeded order.

    Args:
        lengths: int32[n].
        starts: int64[capacity + 2], zeros. Result: positions[starts[l]:starts[l + 1]] have length l.
        positions: int32[n], the result.
        blocks: int32[⌈n / 256⌉], for the order in which the input is read.
        seed: Of the order. Reading blocks of the input in random order costs a tenth of permuting the
            result. Where a length is so common that one block often holds it twice, the result is
            permuted as well.
    """
    for length in lengths:
        starts[length + 1] += 1
    for length in range(starts.size - 1):
        starts[length + 1] += starts[length]
    cursor = starts.copy()
    for i in range(blocks.size):
        blocks[i] = i
    _shuffle(blocks, 0, blocks.size, seed)
    for block in blocks:
        for i in range(_BLOCK * block, min(_BLOCK * (block + 1), lengths.size)):
            length = lengths[i]
            positions[cursor[length]] = i
            cursor[length] += 1
    for length in range(starts.size - 1):
        if (starts[length + 1] - starts[length]) * 4 * _BLOCK > lengths.size:
            _shuffle(positions, starts[length], starts[length + 1], seed)


def _sorted_by_length(lengths: NDArray[np.int32], capacity: int, seed: Any) -> tuple[Any, Any]:
    """`_sort_by_length` with its arrays. numpy's large arrays get huge pages, which save a third at 10 M."""
    starts = np.zeros(capacity + 2, np.int64)
    positions = np.empty(lengths.size, np.int32)
    _sort_by_length(lengths, starts, positions, np.empty(-(-lengths.size // _BLOCK), np.int32), seed)
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
def _best_fit(starts: Any, capacity: int, nodes: Any) -> Any:
    """Fills bins in groups of equal contents.

    Args:
        starts: int64[capacity + 2]: starts[l + 1] - starts[l] examples have length l.
        capacity: Of a bin.
        nodes: int32[5, most]. Column k, the result, is a group of bins: `times` examples of `length` and
            what the parent holds (-1: nothing); the next group of equal room; how many bins end here.

    Returns:
        How many nodes are used, or -1 if there were too few; how many bins.
    """
    words = np.zeros((capacity >> 6) + 1, np.uint64)  # bit r: some bin has room r
    summary = np.zeros((words.size >> 6) + 1, np.uint64)  # bit w: words[w] is not 0
    head = np.full(capacity + 1, -1, np.int32)
    used = 0
    bins = 0
    for length in range(capacity, 0, -1):
        left = starts[length + 1] - starts[length]
        while left > 0:
            if used == nodes.shape[1]:
                return -1, bins
            room = _next_room(words, summary, length)
            parent = -1 if room < 0 else head[room]
            available = left if parent < 0 else np.int64(nodes[_BINS, parent])
            room = capacity if parent < 0 else room
            # With this example in it, its bin is the fullest that takes the next: it takes all it can.
            times = 1 if room < 2 * length else room // length
            count = min(left, available) if times == 1 else min(left // times, available)
            if count == 0:
                times, count = left, 1
            left -= count * times
            # Take `count` bins from the parent, and its bit from the maps if no bin of this room is left.
            if parent < 0:
                bins += count
            else:
                nodes[_BINS, parent] -= count
                if nodes[_BINS, parent] == 0:
                    head[room] = nodes[_NEXT, parent]
                    if head[room] < 0:
                        words[room >> 6] &= ~(_U(1) << _U(room & 63))
                        if words[room >> 6] == 0:
                            summary[room >> 12] &= ~(_U(1) << _U((room >> 6) & 63))
            # Add the node. Written out here: calls would make this function four times slower.
            room -= times * length
            nodes[_LENGTH, used], nodes[_TIMES, used] = length, times
            nodes[_PARENT, used], nodes[_BINS, used] = parent, count
            nodes[_NEXT, used] = head[room]
            if head[room] < 0:
                words[room >> 6] |= _U(1) << _U(room & 63)
                summary[room >> 12] |= _U(1) << _U((room >> 6) & 63)
            head[room] = used
            used += 1
    return used, bins


@_compiled
def _write_out(
    nodes: Any, used: int, positions: Any, starts: Any, places: Any, order: Any, offsets: Any, seed: Any
) -> None:
    """Deals the positions to the bins of the nodes, with the bins in seeded order.

    Args:
        nodes: int32[5, most], from `_best_fit`.
        used: How many of them.
        positions: int32[n], by length.
        starts: int64[capacity + 2], where each length begins in `positions`; used up.
        places: int32[bins], work space: first where a bin comes, then where its next example goes.
        order: int64[n], the result.
        offsets: int64[bins + 1], the result.
        seed: Of the bins' order.
    """
    for b in range(places.size):
        places[b] = b
    _shuffle(places, 0, places.size, seed)
    examples = np.empty(used, np.int32)  # in a bin that ends in this node
    offsets[0] = 0
    b = 0
    for node in range(used):
        parent = nodes[_PARENT, node]
        examples[node] = nodes[_TIMES, node] + (examples[parent] if parent >= 0 else 0)
        for _ in range(nodes[_BINS, node]):
            offsets[places[b] + 1] = examples[node]
            b += 1
    for b in range(places.size):
        offsets[b + 1] += offsets[b]
    for b in range(places.size):
        places[b] = offsets[places[b]]
    first = 0  # bin of this node
    for last in range(used):
        end = first + nodes[_BINS, last]
        node = last
        while node >= 0 and first < end:
            times = nodes[_TIMES, node]
            cursor = starts[nodes[_LENGTH, node]]
            for b in range(first, end):
                at = places[b]
                for i in range(at, at + times):
                    order[i] = positions[cursor]
                    cursor += 1
                places[b] = at + times
            starts[nodes[_LENGTH, node]] = cursor
            node = nodes[_PARENT, node]
        first = end


def best_fit_decreasing(lengths: NDArray[np.int32], capacity: int, seed: Any) -> Order:
    """Longest first, each into the fullest bin that still takes it. O(n + capacity).

    Works on how many examples there are of each length. Bins with equal contents are filled together, so
    the time follows the number of different bins; a bitmap of rooms finds the fullest in a few steps. Then
    the examples are dealt out, with the bins in seeded order: shards that are read front to back should
    not be ordered by length.
    """
    positions, starts = _sorted_by_length(lengths, capacity, seed)
    most = 1 << 16
    nodes = np.empty((5, most), np.int32)
    while (result := _best_fit(starts, capacity, nodes))[0] < 0:  # rare: never more than examples
        most *= 4
        nodes = np.empty((5, most), np.int32)
    used, bins = result
    order = np.empty(lengths.size, np.int64)
    offsets = np.empty(bins + 1, np.int64)
    _write_out(nodes, used, positions, starts, np.empty(bins, np.int32), order, offsets, seed)
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


def first_fit_decreasing(lengths: NDArray[np.int32], capacity: int, seed: Any) -> Order:
    """Longest first, each into the first bin that still takes it. O(n log n).

    A tree over the bins knows the largest room below each node, so the first bin that fits is found on
    one way down.
    """
    positions, _ = _sorted_by_length(lengths, capacity, seed)
    bin_of = np.empty(lengths.size, np.int32)
    bins = _first_fit(lengths, capacity, positions[::-1], bin_of)
    return _collect(positions[::-1], bin_of, bins, seed)


@_compiled
def _first_fit(lengths: Any, capacity: int, positions: Any, bin_of: Any) -> Any:
    """Fills `bin_of`, int32[n], for the examples at `positions` in their order; returns how many bins."""
    leaves = 1
    while leaves < lengths.size:
        leaves *= 2
    rooms = np.full(2 * leaves, capacity, np.int32)
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
    return bins


@_compiled
def _worst_fit(lengths: Any, loads: Any, bin_of: Any) -> None:
    """Deals lengths, longest first, each into the emptiest bin, whatever the capacity. O(n log bins).

    Args:
        lengths: int32[n], descending.
        loads: int64[bins], zeros. Result: the tokens in each bin.
        bin_of: int32[n], the result.
    """
    heap = np.arange(loads.size)  # the emptiest bin on top
    for i in range(lengths.size):
        b = heap[0]
        bin_of[i] = b
        loads[b] += lengths[i]
        at = 0
        child = 1
        while child < heap.size:
            if child + 1 < heap.size and loads[heap[child + 1]] < loads[heap[child]]:
                child += 1
            if loads[heap[child]] >= loads[b]:
                break
            heap[at] = heap[child]
            at = child
            child = 2 * at + 1
        heap[at] = b


@_compiled
def _swap(loads: Any, offsets: Any, members: Any, lengths: Any, capacity: int, seed: Any) -> bool:
    """Swaps examples between overfull bins and others until none is overfull; False if that gets stuck.

    A round tries as many random pairs of bins as there are bins. In a pair it looks at up to 8 × 8 pairs of
    examples and swaps those that lower the excess most. Stuck: eight rounds took less than a tenth off.

    Args:
        loads: int64[bins], tokens in each bin; kept up to date.
        offsets: int64[bins + 1], where each bin begins in `members`.
        members: int64[n], examples, bin after bin; the result.
        lengths: int32[n], the length of each of `members`; kept up to date.
        capacity: Of a bin.
        seed: Of the pairs.
    """
    bins = loads.size
    overfull = np.empty(bins, np.int32)
    count = 0
    excess = 0
    for b in range(bins):
        if loads[b] > capacity:
            overfull[count] = b
            count += 1
            excess += loads[b] - capacity
    before = np.zeros(8, np.int64)  # the excess of the last eight rounds
    drawn = 0
    current = 0
    while count:
        if current >= 8 and 10 * excess > 9 * before[current % 8]:
            return False
        before[current % 8] = excess
        current += 1
        for _ in range(bins):
            if count == 0:
                break
            which = _draw(seed, drawn, count)
            full = overfull[which]
            other = _draw(seed, drawn + 1, bins)
            over, under = loads[full] - capacity, loads[other] - capacity
            drawn += 4
            if under >= 0:
                continue
            start, end = offsets[full], offsets[full + 1]
            if end - start > 8:
                start += _draw(seed, drawn - 2, end - start - 7)
                end = start + 8
            other_start, other_end = offsets[other], offsets[other + 1]
            if other_end - other_start > 8:
                other_start += _draw(seed, drawn - 1, other_end - other_start - 7)
                other_end = other_start + 8
            least = over
            best_i, best_j = -1, -1
            for i in range(start, end):
                for j in range(other_start, other_end):
                    moved = lengths[i] - lengths[j]
                    if moved > 0:
                        left = max(0, over - moved) + max(0, under + moved)
                        if left < least:
                            least, best_i, best_j = left, i, j
            if best_i < 0:
                continue
            excess -= over - least
            moved = lengths[best_i] - lengths[best_j]
            lengths[best_i], lengths[best_j] = lengths[best_j], lengths[best_i]
            members[best_i], members[best_j] = members[best_j], members[best_i]
            loads[full] -= moved
            loads[other] += moved
            if loads[full] <= capacity:
                count -= 1
                overfull[which] = overfull[count]
            if loads[other] > capacity:
                overfull[count] = other
                count += 1
    return True


def swap_search(lengths: NDArray[np.int32], capacity: int, seed: Any) -> Order:
    """Best-fit decreasing, then a search for fewer bins, by halving the gap to the bound. Seconds.

    For a number of bins, examples are spread evenly, longest first, and then swapped out of the overfull
    bins. Most is won where only two to five examples fit a bin: there, best-fit pairs the longest with each
    other and leaves room that no example is short enough for.

    More than 2**18 examples are searched in parts with equal shares of each length: pairs of bins that the
    cache does not hold would make the time grow five times as fast.
    """
    order, offsets = best_fit_decreasing(lengths, capacity, seed)
    positions, _ = _sorted_by_length(lengths, capacity, seed)
    parts = -(-lengths.size // _PART)
    pieces = [positions[part::parts] for part in range(parts)]
    found = [_search(lengths[piece], capacity, seed) for piece in pieces]
    if sum(ends.size - 1 for _, ends in found) >= offsets.size - 1:
        return order, offsets
    order = np.concatenate([piece[at] for piece, (at, _) in zip(pieces, found, strict=True)]).astype(np.int64)
    sizes = np.concatenate([np.diff(ends) for _, ends in found])
    return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _search(lengths: NDArray[np.int32], capacity: int, seed: Any) -> Order:
    """`swap_search` of one part."""
    order, offsets = best_fit_decreasing(lengths, capacity, seed)
    longest_first = np.argsort(-lengths, kind="stable")
    possible = offsets.size - 1
    hopeless = -(-int(lengths.sum(dtype=np.int64)) // capacity) - 1
    while possible - hopeless > 1 + possible // 20_000:
        bins = (possible + hopeless) // 2
        bin_of = np.empty(lengths.size, np.int32)
        _worst_fit(lengths[longest_first], np.zeros(bins, np.int64), bin_of)
        members, ends = _collect(longest_first, bin_of, bins, seed)
        spread = lengths[members]
        loads = np.add.reduceat(spread, ends[:-1], dtype=np.int64)
        if _swap(loads, ends, members, spread, capacity, seed):
            order, offsets = members, ends
            possible = bins
        else:
            hopeless = bins
    return order, offsets


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
