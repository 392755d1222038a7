"""Batches that keep every law, an order that is a function of (seed, epoch), resume as if never stopped."""

import hashlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_sets import bins_of, buffers, make_set
from torch.utils.data import DataLoader

from packing.buffer import PackedBuffer, unpack
from packing.errors import OptionError, ResumeError, ShardError
from packing.loader import (
    Batch,
    LoadedBuffer,
    OrderOptions,
    PackedDataLoader,
    PackedDataset,
    PackedSampler,
    check_batch,
    collate,
    epoch_order,
)
from packing.shards import ShardSet, ShardWriter, open_shards

CAPACITY = 64
BINS = [[5, 3], [64], [1], [20, 20, 20], [1, 1, 1, 1], [33], [2, 60], [7], [10, 50], [64], [9, 9, 9]]
SEEDS = st.sampled_from([0, 1, 2**63, 2**64 - 1])
EPOCHS = st.sampled_from([0, 1, 10**6])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard set of eleven buffers in several files."""
    return make_set(tmp_path_factory.mktemp("loader") / "set", BINS, buffers_per_shard=4)


@pytest.fixture(scope="module")
def shards(directory: Path) -> ShardSet:
    return open_shards(directory)


def loaded(buffer: PackedBuffer, capacity: int | None = CAPACITY) -> LoadedBuffer:
    return LoadedBuffer(
        input_ids=buffer.input_ids,
        labels=buffer.labels,
        seq_lengths=buffer.seq_lengths,
        example_ids=buffer.example_ids,
        capacity=capacity,
    )


def per_buffer(batch: Batch) -> list[list[int]]:
    """The examples in each buffer of a fixed-shape batch; none in an all-tail one."""
    ids = batch["input_ids"][0]
    found: list[list[int]] = [[] for _ in range(ids.numel() // CAPACITY)]
    for start in batch["cu_seq_lens_q"].tolist()[:-1]:
        if ids[start]:
            found[start // CAPACITY].append(int(ids[start]) // 100)
    return found


# Batches


@pytest.mark.parametrize("workers", [0, 1])
def test_a_torch_loader_needs_no_collate(directory: Path, workers: int) -> None:
    """Without a `collate_fn` torch's DataLoader makes the same batches, in worker processes too."""
    dataset = PackedDataset(directory)
    plain = DataLoader(dataset, batch_size=2, num_workers=workers)
    told = DataLoader(dataset, batch_size=2, collate_fn=collate)
    for batch, expected in zip(plain, told, strict=True):
        check_batch(batch)
        assert all(
            torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(expected[key])) for key in expected
        )


@given(bins=bins_of(CAPACITY, most=5), fixed=st.booleans())
def test_batches_keep_the_laws(bins: Any, fixed: bool) -> None:
    """Whatever the bins: T is buffers × capacity, each buffer's rest is one segment, the laws hold."""
    packed = buffers(bins)
    batch = collate([loaded(buffer, CAPACITY if fixed else None) for buffer in packed])
    check_batch(batch)
    real = sum(map(len, packed))
    assert batch["input_ids"].shape == (1, len(packed) * CAPACITY if fixed else real)
    tails = sum(len(buffer) < CAPACITY for buffer in packed) if fixed else 0
    assert batch["cu_seq_lens_q"].numel() - 1 == sum(map(len, bins)) + tails
    supervised = sum(int((buffer.labels != -100).sum()) for buffer in packed)
    assert int((batch["labels"] != -100).sum()) == supervised


@given(bins=bins_of(CAPACITY, most=5), fixed=st.booleans())
def test_examples_come_back_from_a_batch(bins: Any, fixed: bool) -> None:
    """Cutting a batch at cu_seqlens gives the examples, in order, and tails of token 0."""
    packed = buffers(bins)
    batch = collate([loaded(buffer, CAPACITY if fixed else None) for buffer in packed])
    pieces = itertools.pairwise(batch["cu_seq_lens_q"].tolist())
    for buffer in packed:
        for example in unpack(buffer):
            a, b = next(pieces)
            assert batch["input_ids"][0, a:b].tolist() == example.input_ids.tolist()
            assert batch["labels"][0, a:b].tolist() == example.labels.tolist()
        if fixed and len(buffer) < CAPACITY:
            a, b = next(pieces)
            assert b - a == CAPACITY - len(buffer)
            assert not batch["input_ids"][0, a:b].any()
            assert (batch["labels"][0, a:b] == -100).all()
    assert next(pieces, None) is None


