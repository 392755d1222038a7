"""Packed shards in PyTorch Lightning: python with_lightning.py SHARDS MODEL OUT [CHECKPOINT]."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

from packing.loader import PackedDataLoader
from training.kernels import bind


class Sft(lightning.LightningModule):
    """Adds up the loss over a step's supervised tokens and divides once, by their number over all ranks."""

    def __init__(self, shards: str, name: str) -> None:
        super().__init__()
        self.shards = shards
        self.model = bind(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)).train()
        self.register_buffer("sums", torch.zeros(2), persistent=False)  # of the loss, of supervised tokens

    def train_dataloader(self) -> PackedDataLoader:
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        return PackedDataLoader(self.shards, seed=7, rank=rank, world_size=ranks)

    def training_step(self, batch: dict, _: int) -> torch.Tensor:
        loss = self.model(**batch, num_items_in_batch=1).loss
        self.sums += torch.stack([loss.detach(), (batch["labels"] != -100).sum()])
        return loss

    def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
        total, count = self.trainer.strategy.reduce(self.sums, reduce_op="sum").tolist()
        # Lightning divides by the micro-batches, DDP by the ranks; the right divisor is the count of tokens.
        undo = self.trainer.accumulate_grad_batches * self.trainer.world_size
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(undo / count)
        self.sums.zero_()
        norm = torch.nn.utils.get_total_norm(p.grad for p in self.parameters() if p.grad is not None)
        self.print({"loss": total / count, "grad_norm": norm.item()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.0)


shards, name, out, *checkpoint = sys.argv[1:]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    max_steps=4,
    accumulate_grad_batches=4 // ranks,
    gradient_clip_val=1.0,
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    default_root_dir=out,
    callbacks=[ModelCheckpoint(out, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Sft(shards, name), ckpt_path=checkpoint[0] if checkpoint else None)
