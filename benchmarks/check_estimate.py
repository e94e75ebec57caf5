"""Compare predictions of `float8.estimate` with measurements: others' and ours.

Without a file, the rows of `published.json`, and the results of the queue (`gpu.py`) that
`READERS` know. A row is

    layer            forward and backward of a linear layer, with the ops that are timed beside it
    gemm             one GEMM, grouped where its shape has experts
    step             forward and backward of a grouped GEMM
    separate GEMMs   the GEMMs of a transformer layer, each with casts of its own operands
    training step    tokens per second of a model, of which linear layers are a part
    cast             the rate of one cast

and is predicted as what it is: the ops beside a layer are priced by their bytes, casts are those of
the compiler where torchao's were timed, and of a training step only linear layers become faster ::

    step = 1 / (1 - share + share / speedup)      share = linear layers' time in bf16 / step's

A **board** is a row of `DEVICES` with the memory that the published hardware has, and with the
rates that the engine that ran its GEMMs reaches at its own power limit: that of DeepGEMM is
another board than that of torch. These rates are the only fitted numbers: each is the one at which
the rows that say ``fits`` have no error on average. Rows that fitted a constant of the model say so
too. Median errors, by kind, are of all other rows.

With result files of `READERS`: the same table of their rows. The device is the row of `DEVICES`
that a file names, if none is given.

python benchmarks/check_estimate.py                                        # published and ours
python benchmarks/check_estimate.py OUT/bench_{linear,matmul,casts,grouped_mm,model}.json
python benchmarks/check_estimate.py bench_linear.json --device here.json   # by measure_device.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.contenders import BASELINE
from benchmarks.measuring.report import columns, table
from benchmarks.models.transformer import LLAMA, Stack
from float8.config import RECIPES, GemmConfig
from float8.estimate.devices import (
    ANY_PASS,
    BF16,
    DEVICES,
    RAMP_S,
    Device,
    GemmSpeed,
    MemoryPass,
    find_device,
)
from float8.estimate.predict import estimate
from float8.estimate.roofline import (
    FILL,
    READ,
    WRITE,
    Shape,
    Use,
    gemm_seconds,
    gemm_sizes,
    kinds_of_plan,
    layer_seconds,
    passes_of_cast,
    passes_of_layer,
)
from float8.linear.plan import LinearPlan, plan_for

COLUMNS = columns("source board kind what predicted measured off fits", off="error")
FILE = Path(__file__).resolve().parent / "published.json"
RESULTS = FILE.parent / "results"
KINDS = DENSE, CASTS, LAYERS, GROUPED, MODELS = (
    "dense GEMMs", "casts", "layers", "grouped GEMMs", "models",
)  # fmt: skip
Row = dict[str, Any]
Pair = tuple[str, str, float, float]  # kind, what, predicted, measured


@dataclass(frozen=True)
class Compared:
    """One measurement: what it is, and its value predicted and measured, larger being faster."""

    source: str
    board: str
    kind: str
    what: str
    predicted: float
    measured: float
    fits: str = ""

    @property
    def error(self) -> float:
        """0.1 is predicted 10 % faster than measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Check:
    """All rows; ``str`` is the table."""

    rows: Sequence[Compared]

    @property
    def tests(self) -> list[Compared]:
        """The rows that determined no rate."""
        return [row for row in self.rows if not row.fits]

    def errors(self, kind: str | None = None) -> list[float]:
        """The magnitudes of the relative errors of the tests, of one kind or of all, sorted."""
        return sorted(abs(row.error) for row in self.tests if kind in (None, row.kind))

    def __str__(self) -> str:
        rows = [vars(row) | {"off": f"{row.error:+.0%}"} for row in self.rows]
        lines = [table(rows, COLUMNS), "x is a speed-up over bfloat16.", ""]
        for kind in (*KINDS, None):
            errors = self.errors(kind)
            lines.append(
                f"{kind or 'all'}: median error {median(errors):.1%} of {len(errors)} rows, "
                f"largest {max(errors):.0%}"
                if errors
                else f"{kind or 'all'}: not measured"
            )
        return "\n".join([*lines, f"{len(self.rows) - len(self.tests)} rows determined a rate"])