@pytest.mark.parametrize("count", [1, 129, 5000])
def test_any_number_of_examples(count: int, tmp_path: Path) -> None:
    """Buffers of one example, of 129 (a peer breaks at 128) and of 5,000 tiny ones go to a batch."""
    bins = [[1] * count, [2] * count]
    dataset = PackedDataset(make_set(tmp_path / "set", bins, capacity=16_384))
    batch = collate([dataset[0], dataset[1]])
    check_batch(batch)
    assert batch["input_ids"].shape == (1, 2 * 16_384)
    assert batch["cu_seq_lens_q"].numel() == 2 * count + 3
    assert batch["max_length_q"] == 16_384 - count


def test_keys_come_in_order_and_nothing_else(shards: ShardSet) -> None:
    """input_ids first (trainers take the batch's size from it); no mask and no cache, as both would leak."""
    assert list(collate([shards[0]])) == [
        "input_ids",
        "labels",
        "position_ids",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "use_cache",
    ]
    assert collate([shards[0]])["use_cache"] is False


@pytest.mark.parametrize("fixed", [True, False])
def test_an_empty_buffer_is_all_tail(directory: Path, fixed: bool) -> None:
    """The buffer that ranks without a real one get: one segment, nothing trained, all laws kept."""
    batch = collate([PackedDataset(directory, fixed_shape=fixed)[None]])
    check_batch(batch)
    assert batch["cu_seq_lens_q"].tolist() == [0, CAPACITY if fixed else 1]
    assert (batch["labels"] == -100).all()


