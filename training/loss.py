"""The sum of cross entropies over supervised tokens, computed where the head's weight is whole."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.data import IGNORE_INDEX, OptionError

SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration keys of models that change their logits after the head."""


class SupervisedLoss(nn.Module):
    """The FSDP root: a causal language model whose forward gives the loss sum of a batch.

    Inside the root's forward the head is gathered anyway; outside, its weight is a shard. The sum
    is not divided here: the count that divides it is the step's, over all ranks and micro-batches.
    """

    def __init__(self, model: PreTrainedModel, *, kind: Literal["liger", "plain"]) -> None:
        super().__init__()
        self.model = model
        self.kind = kind

    def forward(self, *, labels: Tensor, **inputs: Any) -> Tensor:
        """fp32 scalar: −Σ log p(label). `labels` int64[1, T] as in the batch; the shift is done here."""
        # The first label of each example is −100, so the shift never crosses into the next one.
        targets = F.pad(labels[0, 1:], (0, 1), value=IGNORE_INDEX)
        if self.kind == "plain":
            logits = self.model(**inputs, use_cache=False).logits[0].float()
            return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state[0]
        return _liger(hidden, self.model.get_output_embeddings(), targets)


def _liger(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Source: liger_kernel.ops.fused_linear_cross_entropy; 248,320 logits a token exist a chunk at a time."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden,
        head.weight,
        targets,
        bias=head.bias,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        accum_dtype=torch.float32,  # bf16 sums over chunks lose the small gradients
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
    scaled = [key for key in SCALED_LOGITS if getattr(model.config, key, None) not in (None, 1, 1.0)]
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
