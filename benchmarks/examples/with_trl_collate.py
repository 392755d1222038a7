"""Packed shards in TRL's SFTTrainer with our collate: arguments SHARDS MODEL OUT [CHECKPOINT].

TRL takes a collator of one's own only with `padding_free=False`, and must leave the data set as it is.
"""

import os
import sys

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from packing.loader import collate
from packing.trainers import check_trainer, whole_steps
from training.kernels import bind

shards, name, out, *checkpoint = sys.argv[1:]
args = SFTConfig(
    out,
    padding_free=False,
    packing=False,
    max_length=None,
    dataset_kwargs={"skip_prepare_dataset": True},
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
    data_collator=collate,
    processing_class=AutoTokenizer.from_pretrained(name),
)
check_trainer(trainer)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
trainer.evaluate()
