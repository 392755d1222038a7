"""Plans: every example in exactly one bin, none too full, as few bins as promised, the same everywhere."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import bins
from packing.errors import OptionError
from packing.plan import Algorithm, Plan, lower_bound, plan_bins

ALGORITHMS = get_args(Algorithm)
SEEDS = st.sampled_from([0, 1, 7, 2**63, 2**64 - 1])


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths and a capacity; lengths of 1, of the capacity and equal ones are common."""
    capacity = draw(st.sampled_from([1, 2, 5, 64, 100, 129, 8192, 2**20]))
    length = st.integers(1, capacity) | st.sampled_from([1, capacity, -(-capacity // 2), -(-capacity // 3)])
    return draw(st.lists(length, max_size=80)), capacity


def contents(plan: Plan, lengths: Any) -> list[list[int]]:
    """The lengths in each bin, sorted, bins sorted: what a plan is, apart from order."""
    return sorted(sorted(np.asarray(lengths)[plan.bin(i)].tolist()) for i in range(len(plan)))


def fit_decreasing(lengths: list[int], capacity: int, choose: Callable[[list[int]], int]) -> list[list[int]]:
    """The textbook's loop; `choose` gets the rooms that are large enough, and picks one."""
    packed: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        rooms = [capacity - sum(one) for one in packed]
        fitting = [room for room in rooms if room >= length]
        if fitting:
            packed[rooms.index(choose(fitting))].append(length)
        else:
            packed.append([length])
    return packed


def check_plan(plan: Plan, lengths: Any, capacity: int) -> None:
    lengths = np.asarray(lengths, np.int64)
    assert plan.order.dtype == plan.offsets.dtype == np.int64
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == lengths.size
    assert (np.diff(plan.offsets) > 0).all()
    assert np.array_equal(np.sort(plan.order), np.arange(lengths.size))
    loads = [int(lengths[plan.bin(i)].sum()) for i in range(len(plan))]
    assert max(loads, default=0) <= capacity
    assert len(plan) >= lower_bound(lengths, capacity=capacity)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(problem=problems(), seed=SEEDS)
def test_each_example_is_in_exactly_one_bin(algorithm: Algorithm, problem: Any, seed: int) -> None:
    """Each example once, no bin empty or above capacity, at least as many bins as the bound."""
    lengths, capacity = problem
    check_plan(plan_bins(lengths, capacity=capacity, algorithm=algorithm, seed=seed), lengths, capacity)


@given(problem=problems(), seed=SEEDS)
def test_best_fit_is_the_textbooks(problem: Any, seed: int) -> None:
    """Filling equal bins together gives the rooms that the textbook's loop gives, one by one."""
    lengths, capacity = problem
    plan = plan_bins(lengths, capacity=capacity, seed=seed)
    rooms = sorted(capacity - sum(one) for one in contents(plan, lengths))
    assert rooms == sorted(capacity - sum(one) for one in fit_decreasing(lengths, capacity, min))


@given(problem=problems(), seed=SEEDS)
def test_first_fit_is_the_textbooks(problem: Any, seed: int) -> None:
    """The tree finds the first bin that fits: the same bins as by trying them in turn."""
    lengths, capacity = problem
    plan = plan_bins(lengths, capacity=capacity, algorithm="first_fit_decreasing", seed=seed)
    packed = fit_decreasing(lengths, capacity, lambda fitting: fitting[0])
    assert contents(plan, lengths) == sorted(sorted(one) for one in packed)


@given(problem=problems(), seed=SEEDS)
def test_next_fit_keeps_the_order(problem: Any, seed: int) -> None:
    """Next-fit bins are runs of the input, each ended by an example that did not fit any more."""
    lengths, capacity = problem
    plan = plan_bins(lengths, capacity=capacity, algorithm="next_fit", seed=seed)
    assert plan.order.tolist() == list(range(len(lengths)))
    for i in range(1, len(plan)):
        assert sum(lengths[j] for j in plan.bin(i - 1)) + lengths[plan.bin(i)[0]] > capacity


@given(problem=problems(), seed=SEEDS)
def test_swap_search_never_needs_more_bins(problem: Any, seed: int) -> None:
    """The search starts from best-fit decreasing and only ever takes less."""
    lengths, capacity = problem
    searched = plan_bins(lengths, capacity=capacity, algorithm="swap_search", seed=seed)
    assert len(searched) <= len(plan_bins(lengths, capacity=capacity, seed=seed))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), part=st.sampled_from([2**18, 1000]))
def test_swap_search_finds_triples(seed: int, part: int) -> None:
    """Between a quarter and half of the capacity it needs 5 % fewer bins, searched in parts or whole."""
    lengths = np.random.default_rng(seed).integers(2048, 4097, 3000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bins, "_PART", part)
        plan = plan_bins(lengths, capacity=8192, algorithm="swap_search", seed=seed)
    check_plan(plan, lengths, 8192)
    assert len(plan) < 0.95 * len(plan_bins(lengths, capacity=8192))


@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "swap_search", "first_fit_decreasing"])
def test_the_seed_places_equal_lengths(algorithm: Algorithm) -> None:
    """Another seed moves examples and bins; the same seed moves nothing. Decreasing fits keep their count."""
    lengths = np.random.default_rng(0).integers(20, 60, 2000)
    plans = [plan_bins(lengths, capacity=100, algorithm=algorithm, seed=seed) for seed in (1, 1, 2**63)]
    assert np.array_equal(plans[0].order, plans[1].order)
    assert np.array_equal(plans[0].offsets, plans[1].offsets)
    assert (plans[0].order != plans[2].order).mean() > 0.9
    assert algorithm == "swap_search" or len(plans[0]) == len(plans[2])


