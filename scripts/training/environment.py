"""The record of a run's machine, versions and command, and writing the file of its results."""

import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.report import commit, device_name
from float8.numerics.snapshot import replace_file
from float8.version import __version__


def environment(seed: int, device: str) -> dict[str, Any]:
    """The machine, versions and command of a run."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "seed": seed,
        "git_commit": commit()["commit"],
        "float8": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{device_name(device)}, {torch.get_num_threads()} threads",
    }


class NotWritten(OSError):
    """A file could not be written; the message names it, the reason and the fix."""


def check_writable(path: Path, option: str) -> None:
    """Raise `NotWritten` before the work if a file could not be written after it.

    Its folder is made. `option` is the one that names the file, or its folder. Of several processes
    only the first writes.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise NotWritten(
            f"{path} cannot be written ({error.strerror or error}): take another {option}"
        ) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file as a whole, in a folder that is made.

    Raises:
        NotWritten: it could not be; an older file is still there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise NotWritten(f"{path} could not be written ({error.strerror or error})") from error
