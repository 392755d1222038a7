"""Sources to shards, in processes: the same bytes for any number of them.

pack.py        the story, top to bottom
rows.py        what a worker does with a chunk of rows
pool.py        the workers
accounting.py  what became of every row and token
store.py       where tokens wait until the plan is made
"""

from packing.pipeline.pack import (
    EVAL,
    MAX_REJECTS,
    OnProgress,
    PackReport,
    PartReport,
    Preview,
    Progress,
    first_conversations,
    pack_dataset,
    preview,
)
from packing.pipeline.pool import WorkerDied

__all__ = [
    "EVAL",
    "MAX_REJECTS",
    "OnProgress",
    "PackReport",
    "PartReport",
    "Preview",
    "Progress",
    "WorkerDied",
    "first_conversations",
    "pack_dataset",
    "preview",
]
