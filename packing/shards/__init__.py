"""A directory of packed buffers that is also a Hugging Face dataset: write, read, digest, verify.

    DIR/
      data-00000.arrow …   Arrow streams, one row a buffer: input_ids, labels, seq_lengths, example_ids
      examples.parquet     example number -> where it came from
      rejects.jsonl        the rows that were not packed, and why
      state.json, dataset_info.json     what `datasets.load_from_disk` reads
      manifest.json        versions, capacity, fingerprint, accounts, a digest of every file and of itself
      run.json             times, paths, host: outside the manifest's digests
      eval/                a part: a shard set of its own, its manifest's digest in ours

All files but run.json are the same bytes for the same input. A file's digest is checked once before its
first use; that it was is remembered in the user's cache folder, by device, inode, size and times.
"""

from packing.shards.check import verify
from packing.shards.fit import misfits, too_long, turning
from packing.shards.manifest import EXAMPLES, FORMAT_VERSION, MANIFEST, REJECTS, RUN, most_first
from packing.shards.reader import ShardSet, open_shards
from packing.shards.writer import PartWriter, ShardWriter, check_out

__all__ = [
    "EXAMPLES",
    "FORMAT_VERSION",
    "MANIFEST",
    "REJECTS",
    "RUN",
    "PartWriter",
    "ShardSet",
    "ShardWriter",
    "check_out",
    "misfits",
    "most_first",
    "open_shards",
    "too_long",
    "turning",
    "verify",
]