def test_every_batch_is_new(directory: Path) -> None:
    """No tensor shares memory with another batch's, with another key's, or with the mapped file."""
    dataset = PackedDataset(directory)
    before = dataset[1].input_ids.copy()
    first, second = collate([dataset[1]]), collate([dataset[1]])
    tensors = [value for batch in (first, second) for value in batch.values() if torch.is_tensor(value)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == 12
    for tensor in tensors[:6]:
        tensor.fill_(-1)
    check_batch(second)
    assert np.array_equal(dataset[1].input_ids, before)


def without(batch: Batch, key: str) -> Batch:
    return {name: value for name, value in batch.items() if name != key}


def changed(key: str, place: Any, value: int) -> Any:
    def change(batch: Batch) -> Batch:
        tensor = batch[key].clone()
        tensor[place] = value
        return {**batch, key: tensor}

    return change


BREAKS = {
    "a mask": lambda b: {**b, "attention_mask": torch.ones(1, CAPACITY)},
    "a cache": lambda b: {**b, "use_cache": True},
    "a key missing": lambda b: without(b, "seq_idx"),
    "another order": lambda b: {"labels": b["labels"], **without(b, "labels")},
    "no tensor": lambda b: {**b, "labels": b["labels"].tolist()},
    "int32 ids": lambda b: {**b, "input_ids": b["input_ids"].int()},
    "int64 boundaries": lambda b: {**b, "cu_seq_lens_q": b["cu_seq_lens_q"].long()},
    "int64 seq_idx": lambda b: {**b, "seq_idx": b["seq_idx"].long()},
    "one dimension": lambda b: {**b, "input_ids": b["input_ids"][0]},
    "two rows": lambda b: {**b, "input_ids": b["input_ids"].view(2, -1)},
    "fewer labels": lambda b: {**b, "labels": b["labels"][:, :-1]},
    "max as tensor": lambda b: {**b, "max_length_q": torch.tensor(b["max_length_q"])},
    "max too small": lambda b: {**b, "max_length_k": b["max_length_k"] - 1},
    "max as bool": lambda b: {**b, "max_length_k": True},
    "not from 0": changed("cu_seq_lens_q", 0, 1),
    "uncovered rows": lambda b: {**b, "cu_seq_lens_q": b["cu_seq_lens_q"][:-1]},
    "beyond the end": changed("cu_seq_lens_q", -1, CAPACITY + 1),
    "empty segment": changed("cu_seq_lens_q", 1, 0),
    "keys unlike queries": changed("cu_seq_lens_k", 1, 4),
    "positions run on": changed("position_ids", (0, 5), 5),
    "seq_idx of the neighbour": changed("seq_idx", (0, 5), 0),
    "first label trained": changed("labels", (0, 5), 1000),
    "label of another token": changed("labels", (0, 1), 7),
}


@pytest.mark.parametrize("name", BREAKS)
def test_check_batch_sees_every_break(directory: Path, name: str) -> None:
    """Each law is checked: a batch that breaks one alone is refused."""
    batch = collate([PackedDataset(directory)[0]])
    check_batch(batch)
    with pytest.raises(ValueError):
        check_batch(BREAKS[name](dict(batch)))


@pytest.mark.parametrize(
    ("rows", "words"), [([], "at least one"), ([loaded(buffers([[65]])[0])], "capacity")]
)
def test_collate_refuses(rows: list[LoadedBuffer], words: str) -> None:
    """No buffers, and one above its capacity, are errors and no broken batch."""
    with pytest.raises(ValueError, match=words):
        collate(rows)


def test_rows_of_a_hugging_face_data_set(directory: Path, shards: ShardSet) -> None:
    """Rows of `datasets.load_from_disk`, in any format, collate to the same batch as our own buffers."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_from_disk(str(directory))
    expected = collate([shards[3], shards[0]])
    for format_ in (None, "numpy", "torch"):
        formatted = rows.with_format(format_)
        batch = collate([formatted[3], formatted[0]])
        check_batch(batch)
        assert all(np.array_equal(batch[key], expected[key]) for key in expected)


def test_a_batch_by_hand_is_that_of_collate(shards: ShardSet) -> None:
    """`make_batch` of the training side, which the proofs use, gives what `collate` gives of a buffer."""
    from training.kernels import make_batch

    for buffer in shards:
        ours = collate([loaded(buffer, None)])
        ids, labels = (torch.from_numpy(a.astype(np.int64)) for a in (buffer.input_ids, buffer.labels))
        other = make_batch(ids, buffer.seq_lengths.tolist(), labels=labels)
        check_batch({key: other[key] for key in ours})
        assert other.keys() == ours.keys()
        assert all(
            torch.equal(other[key], value) and other[key].dtype == value.dtype
            if isinstance(value, torch.Tensor)
            else other[key] == value
            for key, value in ours.items()
        )


def test_a_row_without_boundaries_is_refused(directory: Path) -> None:
    """A trainer that dropped the column seq_lengths gets an error, not one long example."""
    row = {"input_ids": [1, 2], "labels": [-100, 2]}
    with pytest.raises(OptionError, match=r"no seq_lengths.*remove_unused_columns"):
        collate([row])
    with pytest.raises(ValueError, match="first label"):
        collate([{**row, "labels": [1, 2], "seq_lengths": [2]}])


# Order


@given(seed=SEEDS, epoch=EPOCHS)
def test_order_is_a_permutation(shards: ShardSet, seed: int, epoch: int) -> None:
    """Every buffer once, the same each time it is asked."""
    options = OrderOptions(seed=seed)
    order, plan = epoch_order(shards, epoch=epoch, options=options)
    assert plan is None
    assert sorted(order.tolist()) == list(range(len(shards)))
    assert np.array_equal(order, epoch_order(shards, epoch=epoch, options=options)[0])


def test_orders_differ(shards: ShardSet) -> None:
    """Each epoch and each seed has an order of its own; neighbours in (seed, epoch) are not the same pair."""
    pairs = [(0, 0), (0, 1), (1, 0), (0, 10**6), (2**63, 0), (2**32, 0), (0, 2**32), (1, 11), (11, 1)]
    orders = {
        tuple(epoch_order(shards, epoch=epoch, options=OrderOptions(seed=seed))[0].tolist())
        for seed, epoch in pairs
    }
    assert len(orders) == len(pairs)


def test_order_is_the_same_everywhere(tmp_path: Path) -> None:
    """This digest holds on every machine and with every numpy: else no run could be resumed elsewhere."""
    shards = open_shards(make_set(tmp_path / "set", [[1]] * 300))
    order, _ = epoch_order(shards, epoch=3, options=OrderOptions(seed=2**63))
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:12] == "e0ad10495029"


def test_without_shuffle_buffers_come_as_they_lie(shards: ShardSet) -> None:
    """shuffle=False is the order on disk, in every epoch."""
    for epoch in (0, 5):
        order, _ = epoch_order(shards, epoch=epoch, options=OrderOptions(shuffle=False))
        assert order.tolist() == list(range(len(shards)))


@given(
    world_size=st.integers(1, 13),
    batch_size=st.integers(1, 4),
    start=st.integers(0, len(BINS)),
    seed=SEEDS,
    epoch=EPOCHS,
)
def test_ranks_share_an_epoch(
    shards: ShardSet, world_size: int, batch_size: int, start: int, seed: int, epoch: int
) -> None:
    """Ranks take equal steps of whole batches; together each buffer once, in the global order."""
    samplers = [
        PackedSampler(
            shards,
            options=OrderOptions(seed=seed),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            epoch=epoch,
            start=start,
        )
        for rank in range(world_size)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(one) for one in batches} == {len(batches[0])}
    assert all(len(keys) == batch_size for one in batches for keys in one)
    dealt = [
        batches[rank][step][i]
        for step in range(len(batches[0]))
        for i in range(batch_size)
        for rank in range(world_size)
    ]
    expected = epoch_order(shards, epoch=epoch, options=OrderOptions(seed=seed))[0][start:].tolist()
    assert dealt[: len(expected)] == expected
    assert set(dealt[len(expected) :]) <= {None}
    assert len(dealt) - len(expected) < world_size * batch_size


def test_a_sampler_goes_from_epoch_to_epoch(shards: ShardSet) -> None:
    """`set_epoch`, as torch's samplers have it, gives the epoch's order from its beginning."""
    sampler = PackedSampler(shards, start=5)
    for epoch in (3, 0):
        sampler.set_epoch(epoch)
        assert list(sampler) == list(PackedSampler(shards, epoch=epoch))
        assert len(sampler) == len(shards)


# Resume


def loaders_of(
    directory: Path, world_size: int, *, state: Any = None, **options: Any
) -> list[PackedDataLoader]:
    """A loader for each rank, gone on from the state as it comes back from JSON."""
    found = [
        PackedDataLoader(directory, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    for loader in found if state else []:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return found


def take(loaders: Sequence[PackedDataLoader], steps: int) -> list[list[int]]:
    """So many steps of all ranks: the examples of each real buffer, in global order; epochs roll over."""
    seen: list[list[int]] = []
    iterators = [iter(loader) for loader in loaders]
    while steps:
        batches = [next(iterator, None) for iterator in iterators]
        if None in batches:
            assert batches == [None] * len(batches), "ranks took unequal steps"
            iterators = [iter(loader) for loader in loaders]
            continue
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states), "ranks disagree on where they are"
        for dealt in zip(*(per_buffer(batch) for batch in batches if batch), strict=True):
            seen += [examples for examples in dealt if examples]
        steps -= 1
    return seen


def never_stopped(directory: Path, count: int, **options: Any) -> list[list[int]]:
    """The first `count` buffers of a run at one rank, a buffer a batch."""
    loader, seen = PackedDataLoader(directory, **options), []
    while len(seen) < count:
        for batch in loader:
            seen += per_buffer(batch)
    return seen[:count]


@settings(max_examples=40)
@given(
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 7)), min_size=3, max_size=4),
    seed=SEEDS,
    replan=st.booleans(),
    prefetch=st.sampled_from([0, 3]),
)
def test_stopping_changes_nothing(directory: Path, runs: Any, seed: int, replan: bool, prefetch: int) -> None:
    """Stopped and resumed twice over, at 1, 2 or 3 ranks each time: the buffers of a run never stopped."""
    state, seen = None, []
    for world_size, batch_size, steps in runs:
        loaders = loaders_of(
            directory,
            world_size,
            state=state,
            batch_size=batch_size,
            prefetch=prefetch,
            seed=seed,
            replan=replan,
        )
        seen += take(loaders, steps)
        state = loaders[0].state_dict()
    assert seen == never_stopped(directory, len(seen), seed=seed, replan=replan)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stop_of_two_epochs(directory: Path, world_size: int) -> None:
    """Stopped after each of the steps of two epochs and resumed at another number of ranks, nothing moves."""
    steps = 2 * len(loaders_of(directory, world_size)[0])
    whole = never_stopped(directory, 3 * len(BINS), seed=5)
    for stop in range(steps + 1):
        loaders = loaders_of(directory, world_size, seed=5)
        seen = take(loaders, stop)
        others = loaders_of(directory, world_size % 3 + 1, seed=5, state=loaders[0].state_dict())
        seen += take(others, 2)
        assert seen == whole[: len(seen)]


def test_batches_made_ahead_do_not_count(directory: Path) -> None:
    """The state counts what the caller got: with eight batches made ahead it is that of none made ahead."""
    ahead, plain = (PackedDataLoader(directory, prefetch=prefetch) for prefetch in (8, 0))
    for one, other in zip(ahead, plain, strict=True):
        assert all(np.array_equal(one[key], other[key]) for key in other)
        assert ahead.state_dict() == plain.state_dict()


def test_leaving_early_ends_the_thread(directory: Path) -> None:
    """A loop that is left early leaves no thread behind, and the next one begins the epoch anew."""
    loader = PackedDataLoader(directory, prefetch=2)
    iterator = iter(loader)
    first = next(iterator)
    assert any("padfree-prefetch" in thread.name for thread in threading.enumerate())
    del iterator
    assert not any("padfree-prefetch" in thread.name for thread in threading.enumerate())
    assert torch.equal(next(iter(loader))["input_ids"], first["input_ids"])


def test_what_the_thread_meets_is_raised(tmp_path: Path) -> None:
    """Damage that the prefetching thread finds reaches the caller as a ShardError."""
    directory = make_set(tmp_path / "set", BINS, buffers_per_shard=1)
    loader = PackedDataLoader(directory, prefetch=2, shuffle=False)
    file = directory / "data-00004.arrow"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(ShardError, match="data-00004"):
        list(loader)


def test_an_epoch_ends_and_the_next_begins(directory: Path) -> None:
    """Epochs follow each other; `set_epoch` goes to one's beginning, but keeps a position just loaded."""
    loader = PackedDataLoader(directory, seed=3)
    assert (loader.epoch, len(loader)) == (0, len(BINS))
    epochs = [[per_buffer(batch) for batch in loader] for _ in range(2)]
    assert loader.epoch == 2
    assert epochs[0] != epochs[1]
    loader.set_epoch(0)
    assert [per_buffer(batch) for batch in loader] == epochs[0]
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "buffers": 4})
    loader.set_epoch(1)
    assert len(loader) == len(BINS)  # of a whole epoch, as trainers expect
    assert [per_buffer(batch) for batch in loader] == epochs[1][4:]
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "buffers": 4})
    loader.set_epoch(0)
    assert [per_buffer(batch) for batch in loader] == epochs[0]


