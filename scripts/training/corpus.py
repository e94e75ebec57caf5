"""Text as bytes, split by whole files: data that every machine has.

The default text is the Python standard library's own source, read from the interpreter that runs
this script: some 12 MB of real, structured text that needs no download. Any folder of text files
serves as well.

A token is a byte (256 of them). Two rules keep training text out of the validation loss:

* whole files are held out, never pieces of a file that is also trained on, and a file that is a
  copy of another is read once;
* which files are held out depends on their names alone (a hash), not on the order in which a file
  system lists them.

The batch of step s is drawn by a generator seeded with (seed, s): the position in the data is the
step number, and a resumed training needs no other state.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
END_OF_FILE = b"\0"  # separates files: it occurs in no text file
HELD_OUT = 10  # one file in ten


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # uint8, all training files one after another
    val: Tensor
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Names the text: a checkpoint resumed on another text would silently diverge."""
        hasher = hashlib.sha256(self.train.numpy().tobytes())
        hasher.update(self.val.numpy().tobytes())
        return hasher.hexdigest()[:16]

    def batch(self, step: int, *, seed: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, each (B, T), the same for every run with this seed."""
        generator = torch.Generator().manual_seed(seed * 1_000_000 + step)
        starts_B = torch.randint(len(self.train) - context, (batch,), generator=generator)
        return _windows(self.train, starts_B, context)

    def val_batches(
        self, count: int, *, batch: int, context: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`count` batches of windows spread evenly over the held-out text, always the same."""
        last = len(self.val) - context - 1
        starts = torch.linspace(0, last, count * batch, dtype=torch.float64).long()
        for starts_B in starts.split(batch):
            yield _windows(self.val, starts_B, context)

    def check(self, context: int) -> None:
        for name, text in (("training", self.train), ("validation", self.val)):
            if len(text) <= context:
                raise ValueError(
                    f"the {name} files hold {len(text)} bytes, but one window of --context "
                    f"{context} needs {context + 1}: give --data more text, or a smaller --context"
                )


def load(folder: Path | None = None) -> Corpus:
    """The corpus of a folder, or (None) of the running interpreter's standard library."""
    files = _standard_library() if folder is None else _folder(folder)
    if len(files) < 2:
        raise ValueError(
            f"{folder or 'the standard library'} holds {len(files)} text file(s), but whole files "
            "are held out for validation: point --data at a folder with at least two"
        )
    held_out = set(sorted(files, key=_rank)[: -(-len(files) // HELD_OUT)])
    train_files = tuple(name for name in files if name not in held_out)
    val_files = tuple(name for name in files if name in held_out)
    return Corpus(_join(files, train_files), _join(files, val_files), train_files, val_files)


def _standard_library() -> dict[str, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = root.rglob("*.py")
    return _read(root, (p for p in paths if not SKIPPED_FOLDERS & {*p.relative_to(root).parts}))


def _folder(root: Path) -> dict[str, bytes]:
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root} is not a folder: point --data at a folder of text files, "
            "or leave it out to read the Python standard library"
        )
    return _read(root, (path for path in root.rglob("*") if path.is_file()))


def _read(root: Path, paths: Iterator[Path]) -> dict[str, bytes]:
    """Name -> contents in the order of names; neither empty, nor binary, nor repeated."""
    files: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes()
        if text and END_OF_FILE not in text and text not in seen:
            seen.add(text)
            files[path.relative_to(root).as_posix()] = text
    return files


def _rank(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _join(files: dict[str, bytes], names: tuple[str, ...]) -> Tensor:
    text = END_OF_FILE.join(files[name] for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts_B: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window_BT1 = text[starts_B[:, None] + torch.arange(context + 1)].long()
    return window_BT1[:, :-1], window_BT1[:, 1:]
