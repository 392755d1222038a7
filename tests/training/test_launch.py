"""How ranks meet, and runs that torchrun starts again or starts from two machines."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from training.launch import Unmet, fresh

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=20)


def test_a_second_life_sees_nothing_of_the_first() -> None:
    """Three ranks, four lives, one store: what a life wrote is not there in the next, whoever comes first."""
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        for life in range(4):
            order = [(life + place) % 3 for place in range(3)]
            waiting = {rank: pool.submit(fresh, store, rank=rank, size=3, timeout=LONG) for rank in order}
            parts = [waiting[rank].result() for rank in range(3)]
            assert not any(part.check(["address"]) for part in parts)
            parts[life % 3].set("address", str(life))
            assert [part.get("address") for part in parts] == [str(life).encode()] * 3


def test_a_rank_that_never_comes_is_named() -> None:
    """Rank 0 says which ranks are missing, the others that rank 0 is, each in its own line."""
    with pytest.raises(Unmet, match=r"of 3 ranks these did not come within 0:00:00\.2.*: \[1, 2\]"):
        fresh(HashStore(), rank=0, size=3, timeout=SHORT)
    with pytest.raises(Unmet, match="rank 0 did not answer rank 2"):
        fresh(HashStore(), rank=2, size=3, timeout=SHORT)
