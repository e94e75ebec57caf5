"""`Source`: the weights of a checkpoint, float8 or not, checked before any is used.

A float8 weight is two or three tensors of the files, which a `Layout` joins. Which layout it is,
``quantization_config`` in ``config.json`` says, or ``hf_quant_config.json``. The files must agree
with it. Opening a `Source` reads the headers of all files and the scales of all float8 weights. It
raises, with all that it found, where

- float8 data has no scale, a scale has no float8 data, or either has another shape or dtype than
  the layout says;
- a scale is NaN, infinite, zero or negative;
- a layer that the config lists as left in high precision is in float8;
- there is float8 data and no config that says how to read it.

It does not read the data of weights: a NaN among these is loaded as it is. Files that another
program changes or truncates while they are read are not detected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.layouts import layout_of
from float8.checkpoints.shards import Shards, Spec
from float8.formats import FORMATS

WEIGHT = ".weight"
# Where quantization configs list the layers that stay in high precision: transformers,
# compressed-tensors, modelopt.
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_SHOWN = 10


class Source:
    """The weights of a folder of safetensors files, or of one such file; see `Shards`.

    The configs lie in the folder, or beside the file. Contradictions between the files, or between
    them and their config, raise ValueError. With ``raises=False`` they are in ``problems`` alone.

    Attributes:
        layout: of the float8 weights; None if the files have none.
        layers: the names of the layers in float8: ``NAME.weight`` is float8.
        problems: the contradictions, one text each.
    """

    def __init__(self, path: str | Path, *, raises: bool = True) -> None:
        self.path = Path(path)
        self.shards = Shards(path)
        specs = self.shards.keys()
        config, self.config_file = _quantization_config(self.path)
        self.layout: Layout | None = (
            None if config is None else _layout_of(config, self.config_file)
        )
        float8 = {key: spec for key, spec in specs.items() if spec.dtype in FORMATS}
        self.layers = [key.removesuffix(WEIGHT) for key in float8 if key.endswith(WEIGHT)]
        fields = config or {}
        fields = fields | fields.get("quantization", {})  # modelopt's own file nests them
        self._skipped = [entry for field in _SKIPPED for entry in fields.get(field) or ()]
        self._parts = self._keys_of_parts()
        self.problems = [*self._problems_of_names(float8), *self._problems_of_layers()]
        if self.problems and raises:
            raise ValueError(told(f"{self.path} contradicts itself", self.problems))

    def weights(self) -> dict[str, Spec]:
        """Key -> `Spec` of all weights, biases and buffers; parts such as scales are left out."""
        parts = {key for keys in self._parts.values() for key in keys}
        return {key: spec for key, spec in self.shards.keys().items() if key not in parts}

    def read(self, key: str, dtype: torch.dtype) -> Tensor:
        """A weight of `weights`, mapped into memory: a plain tensor, or a `Float8Tensor`.

        A `Float8Tensor` dequantises to ``dtype``.
        """
        name = key.removesuffix(WEIGHT)
        return self.layer(name, dtype).weight if name in self._parts else self.shards.read(key)

    def layer(self, name: str, dtype: torch.dtype) -> Layer:
        """One of `layers`, mapped into memory."""
        assert self.layout is not None
        keys = (name + WEIGHT, *self._parts[name])
        return self.layout.layer(name, self.shards.read, keys, dtype)

    def parts(self, name: str) -> list[str]:
        """The keys of one of `layers` beside its weight."""
        return self._parts[name]

    def lists(self, name: str) -> str | None:
        """The entry by which the config leaves a module in high precision, or None."""
        return next((entry for entry in self._skipped if _lists(entry, name)), None)

    def place(self, key: str) -> str:
        """The file and key of a tensor, for messages."""
        return f"{self.shards.keys()[key].file}: {key}"

    def _keys_of_parts(self) -> dict[str, list[str]]:
        """Layer -> its keys beside the weight."""
        suffixes = () if self.layout is None else self.layout.suffixes()
        found = {
            name: [name + s for s in suffixes if name + s in self.shards] for name in self.layers
        }
        return found

    def _problems_of_names(self, float8: Mapping[str, Spec]) -> Iterator[str]:
        for key in float8:
            if not key.endswith(WEIGHT):
                yield f"{self.place(key)} is in float8, and only weights ({WEIGHT}) are read so"
            elif self.layout is None:
                yield (
                    f"{self.place(key)} is {float8[key].dtype}, and no quantization_config in "
                    "config.json says how its scale is stored; copy the config.json of the "
                    "checkpoint beside its files"
                )
        for name in self.layers:
            entry = self.lists(name)
            if entry is not None:
                yield (
                    f"{self.place(name + WEIGHT)} is in float8, and {self.config_file} lists "
                    f"{entry!r} as left in high precision; correct the one that is wrong"
                )
        suffixes = () if self.layout is None else self.layout.suffixes()
        for key in self.shards:
            suffix = next((s for s in suffixes if key.endswith(s)), None)
            if suffix is not None and key.removesuffix(suffix) not in self._parts:
                weight = key.removesuffix(suffix) + WEIGHT
                spec = self.shards.keys().get(weight)
                has = f"is {spec.dtype}" if spec is not None else "is missing"
                yield f"{self.place(key)} is the scale of float8 data, and {weight} {has}"

    def _problems_of_layers(self) -> Iterator[str]:
        for name in self.layers if self.layout is not None else ():
            try:
                self.layer(name, torch.float32)
            except ValueError as error:
                file = self.shards.keys()[name + WEIGHT].file
                yield f"{file}: {error}; {self.config_file} says {self.layout}"


def told(what: str, problems: Iterable[str]) -> str:
    """A message of several lines: what is wrong, and the first of the problems."""
    problems = list(problems)
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return f"{what}:" + "".join(f"\n  {line}" for line in [*problems[:_SHOWN], *more])


def _quantization_config(path: Path) -> tuple[dict[str, Any] | None, str]:
    """What says how float8 weights are stored, and the name of its file."""
    folder = path if path.is_dir() else path.parent
    for name, field in (("config.json", "quantization_config"), ("hf_quant_config.json", None)):
        file = folder / name
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: it is not readable: {error}") from error
        _check_object(file, "it", config)
        config = config.get(field) if field else config
        if config is None:
            continue
        _check_fields(file, field or "it", config)
        if "quantization" in config:
            _check_fields(file, "quantization", config["quantization"])
        return config, name
    return None, ""


def _check_object(file: Path, what: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{file}: {what} is {value!r}, expected an object, {{...}}")


def _check_fields(file: Path, what: str, config: Any) -> None:
    """Raise if a config is no JSON object, or lists skipped modules as anything but names."""
    _check_object(file, what, config)
    for field in _SKIPPED:
        value = config.get(field) or []
        if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise ValueError(f"{file}: {field} is {value!r}, expected a list of names")


def _layout_of(config: Mapping[str, Any], file: str) -> Layout:
    try:
        return layout_of(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _lists(entry: str, name: str) -> bool:
    """Whether an entry of a list of skipped modules means a module or one that contains it."""
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return fnmatchcase(name, entry) or name.startswith(entry + ".")
