"""Examples and buffers: nothing changes on the way in and out, and every broken law is named."""

import dataclasses
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing.buffer import build_buffer, check_buffer, unpack
from packing.errors import OptionError, Reason, RowRejected
from packing.example import IGNORE_INDEX, Example, Note, fit, make_example


def example_of(ids, trained=None):
    return make_example(ids, trained=[True] * len(ids) if trained is None else trained)


@st.composite
def examples(draw):
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30))
    masked = example_of(ids, draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    return dataclasses.replace(masked, turn=draw(st.integers(-1, 9)))


@given(st.lists(examples(), min_size=1, max_size=10))
def test_unpack_is_the_inverse_of_build(given_examples):
    """`unpack(build_buffer(xs)) == xs` for any ids, masks and turns."""
    assert unpack(build_buffer(given_examples)) == given_examples


@pytest.mark.parametrize("count", [1, 129, 5000])
def test_any_number_of_examples(count):
    """One example, 129 (a peer breaks at 128) and 5,000 survive the way in and out."""
    rng = np.random.default_rng(0)
    many = [example_of(rng.integers(0, 1000, rng.integers(1, 4)).tolist()) for _ in range(count)]
    buffer = build_buffer(many)
    assert unpack(buffer) == many
    assert buffer.example_ids.tolist() == list(range(count))


def test_the_first_token_is_never_trained():
    """Each example's first label is -100, so no example's last token is trained to predict the next one."""
    buffer = build_buffer([example_of([1, 2, 3]), example_of([4, 5, 6])])
    assert buffer.labels.tolist() == [-100, 2, 3, -100, 5, 6]


def test_the_mask_is_packed_with_the_ids():
    """The number of trained tokens is the same before and after packing."""
    two = [example_of([1, 2, 3], [False, True, False]), example_of([4, 5], [True, True])]
    assert np.count_nonzero(build_buffer(two).labels != IGNORE_INDEX) == sum(x.supervised for x in two) == 2


def test_capacity_is_kept():
    """Exactly the capacity fits; one token more is refused with the numbers."""
    pair = [example_of([1, 2, 3]), example_of([4, 5])]
    assert len(build_buffer(pair, capacity=5)) == 5
    with pytest.raises(ValueError, match="5 tokens exceed the capacity of 4"):
        build_buffer(pair, capacity=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.array([1, 2, -100, 4], np.int32)}, "first label of example 0 is 1"),
        ({"labels": np.array([-100, 9, -100, 4], np.int32)}, "label 9 at token 1"),
        ({"seq_lengths": np.array([2, 1], np.int32)}, "sum to 3, but there are 4 ids"),
        ({"seq_lengths": np.array([4, 0], np.int32)}, r"seq_lengths\[1\] is 0"),
        ({"example_ids": np.array([0], np.int64)}, "2 lengths, but 1 example ids"),
    ],
)
def test_each_broken_law_is_named(change, message):
    """A buffer that breaks a law is refused with the law and the place."""
    buffer = build_buffer([example_of([1, 2]), example_of([3, 4])])
    check_buffer(buffer)
    with pytest.raises(ValueError, match=message):
        check_buffer(dataclasses.replace(buffer, **change))


def test_no_empty_buffer_and_no_empty_example():
    """Neither a buffer without examples nor an example without tokens exists."""
    with pytest.raises(ValueError, match="at least one"):
        build_buffer([])
    with pytest.raises(ValueError, match="no example"):
        example_of([])


def test_ids_and_mask_of_different_lengths():
    """A mask that does not cover the ids is refused."""
    with pytest.raises(ValueError, match="no example"):
        make_example([1, 2, 3], trained=[True, True])


def test_fit_leaves_what_fits():
    """An example of exactly the capacity comes back as it is."""
    exact = example_of([1, 2, 3, 4])
    assert fit(exact, capacity=4, overflow="drop") is exact


def test_too_long_by_policy():
    """One token too many: drop rejects with the numbers, truncate keeps a prefix and says so, error stops."""
    long = example_of([1, 2, 3, 4, 5])
    with pytest.raises(RowRejected, match="5 tokens, the capacity is 4") as rejected:
        fit(long, capacity=4, overflow="drop")
    assert rejected.value.reason is Reason.TOO_LONG
    cut = fit(long, capacity=4, overflow="truncate")
    assert cut.input_ids.tolist() == [1, 2, 3, 4]
    assert cut.labels.tolist() == [-100, 2, 3, 4]
    assert cut.notes == (Note.TRUNCATED,)
    with pytest.raises(OptionError, match="--capacity"):
        fit(long, capacity=4, overflow="error")
    with pytest.raises(OptionError, match="no overflow 'Drop': choose one of drop, truncate, error"):
        fit(long, capacity=4, overflow="Drop")


def test_nothing_left_to_train_is_rejected():
    """A cut that leaves only the prompt, or a mask of nothing, is rejected, never kept as zeros."""
    prompt_first = example_of([1, 2, 3, 4], [False, False, False, True])
    with pytest.raises(RowRejected) as rejected:
        fit(prompt_first, capacity=3, overflow="truncate")
    assert rejected.value.reason is Reason.NOTHING_TO_TRAIN
    with pytest.raises(RowRejected, match="none of the 1 tokens"):
        fit(example_of([7]), capacity=8, overflow="drop")


def test_examples_compare_by_content():
    """Equal arrays make equal examples; another label or another type does not."""
    assert example_of([1, 2]) == example_of([1, 2])
    assert example_of([1, 2]) != example_of([1, 2], [True, False])
    assert example_of([1, 2]) != "an example"


def test_what_holds_arrays_is_no_key_by_content():
    """An example has no hash, as its arrays can change; buffers are compared, and hashed, by identity."""
    assert not isinstance(example_of([1, 2]), Hashable)
    one, other = (build_buffer([example_of([1, 2])]) for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_a_rejection_survives_the_way_between_processes():
    """Reason and detail are still there after pickling, as worker processes do."""
    import pickle

    back = pickle.loads(pickle.dumps(RowRejected(Reason.TOO_LONG, "9 tokens")))
    assert (back.reason, back.detail, str(back)) == (Reason.TOO_LONG, "9 tokens", "too_long: 9 tokens")


def test_example_fields_are_views_after_unpack():
    """Unpacking copies no tokens: the examples look into the buffer's own memory."""
    buffer = build_buffer([example_of([1, 2, 3])])
    first = unpack(buffer)[0]
    assert isinstance(first, Example)
    assert np.shares_memory(first.input_ids, buffer.input_ids)
