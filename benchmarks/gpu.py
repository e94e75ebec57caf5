"""The queue of experiments on a GPU: what was never measured, or is stale, in order of worth.

    python benchmarks/gpu.py list                        # what is measured, stale, or not known
    python benchmarks/gpu.py run --seconds 540 -o OUT    # call it again with the same OUT to go on
    python benchmarks/gpu.py run --toy -o OUT            # every experiment at toy size, on a CPU
    python benchmarks/gpu.py report                      # the tables of docs/measurements.md

An experiment is a row of `QUEUE`: it calls a benchmark, in a process of its own, and its result is
the file that the benchmark writes. ``OUT/queue.json`` says how each ended, with a digest of the
files whose change makes the result stale: their contents are compared, so a copy of the repository
without its history will do. A result counts where it is: in ``OUT``, or committed in a folder of
``benchmarks/results/``. `list` takes the newest on any GPU, `run` asks for this GPU's.

`run` takes the first experiment that fits into the time that is left, and at the end the first
whose rows it can begin; benchmarks write each row as it is measured. What is cut off is begun
again by the next call, and of its two results the longer one stays; `training` goes on. After
every experiment ``OUT/results.tar.gz`` holds all files, below 16 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks import check_estimate
from benchmarks.measuring import harness, report
from benchmarks.measuring.report import ROOT

RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "measurements.md"
INDEX, ARCHIVE, MOST_BYTES = "queue.json", "results.tar.gz", 16 * 2**20
SPARE = 6  # seconds to end an experiment and to write the archive in
TOY_DEVICE = "a CPU, at toy size"
Row = dict[str, Any]
NVIDIA, BLACKWELL, TWO = ("sm_89", "NVIDIA"), ("sm_100", "NVIDIA"), "2 GPUs"

# --- the experiments

GPU = "float8/kernels/gpu"
CASTS = (f"{GPU}/cast.py", f"{GPU}/tiles.py", f"{GPU}/amax.py", f"{GPU}/jit.py")
GEMMS = ("float8/kernels/products.py", "float8/kernels/cublas.py", f"{GPU}/blockwise_mm.py")
LAYER = (*CASTS, *GEMMS, "float8/kernels/casts.py", "float8/linear/autograd.py")
GROUPED = ("float8/kernels/grouped_products.py", f"{GPU}/grouped_mm.py", f"{GPU}/cast_tokens.py")
OPTIMIZER = ("float8/kernels/optimizer_step.py", f"{GPU}/optimizer_step.py")


@dataclass(frozen=True)
class Experiment:
    """A row of the queue.

    Args:
        name: of its result file.
        seconds: how long it takes on an H100.
        paths: files whose change makes a result stale.
        decides: the question that its result answers.
        command: a file of ``benchmarks/`` and its options, without ``-o``; ``{seconds}`` is the
            time that is left.
        needs: of `HERE`.
        part: seconds of its longest part, which is not begun if fewer are left.
        resumes: whether a later call goes on with its rows.
    """

    name: str
    seconds: int
    paths: tuple[str, ...]
    decides: str
    command: str
    needs: tuple[str, ...] = ("sm_89",)
    part: int = 30
    resumes: bool = False

    @property
    def digest(self) -> str:
        """Of the files of `paths`, and of the command."""
        contents = [(ROOT / path).read_bytes() for path in self.paths]
        return hashlib.sha256(b"\0".join([self.command.encode(), *contents])).hexdigest()[:16]


HERE: dict[str, Callable[[], bool]] = {  # what an experiment may need -> whether it is here
    "sm_89": lambda: torch.cuda.get_device_capability() >= (8, 9),
    "sm_100": lambda: torch.cuda.get_device_capability() >= (10, 0),
    "NVIDIA": lambda: torch.version.hip is None,  # Triton kernels and grouped products
    "transformers": lambda: importlib.util.find_spec("transformers") is not None,
    TWO: lambda: torch.cuda.device_count() > 1,
}
# fmt: off
ONCE = "--device cpu --repeats 1 --warmup 1"
TOYS = {  # what makes a command small, by its file
    "bench_model.py": f"--blocks 1 --modes eager --no-peer {ONCE}",
    "bench_linear.py": f"--shapes 32,64,48 --modes eager --no-peer {ONCE}",
    "bench_grouped_mm.py": f"--shapes 64,32,48,2 --no-peer {ONCE}",
    "bench_matmul.py": f"--shapes 32,64,48 {ONCE}",
    "bench_casts.py": f"--shapes 32,64 --casts 'static both' {ONCE}",
    "bench_memory.py": "--device cpu --quick --ways bf16 tensorwise+saved_activations",
    "bench_optim.py": "--quick --device cpu",
    "bench_numerics.py": f"--size cpu --batch 2 -n 2 {ONCE}",
    "bench_training.py": "--models toy --seconds 1 --held-out 4096 --eager --device cpu "
                         "--contenders bf16 tensorwise",
}
TIMED = "--repeats 5 --stop-after {seconds}"
BLOCKS = f"bench_model.py --blocks 2 {TIMED}"  # with the peak of each contender, alone
SPEED = f"{BLOCKS} --no-peak"
BOTH = f"{SPEED} --modes eager compiled --no-peer"
LAYERS = "bench_linear.py --repeats 10 --stop-after {seconds} --shapes"
EXPERTS = f"bench_grouped_mm.py --shapes mixtral.gate_up qwen3-30b.gate_up {TIMED}"
SUMS = " ".join(f"{recipe}{part}" for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
                for part in ("", "+fast", "+precise", "+cached"))
PUBLISHED = f"bench_model.py --no-peer --no-peak --recipes tensorwise rowwise {TIMED} --size"
SHARED = "bench_model.py --blocks 2 --repeats 5 --no-peak --recipes tensorwise"  # by all ranks
PRODUCERS = (*LAYER, f"{GPU}/norm_cast.py", f"{GPU}/swiglu_cast.py", f"{GPU}/swiglu_gradients.py")
MIXTURE = (*LAYER, *GROUPED, "float8/experts/other_libraries.py")
GATHER = (*LAYER, "float8/distributed/gathered_weights.py")
SAVINGS = (*LAYER, *OPTIMIZER, "float8/activations/ops.py", "float8/activations/copies.py",
           f"{GPU}/dequantize_groups.py", "float8/optim/gradients.py")
STEP = "bench_memory.py --timed --models llama2-7b --blocks 4 --batch 8 --stop-after {seconds}"
WAYS = ("bf16 tensorwise tensorwise+saved_activations tensorwise+saved_activations+float8_adamw "
        "tensorwise+O1 tensorwise+O2")
AS_MX = (*LAYER, *GROUPED, f"{GPU}/expand_scales.py")
RUNS: dict[str, Any] = {"part": 110, "resumes": True}
# The first is worth most. Seconds are those with empty caches: a compiled contender of two blocks
# takes 13, its peak 8.
QUEUE = (
    Experiment("split", 75, LAYER, "Where does the time of two compiled blocks of Llama-3-8B go?",
        f"{SPEED} --modes compiled --recipes tensorwise delayed --split"),
    Experiment("training", 480, LAYER, "Does a wide GPT end at bf16's loss, and how much sooner?",
        "bench_training.py --models wide --stop-after {seconds}", **RUNS),
    Experiment("memory_and_speed", 200, SAVINGS,
        "Is a compiled step of four blocks of Llama-2-7B both smaller and faster than in bf16?",
        f"{STEP} --compiled --ways {WAYS} tensorwise+float8_adamw torchao"),
    Experiment("memory_and_speed_eager", 110, SAVINGS, "And an eager step?",
        f"{STEP} --ways {WAYS}"),
    Experiment("experts", 150, (*LAYER, *GROUPED, f"{GPU}/deep_gemm.py"),
        "Which experts gain, with sums precise and fast, and weights cast once?",
        f"{EXPERTS} --recipes {SUMS} blockwise blockwise+cached blockwise+gw_hp", needs=NVIDIA),
    Experiment("blocks", 150, LAYER, "How much faster are two blocks of Llama-3-8B, and torchao's?",
        f"{BLOCKS} --modes eager compiled --recipes tensorwise rowwise"),
    Experiment("compiled_recipes", 75, LAYER, "What do the blocks gain in the other recipes?",
        f"{SPEED} --modes compiled --no-peer --recipes rowwise delayed blockwise tensorwise+fast "
        "rowwise+fast"),
    Experiment("producers", 150, PRODUCERS, "Do fused norms and feed-forwards pay in the blocks?",
        f"{BOTH} --recipes tensorwise tensorwise+fuse_norms tensorwise+feed_forward "
        "tensorwise+feed_forward+keep_float8 delayed delayed+feed_forward "
        "delayed+feed_forward+keep_float8 delayed+feed_forward+fuse_norms"),
    Experiment("recomputed", 75, (*PRODUCERS, "float8/kernels/recompute.py"),
        "What does it cost to cast again in backward, and does it keep what torchao keeps?",
        f"{SPEED} --modes compiled --recipes tensorwise tensorwise+recompute delayed+recompute "
        "tensorwise+feed_forward+recompute delayed+feed_forward+recompute"),
    Experiment("small_layers", 60, LAYER, "From which width on does a layer gain?",
        f"{LAYERS} 16384,768,768 16384,1024,1024 16384,2048,2048 --modes eager compiled graphed "
        "--recipes tensorwise"),
    Experiment("microbatches", 55, (*LAYER, "float8/linear/weight_cache.py"),
        "What do weights that are cast once per step gain over four microbatches?",
        f"{BOTH} --microbatches 4 --recipes tensorwise tensorwise+cached"),
    Experiment("fsdp2", 50, GATHER, "What does FSDP2's float8 gather cost or gain in one process?",
        f"{BLOCKS} --sharded fsdp --recipes tensorwise tensorwise+gather"),
    Experiment("qwen3_moe", 45, MIXTURE, "What does a layer of Qwen3-30B-A3B in Transformers gain?",
        f"{PUBLISHED} qwen3-moe", needs=(*NVIDIA, "transformers")),
    Experiment("gpt_oss", 45, MIXTURE, "What does a layer of gpt-oss-20b in Transformers gain?",
        f"{PUBLISHED} gpt-oss", needs=(*NVIDIA, "transformers")),
    Experiment("layer", 60, LAYER, "How much faster is one layer, in every recipe?",
        f"{LAYERS} 70b.attn.wo --modes eager compiled --recipes tensorwise delayed static rowwise "
        "blockwise"),
    Experiment("training_small", 600, LAYER, "Does a small GPT end at bf16's loss, and how fast?",
        "bench_training.py --models small --stop-after {seconds}", **RUNS),
    Experiment("unit_scaled", 25, LAYER, "What does it cost to find scales, if a model is scaled?",
        f"{SPEED} --unit --recipes tensorwise delayed unit"),
    Experiment("optimizer", 30, OPTIMIZER, "How long does an optimizer step take?",
        "bench_optim.py --layers 2 --modes eager --repeats 3 --warmup 1 --options float8 "
        "'float8 + float16' --stop-after {seconds}"),
    Experiment("casts", 30, CASTS, "Are the casts as fast as memory?",
        f"bench_casts.py --shapes 16384,8192 {TIMED}", needs=NVIDIA),
    Experiment("gemms", 30, GEMMS, "How much faster are the products alone?",
        "bench_matmul.py --repeats 10 --stop-after {seconds}"),
    Experiment("inspection", 30, (*LAYER, "float8/numerics/statistics.py"),
        "What does it cost to inspect a training?",
        "bench_numerics.py --recipes tensorwise --repeats 3 -n 20 --stop-after {seconds}"),
    Experiment("two_gpus", 60, GATHER, "What does FSDP2's float8 gather gain between two GPUs?",
        f"{SHARED} tensorwise+gather --sharded fsdp", needs=("sm_89", TWO)),
    Experiment("two_gpus_tp", 60, (*LAYER, "float8/distributed/parallel_linear.py"),
        "What do layers that two GPUs share, and their float8 gather, gain?",
        f"{SHARED} --sharded tp", needs=("sm_89", TWO)),
    Experiment("as_mx", 90, AS_MX, "Are powers of two as scales faster as MX, on Blackwell?",
        f"{SPEED} --modes compiled --no-peer --split --recipes rowwise rowwise+unrounded blockwise "
        "blockwise+unrounded mxfp8", needs=BLACKWELL),
    Experiment("grouped_mx", 60, AS_MX, "Which experts gain on Blackwell, in MX and as MX?",
        f"{EXPERTS} --recipes rowwise rowwise+unrounded blockwise mxfp8", needs=BLACKWELL),
)
# fmt: on

# --- what is measured


def index_of(folder: Path) -> dict[str, Row]:
    """How each experiment of a folder ended."""
    file = folder / INDEX
    found: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def newest(folders: Sequence[Path], device: str | None = None) -> dict[str, Row]:
    """Of each experiment the newest entry with a result, of one GPU if it is named."""
    entries = [
        (name, {"files": [f"{name}.json"], "folder": folder} | entry)
        for folder in folders
        for name, entry in index_of(folder).items()
        if device in (None, entry["device"])
    ]
    # The last one counts: what failed or was cut off does not hide a result.
    return dict(sorted(entries, key=lambda each: (each[1]["ended"] == "passed", each[1]["date"])))


def state_of(experiment: Experiment, entry: Row | None) -> str:
    """``never``, ``measured``, ``stale``, or how it ended, with the commit and the GPU."""
    if entry is None:
        return "never"
    where = f"at {entry['commit'][:8]} on {entry['device']}"
    if entry["ended"] != "passed":
        return f"{entry['ended']} {where}"
    return f"{'measured' if entry['digest'] == experiment.digest else 'stale, measured'} {where}"


def folders_of(out: Path | None) -> list[Path]:
    """Where results lie: the committed ones, and ``out``."""
    known = [file.parent for file in sorted(RESULTS.glob(f"*/{INDEX}"))]
    return known if out is None else [*known, out]


def show_queue(options: argparse.Namespace) -> int:
    """Print the queue."""
    entries = newest(folders_of(options.output))
    rows = [
        vars(each)
        | {"state": state_of(each, entries.get(each.name)), "needs": " ".join(each.needs)}
        for each in QUEUE
    ]
    print(report.table(rows, report.columns("name seconds state needs decides", name="experiment")))
    return 0


# --- running


def todo(options: argparse.Namespace, device: str) -> list[Experiment]:
    """What is to run here, by worth."""
    entries, here, able = newest(folders_of(options.output), device), index_of(options.output), []
    for each in QUEUE:
        if options.only and each.name not in options.only:
            continue
        own, again = here.get(each.name, {}), options.again
        is_measured = state_of(each, entries.get(each.name)).startswith("measured")
        is_same = own.get("digest") == each.digest and own["device"] == device
        is_done = is_same and own["ended"] in ("passed", "failed")  # by an earlier call
        if missing := [name for name in each.needs if not (options.toy or HERE[name]())]:
            print(f"{each.name}: left out, needs {', '.join(missing)}", flush=True)
        elif (again and options.only) or (not is_done and (again or not is_measured)):
            able.append(each)
    return able


def run(options: argparse.Namespace) -> int:
    """Run experiments until the time ends; 1 if one failed."""
    begin, device = time.monotonic(), TOY_DEVICE if options.toy else report.device_name("cuda")
    options.output.mkdir(parents=True, exist_ok=True)
    waiting, failed = todo(options, device), []

    def left() -> float:
        return float(options.seconds - SPARE - (time.monotonic() - begin))

    try:
        while waiting:
            # In the order of worth what fits; in the end what can be begun.
            fits = (e for e in waiting if left() >= (e.part if e.resumes else e.seconds))
            begins = (e for e in waiting if left() >= e.part)
            if (chosen := next(fits, next(begins, None))) is None:
                break
            waiting.remove(chosen)
            if execute(chosen, options, device, left()) == "failed":
                failed.append(chosen.name)
    finally:  # of an interrupted call, too
        pack(options.output)
    if waiting:
        print(f"no time left for {', '.join(each.name for each in waiting)}")
    print(f"failed: {', '.join(failed)}" if failed else "none failed")
    return int(bool(failed))


def execute(experiment: Experiment, options: argparse.Namespace, device: str, left: float) -> str:
    """Run one experiment for as long as there is time, and note in the index how it ended."""
    out, name, begin = options.output, experiment.name, time.monotonic()
    limit = min(left, 2 * experiment.seconds)
    command = experiment.command.replace("{seconds}", str(max(1, int(limit) - experiment.part)))
    file, *words = shlex.split(command)
    words += shlex.split(TOYS[file]) if options.toy else []
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if TWO in experiment.needs else []
    words = [*ranks, f"benchmarks/{file}", *words, "-o", str(out / f"{name}.json")]

    def note(ended: str) -> None:
        where = report.environment("cpu" if options.toy else "cuda")
        entry = {key: where[key] for key in ("date", "commit", "dirty")} | {"device": device}
        entry |= {"ended": ended, "seconds": round(time.monotonic() - begin)}
        index = index_of(out) | {name: entry | {"digest": experiment.digest}}
        report.replace_text(out / INDEX, json.dumps(index, indent=1) + "\n")

    is_same = index_of(out).get(name, {}).get("digest") == experiment.digest
    keep_longer(out, name, is_same)
    note("cut off")  # stays, if this process is killed
    with (out / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(limit)
            ended = {0: "passed", report.LATE: "cut off"}.get(status, "failed")
        except subprocess.TimeoutExpired:
            ended = "cut off"
        finally:
            stop(process)
    keep_longer(out, name, False)
    note(ended)
    pack(out)
    print(f"== {name}: {ended} after {time.monotonic() - begin:.0f} s", flush=True)
    lines = (out / f"{name}.log").read_text(errors="replace").splitlines()
    print(*lines[-40:], sep="\n", flush=True)
    return ended


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group; torchrun hands SIGTERM on to its own ones."""
    for each in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SPARE / 2)


