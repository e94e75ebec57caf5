"""What do saving and loading a float8 checkpoint cost in memory and in time?

A synthetic model of linear layers, whose weights are resident in float8 (`--size-mb` of them), is
saved and loaded::

    memory      the peak of resident memory of a fresh process, above what it was before the model
                existed, over the bytes of the checkpoint. `save`: the model is made, then saved.
                `load`: a model on the meta device, then loaded in float8. The model itself is 1.
    throughput  the bytes of the checkpoint over the time of a call, beside safetensors'
                `save_file` and `load_file` of the same tensors, in turns in one process. Files are
                in the page cache when they are read. `save` has its files on the disk when it
                returns, which `save_file` has not: `save_file + fsync` waits for that too.

    python benchmarks/bench_checkpoint.py -o checkpoint.json
    python benchmarks/bench_checkpoint.py --size-mb 64 --layout fine_grained
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

import float8
from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row
from float8 import Float8LinearConfig
from float8.checkpoints import load, save_pretrained
from float8.checkpoints.shards import Shards

# layout -> the recipe whose scales it stores
LAYOUTS = {"fine_grained": "blockwise", "compressed_tensors": "rowwise", "modelopt": "tensorwise"}
COLUMNS = {
    "layer": ("what", ""),
    "layout": ("layout", ""),
    "size_mb": ("checkpoint MB", ",.0f"),
    "peak_mb": ("peak MB", ",.0f"),
    "peak_ratio": ("peak / size", ".3f"),
    "mb_per_s": ("MB/s", ",.0f"),
    "ratio": ("time / safetensors'", ".2f"),
}
MB = 1e6
WIDTH, HIDDEN = 2048, 8192  # of a weight: 16.8 MB


class Model(nn.Module):
    """Linear layers of one size, as many as fill the bytes that are asked for."""

    def __init__(self, size_mb: int, device: str) -> None:
        super().__init__()
        count = max(round(size_mb * MB / (WIDTH * HIDDEN)), 1)
        options: Any = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.layers = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, **options) for _ in range(count))


def resident_model(size_mb: int, layout: str) -> nn.Module:
    """Its weights in float8, made one by one: no other copy of more than one is ever in memory."""
    config = Float8LinearConfig.from_recipe_name(LAYOUTS[layout])
    model = Model(size_mb, "meta")
    for number in range(len(model.layers)):
        layer = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=torch.bfloat16)
        model.layers[number] = float8.convert_to_float8_inference(layer, config=config)
    return model


def save(model: nn.Module, folder: Path, layout: str) -> None:
    """Write the model in this layout."""
    names = [f"layers.{number}" for number in range(len(model.layers))]  # type: ignore[arg-type]
    scales = dict.fromkeys(names, 1.0) if layout == "modelopt" else None
    save_pretrained(model, folder, layout, input_scales=scales)


# --- memory: in a process of its own


def in_child(what: str, folder: Path, options: argparse.Namespace) -> Row:
    """The peak of one call; saving leaves the checkpoint in the folder."""
    arguments = ["--child", what, "--folder", str(folder), "--size-mb", str(options.size_mb)]
    command = [sys.executable, __file__, *arguments, "--layout", options.layout]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def child(options: argparse.Namespace) -> Row:
    """The peak of resident memory in this process, above what it was before the model existed."""
    small = options.folder.with_name(f"{options.folder.name}-small")
    if options.child == "save":
        save(resident_model(1, options.layout), small, options.layout)  # imports what it needs
    load(Model(1, "meta"), small, weights="float8")
    release()
    before = resident_bytes("VmRSS")
    if options.child == "save":
        model: nn.Module = resident_model(options.size_mb, options.layout)
        release()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        save(model, options.folder, options.layout)
    else:
        Path("/proc/self/clear_refs").write_text("5")
        model = load(Model(options.size_mb, "meta"), options.folder, weights="float8")
    peak, after = resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before
    return {"peak_mb": peak / MB, "resident_mb": after / MB, "layers": len(list(model.children()))}


def release() -> None:
    """Give back to the system what is free: the peak shall not hide in memory that was used."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(field: str) -> int:
    """VmRSS, the resident memory of this process, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# --- throughput


def contenders(
    options: argparse.Namespace, folder: Path
) -> dict[str, tuple[Callable[[], Any], str]]:
    """What is timed, by name."""
    from safetensors.torch import load_file, save_file

    model = resident_model(options.size_mb, options.layout)
    shards = Shards(folder / "it")
    tensors = {key: shards.read(key).clone() for key in shards}
    counter = itertools.count()
    file = folder / "theirs.safetensors"

    def ours() -> None:
        save(model, folder / str(next(counter)), options.layout)

    def theirs(is_synced: bool) -> None:
        file.unlink(missing_ok=True)  # ours are new files too
        save_file(tensors, file)
        if is_synced:
            with file.open("rb") as written:
                os.fsync(written.fileno())

    theirs(False)
    return {
        "save_file": (partial(theirs, False), ""),
        "save_file + fsync": (partial(theirs, True), "save_file"),
        "save_pretrained": (ours, "save_file + fsync"),
        "load_file, copied": (lambda: {k: x.clone() for k, x in load_file(file).items()}, ""),
        "load, high_precision": (
            lambda: load(Model(options.size_mb, "meta"), folder / "it"),
            "load_file, copied",
        ),
        "load, float8": (
            lambda: load(Model(options.size_mb, "meta"), folder / "it", weights="float8"),
            "load_file, copied",
        ),
    }


def throughput(options: argparse.Namespace, folder: Path, size: int) -> list[Row]:
    """A row for each contender, timed in turns."""
    calls = contenders(options, folder)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.repeats):
        for name, (call, _) in calls.items():
            begin = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - begin)
            for entry in folder.iterdir():  # room for the next
                if entry.name.isdecimal():
                    shutil.rmtree(entry)
    rows = []
    for name, (_, against) in calls.items():
        row: Row = {"layer": name, "layout": options.layout, "size_mb": size / MB}
        row |= {"samples_s": samples[name]}
        row["mb_per_s"] = size / MB / statistics.median(samples[name])
        if against:
            row |= {"against": against}
            row["ratio"] = harness.paired_ratio(samples[name], samples[against])
        rows.append(row)
    return rows


def memory(options: argparse.Namespace, folder: Path) -> tuple[list[Row], int]:
    """A row each for saving and loading, and the bytes of the checkpoint."""
    rows: list[Row] = []
    size = 0
    for what in ("save", "load"):
        row = in_child(what, folder / "it", options)
        size = sum(spec.nbytes for spec in Shards(folder / "it").keys().values())
        row |= {"layer": f"peak of {what}", "layout": options.layout, "size_mb": size / MB}
        rows.append(row | {"peak_ratio": row["peak_mb"] / row["size_mb"]})
    return rows, size


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mb", type=harness.positive, default=512, help="of float8 weights")
    parser.add_argument("--layout", choices=LAYOUTS, default="fine_grained")
    parser.add_argument("--repeats", type=harness.positive, default=5, help="of timed calls")
    parser.add_argument("--folder", type=Path, help="write there; by default a temporary folder")
    parser.add_argument("--child", choices=("save", "load"), help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON there")
    options = parser.parse_args(argv)
    options.device = "cpu"  # whose memory is measured
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and report."""
    options = parse(argv)
    if options.child:
        print(json.dumps(child(options)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        rows, size = memory(options, Path(name))
        rows += throughput(options, Path(name), size)
    report.publish("bench_checkpoint", argv, options, rows, COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
