"""Packed shards in TRL's SFTTrainer with its own collator: arguments SHARDS MODEL OUT [CHECKPOINT].

The collator reads the column `seq_lengths`, but only with these three settings: TRL's defaults build a mask
of ones, and `packing=True` packs whole buffers again as single documents. Both let examples see each other.
"""

import os
import sys

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from packing.trainers import check_trainer, whole_steps
from training.kernels import bind

shards, name, out, *checkpoint = sys.argv[1:]
args = SFTConfig(
    out,
    padding_free=True,
    packing=False,
    max_length=None,
    per_device_train_batch_size=1,
    per_device_eval_batch_size=1,
    gradient_accumulation_steps=4 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=4,
    save_steps=2,
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    logging_steps=1,
    bf16=torch.cuda.is_available(),
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
)
trainer = SFTTrainer(
    bind(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)),
    args,
    # Where the ranks don't divide the buffers, accelerate would show some twice: this adds empty ones.
    train_dataset=whole_steps(load_from_disk(shards), multiple_of=args.world_size),
    eval_dataset=load_from_disk(
        f"{shards}/eval"
    ),  # repeated rows are left out again here, empty ones are not
    processing_class=AutoTokenizer.from_pretrained(name),
)
check_trainer(trainer)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
trainer.evaluate()