def keep_longer(out: Path, name: str, again: bool) -> None:
    """Restore an earlier result that has more rows; with ``again`` keep this one for that."""
    result, earlier = out / f"{name}.json", out / f"{name}.earlier.json"
    if earlier.exists() and measured_rows(earlier) > measured_rows(result):
        earlier.replace(result)
    earlier.unlink(missing_ok=True)
    if again and result.exists():
        report.replace_text(earlier, result.read_text(encoding="utf-8"))


def measured_rows(file: Path) -> int:
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return sum("ms" in row or "error" not in row for row in rows)


def pack(out: Path) -> None:
    """Write the archive: all files; if that is too large, the index and the smallest ones."""
    files = [f for f in out.iterdir() if f.is_file() and f.suffix not in (".gz", ".part")]
    files.sort(key=lambda file: (file.name != INDEX, file.stat().st_size))
    part = out / f"{ARCHIVE}.part"
    while True:
        with tarfile.open(part, "w:gz") as archive:
            for file in files:
                archive.add(file, file.name)
        if part.stat().st_size < MOST_BYTES or not files:
            break
        files.pop()
    part.replace(out / ARCHIVE)


# --- the report

# Too long for a page: their files have them.
OFF_PAGE = {"casts", "gemms", "inspection"}
FIRST, LAST = (f"<!-- {what} benchmarks/gpu.py report -->" for what in ("made by", "end of"))
SHOWN = (
    "shape mode layer optimizer seed steps ms predicted ratio ratio_to_unit tokens_s gap_percent "
    "sooner gemm_ms attention_ms cast_ms other_ms idle_ms peak_mib peak_gib tokens_in_80_gb "
    "share_of_copy"
)
# Of results before the queue, whose peaks contain the contenders before.
NOT_SHOWN = ("tokens_s", "peak_gib", "peak_mib")


