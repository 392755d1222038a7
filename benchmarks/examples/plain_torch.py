"""Packed shards in a plain torch loop: python plain_torch.py SHARDS MODEL."""

import sys

import torch
from transformers import AutoModelForCausalLM

from packing.loader import PackedDataLoader
from training.kernels import bind

shards, name = sys.argv[1:3]
model = bind(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
loader = PackedDataLoader(shards, seed=7)
for epoch in range(2):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print({"epoch": epoch, "loss": loss.item(), "grad_norm": norm.item()})