def predicted_against_published() -> Check:
    """Every published row with its prediction, and those of `measured_files`."""
    published = json.loads(FILE.read_text(encoding="utf-8"))
    boards = {row["board"]: board_of(row["board"]) for row in published["rows"]}
    rows = [
        Compared(
            row["source"],
            row["board"],
            *PREDICTIONS[row["what"]](row, boards[row["board"]]),
            row.get("fits", ""),
        )
        for row in published["rows"]
    ]
    return Check([*rows, *(row for each in measured_files() for row in of_file(each))])


def measured_files() -> list[Path]:
    """The committed results of the queue, of every benchmark that `READERS` know."""
    found = []
    for index in sorted(RESULTS.glob("*/queue.json")):
        for name, entry in json.loads(index.read_text(encoding="utf-8")).items():
            found += [index.parent / file for file in entry.get("files", [f"{name}.json"])]
    known = [file for file in found if file.exists()]
    return [f for f in known if json.loads(f.read_text(encoding="utf-8"))["benchmark"] in READERS]


def board_of(name: str) -> Device:
    """The device of a board: a row of `DEVICES`, with what the file says of the board."""
    boards = json.loads(FILE.read_text(encoding="utf-8"))["boards"]
    if name not in boards:
        return DEVICES[name]
    board = boards[name]
    base = DEVICES[board["base"]]
    products = dict(base.products)
    for kind, rate in board["rates"].items():
        products[kind] = GemmSpeed(rate * 1e12, RAMP_S)
    grouped = {**base.grouped, **board.get("grouped", {})}
    bandwidth = board["terabytes"] * 1e12 * board["bandwidth_best"]
    own: dict[str, Any] = {"products": products, "grouped": grouped, "passes": {}}
    changed = replace(base, name=name, bandwidth=bandwidth, **own)
    return CompiledCasts(**vars(changed)) if board["compiled_casts"] else changed


class CompiledCasts(Device):
    """A device whose casts are kernels that the compiler makes, as torchao's are.

    An amax of a tensor is two launches. A rowwise cast of columns first writes the operand
    transposed in bfloat16. torchao's own cost model counts the same (its roofline_utils.py).
    """

    def seconds_of(self, passes: Iterable[MemoryPass], elements: float) -> float:
        own: list[MemoryPass] = []
        for each in passes:
            if each.name.startswith("amax rowwise"):
                own.append(each._replace(bytes_per_element=2 * READ))
            elif each is not FILL:
                own += [each, FILL] if each.name == "amax tensorwise" else [each]
        return super().seconds_of(own, elements)


# --- what each kind of row is predicted as


def _plan(recipe: str, device: Device, grouped: bool = False, **changes: Any) -> LinearPlan:
    config = replace(RECIPES[recipe], **changes)
    return plan_for(config, device.arch, torch.bfloat16, grouped)


def _layer(row: Row, device: Device) -> Pair:
    shape, plan = Shape(*row["shape"]), _plan(row["recipe"], device)
    beside = _beside(row, shape)
    bf16 = layer_seconds(device, shape, None, Use()).total + beside / device.bandwidth
    float8 = layer_seconds(device, shape, plan, Use()).total
    if row.get("constant_gradient"):
        # Nothing reads a gradient that is a constant: only its float8 copies are written, instead
        # of the bfloat16 one.
        g = passes_of_layer(plan, Use())[2]
        read = sum(each.bytes_per_element for each in g) - 2 * WRITE
        beside -= (read + READ) * shape.M * shape.N
    float8 += beside / device.bandwidth
    return LAYERS, f"layer {shape} {row['recipe']}, x", bf16 / float8, row["speedup"]


def _beside(row: Row, shape: Shape) -> float:
    """The bytes that the ops beside a layer move."""
    elements = {"x": shape.M * shape.K, "w": shape.N * shape.K, "g": shape.M * shape.N}
    return float(sum(each * elements[name] for name, each in row["beside"].items()))


def _gemm(row: Row, device: Device) -> Pair:
    shape, name = Shape(*row["shape"]), row.get("gemm", "output")
    flops = 2 * shape.M * shape.K * shape.N / 1e12
    fast = row.get("fast", False)
    predicted = flops / gemm_seconds(device, row["kind"], shape, name, fast)
    what = f"{name} {shape} {row['kind']}{' fast' * fast}, TFLOP/s"
    return GROUPED if shape.E else DENSE, what, predicted, flops / (row["us"] / 1e6)


