"""Seconds by stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Clock:
    """Each lap is the time since the last one, under the name of what was done in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def timed(self, items: Iterable[Item], *, stage: str) -> Iterator[Item]:
        """The items, and what it took to make them under the stage's name."""
        rest = iter(items)
        while True:
            started = time.perf_counter()
            item = next(rest, None)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
            if item is None:
                return
            yield item

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started
