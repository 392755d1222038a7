"""Packed shards in an Accelerate loop: python with_accelerate.py SHARDS MODEL OUT [CHECKPOINT].

The loader is not prepared: it knows its rank itself, shows nothing twice and resumes at any number of ranks.
"""

import contextlib
import itertools
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM

from packing.loader import PackedDataLoader
from training.kernels import bind

shards, name, out, *checkpoint = sys.argv[1:]
accelerator = Accelerator(cpu=not torch.cuda.is_available())
ranks = accelerator.num_processes
accumulate = 4 // ranks
model = bind(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
model, optimizer = accelerator.prepare(model, optimizer)
loader = PackedDataLoader(shards, seed=7, rank=accelerator.process_index, world_size=ranks)
accelerator.register_for_checkpointing(loader)
if checkpoint:
    accelerator.load_state(checkpoint[0])
step = 0
for _ in range(loader.epoch, 2):
    batches = iter(loader)
    while step_batches := list(itertools.islice(batches, accumulate)):
        step_batches = send_to_device(step_batches, accelerator.device)
        # The step's supervised tokens over all ranks: the loss is divided by them, once.
        count = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in step_batches))
        total = torch.zeros((), device=accelerator.device)
        for batch in step_batches:
            last = batch is step_batches[-1]
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                loss = model(**batch, num_items_in_batch=count).loss
                accelerator.backward(loss * ranks)  # DDP takes the ranks' mean, where their sum is wanted
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print({"loss": accelerator.reduce(total).item(), "grad_norm": norm.item()})
        step += 1
        if step == 2:
            accelerator.save_state(f"{out}/step-2")
