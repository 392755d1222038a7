"""The first batch of a shard set, as a model would get it: `python benchmarks/first_batch.py SHARDS`."""

import sys

import torch

from packing.loader import PackedDataLoader, check_batch

loader = PackedDataLoader(sys.argv[1], batch_size=1, seed=0)
batch = next(iter(loader))
check_batch(batch)
print(f"first of {len(loader)} batches; model(**batch) takes:")
for key, value in batch.items():
    if isinstance(value, torch.Tensor):
        head = ", ".join(str(number) for number in value.flatten()[:8].tolist())
        print(f"  {key:<14} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}  {head}, …")
    else:
        print(f"  {key:<14} {value}")
