"""The tools for cubins that come with Triton."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def listing(cubin: bytes) -> str:
    """The instructions of a cubin, as text.

    Raises:
        ValueError: Triton's nvdisasm cannot read it, as where a newer ptxas made it.
    """
    return _run(cubin, "nvdisasm", "-ndf", "-c")


def resources(cubin: bytes) -> str:
    """The registers and the memory that a cubin uses, as text."""
    return _run(cubin, "cuobjdump", "-res-usage")


def _run(cubin: bytes, tool: str, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / tool), *arguments, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{tool} of {_TOOLS} cannot read it: {done.stderr.strip()}")
    return done.stdout
