"""Reads safetensors files: tensors by key, each mapped into memory when it is asked for.

A file is 8 bytes with the length of the header (little-endian), the header, and the data. The
header is JSON: key -> ``dtype``, ``shape`` and ``data_offsets`` into the data, and an optional
``__metadata__`` of strings. The tensors fill the data without gaps.

A checkpoint of several files, the shards, has an index beside them: ``NAME.safetensors.index.json``
with ``weight_map``, key -> file.

`Shards` reads the headers alone. `Shards.read` maps the bytes of one tensor, and the mapping ends
with the tensor: memory holds what the caller keeps. Nothing is unpickled.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The names of dtypes in a header.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUFFIX = ".safetensors"
INDEX_SUFFIX = SUFFIX + ".index.json"
METADATA_KEY = "__metadata__"
LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def kind_of(key: str) -> str:
    """A key or name of a layer with ``*`` for each number between dots."""
    return _NUMBER.sub("*", key)


def kinds_of(names: Iterable[str]) -> str:
    """Names in words: those that differ in numbers alone become one pattern, with its count."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(kind_of(name), []).append(name)
    return ", ".join(n[0] if len(n) == 1 else f"{p} ({len(n)})" for p, n in patterns.items())


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor without its data.

    ``dtype`` is one of `DTYPES`. ``shape`` is () for a single number. ``file`` is the name of the
    file that has the tensor; it is empty before the tensor is written.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""

    @property
    def nbytes(self) -> int:
        """The size of its data in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: its spec, its file and the offset of its first byte in it."""

    spec: Spec
    path: Path
    begin: int


class Shards:
    """The tensors of a folder of safetensors files, or of one such file.

    A folder is read as its index says; without an index, ``model.safetensors`` is read, and without
    that all ``.safetensors`` files together. A file is ``*.safetensors`` or
    ``*.safetensors.index.json``. Raises FileNotFoundError if the folder, the file or a shard is
    missing, and ValueError if a file is damaged or the files and their index disagree.

    Attributes:
        path: the folder or file.
        metadata: the ``__metadata__`` of all files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, str] = {}
        self._places: dict[str, _Place] = {}
        if not self.path.exists():
            is_name = not self.path.is_absolute() and len(self.path.parts) == 2  # "owner/model"
            hint = "; huggingface_hub.snapshot_download downloads one of the Hub, to a folder"
            raise FileNotFoundError(
                f"{self.path}: there is no such folder or file" + (hint if is_name else "")
            )
        index, files = _files_of(self.path)
        for file in files:
            found, metadata = read_header(file)
            self.metadata |= metadata
            for key, place in found.items():
                if key in self._places:
                    other = self._places[key].path.name
                    raise ValueError(f"{self.path}: {other} and {file.name} both have {key}")
                self._places[key] = place
        if index is not None:
            self._check_index(index)

    def _check_index(self, index: Path) -> None:
        listed = _weight_map(index)
        for key, name in listed.items():
            has = self._places.get(key)
            if has is None or has.path.name != name:
                where = "no file has it" if has is None else f"{has.path.name} has it"
                raise ValueError(f"{index}: it says that {key} is in {name}, and {where}")
        for key, place in self._places.items():
            if key not in listed:
                raise ValueError(f"{place.path}: it has {key}, which {index.name} does not list")

    def keys(self) -> Mapping[str, Spec]:
        """Key -> `Spec` of all tensors, in the order of the files; no data is read."""
        return {key: place.spec for key, place in self._places.items()}

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, key: str) -> Tensor:
        """A tensor on the CPU; KeyError if no file has it.

        Its memory is a private mapping of the file: pages are read when they are touched, writing
        to it changes no file, and it is unmapped when the tensor is freed. Copy what is kept longer
        than the file.
        """
        if key not in self._places:
            raise KeyError(f"{self.path} has no tensor {key}")
        place = self._places[key]
        spec, size = place.spec, place.spec.nbytes
        if not size:
            return torch.empty(spec.shape, dtype=spec.dtype)
        start = place.begin - place.begin % mmap.ALLOCATIONGRANULARITY
        inside = place.begin - start
        with place.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), inside + size, access=mmap.ACCESS_COPY, offset=start)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=inside)
        if inside % spec.dtype.itemsize:  # files of other writers: tensors start at any byte
            data = data.clone()
        return data.view(spec.dtype).view(spec.shape)


def _files_of(path: Path) -> tuple[Path | None, list[Path]]:
    """The index, or None, and the files to read."""
    if path.is_dir():
        indices = sorted(path.glob("*" + INDEX_SUFFIX))
        if len(indices) > 1:
            several = ", ".join(index.name for index in indices)
            raise ValueError(f"{path}: it has several indices, {several}; give the path of one")
        whole = path / f"model{SUFFIX}"
        if indices and whole.exists():
            raise ValueError(
                f"{path}: it has both {whole.name} and {indices[0].name}; give the path of one"
            )
        if indices or whole.exists():
            return _files_of(indices[0] if indices else whole)
        files = sorted(path.glob("*" + SUFFIX))
        if not files:
            raise ValueError(_no_files(path))
        return None, files
    if path.name.endswith(INDEX_SUFFIX):
        names = dict.fromkeys(_weight_map(path).values())
        missing = [name for name in names if not (path.parent / name).is_file()]
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise FileNotFoundError(
                f"{path}: {len(missing)} of its {len(names)} files are missing: {shown}; download "
                "or copy them again"
            )
        return path, [path.parent / name for name in names]
    if path.suffix != SUFFIX:
        raise ValueError(f"{path}: it is no {SUFFIX} file{_pickled([path])}")
    return None, [path]


def _no_files(folder: Path) -> str:
    return f"{folder}: it has no {SUFFIX} file{_pickled(sorted(folder.iterdir()))}"


def _pickled(files: list[Path]) -> str:
    names = [file.name for file in files if file.suffix in PICKLES]
    if not names:
        return ""
    return (
        f"; {', '.join(names[:3])} would be unpickled, which can run code: save the tensors by "
        "safetensors.torch.save_file first"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Key -> file of an index."""
    try:
        text = index.read_text(encoding="utf-8")
        weight_map = json.loads(text, object_pairs_hook=_no_duplicates)["weight_map"]
        named = {str(key): str(file) for key, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: it is no index of shards: {error!r}") from error
    for key, file in named.items():
        if Path(file).name != file or not file.endswith(SUFFIX):
            raise ValueError(
                f"{index}: it says that {key} is in {file!r}, which is not the name of a {SUFFIX} "
                f"file beside it{_pickled([Path(file)])}"
            )
    return named


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} is there twice")
    return found


