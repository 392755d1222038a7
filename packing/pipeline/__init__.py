"""Sources to shards, in processes: the same bytes for any number of them.

pack.py        the story, top to bottom
options.py     what can be chosen
rows.py        what a worker does with a chunk of rows
pool.py        the workers
accounting.py  what became of every row and token
store.py       where tokens wait until the plan is made
"""

from packing.pipeline.options import PackOptions, check_workers
from packing.pipeline.pack import (
    EVAL,
    OnProgress,
    PackReport,
    PartReport,
    Preview,
    Progress,
    first_rows,
    pack_dataset,
    preview,
)
from packing.pipeline.pool import WorkerDied

__all__ = [
    "EVAL",
    "OnProgress",
    "PackOptions",
    "PackReport",
    "PartReport",
    "Preview",
    "Progress",
    "WorkerDied",
    "check_workers",
    "first_rows",
    "pack_dataset",
    "preview",
]
