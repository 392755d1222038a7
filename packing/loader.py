"""Batches for torch: a data set of buffers, a sampler with an order of its own, collate, resume.

    loader = PackedDataLoader("packed", batch_size=1, rank=rank, world_size=world_size, seed=7)
    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch).loss
            …  # and at times: save loader.state_dict()

A batch, T = buffers × capacity (the law of each key is in `check_batch`):

    input_ids, labels, position_ids   int64[1, T]
    cu_seq_lens_q, cu_seq_lens_k      int32[N + 1]
    max_length_q, max_length_k        int
    seq_idx                           int32[1, T]
    use_cache                         False: a cache turns packed detection off

This is the only file of `packing` that imports torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, main_thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils.collate import default_collate_fn_map

from packing import boundaries
from packing.buffer import PackedBuffer, check_buffer
from packing.errors import OptionError, ResumeError, ShardError
from packing.example import IGNORE_INDEX
from packing.plan import Plan, plan_bins
from packing.shards import ShardSet, open_shards

Batch = dict[str, Any]

_DTYPES = {
    "input_ids": np.int64,
    "labels": np.int64,
    "position_ids": np.int64,
    "cu_seq_lens_q": np.int32,
    "cu_seq_lens_k": np.int32,
    "seq_idx": np.int32,
}
BATCH_KEYS = [
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

STATE_VERSION = 1
"""Of `PackedDataLoader.state_dict`: raised when a state would mean another place than before."""

Key = int | NDArray[np.int64] | None
"""What a data set gives a buffer for: its number, the places of its examples, or None for an empty one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedBuffer(PackedBuffer):
    """A buffer and the length to which `collate` fills it.

    Attributes:
        capacity: Tokens after filling; None leaves the buffer at its own length.
    """

    capacity: int | None


def collate(rows: Sequence[PackedBuffer | Mapping[str, Any]]) -> Batch:
    """Buffers, side by side, as the arguments of a model's forward.

    A `LoadedBuffer` with a capacity is filled with exactly one more segment of token 0 and label -100:
    rows that no segment covers give NaN gradients, and a segment a pad token would cost the kernels
    thousands of empty steps. All tensors are new: flash-linear-attention caches what it derives from
    `cu_seqlens` by object identity, so a refilled tensor would get the last batch's boundaries.

    Args:
        rows: Buffers, or rows of the shard directory opened by `datasets.load_from_disk`.

    Raises:
        OptionError: a row without its columns, as trainers drop those that a model does not take.
        ValueError: no rows, or one above its capacity.
    """
    if not rows:
        raise ValueError("a batch holds at least one buffer")
    buffers = [row if isinstance(row, PackedBuffer) else _from_row(row) for row in rows]
    segments = [_segments(buffer) for buffer in buffers]
    lengths = segments[0] if len(segments) == 1 else np.concatenate(segments)
    cu_seqlens, position_ids, seq_idx, longest = boundaries.all_of(lengths)
    ids = np.empty((1, position_ids.size), np.int64)
    labels = np.empty((1, position_ids.size), np.int64)
    start = 0
    for buffer, filled in zip(buffers, segments, strict=True):
        real, end = start + len(buffer), start + int(filled.sum())
        ids[0, start:real], ids[0, real:end] = buffer.input_ids, 0
        labels[0, start:real], labels[0, real:end] = buffer.labels, IGNORE_INDEX
        start = end
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(position_ids[None]),
        "cu_seq_lens_q": torch.from_numpy(cu_seqlens),
        "cu_seq_lens_k": torch.from_numpy(cu_seqlens.copy()),
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": torch.from_numpy(seq_idx[None]),
        "use_cache": False,
    }


# For a DataLoader that was given no collate_fn: torch's own can make nothing of a buffer.
default_collate_fn_map[PackedBuffer] = lambda rows, *, collate_fn_map: collate(rows)


def _segments(buffer: PackedBuffer) -> NDArray[np.int64]:
    """The lengths of a buffer's segments, its tail included."""
    if isinstance(buffer, LoadedBuffer) and buffer.capacity is not None:
        return boundaries.with_tail(buffer.seq_lengths, capacity=buffer.capacity)
    return boundaries.check_lengths(buffer.seq_lengths)