def test_going_back_to_a_state(directory: Path) -> None:
    """A loader that loads the state that it gave itself goes on from there, from wherever it has got to."""
    loader = PackedDataLoader(directory, seed=4)
    whole = never_stopped(directory, len(BINS), seed=4)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    for further in (0, 2):
        for _ in range(further):
            next(iterator)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        iterator = iter(loader)
        assert per_buffer(next(iterator)) == [whole[3]]


def test_an_iterator_that_is_not_drawn_from_changes_nothing(directory: Path) -> None:
    """Lightning's order: iter, set the epoch, draw; and iter twice after a state was loaded."""
    loader = PackedDataLoader(directory, seed=4)
    whole = never_stopped(directory, 2 * len(BINS), seed=4)
    iterator = iter(loader)
    loader.set_epoch(1)
    assert per_buffer(next(iterator)) == [whole[len(BINS)]]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "buffers": 3})
    iter(loader)
    assert per_buffer(next(iter(loader))) == [whole[3]]


def test_an_epoch_is_over_with_its_last_batch(directory: Path) -> None:
    """Who takes len() batches and draws no further gets the next epoch next, not the same again."""
    loader = PackedDataLoader(directory, seed=4)
    whole = never_stopped(directory, 2 * len(BINS), seed=4)
    seen = []
    for _ in range(2):
        iterator = iter(loader)
        for _ in range(len(loader)):
            seen += per_buffer(next(iterator))
    assert seen == whole