def report_page(options: argparse.Namespace) -> int:
    """Write the tables into the page, between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(FIRST)
    _, _, after = rest.partition(LAST)
    PAGE.write_text(f"{before}{FIRST}\n\n{tables()}\n{LAST}{after}", encoding="utf-8")
    print(f"{PAGE}: the tables between its two comments are new")
    return 0


def tables() -> str:
    """A table for each question with a result, the newest first; the questions that have none."""
    entries = newest(folders_of(None))
    known = [each for each in QUEUE if results_of(entries.get(each.name))]
    known.sort(key=lambda each: str(entries[each.name]["date"]), reverse=True)
    parts = [section(each, entries[each.name]) for each in known if each.name not in OFF_PAGE]
    open_ = "".join(f"- {each.decides} (`{each.name}`)\n" for each in QUEUE if each not in known)
    return "\n".join([*parts, "**Not measured yet:**\n", open_])


def results_of(entry: Row | None) -> dict[Path, Row]:
    """The files of an entry with what was measured, also of one that failed or was cut off."""
    files = [entry["folder"] / name for name in entry["files"]] if entry else []
    return {f: json.loads(f.read_text(encoding="utf-8")) for f in files if measured_rows(f)}


def section(experiment: Experiment, entry: Row) -> str:
    """The question, what was measured on, and a table of each file."""
    lines, ended = [], "" if entry["ended"] == "passed" else f", {entry['ended']}"
    for file, result in results_of(entry).items():
        rows = [row for row in result["rows"] if "ms" in row or "error" not in row]
        if entry["digest"]:
            predict(file, rows)
        columns = {
            key: (result["columns"].get(key, head), spec)
            for key, (head, spec) in report.columns(SHOWN, predicted="predicted").items()
            if any(key in row for row in rows) and (entry["digest"] or key not in NOT_SHOWN)
        }
        same = [k for k in columns if len({row.get(k) for row in rows}) == 1 < len(rows)]
        same = [key for key in same if isinstance(rows[0][key], str)]  # said once
        what = "".join(f"{rows[0][key]}, " for key in same)
        where = f"{entry['device']} at {entry['commit'][:8]}{ended}"
        lines += ["", f"{what}{where} ([file]({os.path.relpath(file, PAGE.parent)})):", ""]
        lines += markdown(rows, {key: columns[key] for key in columns if key not in same})
    return "\n".join([f"**{experiment.decides}** (`{experiment.name}`)", *lines, ""])


def markdown(rows: Sequence[Row], columns: report.Columns) -> list[str]:
    """A table of a page."""
    lines = [[head for head, _ in columns.values()], ["---"] * len(columns)]
    lines += [
        [format(row[key], spec) if key in row else "" for key, (_, spec) in columns.items()]
        for row in rows
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def predict(file: Path, rows: Sequence[Row]) -> None:
    """Add the ratios that `float8.estimate` predicts, if it does for this benchmark and GPU."""
    with contextlib.suppress(ValueError):
        for row, each in itertools.product(rows, check_estimate.of_file(file)):
            name = f"{row.get('mode')} {row.get('layer')}, x"
            if each.what.endswith(name) and row.get("shape", "") in each.what:
                row["predicted"] = 1 / each.predicted


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="print the queue")
    running = commands.add_parser("run", help="run what is never measured or stale")
    for each, required in ((listing, False), (running, True)):
        each.add_argument("-o", "--output", type=Path, metavar="OUT", required=required)
    running.add_argument("--seconds", type=harness.positive, default=540, help="default: 540")
    running.add_argument("--only", nargs="+", choices=[e.name for e in QUEUE], metavar="NAME")
    running.add_argument("--again", action="store_true", help="also what is measured")
    running.add_argument("--toy", action="store_true", help="at toy size, on a CPU")
    commands.add_parser("report", help=f"write the tables of {PAGE.name}")
    options = parser.parse_args(argv)
    if options.command == "run" and not (options.toy or torch.cuda.is_available()):
        parser.error("torch sees no CUDA device here: `run --toy` runs on a CPU")
    return {"list": show_queue, "run": run, "report": report_page}[options.command](options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as an interrupt
    sys.exit(main(sys.argv[1:]))
