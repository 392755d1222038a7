"""Packed shards in transformers.Trainer: python with_trainer.py SHARDS MODEL OUT [CHECKPOINT].

`torchrun --nproc-per-node 2 with_trainer.py …` trains on the same buffers in the same steps.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from packing.loader import PackedDataset, collate
from packing.trainers import check_trainer
from training.kernels import bind

shards, name, out, *checkpoint = sys.argv[1:]
args = TrainingArguments(
    out,
    per_device_train_batch_size=1,
    per_device_eval_batch_size=1,
    gradient_accumulation_steps=4 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=4,
    save_steps=2,
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    logging_steps=1,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
)
trainer = Trainer(
    bind(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)),
    args,
    # Where the ranks don't divide the buffers, accelerate would show some twice: multiple_of adds empty ones.
    train_dataset=PackedDataset(shards, multiple_of=args.world_size),
    eval_dataset=PackedDataset(f"{shards}/eval", multiple_of=args.world_size),
    data_collator=collate,
)
check_trainer(trainer)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
trainer.evaluate()