@pytest.mark.parametrize("move", ["iter", "set_epoch", "load_state_dict"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_one_iterator_at_a_time(directory: Path, move: str, prefetch: int) -> None:
    """An iterator made before the loader was taken elsewhere says so: going on it would spoil the state."""
    loader = PackedDataLoader(directory, prefetch=prefetch)
    iterator = iter(loader)
    next(iterator)
    {
        "iter": lambda: next(iter(loader)),
        "set_epoch": lambda: loader.set_epoch(0),
        "load_state_dict": lambda: loader.load_state_dict(loader.state_dict()),
    }[move]()
    with pytest.raises(RuntimeError, match="this iterator has ended"):
        next(iterator)


def test_a_state_at_the_end_of_an_epoch(directory: Path) -> None:
    """Stopped after the last batch of an epoch: the rest of that epoch is nothing, then comes the next."""
    loader = PackedDataLoader(directory)
    for batch in loader:
        last, state = batch, loader.state_dict()
    assert state["buffers"] == len(BINS)
    resumed = PackedDataLoader(directory)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert not torch.equal(next(iter(resumed))["input_ids"], last["input_ids"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 8}, "it has seed 7, this loader 8"),
        ({"shuffle": False}, "it has shuffle True, this loader False"),
        ({"replan": True}, "it has replan False, this loader True"),
        ({"replan": True, "capacity": 128}, "another order"),
    ],
)
def test_another_order_is_refused(directory: Path, options: Any, words: str) -> None:
    """A state of another seed, shuffle or planning can't be gone on from: the order would be another."""
    state = PackedDataLoader(directory, seed=7).state_dict()
    loader = PackedDataLoader(directory, **{"seed": 7, **options})
    with pytest.raises(ResumeError, match=words):
        loader.load_state_dict(state)


