"""Files that are whole or not there, and what tells that they were changed: their digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from training.errors import InputError, ResumeError, one_line, writing

TRAINER = "trainer.json"
METADATA = ".metadata"  # torch's: which tensor lies where
TENSORS = "__{}_*.distcp"
DIGESTS = "digests.json"
PART = "digests-{}.json"
INDEX = "model.safetensors.index.json"
PAGE = 4096


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, of the same ending, that takes the path's place when the block is through.

    A full disk or a kill leaves the file that was there.

    Raises:
        OutputError: the system refuses, also in the block.
    """
    beside = path.with_name(f".partial-{path.name}")
    with writing(path):
        try:
            yield beside
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, or leaves the one that was there.

    Raises:
        OutputError: the system refuses.
    """
    with replacing(path) as beside:
        beside.write_text(text, "utf-8")


def write_part(partial: Path, *, rank: int) -> None:
    """The digests of the tensors that this rank wrote; the file is there when all of them are.

    Raises:
        OutputError: the system refuses.
    """
    digests = {file.name: _digest(file) for file in sorted(partial.glob(TENSORS.format(rank)))}
    replace_text(partial / PART.format(rank), json.dumps(digests))


def parts(partial: Path) -> int:
    """How many ranks have written theirs."""
    return len(list(partial.glob(PART.format("*"))))


def join_parts(partial: Path) -> None:
    """One file with the digests of all files of a checkpoint in place of the ranks' own.

    Raises:
        OutputError: the system refuses.
    """
    digests = {name: _digest(partial / name) for name in (METADATA, TRAINER)}
    for file in sorted(partial.glob(PART.format("*"))):
        digests |= json.loads(file.read_text("utf-8"))
    replace_text(partial / DIGESTS, json.dumps(digests, indent=1) + "\n")
    for file in partial.glob(PART.format("*")):
        file.unlink()


def check_trainer(checkpoint: Path) -> None:
    """Compares the digest of what rank 0 wrote beside the tensors.

    Raises:
        ResumeError: it is missing or damaged, or the digests are.
    """
    _check(checkpoint / TRAINER, _known(checkpoint))


def check_digests(checkpoint: Path, *, rank: int = 0, world_size: int = 1) -> None:
    """Compares what every rank reads, and this rank's part of the tensors; to be called before any is read.

    Raises:
        ResumeError: names the file that is missing, damaged or of another checkpoint.
    """
    known = _known(checkpoint)
    there = {METADATA, TRAINER, *(file.name for file in checkpoint.glob(TENSORS.format("*")))}
    if strange := sorted(there ^ known.keys()):
        raise damaged(checkpoint / strange[0])
    for name in (METADATA, TRAINER, *sorted(there - {METADATA, TRAINER})[rank::world_size]):
        _check(checkpoint / name, known)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that transformers reads: the one file before those that an index names.

    Others may hold a model in another form. Where there is neither, all there are.

    Raises:
        InputError: the index is damaged, or names a file that is not there.
    """
    one, index = folder / "model.safetensors", folder / INDEX
    if one.exists():
        return [one]
    if not index.exists():
        return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: no index of weights ({one_line(error)}); download it again") from error
    if absent := [name for name, file in zip(names, files, strict=True) if not file.is_file()]:
        raise InputError(f"{index} names {absent[0]!r}, which is no file: download it")
    return files


def weights_digest(directory: str) -> str:
    """Of a directory's weights: names, sizes, headers, and of each tensor both ends and the middle.

    Whatever was trained differs there; reading all would take as long as loading. "" where there are none.

    Raises:
        InputError: one is damaged, or the system refuses to read it.
    """
    files = weight_files(Path(directory)) if directory else []
    found = hashlib.sha256()
    for file in files:
        try:
            with safe_open(file, framework="pt"):  # reads the header, and the file's length against it
                pass
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = stream.read(size)
                found.update(f"{file.name} {file.stat().st_size} ".encode() + header)
                tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
                for first, last in sorted(tensor["data_offsets"] for tensor in tensors):
                    for place in (first, (first + last) // 2, max(first, last - PAGE)):
                        stream.seek(8 + size + place)
                        found.update(stream.read(min(PAGE, last - place)))
        except SafetensorError as error:
            raise InputError(f"{file}: damaged or cut off: {error}; download it again") from error
        except OSError as error:
            raise InputError(f"{file}: can't be read: {error.strerror or error}") from error
    return found.hexdigest() if files else ""


def tensor_sizes(file: Path) -> dict[str, int]:
    """The tensors of a sound safetensors file by name, and how many bytes each has."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    places = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    return {name: last - first for name, (first, last) in places.items()}


def _known(checkpoint: Path) -> dict[str, str]:
    try:
        known = json.loads((checkpoint / DIGESTS).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(checkpoint / DIGESTS) from error
    if not isinstance(known, dict):
        raise damaged(checkpoint / DIGESTS)
    return known


def _check(file: Path, known: dict[str, str]) -> None:
    try:
        same = _digest(file) == known.get(file.name)
    except OSError as error:
        raise damaged(file) from error
    if not same:
        raise damaged(file)


def damaged(file: Path) -> ResumeError:
    """The error for a file of a checkpoint."""
    return ResumeError(
        f"{file} is missing or damaged, so the checkpoint can't be loaded: remove {file.parent} to take the "
        "one before"
    )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
