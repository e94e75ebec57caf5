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
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from float8.checkpoints.files import INDEX_SUFFIX, SUFFIX, Spec
from float8.checkpoints.layouts import WEIGHT, Layout, layout_of
from float8.formats import E4M3, FORMATS
from float8.tensor import Float8Tensor

# Where quantization configs list the layers that stay in high precision: transformers,
# compressed-tensors, modelopt.
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_SHOWN = 10


class Source:
    """The weights of a folder of safetensors files, or of one such file.

    Of a folder, the files of its indices and ``model.safetensors`` are read, and without these all
    ``.safetensors`` files together. The configs lie in the folder, or beside the file. Raises
    FileNotFoundError if the folder, the file or a shard is missing. Raises ValueError if a file is
    damaged, if two files have the same key, or if files contradict each other or their config. With
    ``raises=False`` these contradictions are in ``problems`` alone.

    Attributes:
        specs: key -> dtype, shape and file of all tensors.
        weights: the same of all weights, biases and buffers, without scales.
        model_config: the content of ``config.json``, empty if there is none.
        layout: of the float8 weights; None if the files have none.
        layers: the layers in float8, ``NAME.weight`` is float8 -> their keys beside the weight.
        data_key, weight_key: the end of the keys of float8 or packed data in the files, and of
            these weights in `weights`, where a packed one has the shape and key of a model.
        problems: the contradictions, one text each.
    """

    def __init__(self, path: str | Path, *, raises: bool = True) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.specs: dict[str, Spec] = {}
        self._open: tuple[str, Any] | None = None  # the file that was read last
        for name in sorted(_files_of(self.path)):
            self._read_header(name)
        self.model_config, self.layout, self._skipped, self.config_file = _read_config(self.folder)
        suffixes = () if self.layout is None else self.layout.suffixes[1:]
        self.data_key = end = WEIGHT if self.layout is None else self.layout.data_key
        self.weight_key = WEIGHT if self.layout is None else self.layout.weight_key
        float8 = [
            key
            for key, spec in self.specs.items()
            if spec.dtype in FORMATS or (end != WEIGHT and key.endswith(end))
        ]
        self.layers = {
            name: [name + suffix for suffix in suffixes if name + suffix in self.specs]
            for name in (key.removesuffix(end) for key in float8 if key.endswith(end))
        }
        parts = {key for keys in self.layers.values() for key in keys}
        plain = {key: spec for key, spec in self.specs.items() if key not in parts}
        self.weights = dict(self._weight_of(*item) for item in plain.items())
        self.problems = [*self._problems(float8, suffixes)]
        if self.problems and raises:
            raise ValueError(told(f"{self.path} contradicts itself", self.problems))

    def _weight_of(self, key: str, spec: Spec) -> tuple[str, Spec]:
        """The key of a tensor in a model, and its spec there; of a packed weight, of float8."""
        name = key.removesuffix(self.data_key)
        if self.layout is None or not self.layout.is_mxfp4 or name not in self.layers:
            return key, spec
        shape = self.layout.turned(self.layout.shape_of(spec.shape))
        return name + self.weight_key, Spec(E4M3.dtype, shape, spec.file)

    def _read_header(self, name: str) -> None:
        file = self.folder / name
        try:
            with safe_open(file, "pt") as opened:  # tensors are mapped, not read
                for key in sorted(opened.keys()):
                    if key in self.specs:
                        both = f"{self.specs[key].file} and {name} both have {key}"
                        raise ValueError(f"{self.path}: {both}; give the path of one")
                    self.specs[key] = Spec.of(opened.get_tensor(key), name)
        except SafetensorError as error:
            raise ValueError(f"{file}: it is damaged or no {SUFFIX} file: {error}") from error

    def stored(self, key: str) -> Tensor:
        """A tensor as the file has it; its memory is that of the mapped file: do not write to it.

        The file stays mapped until a tensor of another one is read and its own are freed.
        """
        name = self.specs[key].file
        if self._open is None or self._open[0] != name:  # opening reads the whole header
            self._open = name, safe_open(self.folder / name, "pt")
        return self._open[1].get_tensor(key)

    def read(self, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """One of `weights`, mapped into memory: a plain tensor, or a `Float8Tensor`.

        A `Float8Tensor` dequantises to ``dtype``.
        """
        name = key.removesuffix(self.weight_key)
        if name + self.weight_key != key or name not in self.layers:
            return self.stored(key)
        weight = self.layer(name, dtype)[0]
        return weight if weight.dim() == 2 else weight.mT

    def layer(
        self, name: str, dtype: torch.dtype = torch.float32
    ) -> tuple[Float8Tensor, Tensor | None]:
        """The weight and input scale of one of `layers`, mapped into memory."""
        assert self.layout is not None
        return self.layout.layer(name, self.stored, self.layers[name], dtype)

    def lists(self, name: str) -> str | None:
        """The entry by which the config leaves a module in high precision, or None."""
        return next((entry for entry in self._skipped if _lists(entry, name)), None)

    def place(self, key: str) -> str:
        """The file and key of a tensor, for messages."""
        spec = self.specs.get(key) or self.weights[key]
        return f"{spec.file}: {key}"

    def _problems(self, float8: list[str], suffixes: tuple[str, ...]) -> Iterator[str]:
        end = self.data_key
        for key in float8:
            if not key.endswith(end):
                yield f"{self.place(key)} is in float8, and only weights ({end}) are read so"
        for key in self.weights:
            suffix = next((s for s in suffixes if key.endswith(s)), None)
            if suffix is not None:
                weight = key.removesuffix(suffix) + end
                has = f"is {self.specs[weight].dtype}" if weight in self.specs else "is missing"
                yield f"{self.place(key)} is the scale of float8 data, and {weight} {has}"
        for name in self.layers:
            place = self.place(name + end)
            if (entry := self.lists(name)) is not None:
                yield f"{place} is in float8, and {self.config_file} lists {entry!r} as skipped"
            if self.layout is None:
                yield (
                    f"{place} is in float8, and no quantization_config in config.json says how its "
                    "scale is stored; copy it beside the files"
                )
                continue
            try:
                self.layout.checked(name, self.stored, self.layers[name])
            except ValueError as error:
                file = self.specs[name + end].file
                yield f"{file}: {error}; {self.config_file} says {self.layout!r}"


def told(what: str, problems: Iterable[str]) -> str:
    """A message of several lines: what is wrong, and the first of the problems."""
    problems = list(problems)
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return f"{what}:" + "".join(f"\n  {line}" for line in [*problems[:_SHOWN], *more])


def _files_of(path: Path) -> set[str]:
    """The names of the files to read."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: there is no such folder or file; huggingface_hub.snapshot_download fetches "
            "one of the Hub"
        )
    files = [path]
    if path.is_dir():
        files = [*path.glob("*" + INDEX_SUFFIX), *path.glob("model" + SUFFIX)]
        files = files or [*path.glob("*" + SUFFIX)]
    names: set[str] = set()
    for file in files:
        if not file.name.endswith(INDEX_SUFFIX):
            names.add(file.name)
            continue
        try:
            names |= {str(name) for name in json.loads(file.read_bytes())["weight_map"].values()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file}: it is no index of safetensors files: {error!r}") from error
    if not names:
        raise ValueError(f"{path}: it has no {SUFFIX} file, and pickled files are not read")
    return names


def _read_config(folder: Path) -> tuple[dict[str, Any], Layout | None, list[str], str]:
    """The model's config; how float8 weights are stored, which modules are not."""
    model: dict[str, Any] = {}
    for name, field in (("config.json", "quantization_config"), ("hf_quant_config.json", None)):
        file = folder / name
        try:
            config: Any = json.loads(file.read_bytes()) if file.is_file() else {}
            model = config if field else model
            if config := config.get(field) if field else config:
                fields = config | config.get("quantization", {})  # modelopt's own file nests them
                skipped = [entry for key in _SKIPPED for entry in fields.get(key) or []]
                return model, layout_of(config), skipped, name
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: it is not readable: {error}") from error
    return model, None, [], ""


def _lists(entry: str, name: str) -> bool:
    """Whether an entry of a list of skipped modules means a module or one that contains it."""
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return fnmatchcase(name, entry) or name.startswith(entry + ".")
