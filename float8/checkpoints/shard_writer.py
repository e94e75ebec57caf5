"""Writes safetensors files whose tensors are made one at a time.

All dtypes and shapes are known in advance, so the headers are written first and every tensor goes
to its place when it comes: memory holds one tensor. Within a file, tensors of larger elements come
first, so that each starts at a multiple of its element's size, as torch's views need it. The
formats are those of ``shards.py``, and the names those of HuggingFace: ``model.safetensors``, or
``model-00001-of-00003.safetensors`` and so on with their index.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from float8.arguments import check_type
from float8.checkpoints.new_folder import new_folder, write_file
from float8.checkpoints.shards import DTYPE_NAMES, INDEX_SUFFIX, METADATA_KEY, SUFFIX, Spec

FORMAT = {"format": "pt"}  # the metadata that HuggingFace's readers ask for
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_SHARD_BYTES = 5_000_000_000
_BUFFER_BYTES = 16 << 20


def write_shards(
    folder: str | Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: float = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] = FORMAT,
    *,
    files: Mapping[str, str | bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Write tensors as a folder of safetensors files that appears when all of it is on the disk.

    ``specs`` has all keys; ``tensors`` come in its order. They are read once, each is written
    before the next, and they may be on any device and have any strides. A file has no more than
    ``max_shard_bytes`` bytes of tensors, unless it has one tensor alone. ``metadata`` is that of
    each file; ``files`` has further files of the folder, such as ``config.json``, by name.

    The folder must be absent or empty, else FileExistsError is raised; its parents are made.
    ``overwrite=True`` replaces the checkpoint in it, and other files stay. Raises ValueError if a
    tensor is not as ``specs`` says. If writing fails, the folder is as it was before.
    """
    with new_folder(folder, overwrite) as temporary:
        try:
            write_files(temporary, specs, tensors, max_shard_bytes, metadata)
            for name, content in (files or {}).items():
                write_file(temporary / name, content)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            total = sum(spec.nbytes for spec in specs.values())
            raise type(error)(
                error.errno,
                f"{error.strerror} while a checkpoint of {total / 1e9:.3g} GB was written; nothing "
                "of it is left, and what was there before is unchanged",
                str(folder),
            ) from error


def write_files(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: float,
    metadata: Mapping[str, str],
) -> None:
    """Write the shards and their index into an existing folder; see `write_shards`."""
    check_shard_bytes(max_shard_bytes)
    shards, stream = files_of(specs, max_shard_bytes), iter(tensors)
    for name, shard in shards.items():
        _write_shard(folder / name, shard, stream, metadata)
    if (extra := next(stream, None)) is not None:
        raise ValueError(f"{extra[0]}: it comes after the last tensor that was announced")
    if len(shards) > 1:
        weight_map = {key: name for name, shard in shards.items() for key in shard}
        total = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / f"model{INDEX_SUFFIX}", json.dumps(index, indent=2) + "\n")


def files_of(specs: Mapping[str, Spec], max_shard_bytes: float) -> dict[str, dict[str, Spec]]:
    """The files of a checkpoint, at least one, and the tensors of each in their order."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for key, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][key] = spec
        filled += spec.nbytes
    return dict(zip(shard_names(len(shards)), shards, strict=True))


def shard_names(count: int) -> list[str]:
    """The names of the files of a checkpoint of so many shards."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def check_shard_bytes(size: object) -> None:
    """Raise TypeError if this size of shards is no number, and ValueError if it is not positive."""
    check_type(size, (int, float), "checkpoints", "max_shard_bytes", "a number, such as 5e9")
    if not size > 0:  # type: ignore[operator]
        raise ValueError(f"max_shard_bytes must be > 0, got {size}")


def _write_shard(
    path: Path,
    specs: Mapping[str, Spec],
    stream: Iterator[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    header, places = _header(specs, metadata)
    with path.open("wb", buffering=0) as file:
        _write(file, header)
        for key, spec in specs.items():
            name, tensor = next(stream, ("", None))
            _check(key, spec, name, tensor)
            assert tensor is not None
            file.seek(len(header) + places[key])
            _write_tensor(file, tensor)
            del tensor
        os.fsync(file.fileno())


def _header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, length included, and where each tensor starts after them."""
    end, places = 0, {}
    entries: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    for key, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        places[key], end = end, end + spec.nbytes
        entries[key] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [places[key], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _check(key: str, spec: Spec, name: str, tensor: Tensor | None) -> None:
    """Raise unless the tensor that comes is the one that was announced."""
    if tensor is None:
        raise ValueError(f"{key}: it was announced, and the tensors ended before it")
    if name != key:
        raise ValueError(f"{key}: it was announced here, and {name} comes in its place")
    if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
        raise ValueError(
            f"{key}: {spec.dtype} of shape {spec.shape} was announced, and {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} comes"
        )


def _write_tensor(file: FileIO, tensor: Tensor) -> None:
    """Write the elements of a tensor, row-major, by way of a small buffer."""
    if not tensor.numel():
        return
    on_cpu = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = on_cpu.view(-1).view(torch.uint8)
    buffer = bytearray(min(flat.numel(), _BUFFER_BYTES))
    for part in flat.split(_BUFFER_BYTES):
        torch.frombuffer(buffer, dtype=torch.uint8)[: len(part)].copy_(part)
        _write(file, memoryview(buffer)[: len(part)])


def _write(file: FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data).cast("B")
    while left:  # a call writes fewer on a disk that becomes full
        left = left[file.write(left) :]
