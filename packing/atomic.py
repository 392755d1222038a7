"""A folder that appears whole or not at all, by one writer at a time.

The folder NAME is written as `.NAME.padfree-partial` beside it and renamed when whole. Only who holds the
lock on the file `.NAME.padfree-lock` may write, rename or remove; the kernel drops the lock when the owner
dies, so the next writer can tell what is stale and removes it. A folder that is replaced waits as
`.NAME.padfree-old` until the new one is in place; if the writer dies between the two renames, the next
writer puts it back.

Not for object stores, and without fsync: after a power cut a file's content may be missing, which readers
notice by its digest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from packing.errors import OutputError


@contextmanager
def writing(path: Path, *, then: str = "nothing was kept") -> Iterator[None]:
    """Turns what the operating system refuses (a full disk, missing rights) into one line.

    Args:
        path: Named where the system names no file.
        then: How the line ends: what that means, or the next step.

    Raises:
        OutputError: any OSError inside.
    """
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise OutputError(f"{place}: can't write: {error.strerror or error}; {then}") from error


def cache_folder() -> Path:
    """$PADFREE_CACHE, or the user's cache folder for padfree; for a user who has no home one of no use."""
    if own := os.environ.get("PADFREE_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "padfree"
    except RuntimeError:  # a container's user id that no passwd file knows, and no $HOME
        return Path(os.devnull)  # neither to be made nor read: an OSError as of a home that can't be written


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.padfree-{kind}")


def interrupted(target: Path) -> Path | None:
    """Where the folder waits that was being replaced at `target` when the writer died; None if it was not."""
    old = _beside(Path(os.path.realpath(target)), "old")
    return old if old.is_dir() and not os.path.lexists(target) else None


def check_target(target: Path, *, force: bool, may_replace: Callable[[Path], bool]) -> None:
    """Refuses to write over what is there; the arguments are `AtomicFolder`'s.

    Raises:
        OutputError: it exists, and `force` is not given or may not replace it.
    """
    if not os.path.lexists(target):
        return
    if not force:
        raise OutputError(f"{target} exists: choose another name, or replace it with --force")
    if not may_replace(target):
        raise OutputError(f"{target} holds no shard set, so --force does not replace it: remove it first")


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file to write, which has its name when the block ends well, and is gone where it does not.

    Raises:
        OutputError: the target exists and `force` is not given, it can be no file, another process writes
            it, or the system refuses.
    """
    if not target.parent.is_dir():
        raise OutputError(f"{target.parent}: no such directory; make it first")
    if target.is_dir():
        raise OutputError(f"{target} is a folder: name a file")
    lock_path = target.with_name(f".{target.name}.lock")
    with writing(target):
        lock = _own(lock_path, target=target)
        partial = target.with_name(f".{target.name}.partial")
        try:
            check_target(target, force=force, may_replace=lambda _: True)
            with partial.open("wb") as file:
                yield file
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
            os.close(lock)


def _own(lock_path: Path, *, target: Path) -> int:
    """Takes the lock of a target and returns its descriptor.

    Raises:
        OutputError: another process has it.
    """
    while True:
        lock = os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the two calls its owner may have finished, and removed the file that we opened.
            if os.path.samestat(os.fstat(lock), os.stat(lock_path)):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise OutputError(f"another process is writing {target}: wait, or choose another name") from None
        except FileNotFoundError:
            pass
        os.close(lock)


class AtomicFolder:
    """Write below `path`, then `publish`; or `discard`.

    Args:
        target: Where the folder is to appear. Missing parents are made. A link is followed.
        force: Replace what is there, if it `may_replace`.
        may_replace: Whether the folder that is there is of the kind that `force` may replace, so that a
            mistyped name does not cost somebody's files.

    Raises:
        OutputError: the target exists, another process is writing it, or the system refuses.
    """

    def __init__(self, target: str | Path, *, force: bool, may_replace: Callable[[Path], bool]) -> None:
        self.target = Path(os.path.realpath(target))
        self.path = _beside(self.target, "partial")
        self._old = _beside(self.target, "old")
        self._lock_path = _beside(self.target, "lock")
        self._force = force
        self._may_replace = may_replace
        with writing(self.target):
            self._lock: int | None = self._own()
            try:
                self._restore()
                self._check_target()
                self._clear()
                os.mkdir(self.path)
            except BaseException:
                self.discard()
                raise

    def publish(self) -> None:
        """Puts the folder in its place, or leaves what was there.

        Raises:
            OutputError: the target has appeared meanwhile, or the system refuses.
        """
        with writing(self.target):
            self._check_target()
            if os.path.lexists(self.target):
                os.rename(self.target, self._old)
                try:
                    os.rename(self.path, self.target)
                except OSError:
                    os.rename(self._old, self.target)
                    raise
                shutil.rmtree(self._old)
            else:
                os.rename(self.path, self.target)
            self._release()

    def discard(self) -> None:
        """Removes all that was written; does nothing once published.

        Raises:
            OutputError: the system refuses.
        """
        if self._lock is not None:
            with writing(self.path):
                try:
                    self._clear()
                finally:
                    self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
        self._lock = None

    def _check_target(self) -> None:
        check_target(self.target, force=self._force, may_replace=self._may_replace)

    def _own(self) -> int:
        """Takes the lock and returns its descriptor."""
        os.makedirs(self.target.parent, exist_ok=True)
        return _own(self._lock_path, target=self.target)

    def _restore(self) -> None:
        """Tidies up after a writer that died while it replaced the target."""
        if not os.path.lexists(self._old):
            return
        if os.path.lexists(self.target):
            shutil.rmtree(self._old)
        else:
            os.rename(self._old, self.target)

    def _clear(self) -> None:
        if os.path.lexists(self.path):
            shutil.rmtree(self.path)