@pytest.mark.parametrize("common", [True, False])
def test_ties_mix_the_whole_input(common: bool) -> None:
    """Examples that share a bin come from all over the input, be their length a common or a rare one."""
    lengths = np.full(20_000, 10) if common else np.random.default_rng(0).integers(500, 1500, 20_000)
    plan = plan_bins(lengths, capacity=40 if common else 8192)
    spread = [np.ptp(plan.bin(i)) for i in range(len(plan)) if plan.bin(i).size >= 4]
    assert len(spread) > 1000
    assert np.median(spread) > 10_000  # 12,000 of 20,000 for four numbers drawn at random
    firsts = lengths[plan.order[plan.offsets[:-1]]]
    assert common or abs(np.corrcoef(np.arange(firsts.size), firsts)[0, 1]) < 0.1, (
        "bins are ordered by length"
    )


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        ("best_fit_decreasing", "eb723a089207"),
        ("swap_search", "eb723a089207"),
        ("first_fit_decreasing", "528974fa8c7b"),
        ("next_fit", "901c3caef92b"),
    ],
)
def test_plans_are_the_same_everywhere(algorithm: Algorithm, digest: str) -> None:
    """A plan is a function of lengths, capacity and seed alone: this digest holds on every machine.

    Whoever moves it changes the bytes of every packed set and the order of every replanned epoch.
    """
    lengths = (np.arange(5000, dtype=np.int64) * 7919) % 3001 + 1
    plan = plan_bins(lengths, capacity=8192, algorithm=algorithm, seed=12345)
    data = plan.order.astype("<i8").tobytes() + plan.offsets.astype("<i8").tobytes()
    assert hashlib.sha256(data).hexdigest()[:12] == digest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_any_whole_numbers_do(algorithm: Algorithm, dtype: Any) -> None:
    """The plan depends on the numbers, not on how they are stored; and the input is left alone."""
    lengths = np.arange(1, 101, dtype=dtype)
    spaced = np.repeat(lengths, 2)[::2]
    plan = plan_bins(lengths, capacity=100, algorithm=algorithm)
    assert np.array_equal(plan.order, plan_bins(spaced, capacity=100, algorithm=algorithm).order)
    assert np.array_equal(plan.order, plan_bins(lengths.tolist(), capacity=100, algorithm=algorithm).order)
    assert np.array_equal(lengths, np.arange(1, 101))


def test_the_largest_capacity() -> None:
    """Bins of 2**24 tokens, filled by examples of any length."""
    lengths = [2**24, 2**24 - 1, 1, 1, 2**23, 2**23]
    check_plan(plan_bins(lengths, capacity=2**24), lengths, 2**24)
    assert len(plan_bins(lengths, capacity=2**24)) == 4


def test_many_different_bins() -> None:
    """More groups of bins than the first node table holds (65,536): it grows, and nothing is lost."""
    lengths = np.random.default_rng(0).integers(1, 2**20, 80_000)
    check_plan(plan_bins(lengths, capacity=2**20), lengths, 2**20)


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([3, 9, 2], {"capacity": 8}, "length 1 is 9"),
        ([3, 0], {"capacity": 8}, "length 1 is 0"),
        ([3, -(2**40)], {"capacity": 8}, "length 1 is -1099511627776"),
        ([3, 2**32 + 1], {"capacity": 8}, "length 1 is 4294967297"),
        ([1.5], {"capacity": 8}, "whole numbers"),
        ([[1, 2]], {"capacity": 8}, "whole numbers"),
        ([1], {"capacity": 0}, "capacity of 0"),
        ([1], {"capacity": 2**24 + 1}, "capacity of 16777217"),
        ([1], {"capacity": 8, "seed": -1}, "seed of -1"),
        ([1], {"capacity": 8, "seed": 2**64}, "seed of"),
        ([1], {"capacity": 8, "algorithm": "magic"}, "no algorithm 'magic'"),
    ],
)
def test_what_cannot_be_planned_is_said(lengths: Any, options: Any, words: str) -> None:
    """A length, capacity, seed or algorithm that can't be is one clear line, with the number in it."""
    with pytest.raises(OptionError, match=words):
        plan_bins(lengths, **options)


def test_numba_is_imported_late() -> None:
    """Importing `packing.plan` does not import numba, which takes 0.3 s."""
    code = "import sys, packing.plan; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.shared
def test_fill_of_chat_lengths(shared: Path) -> None:
    """200,000 chat-like lengths at 8,192: 29,328 bins by best fit; by search one above the bound at most."""
    lengths = np.load(shared / "data" / "ultrachat_like_lengths.npy")
    assert len(plan_bins(lengths, capacity=8192)) <= 29_328
    searched = plan_bins(lengths, capacity=8192, algorithm="swap_search")
    assert len(searched) <= lower_bound(lengths, capacity=8192) + 1