def _from_row(row: Mapping[str, Any]) -> PackedBuffer:
    """A row of a Hugging Face data set as a buffer, checked: who knows what was done to the data set."""
    if missing := [name for name in ("input_ids", "labels", "seq_lengths") if name not in row]:
        raise OptionError(
            f"a row has no {missing[0]}, only {list(row)}: without its boundaries examples would see each "
            "other; keep all columns (in a Trainer: remove_unused_columns=False)"
        )
    lengths = np.asarray(row["seq_lengths"], np.int32)
    buffer = PackedBuffer(
        input_ids=np.asarray(row["input_ids"], np.int32),
        labels=np.asarray(row["labels"], np.int32),
        seq_lengths=lengths,
        example_ids=np.zeros(lengths.size, np.int64),
    )
    check_buffer(buffer)
    return buffer


def check_batch(batch: Mapping[str, Any]) -> None:
    """Checks every law of a batch: for tests, and for a trainer's first step.

    Tensors on a device are copied to the host, which waits for the device.

    Raises:
        ValueError: names the law that fails.
    """
    if list(batch) != BATCH_KEYS:
        raise ValueError(f"a batch has the keys {BATCH_KEYS}, in this order, not {list(batch)}")
    arrays = {key: value.numpy(force=True) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    for key, dtype in _DTYPES.items():
        if key not in arrays or arrays[key].dtype != dtype:
            found = arrays[key].dtype if key in arrays else type(batch[key]).__name__
            raise ValueError(f"{key} must be a tensor of {np.dtype(dtype)}, not {found}")
    ids, labels = arrays["input_ids"], arrays["labels"]
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"input_ids must be of shape [1, T], not {list(ids.shape)}")
    for key in ("labels", "position_ids", "seq_idx"):
        if arrays[key].shape != ids.shape:
            raise ValueError(f"{key} must be of shape {list(ids.shape)}, not {list(arrays[key].shape)}")
    lengths = boundaries.lengths_from_cu_seqlens(arrays["cu_seq_lens_q"])
    if (total := int(lengths.sum())) != ids.shape[1]:
        raise ValueError(f"cu_seq_lens_q ends at {total}, but there are {ids.shape[1]} tokens")
    computed: dict[str, NDArray[Any]] = {
        "cu_seq_lens_k": boundaries.cu_seqlens(lengths),
        "position_ids": boundaries.position_ids(lengths)[None],
        "seq_idx": boundaries.seq_idx(lengths)[None],
    }
    for key, expected in computed.items():
        if not np.array_equal(arrays[key], expected):
            raise ValueError(f"{key} has other boundaries than cu_seq_lens_q")
    for key in ("max_length_q", "max_length_k"):
        if type(batch[key]) is not int or batch[key] != boundaries.max_seqlen(lengths):
            raise ValueError(f"{key} must be the int {boundaries.max_seqlen(lengths)}, not {batch[key]!r}")
    if batch["use_cache"] is not False:
        raise ValueError(f"use_cache must be False, not {batch['use_cache']!r}")
    if (labels[0, boundaries.starts(lengths)] != IGNORE_INDEX).any():
        raise ValueError("the label at a segment's first position must be -100: models shift inside")
    if ((labels != IGNORE_INDEX) & (labels != ids)).any():
        raise ValueError("a label must be the token's own id, or -100")


