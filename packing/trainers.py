"""Packed shards in trainers that others wrote: their settings checked, and data sets that fill whole steps.

    trainer = Trainer(model, args, train_dataset=PackedDataset("shards"), data_collator=collate)
    check_trainer(trainer)
    trainer.train()

What a trainer may do to a packed batch, and what becomes of it (refused: by `check_trainer`):

    drop the column seq_lengths                 `collate` refuses a row without it
    add an attention mask                       refused, and by a bound model too
    take a model that is not bound              refused
    use a cache                                 `collate` says use_cache=False, TRL does too
    pack the buffers again, or cut them         refused
    cut batches apart (dispatch_batches)        refused
    repeat samples to even out the ranks        refused; `multiple_of` and `whole_steps` mend it
    take a model with too few words             refused: its embedding has no row for an id
    take a model of another vocabulary          refused of a PackedDataset: the ids would mean other words
    take a model with too few positions         refused
    take one that turns all by the longest      refused: rotary embeddings "dynamic" and "longrope"
    take means over ranks of unequal tokens     refused
    have nothing to train or evaluate on        refused
    gather the logits in an evaluation          refused
    shuffle with a sampler of its own           harmless: a buffer is a sample like any other
    take the batch's size from its first tensor harmless: that is input_ids, one row
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from packing.buffer import PackedBuffer
from packing.errors import OptionError
from packing.example import IGNORE_INDEX
from packing.loader import PackedDataset, collate
from packing.shards import misfits, too_long

if TYPE_CHECKING:
    import datasets


def whole_steps(dataset: datasets.Dataset, *, multiple_of: int) -> datasets.Dataset:
    """A shard set, as `datasets.load_from_disk` gives it, with rows that train nothing at its end.

    Args:
        dataset: Rows with `input_ids`, `labels`, `seq_lengths`.
        multiple_of: The rows in the result are a multiple of this: ranks × rows in a batch. Else accelerate
            repeats the first rows at the end, or leaves a rank waiting for the others.
    """
    import datasets

    missing = -len(dataset) % multiple_of
    if not missing:
        return dataset
    row = {"input_ids": [0, 0], "labels": [IGNORE_INDEX] * 2, "seq_lengths": [2], "example_ids": []}
    columns = {name: [row[name]] * missing for name in dataset.column_names}
    return datasets.concatenate_datasets(
        [dataset, datasets.Dataset.from_dict(columns, features=dataset.features)]
    )


def check_trainer(trainer: Any) -> None:
    """Checks the settings of a `transformers.Trainer` or a TRL `SFTTrainer`, before `train`.

    Raises:
        OptionError: the first setting that would let examples see each other, show buffers twice, weigh
            tokens unequally or gather all logits; with the setting that is right. Or it is no trainer, or
            its model does not fit its data sets (`misfits`), which are read where no manifest tells.
    """
    if not (hasattr(trainer, "args") and hasattr(trainer, "data_collator")):
        raise OptionError(
            f"check_trainer takes a transformers.Trainer or a trl.SFTTrainer, not the "
            f"{type(trainer).__name__} {' '.join(repr(trainer).split())[:60]}"
        )
    if (problem := next(_problems(trainer), None)) is not None:
        raise OptionError(f"{type(trainer).__name__}: {problem}")


def _problems(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) != args.world_size:
        yield (
            f"{started} processes were started, but its world size is {args.world_size}, so each trains by "
            "itself: on a CPU set use_cpu=True"
        )
    yield from _collator(trainer)
    if (longest := getattr(args, "max_length", None)) is not None:
        yield (
            f"max_length={longest} cuts rows, whose seq_lengths then name more tokens than there are: set "
            "max_length=None"
        )
    if args.accelerator_config.dispatch_batches:
        yield (
            "dispatch_batches=True cuts a batch apart along its first dimension, and a packed batch is one "
            'row: set accelerator_config={"dispatch_batches": False}'
        )
    if args.n_gpu > 1:
        yield (
            f"{args.n_gpu} GPUs in one process are DataParallel, which cuts a packed batch apart: start one "
            "process a GPU with torchrun"
        )
    parallel = trainer.accelerator.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        yield ("context and sequence parallelism cut sequences apart and know no boundaries: leave them off")
    for name, size in (("train", args.train_batch_size), ("eval", args.eval_batch_size)):
        yield from _rows(trainer, name=name, step=size * args.world_size)
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False takes the mean of the ranks' means: tokens weigh unequally, "
            "and a rank without a trained token gives NaN: set it to True"
        )
    if trainer.compute_metrics is not None and trainer.preprocess_logits_for_metrics is None:
        yield (
            "compute_metrics makes evaluation gather the logits of all tokens, tokens × vocabulary floats: "
            "give preprocess_logits_for_metrics too, or leave compute_metrics out"
        )
    if not _bound(trainer.model):
        yield (
            "its model is not bound, so nothing sees to it that its layers keep to the boundaries: give it "
            "training.kernels.bind(model)"
        )
    for name in ("train", "eval"):
        yield from _model(trainer, name=name)


def _bound(model: Any) -> bool:
    """Whether the check of a binding is in the model, or in one that adapters were put around."""
    return any(
        type(hook).__module__ == "training.kernels.binding"
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


def _collator(trainer: Any) -> Iterator[str]:
    args, collator = trainer.args, trainer.data_collator
    if getattr(args, "packing", False) or getattr(args, "eval_packing", False):
        yield (
            "packing=True packs whole buffers again, as if each were one document, so examples see each "
            "other: set packing=False, padding_free=True, max_length=None"
        )
    if collator is collate:
        return
    if not type(collator).__module__.startswith("trl."):
        yield (
            f"its data_collator is {getattr(collator, '__name__', type(collator).__name__)}, which knows no "
            "boundaries: set data_collator=packing.loader.collate"
        )
    if not getattr(collator, "padding_free", False):
        yield (
            "padding_free=False makes the collator build a mask of ones, so examples see each other: set "
            "padding_free=True, packing=False, max_length=None"
        )


def _rows(trainer: Any, *, name: str, step: int) -> Iterator[str]:
    for part in _parts(trainer, name=name):
        missing = -len(part) % step
        if not len(part):
            yield f"{name}_dataset has no row: give it another, or leave it out"
        elif trainer.args.world_size == 1:
            continue
        elif name == "eval" and _is_trl(trainer):
            # TRL takes the mean over batches after accelerate has left out the repeated rows.
            last = part[len(part) - 1]
            labels = last.labels if isinstance(last, PackedBuffer) else last.get("labels")
            if labels is not None and all(label == IGNORE_INDEX for label in labels):
                yield (
                    "eval_dataset has empty rows, which TRL would count as a loss of 0: give it "
                    "load_from_disk(…) without whole_steps"
                )
        elif missing and not trainer.args.dataloader_drop_last:
            yield (
                f"{len(part)} rows in {name}_dataset are no multiple of {step} (ranks × batch size), so "
                f"accelerate would show {missing} of them twice (even_batches): open it with "
                f"PackedDataset(…, multiple_of={step}), or whole_steps(…, multiple_of={step})"
            )


def _parts(trainer: Any, *, name: str) -> list[Any]:
    dataset = getattr(trainer, f"{name}_dataset")
    if dataset is None:
        return []
    parts = dataset.values() if isinstance(dataset, dict) else [dataset]
    return [part for part in parts if hasattr(part, "__len__")]  # a stream can't be looked through


def _model(trainer: Any, *, name: str) -> Iterator[str]:
    vocabulary = trainer.model.get_input_embeddings().num_embeddings
    config = trainer.model.config.get_text_config()
    for part in (inner for outer in _parts(trainer, name=name) for inner in _within(outer)):
        if isinstance(part, PackedDataset):
            tail = part.capacity if part.fixed_shape else 0
            yield from misfits(part.shards, vocabulary=vocabulary, config=config, tail=tail)
            continue
        if len(part) and isinstance(first := part[0], Mapping) and "input_ids" not in first:
            yield f"{name}_dataset has no input_ids, only {', '.join(first)}: give it a shard set's rows"
            continue
        least, largest, longest = _extremes(part)
        if least < 0:
            yield f"{name}_dataset holds token id {least}, and no model has a word for that: pack it again"
        if largest >= vocabulary:
            yield (
                f"{name}_dataset holds ids up to {largest}, the model has {vocabulary} words: pack with the "
                "model's own tokenizer, or give the model more (resize_token_embeddings)"
            )
        yield from too_long(config, holder=f"{name}_dataset", longest=longest, tail=0)


_WRAPPERS = ("Subset", "ConcatDataset")


def _within(dataset: Any) -> Iterator[Any]:
    """What torch's Subset and ConcatDataset are made of; another data set is itself."""
    if type(dataset).__module__ != "torch.utils.data.dataset" or type(dataset).__name__ not in _WRAPPERS:
        yield dataset
        return
    for part in dataset.datasets if hasattr(dataset, "datasets") else [dataset.dataset]:
        yield from _within(part)


