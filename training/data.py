"""The shards as the trainer sees them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from training.errors import OptionError
from training.packed import (
    IGNORE_INDEX,
    LoadedBuffer,
    PackedBuffer,
    PackedDataLoader,
    collate,
    misfits,
    open_shards,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BUFFERS = "buffers"  # a batch's own buffers, on their way through the loader


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one rank computes at a time, and what it is made of.

    Attributes:
        inputs: The arguments of the model's forward, `labels` among them: the loader's batch.
        real_tokens: Tokens of examples, the tail left out.
        supervised_tokens: Labels that are not −100.
        seq_lengths: The examples' lengths.
        buffers: Buffers laid side by side, all-tail ones included.
        example_ids: The examples' numbers.
    """

    inputs: Mapping[str, Any]
    real_tokens: int
    supervised_tokens: int
    seq_lengths: tuple[int, ...]
    buffers: int
    example_ids: tuple[int, ...]


def micro_batch(inputs: Mapping[str, Any], buffers: Sequence[PackedBuffer]) -> MicroBatch:
    """A batch and what its buffers, all-tail ones included, say of it."""
    return MicroBatch(
        inputs=inputs,
        real_tokens=sum(map(len, buffers)),
        supervised_tokens=int((inputs["labels"] != IGNORE_INDEX).sum()),
        seq_lengths=tuple(int(length) for buffer in buffers for length in buffer.seq_lengths),
        buffers=len(buffers),
        example_ids=tuple(int(number) for buffer in buffers for number in buffer.example_ids),
    )


class TrainingData:
    """The micro-batches of this rank from a shard directory."""

    def __init__(
        self,
        directory: str,
        *,
        part: str | None = None,
        rank: int,
        world_size: int,
        buffers: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Opens the shards; the digest of each file is checked when it is first read.

        Args:
            directory: What `padfree pack` wrote.
            part: A shard set inside it, as "eval".
            rank: Of this process.
            world_size: Processes that share the buffers.
            buffers: In a micro-batch.
            seed: Of the order.
            shuffle: Whether each epoch has an order of its own.
            prefetch: Micro-batches that a thread makes ready ahead.
            pin_memory: For copies to a GPU that don't wait.

        Raises:
            ShardError: missing, damaged, or without a buffer.
        """

        def with_buffers(buffers: Sequence[LoadedBuffer]) -> dict[str, Any]:
            return {**collate(buffers), _BUFFERS: buffers}

        shards = open_shards(directory)
        self.shards = shards.part(part) if part else shards
        self.capacity: int = self.shards.capacity
        self._world_size = world_size
        self._loader = PackedDataLoader(
            self.shards,
            seed=seed,
            shuffle=shuffle,
            prefetch=prefetch,
            pin_memory=pin_memory,
            batch_size=buffers,
            rank=rank,
            world_size=world_size,
            collate_fn=with_buffers,
        )

    @cached_property
    def _chat(self) -> Mapping[str, Any]:
        """What the manifest says of tokenizer and template; nothing where the shards came without."""
        found: Mapping[str, Any] = self.shards.manifest["fingerprint"].get("chat", {})
        return found

    @cached_property
    def vocabulary(self) -> int:
        """Words of the tokenizer; where the manifest does not say, the least that the ids need."""
        known = self.shards.vocabulary
        return 1 + self.shards.largest_id if known is None else known

    def steps_of_epoch(self, *, accumulation: int) -> int:
        """How many steps of so many micro-batches a rank an epoch has; the last may have fewer."""
        return math.ceil(len(self._loader) / accumulation)

    def check_ranks(self) -> None:
        """Refuses more ranks than buffers: some would never see an example.

        Raises:
            OptionError: names both numbers.
        """
        if len(self.shards) < self._world_size:
            raise OptionError(
                f"{self.shards.path} holds {len(self.shards)} buffers, too few for {self._world_size} ranks: "
                "use fewer ranks, or pack more data or a smaller capacity"
            )

    def check_alike(self, other: TrainingData) -> None:
        """Refuses shards to evaluate on that were packed otherwise: their loss would say nothing of training.

        Raises:
            OptionError: another tokenizer or another chat template.
        """
        tokenizers = {part._chat.get("tokenizer") for part in (self, other)} - {None}
        # Of a tokenizer's templates, a manifest names those that its conversations took, with tools or not.
        mine, theirs = (set(part._chat.get("chat_template") or ()) for part in (self, other))
        for what, alike in (
            ("tokenizer", len(tokenizers) < 2),
            ("chat template", mine <= theirs or theirs <= mine),
        ):
            if not alike:
                raise OptionError(
                    f"{other.shards.path} was packed with another {what} than {self.shards.path}: "
                    "pack both alike"
                )

    def check_model(self, config: PretrainedConfig) -> None:
        """Refuses a model that these shards were not made for.

        Raises:
            OptionError: another vocabulary, or examples, or a tail, of more tokens than it takes.
        """
        for problem in misfits(self.shards, vocabulary=config.vocab_size, config=config):
            raise OptionError(problem)

    def steps(self, *, accumulation: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step, epoch after epoch without end, from where the state is.

        An epoch's last step takes what is left, nothing of the next epoch. So the buffers of a step depend on
        the product of buffers, ranks and accumulation alone, and a run may go on with another split of it.
        """
        while True:
            epoch = self.epoch()
            while batches := list(itertools.islice(epoch, accumulation)):
                yield batches

    def epoch(self) -> Iterator[MicroBatch]:
        """The rest of the loader's epoch, or the next one."""
        for inputs in self._loader:
            buffers = inputs.pop(_BUFFERS)
            yield micro_batch(inputs, buffers)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is; the same on every rank at the same step."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, on any number of ranks.

        Raises:
            ResumeError: it belongs to other shards or to another order.
        """
        self._loader.load_state_dict(state)


__all__ = ["IGNORE_INDEX", "MicroBatch", "TrainingData", "micro_batch"]