def _step(row: Row, device: Device) -> Pair:
    shape, recipe = Shape(*row["shape"]), row["recipe"]
    plan = None if recipe == BF16 else _plan(recipe, device, grouped=shape.E is not None)
    flops = 6 * shape.M * shape.K * shape.N / 1e12
    predicted = flops / layer_seconds(device, shape, plan, Use()).total
    return GROUPED, f"step {shape} {recipe}, TFLOP/s", predicted, flops / (row["us"] / 1e6)


def _separate_gemms(row: Row, device: Device) -> Pair:
    bf16 = float8 = 0.0
    for layer in row["layers"]:
        for rows, cols, contraction in gemm_sizes(Shape(*layer)).values():
            sizes = Shape(rows, contraction, cols)
            bf16 += gemm_seconds(device, BF16, sizes)
            float8 += gemm_seconds(device, row["kind"], sizes)
            of_a, of_b = row["cast_bytes"]
            moved = (of_a * rows + of_b * cols) * contraction
            float8 += device.pass_seconds(ANY_PASS, moved) if moved else 0.0
    if row["kind"] == BF16:
        flops = sum(6 * prod(layer) for layer in row["layers"]) / 1e12
        return LAYERS, "12 GEMMs bf16, TFLOP/s", flops / bf16, flops / (row["bf16_ms"] / 1e3)
    what = f"12 GEMMs {row['recipe']}, x"
    return LAYERS, what, bf16 / float8, row["bf16_ms"] / row["float8_ms"]


def _training_step(row: Row, device: Device) -> Pair:
    plan, tokens = _plan(row["recipe"], device), row["tokens"]
    bf16 = float8 = 0.0
    for K, N, count in row["linears"]:
        shape = Shape(tokens, K, N)
        for use, times in ((Use(), 1.0), (Use(training=False), row["recomputed"])):
            bf16 += count * times * layer_seconds(device, shape, None, use).total
            float8 += count * times * layer_seconds(device, shape, plan, use).total
    share = bf16 / (tokens / row["bf16_tokens_per_s"])
    predicted = 1 / (1 - share + share * float8 / bf16)
    published = row["float8_tokens_per_s"] / row["bf16_tokens_per_s"]
    return MODELS, f"{row['model']} {row['recipe']}, x", predicted, published


def _cast(row: Row, device: Device) -> Pair:
    M, K = row["shape"]
    moved = 3 * M * K
    predicted = moved / device.pass_seconds(row.get("pass", ANY_PASS), moved) / 1e9
    return CASTS, f"{row['kernel']} {M},{K}, GB/s", predicted, row["gb_per_s"]


PREDICTIONS = {
    "layer": _layer,
    "gemm": _gemm,
    "step": _step,
    "separate GEMMs": _separate_gemms,
    "training step": _training_step,
    "cast": _cast,
}


# --- result files of this project


def _sizes(row: Row) -> tuple[int, ...]:
    """The numbers in brackets at the end of a row's shape."""
    (numbers,) = re.findall(r"\(([\d, ]+)\)$", row["shape"])
    return tuple(map(int, numbers.split(",")))


def _able(device: Device, recipe: str) -> bool:
    return set(kinds_of_plan(_plan(recipe, device), Use()).values()) <= set(device.products)


def _of_linear(result: Row, device: Device) -> Iterator[Pair]:
    """Speed-ups over nn.Linear, or over bfloat16's grouped GEMM."""
    # Until version 1.0 gradients were summed precisely.
    is_old = result["environment"].get("float8", "").startswith("0.")
    names = ("gemm_config_grad_input", "gemm_config_grad_weight") if is_old else ()
    changes: dict[str, Any] = dict.fromkeys(names, GemmConfig(use_fast_accum=False))
    for row in result["rows"]:
        name, mode = row["layer"], row.get("mode", "eager")
        if name in RECIPES and "ratio" in row and _able(device, name):
            shape = Shape(*_sizes(row))
            plain = layer_seconds(device, shape, None, Use()).total
            plan = _plan(name, device, shape.E is not None, **changes)
            own = layer_seconds(device, shape, plan, Use()).total
            kind = GROUPED if shape.E else LAYERS
            yield kind, f"{row['shape']} {mode} {name}, x", plain / own, 1 / row["ratio"]


def _of_matmul(result: Row, device: Device) -> Iterator[Pair]:
    for row in result["rows"]:
        for kind, ms in ((BF16, "baseline_ms"), (row["granularity"], "ms")):
            if kind in device.products and ms in row:
                gemm = {"shape": _sizes(row), "kind": kind, "us": row[ms] * 1e3}
                yield _gemm(gemm, device)