def test_other_data_are_refused(directory: Path, tmp_path: Path) -> None:
    """A state of other shards is refused, be they other tokens or only another fingerprint."""
    state = PackedDataLoader(directory).state_dict()
    other = make_set(tmp_path / "other", BINS[1:])
    with ShardWriter(tmp_path / "named", capacity=CAPACITY, fingerprint={"test": 2}) as writer:
        for buffer in buffers(BINS):
            writer.write(buffer)
        writer.finish({})
    for shards in (other, tmp_path / "named"):
        with pytest.raises(ResumeError, match="other data"):
            PackedDataLoader(shards).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"buffers": len(BINS) + 1},
        {"buffers": -1},
        {"epoch": -1},
        {"epoch": "1"},
        {"buffers": None},
        {"options": None},
        {"more": 1},
        {"version": 2},
        {"version": None},
    ],
)
def test_what_is_no_state_is_refused(directory: Path, change: Any) -> None:
    """A state with a position that can't be, or of another shape, is refused and changes nothing."""
    loader = PackedDataLoader(directory)
    state = loader.state_dict()
    with pytest.raises(ResumeError):
        loader.load_state_dict({**state, **change})
    with pytest.raises(ResumeError):
        loader.load_state_dict({})
    assert loader.state_dict() == state
    assert len(list(loader)) == len(BINS)


def test_a_state_of_another_version_is_named(directory: Path) -> None:
    """Who meets a state that means something else is told which one, not that it is no state."""
    loader = PackedDataLoader(directory)
    with pytest.raises(ResumeError, match="version 2, this loader reads 1"):
        loader.load_state_dict({**loader.state_dict(), "version": 2})


# New bins


@given(seed=SEEDS, epoch=EPOCHS, capacity=st.sampled_from([None, 64, 80, 1000]))
def test_new_bins_hold_every_example_once(
    shards: ShardSet, directory: Path, seed: int, epoch: int, capacity: int | None
) -> None:
    """Planned anew, at the same or another capacity, each example is whole, in exactly one buffer."""
    options = OrderOptions(seed=seed, replan=True, capacity=capacity)
    dataset = PackedDataset(shards, capacity=capacity)
    found = {}
    for (key,) in PackedSampler(shards, options=options, epoch=epoch):
        buffer = dataset[key]
        assert len(buffer) <= (capacity or CAPACITY) == buffer.capacity
        for number, example in zip(buffer.example_ids.tolist(), unpack(buffer), strict=True):
            assert number not in found
            found[number] = example
    assert sorted(found) == list(range(sum(map(len, BINS))))
    assert all(found[number] == shards.example(number) for number in found)


def test_new_bins_in_every_epoch(directory: Path) -> None:
    """Who shares a buffer changes from epoch to epoch, and is the same when an epoch is asked for again."""
    loader = PackedDataLoader(directory, replan=True, seed=1)
    epochs = [sorted(sorted(one) for batch in loader for one in per_buffer(batch)) for _ in range(3)]
    assert len({str(one) for one in epochs}) == 3
    loader.set_epoch(1)
    assert sorted(sorted(one) for batch in loader for one in per_buffer(batch)) == epochs[1]


