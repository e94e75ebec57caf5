"""`new_folder`: a folder that appears whole under its name, or not at all.

It is made beside its final place, under a name that starts with a dot, and renamed when it is
complete and on the disk. Any error removes it. An existing folder stays as it is until then; with
``overwrite`` the new one takes its place by two renames, and what the old one has beside a
checkpoint's own files moves into the new one: tokenizers, notes, the states of optimizers. A
process that is killed between the renames leaves the old folder, complete, beside the new one.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The files that belong to a checkpoint's weights: those of an old one go when a new one comes.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def refuses_folder(folder: Path, overwrite: bool) -> str | None:
    """The reason why no checkpoint can be written to a folder, or None."""
    if not os.path.lexists(folder):
        return None
    if not folder.is_dir():
        return f"{folder} exists and is no folder; give another name"
    if Path.cwd().is_relative_to(folder.resolve()):
        return (
            f"{folder} is or contains the current folder of this process, which another folder "
            "cannot replace; give the name of a folder in it"
        )
    if os.path.ismount(folder):
        return f"{folder} is a mount point, which no folder can replace; give a name below it"
    if not overwrite and any(folder.iterdir()):
        return (
            f"{folder} exists and is not empty; give another name, or overwrite=True to replace "
            "the checkpoint in it"
        )
    return None


@contextmanager
def new_folder(folder: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder to write in, which becomes ``folder`` when the block ends without error.

    ``folder`` must be absent or empty, else FileExistsError is raised; its parents are made.
    ``overwrite=True`` replaces the checkpoint in it, see the module. The temporary folder lies
    beside it. Files in it are to be written by `write_file` or be synced otherwise. If writing
    fails, nothing is left.
    """
    final = Path(folder).resolve()
    if (reason := refuses_folder(final, overwrite)) is not None:
        raise FileExistsError(reason)
    final.parent.mkdir(parents=True, exist_ok=True)
    own = secrets.token_hex(4)
    temporary = final.with_name(f".{final.name}.{own}.new")
    temporary.mkdir()
    try:
        if final.exists():
            shutil.copymode(final, temporary)
        yield temporary
        sync(temporary)
        _put_in_place(temporary, final, final.with_name(f".{final.name}.{own}.old"), overwrite)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(final.parent)


def _put_in_place(temporary: Path, final: Path, old: Path, overwrite: bool) -> None:
    if not (overwrite and final.exists()):
        try:
            temporary.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FileExistsError(
                f"{final} appeared while the checkpoint was written, and is left as it is; write "
                "from one process only, to a name of its own"
            ) from error
        return
    final.rename(old)
    try:
        temporary.rename(final)
    except BaseException:
        old.rename(final)
        raise
    for entry in old.iterdir():
        if not (_WEIGHTS.fullmatch(entry.name) or (final / entry.name).exists()):
            entry.rename(final / entry.name)
    shutil.rmtree(old)


def write_file(path: Path, text: str | bytes) -> None:
    """Write a small file, and have it on the disk when this returns."""
    with path.open("wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
