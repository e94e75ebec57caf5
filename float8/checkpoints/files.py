"""Folders of safetensors files: read tensor by tensor, and written whole or not at all.

The format is that of the package ``safetensors``, and the names are those of HuggingFace:
``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with
``model.safetensors.index.json``, whose ``weight_map`` says which file has a key.

``source.py`` reads them. `write_shards` holds the tensors of one file. It makes a folder beside the
final one, under a name that starts with a dot, which is renamed when all of it is on the disk. Any
error removes it, and an existing folder stays as it is until then. A process that is killed between
the two renames of an overwrite leaves the old folder, complete, beside the new one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tabulate import tabulate
from torch import Tensor

MAX_SHARD_BYTES = 5_000_000_000
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
# The files that belong to a checkpoint's weights: those of an old one go when a new one comes.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor without its data.

    ``file`` is the name of the file that has it, or empty before it is written.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""

    @classmethod
    def of(cls, x: Tensor, file: str = "") -> Spec:
        """The spec of a tensor."""
        return cls(x.dtype, tuple(x.shape), file)

    @property
    def nbytes(self) -> int:
        """The size of its data in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def table(headers: list[str], rows: list[list[Any]], align: str) -> str:
    """``align`` has l or r for each of the first columns; the others are right."""
    kinds = ["left" if x == "l" else "right" for x in align.ljust(len(headers), "r")]
    return tabulate(rows, headers, "simple", colalign=kinds, disable_numparse=True)


def in_files(specs: Mapping[str, Spec], max_shard_bytes: float) -> dict[str, Spec]:
    """The specs with their files: no more than so many bytes, unless it is one tensor alone."""
    numbers: dict[str, int] = {}
    count, filled = 1, 0
    for key, spec in specs.items():
        if filled and filled + spec.nbytes > max_shard_bytes:
            count, filled = count + 1, 0
        numbers[key] = count
        filled += spec.nbytes
    one = f"model{SUFFIX}" if count == 1 else ""
    return {
        key: replace(spec, file=one or f"model-{numbers[key]:05}-of-{count:05}{SUFFIX}")
        for key, spec in specs.items()
    }


def write_shards(
    folder: str | Path,
    specs: Mapping[str, Spec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    files: Mapping[str, bytes | dict[str, Any]] | None = None,
    overwrite: bool = False,
) -> None:
    """Write tensors as a folder of safetensors files that appears when all of it is on the disk.

    ``specs`` has all keys and their files, as of `in_files`. ``tensors`` come in its order, on any
    device and with any strides. ``files`` has the contents of further files by name, those of JSON
    such as ``config.json`` as dictionaries.

    The folder must be absent or empty, else FileExistsError is raised. ``overwrite=True`` replaces
    the checkpoint in it, and other files stay. Raises OSError if the disk is full: the folder is
    as it was before.
    """
    stream, files = iter(tensors), dict(files or {})
    shards: dict[str, dict[str, Spec]] = {}
    for key, spec in specs.items():
        shards.setdefault(spec.file, {})[key] = spec
    if len(shards) > 1:
        total = {"total_size": sum(spec.nbytes for spec in specs.values())}
        weight_map = {key: specs[key].file for key in sorted(specs)}
        files[f"model{INDEX_SUFFIX}"] = {"metadata": total, "weight_map": weight_map}
    with new_folder(folder, overwrite) as temporary:
        for name, shard in shards.items():
            # Copies: safetensors takes no tensors that share memory or have other strides.
            own = {
                key: torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())
                for key, x in islice(stream, len(shard))
            }
            assert {key: Spec.of(x, name) for key, x in own.items()} == shard, name
            try:
                save_file(own, temporary / name, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{folder}: nothing of it is left, {error}") from error
            _sync(temporary / name)
        assert next(stream, None) is None
        for name, content in files.items():
            if isinstance(content, bytes):
                (temporary / name).write_bytes(content)
            else:
                (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
            _sync(temporary / name)


def reason_against_folder(folder: Path, overwrite: bool) -> str | None:
    """The reason why no checkpoint can be written to a folder, or None."""
    if not os.path.lexists(folder):
        return None
    if not folder.is_dir():
        return f"{folder} exists and is no folder; give another name"
    if Path.cwd().is_relative_to(folder.resolve()) or os.path.ismount(folder):
        return (
            f"{folder} cannot be replaced: it is a mount point, or it is or contains the current "
            "folder of this process; give a name below it"
        )
    if not overwrite and any(folder.iterdir()):
        return f"{folder} exists and is not empty; give another name, or overwrite=True"
    return None


@contextmanager
def new_folder(folder: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``folder``, which becomes it when the block ends without error."""
    final = Path(folder).resolve()
    if (reason := reason_against_folder(final, overwrite)) is not None:
        raise FileExistsError(reason)
    final.parent.mkdir(parents=True, exist_ok=True)
    name = f".{final.name}.{secrets.token_hex(4)}"
    temporary, old = final.with_name(f"{name}.new"), final.with_name(f"{name}.old")
    temporary.mkdir()
    try:
        if final.exists():
            shutil.copymode(final, temporary)
        yield temporary
        _sync(temporary)
        if overwrite and final.exists():
            final.rename(old)
        temporary.rename(final)  # fails if a folder with files has appeared meanwhile
    except BaseException:
        if old.exists():
            old.rename(final)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if old.exists():
        for entry in old.iterdir():
            if not (_WEIGHTS.fullmatch(entry.name) or (final / entry.name).exists()):
                entry.rename(final / entry.name)
        shutil.rmtree(old)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
