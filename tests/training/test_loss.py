"""Which loss may run: the fused one never where a model changes its logits after the head."""

import pytest
import torch

from training.errors import OptionError
from training.kernels.families import FAMILIES, Family, build, tiny_config
from training.loss import choose_loss


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_fused_loss_for_changed_logits(family: Family) -> None:
    """With each number named after logits or the head at 0.5: other logits than the head's are refused."""
    config = tiny_config(family)
    text = config.get_text_config()
    keys = [
        key
        for key, value in text.to_dict().items()
        if ("logit" in key or "lm_head" in key) and not key.startswith("num_")
        if value is None or type(value) in (int, float)
    ]
    for key in keys:
        setattr(text, key, 0.5)
    model = build(config, family.architecture)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        head = model.get_output_embeddings()(model.get_decoder()(input_ids=ids).last_hidden_state)
        changed = not torch.allclose(model(input_ids=ids).logits, head)
    if family.name in ("Falcon-H1", "Granite-MoE-hybrid", "Gemma 3"):
        assert changed
    if changed:
        with pytest.raises(OptionError, match="changes its logits after the head"):
            choose_loss("liger", device=torch.device("cpu"), model=model)
        with pytest.raises(OptionError, match="changes its logits after the head"):
            choose_loss("auto", device=torch.device("cuda"), model=model)
    assert choose_loss("plain", device=torch.device("cuda"), model=model) == "plain"