def _extremes(dataset: Any) -> tuple[int, int, int]:
    """The least and the largest token id and the longest example, a second for 250 million tokens."""
    import pyarrow.compute as pc

    found, longest = [], 0
    # Of datasets, by its own columns, not by Python's numbers; but what a transform gives is known by row.
    if hasattr(dataset, "column_names") and dataset.format["type"] != "custom":
        lengths = "seq_lengths" in dataset.column_names  # positions restart with each
        for batch in dataset.with_format("arrow").iter(batch_size=1000):
            ids = batch["input_ids"]
            found += [n for n in pc.min_max(pc.list_flatten(ids)).as_py().values() if n is not None]
            each = pc.list_flatten(batch["seq_lengths"]) if lengths else pc.list_value_length(ids)
            longest = max(longest, pc.max(each).as_py() or 0)
    else:
        for row in (dataset[number] for number in range(len(dataset))):
            if isinstance(row, PackedBuffer):
                row = {"input_ids": row.input_ids, "seq_lengths": row.seq_lengths}
            ids = np.asarray(row["input_ids"])
            longest = max(longest, *map(int, row.get("seq_lengths", (ids.size,))), 0)
            found += [int(extreme(ids)) for extreme in (np.min, np.max) if ids.size]
    return min(found, default=0), max(found, default=-1), longest


def _is_trl(trainer: Any) -> bool:
    return any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)