class PackedDataset(Dataset[LoadedBuffer]):
    """A shard set as a map-style data set, for torch's `DataLoader`, whose batches `collate` makes.

    Indexing takes a `Key`: what a `PackedSampler` gives, or a buffer's number. It has no order and no state
    of its own, so copies in worker processes can't go stale.

    Args:
        source: A shard directory, or an open shard set.
        capacity: Tokens to which buffers are filled; None takes the shard set's. Less than that is for new
            bins alone (`OrderOptions.replan`): a stored buffer is refused when it is asked for.
        fixed_shape: Fill every buffer to the capacity; else buffers keep their own lengths.
        multiple_of: Empty buffers at the end make the length a multiple of this: ranks × buffers in a
            batch, for trainers that would repeat buffers, or wait for each other, where ranks run out.

    Raises:
        ShardError: missing, damaged, or without a buffer.
        OptionError: a number that can't be.
    """

    def __init__(
        self,
        source: str | Path | ShardSet,
        *,
        capacity: int | None = None,
        fixed_shape: bool = True,
        multiple_of: int = 1,
    ) -> None:
        if multiple_of < 1:
            raise OptionError(f"multiple_of {multiple_of} can't be: choose 1 or more")
        if capacity is not None and capacity < 1:
            raise OptionError(f"capacity {capacity} can't be: choose 1 or more")
        self.shards = source if isinstance(source, ShardSet) else open_shards(source)
        if not len(self.shards):
            raise ShardError(f"{self.shards.path} holds no buffers: nothing to load")
        self.capacity = self.shards.capacity if capacity is None else capacity
        self.fixed_shape = fixed_shape
        self._length = len(self.shards) + -len(self.shards) % multiple_of

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Key) -> LoadedBuffer:
        if key is None or (not isinstance(key, np.ndarray) and len(self.shards) <= key < self._length):
            # No real tokens: collate makes it all tail. Without a fixed shape one token is tail enough.
            nothing = np.zeros(0, np.int32)
            return LoadedBuffer(
                input_ids=nothing,
                labels=nothing,
                seq_lengths=nothing,
                example_ids=nothing.astype(np.int64),
                capacity=self.capacity if self.fixed_shape else 1,
            )
        if not isinstance(key, np.ndarray) and self.fixed_shape and self.capacity < self.shards.capacity:
            raise OptionError(
                f"a capacity of {self.capacity} is less than the {self.shards.capacity} of the buffers in "
                f"{self.shards.path}: leave it out, or plan new bins with OrderOptions(replan=True, …)"
            )
        buffer = self.shards.gather(key) if isinstance(key, np.ndarray) else self.shards[key]
        return LoadedBuffer(
            input_ids=buffer.input_ids,
            labels=buffer.labels,
            seq_lengths=buffer.seq_lengths,
            example_ids=buffer.example_ids,
            capacity=self.capacity if self.fixed_shape else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """All that decides the order of an epoch, beside the shard set and the epoch's number.

    Attributes:
        seed: 0 … 2**64 - 1.
        shuffle: Permute the buffers anew in each epoch; else they come as they lie.
        replan: Plan new bins from the examples' lengths in each epoch.
        capacity: Most tokens in a new bin; None takes the shard set's. Only with `replan`.
    """

    seed: int = 0
    shuffle: bool = True
    replan: bool = False
    capacity: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise OptionError(f"seed {self.seed} can't be: choose 0 to 2**64 - 1")
        if self.capacity is not None and not self.replan:
            raise OptionError("another capacity needs new bins: set replan=True as well")
        if self.capacity is not None and self.capacity < 1:
            raise OptionError(f"capacity {self.capacity} can't be: choose 1 or more")


def epoch_order(
    shards: ShardSet, *, epoch: int, options: OrderOptions
) -> tuple[NDArray[np.int64], Plan | None]:
    """The order of an epoch, for all ranks together: a pure function of its arguments.

    Stable over machines and versions of numpy: the bits of PCG64 are guaranteed, and a stable sort of them
    (unlike `Generator.permutation`) leaves nothing else that could change.

    Returns:
        int64[buffers], and the plan whose bins they number; None where they number the stored buffers.

    Raises:
        OptionError: an epoch below 0; with `replan`, an example longer than the capacity.
    """
    if epoch < 0:
        raise OptionError(f"epoch {epoch} can't be: choose 0 or more")
    text = f"padfree order 1: seed {options.seed}, epoch {epoch}"
    digest = hashlib.sha256(text.encode()).digest()
    plan: Plan | None = None
    if options.replan:
        capacity = shards.capacity if options.capacity is None else options.capacity
        plan = plan_bins(shards.seq_lengths, capacity=capacity, seed=int.from_bytes(digest[:8], "little"))
    count = len(shards) if plan is None else len(plan)
    if not options.shuffle:
        return np.arange(count), plan
    random = np.random.PCG64(int.from_bytes(digest[8:24], "little")).random_raw(count)
    return np.argsort(random, kind="stable"), plan


class PackedSampler(Sampler[list[Key]]):
    """Which buffers this rank gets, batch by batch: a `batch_sampler` for torch's `DataLoader`.

    Step s of W ranks takes the next W × batch_size buffers of the epoch, dealt out in turn. Where they run
    out, ranks get None: all take the same number of steps, and no buffer is left out or seen twice.

    Args:
        shards: What to order.
        options: The order; None takes the defaults.
        batch_size: Buffers in a batch.
        rank: Of this process, 0 … world_size - 1.
        world_size: Processes that share the buffers.
        epoch: The epoch's number, from 0.
        start: Buffers of this epoch, over all ranks, that were handed out before.

    Raises:
        OptionError: a number that can't be.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        options: OrderOptions | None = None,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        start: int = 0,
    ) -> None:
        if batch_size < 1:
            raise OptionError(f"batch_size {batch_size} can't be: choose 1 or more")
        if not 0 <= rank < world_size:
            raise OptionError(f"rank {rank} of {world_size} can't be: choose 0 to world_size - 1")
        self._shards = shards
        self._options = options or OrderOptions()
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self.set_epoch(epoch)
        if not 0 <= start <= self.buffers:
            raise OptionError(f"start {start} can't be: epoch {epoch} has {self.buffers} buffers")
        self.start = start

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch; before its iterator is made, as torch has it."""
        self._order, self._plan = epoch_order(self._shards, epoch=epoch, options=self._options)
        self.epoch = epoch
        self.start = 0

    @property
    def buffers(self) -> int:
        """Buffers of the whole epoch, over all ranks."""
        return self._order.size

    def __len__(self) -> int:
        """Batches of this rank from `start` on; the same on every rank."""
        return math.ceil((self.buffers - self.start) / (self._batch_size * self._world_size))

    def __iter__(self) -> Iterator[list[Key]]:
        step = self._batch_size * self._world_size
        for first in range(self.start, self.buffers, step):
            numbers = self._order[first + self._rank : first + step : self._world_size].tolist()
            keys: list[Key] = [number if self._plan is None else self._plan.bin(number) for number in numbers]
            yield keys + [None] * (self._batch_size - len(keys))


class PackedDataLoader:
    """Batches of this rank, epoch after epoch, with a state to go on from.

    Each new iterator begins the loader's epoch anew; only the first after `load_state_dict` goes on where
    the state was taken. With its last batch an epoch is over, and the next iterator begins the next. The
    loader is at one place: an iterator that is drawn from, `set_epoch` and `load_state_dict` end the one
    before.

    Args:
        source: A shard directory, or an open shard set.
        batch_size: Buffers in a batch.
        rank: Of this process, 0 … world_size - 1.
        world_size: Processes that share the buffers.
        seed: With the epoch's number it decides the order.
        shuffle: Permute the buffers anew in each epoch.
        replan: Plan new bins from the examples' lengths in each epoch, without tokenizing again.
        capacity: Most tokens in a new bin, only with `replan`; None takes the shard set's.
        fixed_shape: Fill every buffer to the capacity.
        num_workers: Processes that read; 0 reads in this one. Handing tensors between processes costs far
            more than reading them from a mapped file does.
        prefetch: Batches that a thread makes ready ahead; 0 for none.
        pin_memory: Put tensors in page-locked memory, for copies to a GPU that don't wait.
        collate_fn: Makes a batch of its buffers: `collate`, or one that adds to its keys.

    Raises:
        ShardError: missing, damaged, or without a buffer.
        OptionError: a number that can't be, or pinned memory without a GPU.
    """

    def __init__(
        self,
        source: str | Path | ShardSet,
        *,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        replan: bool = False,
        capacity: int | None = None,
        fixed_shape: bool = True,
        num_workers: int = 0,
        prefetch: int = 0,
        pin_memory: bool = False,
        collate_fn: Callable[[Sequence[LoadedBuffer]], Batch] = collate,
    ) -> None:
        if pin_memory and not torch.cuda.is_available():
            raise OptionError("pin_memory needs a GPU: leave it off")
        for name, value in (("num_workers", num_workers), ("prefetch", prefetch)):
            if value < 0:
                raise OptionError(f"{name} {value} can't be: choose 0 or more")
        self.options = OrderOptions(seed=seed, shuffle=shuffle, replan=replan, capacity=capacity)
        self.dataset = PackedDataset(source, capacity=capacity, fixed_shape=fixed_shape)
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._collate = collate_fn
        self._sampler = self._sampler_at(epoch=0, buffers=0)
        self._buffers = 0  # of the sampler's epoch, handed to callers over all ranks
        self._resumed = False
        self._iterator: object = None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._sampler.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the loader is in it; the same on every rank.

        Trainers count what they have taken themselves and compare: Lightning loses batches otherwise.
        """
        return math.ceil(self._sampler.buffers / (self._batch_size * self._world_size))

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch; a position that was just loaded in that epoch is kept."""
        if not (self._resumed and epoch == self.epoch):
            self._go_to(epoch=epoch, buffers=0)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: the same on every rank at the same step. Batches made ahead don't count."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "buffers": self._buffers,
            "options": asdict(self.options),
            "fingerprint": self.dataset.shards.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, at any number of ranks and any batch size.

        Raises:
            ResumeError: the state is of other data, of another order or version, or is no state.
        """
        mine = self.state_dict()
        if (version := state.get("version")) != STATE_VERSION:
            raise ResumeError(
                f"the state is of version {version}, this loader reads {STATE_VERSION}: go on with the "
                "padfree that saved it"
            )
        if {key: type(value) for key, value in state.items()} != {key: type(mine[key]) for key in mine}:
            raise ResumeError(f"no state of a PackedDataLoader: {dict(state)}")
        if state["fingerprint"] != mine["fingerprint"]:
            raise ResumeError(
                f"the state is of other data: fingerprint {state['fingerprint'][:12]}…, but "
                f"{self.dataset.shards.path} has {mine['fingerprint'][:12]}…; use the shards that it was "
                "saved with"
            )
        for name in mine["options"] | state["options"]:
            saved, given = state["options"].get(name), mine["options"].get(name)
            if saved != given:
                raise ResumeError(
                    f"the state is of another order: it has {name} {saved}, this loader {given}; use the "
                    "same options"
                )
        try:
            self._go_to(epoch=state["epoch"], buffers=state["buffers"])
        except OptionError as error:
            raise ResumeError(f"the state is of no place in these data: {error}") from None
        self._resumed = True

    def __iter__(self) -> Iterator[Batch]:
        # A generator takes the loader nowhere before its first batch is drawn: Lightning makes iterators that
        # it never draws from, and sets the epoch afterwards.
        if not self._resumed:
            over = self._buffers >= self._sampler.buffers
            self._go_to(epoch=self.epoch + over, buffers=0)
        self._resumed = False
        self._iterator = token = object()
        with closing(self._made()) as made, closing(_ahead(made, count=self._prefetch)) as batches:
            for batch in batches:
                self._check_current(token)
                taken = self._buffers + self._batch_size * self._world_size
                self._buffers = min(taken, self._sampler.buffers)
                yield batch
        self._check_current(token)
        self._go_to(epoch=self.epoch + 1, buffers=0)

    def _go_to(self, *, epoch: int, buffers: int) -> None:
        if (epoch, buffers) != (self._sampler.epoch, self._sampler.start):
            self._sampler = self._sampler_at(epoch=epoch, buffers=buffers)
        self._buffers = buffers
        self._resumed = False
        self._iterator = None

    def _sampler_at(self, *, epoch: int, buffers: int) -> PackedSampler:
        return PackedSampler(
            self.dataset.shards,
            options=self.options,
            batch_size=self._batch_size,
            rank=self._rank,
            world_size=self._world_size,
            epoch=epoch,
            start=buffers,
        )

    def _check_current(self, token: object) -> None:
        if self._iterator is not token:
            raise RuntimeError(
                "this iterator has ended: a later one, set_epoch or load_state_dict took its loader elsewhere"
            )

    def _made(self) -> Generator[Batch]:
        if self._num_workers:
            loader: Any = DataLoader(
                self.dataset,
                batch_sampler=self._sampler,
                collate_fn=self._collate,
                num_workers=self._num_workers,
            )
        else:
            loader = (self._collate([self.dataset[key] for key in keys]) for keys in self._sampler)
        for batch in loader:
            yield _pinned(batch) if self._pin_memory else batch


def _pinned(batch: Batch) -> Batch:
    return {
        key: value.pin_memory() if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }


def _ahead(batches: Iterator[Batch], *, count: int) -> Generator[Batch]:
    """The same batches, with up to `count` of them made ahead by a thread; with 0, by the caller."""
    if not count:
        yield from batches
        return
    # Queues written in C: taking a batch costs 45 µs on a cold cache, 110 with futures.
    wanted: SimpleQueue[bool] = SimpleQueue()
    made: SimpleQueue[Batch | Exception | None] = SimpleQueue()

    def asked() -> bool:
        """Waits for the next wish, but not for good.

        Python waits for this thread when it exits, and a process that failed leaves its iterator unclosed.
        A daemon thread would be torn down amid torch's C++ code, which aborts the process.
        """
        while True:
            try:
                return wanted.get(timeout=0.2)
            except Empty:
                if not main_thread().is_alive():
                    return False

    def make() -> None:
        try:
            while asked() and (batch := next(batches, None)) is not None:
                made.put(batch)
            made.put(None)
        except Exception as error:  # noqa: BLE001 - raised again below, in the caller's thread
            made.put(error)

    thread = Thread(target=make, name="padfree-prefetch")
    thread.start()
    for _ in range(count):
        wanted.put(True)
    try:
        while (item := made.get()) is not None:
            if isinstance(item, Exception):
                raise item
            wanted.put(True)
            yield item
    finally:
        wanted.put(False)
        thread.join()
