"""The sum of cross entropies over supervised tokens, computed where the head's weight is whole."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.data import IGNORE_INDEX
from training.errors import OptionError

SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Configuration keys of models that change their logits after the head."""


class SupervisedLoss(nn.Module):
    """The FSDP root: a causal language model whose forward gives the loss sum of a batch.

    The sum is not divided here: the count that divides it is the step's, over all ranks and
    micro-batches.
    """

    def __init__(self, model: PreTrainedModel, *, kind: Literal["liger", "plain"], chunk: int = 8) -> None:
        """Takes the model as it is; with "liger" its head gives the loss in place of logits.

        Args:
            model: The causal language model.
            kind: "liger", fused into the head, or "plain".
            chunk: Of the fused loss: see `FusedHead`.
        """
        super().__init__()
        self.model = model
        self.kind = kind
        if kind == "liger":
            head = model.get_output_embeddings()
            head.__class__ = FusedHead
            head.chunk = chunk

    def forward(self, *, labels: Tensor, **inputs: Any) -> Tensor:
        """fp32 scalar: −Σ log p(label). `labels` int64[1, T] as in the batch; the shift is done here."""
        # The first label of each example is −100, so the shift never crosses into the next one.
        targets = F.pad(labels[0, 1:], (0, 1), value=IGNORE_INDEX)
        inputs["use_cache"] = False
        if self.kind == "liger":
            self.model.get_output_embeddings().targets = targets
            loss: Tensor = self.model(**inputs).logits
            return loss
        logits = self.model(**inputs).logits[0].float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


class FusedHead(nn.Linear):
    """A language model's head that gives the loss sum, so that the logits are never whole in memory.

    It is called by the model's own forward, where FSDP has gathered its weight. 8,192 tokens over
    248,320 words would be 7.6 GiB of logits in fp32, and their gradient as much.

    Attributes:
        targets: int64[T], set before each call.
        chunk: liger cuts the tokens so that a chunk's logits take about `chunk` times the memory of the
            hidden states. Its own 1 makes 256 tokens at a hidden size of 5,120, and each chunk reads and
            writes the weight's whole fp32 gradient.
    """

    targets: Tensor
    chunk: int

    def forward(self, hidden: Tensor) -> Tensor:
        """fp32 scalar from [1, T, H]. Source: liger_kernel.ops.fused_linear_cross_entropy."""
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss: Tensor = liger_fused_linear_cross_entropy(
            hidden[0],
            self.weight,
            self.targets,
            bias=self.bias,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            accum_dtype=torch.float32,  # bf16 sums over chunks lose the small gradients
            chunk_mem_const=self.chunk,
        )
        return loss


def choose_loss(
    kind: Literal["auto", "liger", "plain"], *, device: torch.device, model: PreTrainedModel
) -> Literal["liger", "plain"]:
    """Which loss runs, decided before the first step.

    Raises:
        OptionError: the fused loss is missing on CUDA, or would be another than the model's own.
    """
    if kind == "plain" or (kind == "auto" and device.type == "cpu"):
        return "plain"
    config = model.config.get_text_config()
    scaled = [key for key in SCALED_LOGITS if getattr(config, key, None) not in (None, 1, 1.0)]
    if scaled:
        raise OptionError(
            f"{type(model).__name__} changes its logits after the head ({scaled[0]}), which the fused "
            "loss leaves out; set model.loss=plain"
        )
    if find_spec("liger_kernel") is None:
        raise OptionError(
            "no fused linear cross entropy: install liger-kernel, or set model.loss=plain, "
            "which needs about 12 bytes a token and word of the vocabulary"
        )
    if device.type == "cpu":
        raise OptionError("model.loss=liger runs on CUDA alone; set model.loss=plain")
    return "liger"