def test_what_new_bins_cannot_do(directory: Path) -> None:
    """A capacity below an example's length, or without new bins, is said."""
    with pytest.raises(OptionError, match="64 tokens; a bin takes 1 to 63"):
        PackedDataLoader(directory, replan=True, capacity=63)
    with pytest.raises(OptionError, match="replan=True"):
        PackedDataLoader(directory, capacity=128)
    for number in (0, -1):
        with pytest.raises(OptionError, match=f"capacity {number} can't be"):
            OrderOptions(replan=True, capacity=number)
        with pytest.raises(OptionError, match=f"capacity {number} can't be"):
            PackedDataset(directory, capacity=number)


def test_a_capacity_below_the_stored_buffers_is_for_new_bins(directory: Path) -> None:
    """A stored buffer is refused whatever its own length, with the way out; empty ones are not."""
    dataset = PackedDataset(directory, capacity=CAPACITY - 1)
    for number in range(len(dataset)):
        with pytest.raises(OptionError, match=r"63 is less than the 64 .*replan=True"):
            dataset[number]
    assert dataset[np.array([1])].capacity == dataset[None].capacity == 63


# In torch's own loader


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_dataloader(directory: Path, workers: int) -> None:
    """In torch's DataLoader, with workers and without: the data set by number, and by our sampler."""
    dataset = PackedDataset(directory)
    plain = DataLoader(dataset, batch_size=2, collate_fn=collate, num_workers=workers)
    found = []
    for batch in plain:
        check_batch(batch)
        found += per_buffer(batch)
    ours = [buffer.example_ids.tolist() for buffer in dataset.shards]
    assert found == ours
    sampler = PackedSampler(
        dataset.shards, options=OrderOptions(replan=True), batch_size=2, rank=1, world_size=2
    )
    batches = list(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=workers))
    assert len(batches) == len(sampler)
    assert torch.equal(
        batches[0]["input_ids"], collate([dataset[key] for key in next(iter(sampler))])["input_ids"]
    )


def test_workers_change_nothing(directory: Path) -> None:
    """Two worker processes, that open the set anew, give the batches and states of none."""
    workers, none = (
        PackedDataLoader(directory, batch_size=2, num_workers=number, replan=True) for number in (2, 0)
    )
    for one, other in zip(workers, none, strict=True):
        check_batch(one)
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert workers.state_dict() == none.state_dict()


@pytest.mark.parametrize("multiple_of", [1, 2, 8, 11, 12])
def test_a_length_that_ranks_divide(directory: Path, multiple_of: int) -> None:
    """Empty buffers at the end make a multiple; by number they are there, beyond them is an IndexError."""
    dataset = PackedDataset(directory, multiple_of=multiple_of)
    assert len(dataset) % multiple_of == 0
    assert 0 <= len(dataset) - len(BINS) < multiple_of
    assert [len(dataset[i]) for i in range(len(dataset))][len(BINS) :] == [0] * (len(dataset) - len(BINS))
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1"),
        ({"world_size": 0}, "rank 0 of 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**64}, "seed"),
        ({"num_workers": -1}, "num_workers -1"),
        ({"prefetch": -1}, "prefetch -1"),
    ],
)
def test_options_that_cannot_be(directory: Path, options: Any, words: str) -> None:
    """A number that can't be is one clear line."""
    with pytest.raises(OptionError, match=words):
        PackedDataLoader(directory, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_pinned_memory_needs_a_gpu(directory: Path) -> None:
    """Without a GPU it is refused at once, and not by the first batch."""
    with pytest.raises(OptionError, match="needs a GPU"):
        PackedDataLoader(directory, pin_memory=True)


@pytest.mark.gpu
def test_pinned_memory(directory: Path) -> None:
    """All tensors are pinned, by the prefetching thread as well, and the laws hold."""
    for prefetch in (0, 2):
        for batch in PackedDataLoader(directory, pin_memory=True, prefetch=prefetch):
            check_batch(batch)
            assert all(value.is_pinned() for value in batch.values() if torch.is_tensor(value))


def test_a_set_without_buffers(tmp_path: Path) -> None:
    """A set in which nothing was packed is said to be empty, not an endless or empty loop."""
    with pytest.raises(ShardError, match="no buffers"):
        PackedDataLoader(make_set(tmp_path / "set", []))


def test_a_process_ends_while_its_iterator_lives(directory: Path) -> None:
    """A script, or one that failed, exits although batches are made ahead for an iterator still alive."""
    program = (
        "import sys\nfrom packing.loader import PackedDataLoader\n"
        "ahead = iter(PackedDataLoader(sys.argv[1], prefetch=2))\nnext(ahead)\nprint('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
