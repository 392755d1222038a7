"""A model's weights as they are stored: which tensor is which, into the shards, and back under their names.

Names and shapes in files are not always the model's: transformers keeps experts in one tensor that are stored
one by one, projections together that are stored apart, and has renamed modules since. Its own rules
(`transformers.conversion_mapping`) say how; they are followed here tensor by tensor, so that no process ever
holds the whole model.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from training.errors import InputError, one_line
from training.files import weight_files
from training.lora import TEXT_PARTS, is_adapter, own_name
from training.model import tied_names

_PLAIN = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the types whose numbers are the weights themselves."""
_BLOCK = re.compile(r".*?\.[0-9]+\.")
"""Of a stored name the part up to its layer's number."""
_RECOMPUTED = (r"rotary_emb\.inv_freq",)
"""What old checkpoints hold and every model computes itself; transformers leaves it out as well."""
_ROWS = 4096  # of a matrix that are read at once
_TWICE = "take away the file or tensor that does not belong to the model"
_QUANTIZED = "the weights are quantized, and training takes plain ones: give the model's bf16 weights"


@dataclass(frozen=True, eq=False)
class Made:
    """Tensors of a model that are made from stored ones of other shapes, and can be taken apart again."""

    converter: WeightConverter
    sources: dict[str, str] = field(default_factory=dict)
    """From the name that the converter goes by to the stored one, in the converter's order."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Of the stored ones, by the first of these names."""
    targets: dict[str, str] = field(default_factory=dict)
    """From the name that the converter gives to the model's."""

    def convert(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors by the names that the converter gives; `read` takes a stored one's name."""
        tensors = {name: read(key) for name, key in self.sources.items()}
        return _apply(copy.deepcopy(self.converter), tensors, model=model)

    def revert(self, model: PreTrainedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From the model's tensors by its names to those to store by theirs; no part keeps a larger whole."""
        tensors = {name: values[own] for name, own in self.targets.items()}
        match self.converter.operations:
            case [Concatenate(dim=dim)]:  # its reverse makes equal parts, which these need not be
                (whole,) = tensors.values()
                parts = sorted(self.sources, key=lambda name: self._pattern(name))
                split = torch.split(whole, [self.shapes[name][dim] for name in parts], dim=dim)
                found = dict(zip(parts, split, strict=True))
            case _:
                found = _apply(self.converter.reverse_transform(), tensors, model=model)
        return {self.sources[name]: value.contiguous() for name, value in found.items()}

    def _pattern(self, name: str) -> int:
        """The number of the pattern that takes a source: those of the first come first."""
        _, pattern = self.converter.rename_source_key(name)
        return list(self.converter.source_patterns).index(pattern)


def _apply(converter: Any, tensors: Mapping[str, Tensor], *, model: PreTrainedModel) -> dict[str, Tensor]:
    first = ""
    for name, value in tensors.items():
        renamed, pattern = converter.rename_source_key(name)
        first = first or renamed
        converter.add_tensor(renamed, name, pattern, value)
    made = converter.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class Stored:
    """Where each of a model's tensors comes from in a folder of safetensors, and goes in an export."""

    as_they_are: dict[str, str]
    """From the model's name to the stored one."""
    made: tuple[Made, ...]
    places: Mapping[str, Path] = field(default_factory=dict)
    """The files, by stored name."""
    left: tuple[str, ...] = ()
    """Stored tensors that are none of the model's: a vision tower, heads of several tokens."""

    def stored(self) -> set[str]:
        """The names of all stored tensors that the model's come from."""
        return {*self.as_they_are.values(), *(key for made in self.made for key in made.sources.values())}


@torch.no_grad()
def load_weights(model: PreTrainedModel, *, stored: Stored) -> None:
    """Reads safetensors straight into the shards.

    Each rank reads its own slices alone; of tensors that are made from others, one after the other, all.

    Args:
        model: Sharded.
        stored: From `match_weights`.
    """
    state = model.state_dict()
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name, key in stored.as_they_are.items():
        by_file[stored.places[key]].append((name, key))
    for file, tensors in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name, key in tensors:
                _fill(state[name], opened.get_slice(key))
    for made in stored.made:
        with ExitStack() as files:  # not longer: what was read of a mapped file counts as memory in use
            found = made.convert(model, _reader(stored.places, files))
        for name, value in found.items():
            _fill(state[made.targets[name]], value)


def _reader(places: Mapping[str, Path], stack: ExitStack) -> Callable[[str], Tensor]:
    """Reads stored tensors by name; files stay open as long as the stack."""
    files: dict[Path, Any] = {}

    def read(key: str) -> Tensor:
        place = places[key]
        if place not in files:
            files[place] = stack.enter_context(safe_open(place, framework="pt"))
        value: Tensor = files[place].get_tensor(key)
        return value

    return read


def _fill(tensor: Tensor, value: Any) -> None:
    """Takes this rank's part of a whole value: a tensor, or a slice of safetensors, which reads no more."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(value[...])
        return
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 not in shape:  # else there are more ranks than rows
        part = tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))
        tensor.to_local().copy_(value[part])


@dataclass(frozen=True)
class _Header:
    """What is known of stored tensors without reading them: types, shapes, and where they lie."""

    types: dict[str, str]
    shapes: dict[str, torch.Size]
    places: dict[str, Path]


def match_weights(model: PreTrainedModel, directory: str) -> Stored:
    """Which of the stored tensors each of a model's comes from: from headers, so the model may be on meta.

    What is tied and stored twice is compared, so read whole.

    Args:
        model: Not sharded yet: transformers knows its rules by the model's class.
        directory: Of the safetensors.

    Raises:
        InputError: no safetensors, damaged ones, a name in two of them, two that are one parameter, tied
            parameters that differ, a parameter that they do not hold in that shape, or one whose numbers are
            not the weight itself: quantized, scaled or with a bias that the model has not.
    """
    header = _read_headers(weight_files(Path(directory)), directory=directory)
    found = _find(model, header.shapes, places=header.places, directory=directory)
    state = {name: value for name, value in model.state_dict().items() if not is_adapter(name)}
    for name, key in found.as_they_are.items():
        if header.shapes[key] != state[name].size():
            raise InputError(
                f"{directory}: {key} is of {list(header.shapes[key])} in the safetensors, of "
                f"{list(state[name].size())} by config.json: one of them belongs to another model"
            )
    if odd := [key for key in sorted(found.stored()) if header.types[key] not in _PLAIN]:
        raise InputError(f"{directory}: {odd[0]} is stored as {header.types[odd[0]]}: {_QUANTIZED}")
    tied = tied_names(model)
    for name, one in tied.items():
        twin, other = found.as_they_are.get(name), found.as_they_are.get(one)
        if twin and other and not _equal(header.places, twin, other):
            raise InputError(
                f"{directory}: {twin} and {other} are tied by config.json, and differ in the "
                "safetensors: set tie_word_embeddings to false there, or take one of them out"
            )
        if other is None and twin:  # the head alone is stored
            found.as_they_are[one] = found.as_they_are.pop(name)
    has = found.as_they_are.keys() | {name for made in found.made for name in made.targets.values()}
    if missing := [name for name in state if name not in has | tied.keys()]:
        raise InputError(
            f"{directory}: {len(missing)} of {len(has) + len(missing)} parameters of {type(model).__name__} "
            f"are not in the safetensors, among them {own_name(missing[0])}"
        )
    left = header.types.keys() - found.stored()
    _check_left(left, taken=found.stored(), model=model, directory=directory)
    return dataclasses.replace(found, left=tuple(sorted(left)))


def default_names(model: PreTrainedModel) -> Stored:
    """How transformers' own `save_pretrained` stores a model that has no files yet.

    Args:
        model: On meta.
    """
    stored = revert_weight_conversion(model, model.state_dict())
    return _find(model, {name: value.size() for name, value in stored.items()})


def _read_headers(files: Sequence[Path], *, directory: str) -> _Header:
    """What files say of their tensors.

    Raises:
        InputError: none, damaged or unreadable ones, or a name in two of them.
    """
    if not files:
        raise InputError(f"{directory}: no *.safetensors files to load weights from")
    header = _Header(types={}, shapes={}, places={})
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:  # reads the header, and the length against it
                slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
                types = {key: part.get_dtype() for key, part in slices.items()}
                shapes = {key: torch.Size(part.get_shape()) for key, part in slices.items()}
        except SafetensorError as error:
            raise InputError(f"{file}: damaged or cut off: {error}; download it again") from error
        except OSError as error:
            raise InputError(f"{file}: can't be read: {one_line(error)}") from error
        if twice := sorted(header.places.keys() & types):
            raise InputError(
                f"{directory}: {twice[0]} is in {header.places[twice[0]].name} and in {file.name}: {_TWICE}"
            )
        header.types.update(types)
        header.shapes.update(shapes)
        header.places.update(dict.fromkeys(types, file))
    return header


class _Rules:
    """transformers' own rules for one model: renamings first, then at most one conversion."""

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix = model.base_model_prefix
        self.names = {own_name(name): name for name in model.state_dict() if not is_adapter(name)}
        """From the name without adapters to the model's."""

    def match(self, key: str) -> tuple[str, str, WeightConverter | None] | None:
        """For a stored name: the parameter, the name that a converter takes it by, and the converter, if any.

        None for what the model has no parameter for, a vision tower's, say.
        """
        text = [own + key.removeprefix(there) for own, there in TEXT_PARTS if key.startswith(there)]
        for form in (key, *text):
            name, pattern = rename_source_key(
                form, self._renamings, self._converters, self._prefix, self.names
            )
            if name in self.names and pattern is None:
                return name, name, None
            if name in self.names:
                seen, _ = rename_source_key(form, self._renamings, [])
                return name, seen, next(c for c in self._converters if c.rename_source_key(seen)[1])
        return None


def _find(
    model: PreTrainedModel,
    shapes: Mapping[str, torch.Size],
    *,
    places: Mapping[str, Path] = MappingProxyType({}),
    directory: str = "",
) -> Stored:
    """Takes stored names to the model's.

    Raises:
        InputError: two stored tensors are one parameter, or several do not make one.
    """
    rules = _Rules(model)
    as_they_are: dict[str, str] = {}
    groups: dict[str, Made] = {}
    for key in sorted(shapes, key=dot_natural_key):
        if (found := rules.match(key)) is None:
            continue
        name, seen, converter = found
        if converter is None:
            taken, by = as_they_are, rules.names[name]
        else:
            group = groups.setdefault(name, Made(converter))
            group.shapes[seen] = shapes[key]
            taken, by = group.sources, seen
        if by in taken:
            raise InputError(f"{directory}: {taken[by]} and {key} are both {seen}: {_TWICE}")
        taken[by] = key
    made = tuple(groups.values())
    _try(made, model=model, shapes=shapes, names=rules.names, directory=directory)
    for one in made:
        if again := sorted(as_they_are.keys() & one.targets.values()):
            part = next(iter(one.sources.values()))
            raise InputError(f"{directory}: {as_they_are[again[0]]} and {part} are both {again[0]}: {_TWICE}")
    return Stored(as_they_are=as_they_are, made=made, places=places)


def _try(
    conversions: Sequence[Made],
    *,
    model: PreTrainedModel,
    shapes: Mapping[str, torch.Size],
    names: Mapping[str, str],
    directory: str,
) -> None:
    """Carries conversions out on meta, there and back, and notes which of the model's tensors they make.

    Raises:
        InputError: one gives other shapes than the model's, or can't be taken back.
    """
    state = model.state_dict()
    for made in conversions:
        stored = list(made.sources.values())
        said = f"{directory}: {len(stored)} stored tensors, {stored[0]} to {stored[-1]},"
        try:
            found = made.convert(model, lambda key: torch.empty(shapes[key], device="meta"))
        except (LookupError, RuntimeError, ValueError) as error:
            raise InputError(
                f"{said} do not fit together ({one_line(error)}): one is missing, or belongs to another model"
            ) from error
        for name, value in found.items():
            own = name if name in names else f"{model.base_model_prefix}.{name}"
            wanted = list(state[names[own]].size()) if own in names else "not there"
            if list(value.size()) != wanted:
                raise InputError(
                    f"{said} make {own} of {list(value.size())}, by config.json it is {wanted}: one is "
                    "missing, or belongs to another model"
                )
            made.targets[name] = names[own]
        try:
            back = made.revert(model, {made.targets[name]: value for name, value in found.items()})
        except LookupError:  # other names than the stored ones
            back = {}
        if {key: value.size() for key, value in back.items()} != {key: shapes[key] for key in stored}:
            raise InputError(
                f"{said} can't be told apart again once they are {', '.join(made.targets.values())}, so an "
                "export would not hold them: write the model anew with from_pretrained and save_pretrained"
            )


def _equal(places: Mapping[str, Path], one: str, other: str) -> bool:
    """Whether two stored matrices are the same numbers; read in parts."""
    with (
        safe_open(places[one], framework="pt") as first,
        safe_open(places[other], framework="pt") as second,
    ):
        rows, others = first.get_slice(one), second.get_slice(other)
        if rows.get_shape() != others.get_shape():
            return False
        return all(
            torch.equal(rows[start : start + _ROWS], others[start : start + _ROWS])
            for start in range(0, rows.get_shape()[0], _ROWS)
        )


def _check_left(left: Set[str], *, taken: Set[str], model: PreTrainedModel, directory: str) -> None:
    """Nothing is left beside a parameter that was taken, or in its block: it would change what they compute.

    A scale, a bias, a norm, an expert more: config.json is another model's, or the weights are not plain.

    Raises:
        InputError: names the first.
    """
    beside = {name.rpartition(".")[0] for name in taken} | taken
    blocks = {found[0] for name in taken if (found := _BLOCK.match(name))}
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *_RECOMPUTED]
    for key in sorted(left):
        block = _BLOCK.match(key)
        if key.rpartition(".")[0] not in beside and (block is None or block[0] not in blocks):
            continue
        if not any(re.search(pattern, key) for pattern in ignored):
            raise InputError(
                f"{directory}: {key} is in the safetensors, and {type(model).__name__} by config.json has no "
                f"place for it: either it belongs to another model, or {_QUANTIZED}"
            )
