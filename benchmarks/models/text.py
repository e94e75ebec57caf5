"""Bytes to train on: Python sources that every machine has, or a folder; whole files are held out.

Which files are held out depends on a hash of their names, and the batch of a step on (seed, step).
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # one file in ten
LARGEST = 2**17  # bytes of a file of torch's: a larger one is a table, or weighs too much
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SEPARATOR = b"\0"  # of files: it occurs in no text file
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Text:
    """Bytes, uint8: all files one after another."""

    train: Tensor
    held_out: Tensor

    @property
    def digest(self) -> str:
        both = self.train.numpy().tobytes() + self.held_out.numpy().tobytes()
        return hashlib.sha256(both).hexdigest()[:16]

    def batch(self, step: int, *, seed: int, batch: int, context: int) -> Pair:
        """Tokens and the tokens after them, (B, T)."""
        generator = torch.Generator().manual_seed(seed * 1_000_000 + step)
        starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def windows_in_turn(self, steps: int, *, seed: int, batch: int, context: int) -> Iterator[Pair]:
        """Batches of windows that do not overlap, in an order that the seed decides.

        Raises:
            ValueError: the text has fewer windows than that.
        """
        count = (len(self.train) - 1) // context
        if steps * batch > count:
            raise ValueError(
                f"{steps} steps of {batch} windows of {context} bytes: text has {count}"
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        for some in order[: steps * batch].split(batch):
            yield _windows(self.train, some * context, context)

    def held_out_batches(self, count: int, *, batch: int, context: int) -> Iterator[Pair]:
        """Windows spread evenly over the held-out files."""
        last = len(self.held_out) - context - 1
        starts = torch.linspace(0, last, count * batch, dtype=torch.float64).long()
        for some in starts.split(batch):
            yield _windows(self.held_out, some, context)


def load(folder: Path | None = None, standard_library: bool = False) -> Text:
    """The files of a folder; None is torch's Python sources, or those of the standard library.

    Raises:
        ValueError: fewer than two files are there.
    """
    stdlib, sources = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    root = folder or (stdlib if standard_library else sources)
    paths = root.rglob("*" if folder else "*.py")
    skipped = SKIPPED if root == stdlib else set()
    return _split(root, paths, skipped, LARGEST if root == sources else None)


def installed() -> Text:
    """All Python sources of this machine: the standard library's, and those of packages."""
    paths = sysconfig.get_paths()
    roots = dict.fromkeys(Path(paths[key]) for key in ("stdlib", "platlib", "purelib"))
    return _split(
        Path("/"), (path for root in roots for path in root.rglob("*.py")), set(), LARGEST
    )


def _split(root: Path, paths: Iterable[Path], skipped: set[str], largest: int | None) -> Text:
    """The different text files, whole files held out; without large ones, and folders skipped."""
    files: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        is_left_out = not path.is_file() or (largest is not None and path.stat().st_size > largest)
        if is_left_out or skipped & set(name.parts):
            continue
        text = path.read_bytes()
        if text and SEPARATOR not in text and text not in seen:
            files[name.as_posix()] = text
            seen.add(text)
    if len(files) < 2:
        raise ValueError(f"{root} has {len(files)} text files, but two are needed: give --data")
    by_hash = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = set(by_hash[: -(-len(files) // HELD_OUT)])
    return Text(
        _join(text for name, text in files.items() if name not in held_out),
        _join(text for name, text in files.items() if name in held_out),
    )


def _join(files: Iterator[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(SEPARATOR.join(files)), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context: int) -> Pair:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
