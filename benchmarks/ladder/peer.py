"""A peer on the same lengths: TRL's SFTTrainer with packing, as its documentation sets it up.

    SFTTrainer(model, args=SFTConfig(packing=True, max_length=8192, use_liger_kernel=True, …), train_dataset)

Its best-fit packing joins the examples anew; its collator gives `cu_seq_lens_q`, `max_length_q`, `seq_idx`.
flash-attn is not needed: the product's varlen attention stands in for it, so both run the same kernels.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from packing import ShardSet, open_shards, unpack
from training.config import Config
from training.kernels import attention, bind
from training.metrics import FILE
from training.model import read_config


class Clock(TrainerCallback):
    """Writes a line a step with the trainer's keys into `metrics.jsonl`."""

    def __init__(self, folder: Path, *, capacity: int) -> None:
        self._lines = (folder / FILE).open("w", encoding="utf-8")
        self._capacity = capacity
        self.lengths: list[int] = []  # of the examples of this step, noted by the collator

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        line = {
            "kind": "train",
            "step": state.global_step,
            "step_s": time.perf_counter() - self._started,
            "real_tokens": sum(self.lengths),
            "fill": sum(self.lengths) / self._capacity,
        }
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


def train(config: Config, *, recompute: bool) -> None:
    """Trains `config.run.steps` steps on one device.

    Args:
        config: As for the trainer; its precision, learning rate and data count, all else is TRL's default.
        recompute: TRL's default; False where memory allows it.
    """
    shards = open_shards(config.data.shards)
    cuda = torch.cuda.is_available()
    attention.register()
    torch.manual_seed(config.run.seed)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(
            read_config(config.model, vocabulary=0),
            dtype=torch.bfloat16 if cuda else torch.float32,
            attn_implementation=attention.FUSED,
        )
    if not cuda:
        bind(model)  # a dry run: transformers' references can't keep packed examples apart
    arguments = SFTConfig(
        output_dir=config.run.dir,
        max_steps=config.run.steps,
        packing=True,
        max_length=shards.capacity,
        per_device_train_batch_size=1,
        learning_rate=config.optim.lr,
        use_liger_kernel=cuda,
        gradient_checkpointing=recompute,
        bf16=cuda,
        use_cpu=not cuda,
        save_strategy="no",
        report_to="none",
        logging_steps=10,
    )
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    clock = Clock(Path(config.run.dir), capacity=shards.capacity)
    trainer = SFTTrainer(
        model, args=arguments, train_dataset=_rows(shards), processing_class=_tokenizer(), callbacks=[clock]
    )
    collator = trainer.data_collator

    def noted(rows: list[dict[str, Any]]) -> dict[str, Any]:
        clock.lengths = [length for row in rows for length in row["seq_lengths"]]
        return collator(rows)

    trainer.data_collator = noted
    trainer.train()


def _rows(shards: ShardSet) -> Dataset:
    examples = [example for number in range(len(shards)) for example in unpack(shards[number])]
    return Dataset.from_dict(
        {
            "input_ids": [example.input_ids.tolist() for example in examples],
            "labels": [example.labels.tolist() for example in examples],
        }
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """The ids are there already; SFTTrainer asks for a tokenizer and its pad token all the same."""
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
