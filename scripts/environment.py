"""What a reader of a run's numbers needs to judge and to repeat them, and the file they go into."""

import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def environment(seed: int, device: str) -> dict[str, Any]:
    """What a reader of the numbers needs to judge and to repeat them."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "seed": seed,
        "git_commit": commit or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine(device),
    }


def machine(device: str) -> str:
    """The GPU's name, or the CPU's and how many of its threads torch uses."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