# casts of bench_casts -> a recipe, and an operand of its output, that is cast so
CAST_OF = {
    "dynamic": ("tensorwise", "a"),
    "static": ("unit", "a"),
    "delayed": ("delayed", "a"),
    "rowwise": ("rowwise", "a"),
    "1x128": ("blockwise", "a"),
    "128x128": ("blockwise", "b"),
    "1x32": ("mxfp8", "a"),
}


def _of_casts(result: Row, device: Device) -> Iterator[Pair]:
    """Kernels that cast operands; of tokens, in groups of 128 on average."""
    for row in result["rows"]:
        name, _, where = row["cast"].rpartition(" ")
        is_ours = name in CAST_OF and where in ("rows", "both", "tokens")
        if is_ours and "gbps" in row:
            recipe, operand = CAST_OF[name]
            cast = getattr(RECIPES[recipe].gemms.output, operand)
            M, K = _sizes(row)
            filled = Shape(M, K, K, M // 128 + 1).filled if where == "tokens" else 1.0
            passes = passes_of_cast(Use(), cast, 1 if where == "rows" else 2)
            moved = row["bytes_per_element"] * M * K
            predicted = moved / device.seconds_of(passes, M * K * filled) / 1e9
            yield CASTS, f"{row['cast']} {M},{K}, GB/s", predicted, row["gbps"]


def _of_model(result: Row, device: Device) -> Iterator[Pair]:
    """Speed-ups of a stack of blocks, whose other ops take the same time in float8."""
    options, rows = result["options"], result["rows"]
    plain = {"unit": "False", "sharded": "None", "microbatches": "1"}  # absent from older files
    if options["size"] not in LLAMA or any(options.get(k, v) != v for k, v in plain.items()):
        return
    for row in rows:
        name, mode = row["layer"], row["mode"]
        if name in RECIPES and "ratio" in row and _able(device, name):
            predicted = model_speedup(result, mode, name, device)
            yield MODELS, f"{options['size']} {mode} {name}, x", predicted, 1 / row["ratio"]


def model_speedup(result: Row, mode: str, recipe: str, device: Device) -> float:
    """Predicted for the model of a result file, from its time in bf16: only linear layers gain."""
    options = result["options"]
    sizes = replace(LLAMA[options["size"]], layers=int(options["blocks"]))
    with torch.device("meta"):
        model = Stack(sizes).bfloat16()
    (plain,) = (r for r in result["rows"] if (r["layer"], r["mode"]) == (BASELINE, mode))
    total = estimate(model, sizes.batch * sizes.context, device, recipe).total(recipe)
    share = total.bf16_s / (plain["ms"] / 1e3)
    return 1 / (1 - share + share / total.speedup)


READERS = {
    "bench_linear": _of_linear,
    "bench_grouped_mm": _of_linear,
    "bench_matmul": _of_matmul,
    "bench_casts": _of_casts,
    "bench_model": _of_model,
}


def of_file(file: Path, device: str | Device | None = None) -> list[Compared]:
    """Every timed row of a result file that the device runs.

    Raises:
        ValueError: a file of another benchmark, or of a device that has no datasheet.
    """
    result = json.loads(file.read_text(encoding="utf-8"))
    name, hardware = result.get("benchmark"), result.get("environment", {}).get("device", "")
    if name not in READERS:
        raise ValueError(f"{file} is by {name}; what can be compared: {', '.join(READERS)}")
    # PCIe and NVL boards carry the same chips with other peaks, which the table does not list.
    words = set() if {"PCIe", "NVL"} & set(hardware.split()) else set(hardware.split())
    sheet = next((own for key, own in DEVICES.items() if key in words), None)
    if device is None and sheet is None:
        raise ValueError(f"{file}: there is no datasheet for {hardware!r}, give --device")
    found = sheet if device is None else find_device(device)
    assert found is not None
    return [Compared(file.name, found.name, *pair) for pair in READERS[name](result, found)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="*", metavar="FILE", help="else published.json")
    known = f"{', '.join(DEVICES)}, or a file of measure_device.py"
    parser.add_argument("--device", help=f"{known}; default: the datasheet of the file's device")
    options = parser.parse_args(argv)
    if not options.results:
        print(predicted_against_published())
        return 0
    try:
        print(Check([row for file in options.results for row in of_file(file, options.device)]))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