def read_header(file: Path) -> tuple[dict[str, _Place], dict[str, str]]:
    """The tensors of one file and its metadata.

    Raises ValueError if the file is truncated or its header is not that of a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise ValueError(
                f"{file}: its first 8 bytes ask for a header of {length} bytes, and the file has "
                f"{size}: it is truncated or no {SUFFIX} file"
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        metadata = header.pop(METADATA_KEY, {})
        found = {key: _place(file, 8 + length, entry) for key, entry in header.items()}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError(f"{METADATA_KEY} has other values than strings")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: its header is not readable: {error}") from error
    end = 8 + length
    for key, place in sorted(found.items(), key=lambda item: (item[1].begin, item[1].spec.nbytes)):
        if place.begin != end:
            raise ValueError(
                f"{file}: {key} starts at byte {place.begin}, where {end} is expected: tensors "
                "overlap or leave a gap"
            )
        end += place.spec.nbytes
    if end != size:
        what = "it is truncated" if size < end else "bytes follow that belong to no tensor"
        raise ValueError(f"{file}: its tensors end at byte {end} of {size}: {what}")
    return found, metadata


def _place(file: Path, data: int, entry: dict[str, Any]) -> _Place:
    begin, end = entry["data_offsets"]
    name, shape = entry["dtype"], tuple(entry["shape"])
    if name not in DTYPES:
        raise ValueError(f"dtype {name} is none of {', '.join(DTYPES)}")
    if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)):
        raise ValueError(f"shape {shape} and data_offsets {[begin, end]} are not sizes")
    spec = Spec(DTYPES[name], shape, file.name)
    if end - begin != spec.nbytes:
        raise ValueError(f"{name} of shape {shape} has {spec.nbytes} bytes, not {end - begin}")
    return _Place(spec, file, data + begin)
