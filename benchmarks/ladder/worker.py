"""One rank of one rung: `torchrun … -m ladder.worker SPEC.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Runs what the file says: kind, folder, config (TOML), profile_step, kernels, sorted, recompute."""
    spec: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
    folder = Path(spec["folder"])
    if spec["kind"] == "padded" and not spec["kernels"]:
        for package in ("fla", "causal_conv1d", "flash_qla"):
            # As on a machine without kernels: transformers finds none, and binds its references.
            sys.modules[package] = None  # type: ignore[assignment]

    from ladder.observe import Observer

    rank = int(os.environ["RANK"])
    Observer(folder, rank=rank, profile_step=spec["profile_step"])
    from training.config import load

    config = load(spec["config"])
    if spec["kind"] == "padded":
        from ladder import padded

        padded.train(config, in_order_of_length=spec["sorted"])
    elif spec["kind"] == "peer":
        from ladder import peer

        peer.train(config, recompute=spec["recompute"])
    else:
        from training.train import train

        train(config)
    if rank == 0:
        (folder / "bound.json").write_text(json.dumps(_bound()), "utf-8")


def _bound() -> dict[str, str]:
    """What transformers bound to its names of the mixing functions: the kernel, or its own reference."""
    module = sys.modules.get("transformers.models.qwen3_5.modeling_qwen3_5")
    found = {}
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        function = getattr(module, name)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        bound = cells["implementation"].cell_contents
        found[name] = f"{bound.__module__}.{bound.__qualname__}"
    return found


if __name__ == "__main__":
    main(sys.argv[1])
    from training.launch import leave  # late, as all that loads transformers here

    leave(0)
