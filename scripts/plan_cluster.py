"""Predict the cost of a training step on a cluster, in bf16 and in float8.

    python scripts/plan_cluster.py --model 70b --gpus 64 512 4096 16384
    python scripts/plan_cluster.py --model 405b --tensor-parallel 8 --strategy hsdp --device B200
    python scripts/plan_cluster.py --layers 24 --hidden 2048 --feed-forward 5632 --heads 16 \\
        --kv-heads 16 --vocabulary 32000

No number that this prints was measured: each follows from published sizes, datasheets, and the
assumptions that are printed below the table and can be changed by options.

columns
  node GB, network GB  what one GPU sends per step over its link inside the node (NVLink, Infinity
                       Fabric) and over its network link: weights, gradients, replicas, activations
  memory GB            weights and gradients in float32 (8 bytes per parameter that the GPU owns),
                       Adam's moments (8 more; 2.1 with --optimizer float8_adamw), two gathered
                       blocks, embedding and head, activations, logits; "!" where the device has
                       less
  compute ms           linear layers by float8.estimate, attention, norms and SwiGLU
  comm ms              all communication, without overlap
  step ms              the prediction; speed-up is bf16's step over this one

docs
  The formulas are at the top of scripts/training/cluster.py: bytes of rings, memory, time. float8
  is dynamic or delayed scaling with one scale per weight, whose gathers take one byte per element
  (enable_fsdp_float8_all_gather=True) and one all-reduce per step for all scales
  (float8.after_step). Gradients as float8 (float8.distributed.gradients) are --gradients float8.
  python benchmarks/bench_comm.py counts the bytes that are sent, on any machine. python
  benchmarks/bench_linear.py times a layer; --device FILE takes figures that
  benchmarks/measure_device.py measured. Activations kept of a block, in
  bytes per token (C hidden, F feed-forward, K keys and values): 12 C + 2 K + 6 F in bf16; 11 C + 2
  K + 5 F in float8, whose linear layers keep one byte of an input, but a copy of their own of
  attention's result.

left out
  Pipeline and context parallelism, stragglers, failures, the data loader, the network's topology
  and congestion, fragmentation of memory, communicators' buffers, and that kernels which
  communicate slow down those which compute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.shapes import HEAD_DIM
from float8.estimate import Device
from float8.estimate.devices import find_device
from scripts.training.cluster import BF16, MODELS, NODE, Assumptions, Cluster, Model, Step

RECIPES = ("tensorwise", "delayed")  # those whose weights are gathered as float8
GIGA = 1e9
# Per GPU and direction inside a node, memory; datasheets print both directions of a link together.
# fmt: off
BOARDS: dict[str, tuple[float, float, str]] = {
    "H100 SXM":   (450e9,  80e9, "datasheet: NVIDIA H100 SXM, NVLink 900 GB/s both ways, 80 GB"),
    "H200 SXM":   (450e9, 141e9, "datasheet: NVIDIA H200 SXM, NVLink 900 GB/s both ways, 141 GB"),
    "B200":       (900e9, 180e9, "datasheet: NVIDIA HGX B200, NVLink 1.8 TB/s both ways, 180 GB"),
    "B300":       (900e9, 288e9, "datasheet: NVIDIA HGX B300, NVLink 1.8 TB/s both ways, 288 GB"),
    "MI300X":     (448e9, 192e9, "datasheet: AMD MI300X, 7 links of 128 GB/s both ways, 192 GB"),
}
# fmt: on
NETWORK = 50e9
NETWORK_SOURCE = "datasheet: one 400 Gb/s port per GPU (ConnectX-7, as in NVIDIA DGX H100)"
# Bytes per gradient, scattered and summed over replicas. float8 shares a float32 scale among 1024
# elements, which an all-reduce sends twice; under HSDP torch sums the shards in float32.
GRADIENTS = {"float32": (4.0, 4.0), "bf16": (2.0, 2.0), "float8": (1 + 2 * 4 / 1024, 4.0)}
# Bytes of both moments per parameter: float32; float8 with a scale per group of 128, and an
# exponent of the second (float8.optim.AdamW); the second float16 with a scale.
MOMENTS = {"adamw": 8.0, "float8_adamw": 2 + 12 / 128, "float8_adamw_v16": 3 + 8 / 128}
HEADERS = (
    *("GPUs", "layout", "precision", "node GB", "network GB", "memory GB"),
    *("compute ms", "comm ms", "step ms", "tokens/s", "speed-up"),
)


def cluster_of(gpus: int, args: argparse.Namespace, device: Device) -> Cluster:
    """The cluster of so many GPUs that the options describe.

    Raises:
        ValueError: GPUs that do not divide into whole nodes and tensor-parallel groups.
    """
    t = args.tensor_parallel
    if gpus % t or (gpus > NODE and gpus % NODE):
        raise ValueError(
            f"--gpus {gpus} does not divide into nodes of {NODE} and --tensor-parallel {t}: take "
            f"{max(1, round(gpus / NODE)) * NODE}"
        )
    shards = min(gpus, NODE) // t if args.strategy == "hsdp" else gpus // t
    return Cluster(device, gpus, t, shards, args.node_bandwidth, args.network_bandwidth)


def rows_of(step: Step, memory: float) -> list[list[str]]:
    """Two rows: in bf16 and in the recipe."""
    baseline = replace(step, recipe=BF16)
    return [_row(each, baseline, memory) for each in (baseline, step)]


def _row(step: Step, baseline: Step, memory: float) -> list[str]:
    sent = step.gather.times(2) + step.reduce + step.activations
    needed = sum(step.memory.values())
    cells = [f"{step.cluster.gpus:,}", step.cluster.layout, step.recipe]
    cells += [f"{sent.node / GIGA:,.1f}", f"{sent.network / GIGA:,.1f}"]
    cells += [f"{needed / GIGA:,.1f}{'!' if needed > memory else ''}"]
    compute = step.forward_seconds + step.backward_seconds
    cells += [f"{x * 1e3:,.0f}" for x in (compute, step.communication_seconds, step.seconds)]
    cells += [f"{step.tokens * step.cluster.gpus / step.seconds:,.0f}"]
    return [*cells, f"{baseline.seconds / step.seconds:.2f}x"]


def assumptions(args: argparse.Namespace, step: Step, board: str) -> list[str]:
    """One line per assumption, with its source."""
    assumed, model, device = step.assumed, step.model, step.cluster.device
    overlap = "overlapping compute" if assumed.overlaps else "without overlap (--no-overlap)"
    kept = "their input, recomputed in backward" if assumed.recomputes else "all that backward uses"
    return [
        f"model {model.name}: {model.parameters / GIGA:.2f}e9 parameters, {model.blocks} blocks, "
        f"hidden {model.hidden}, feed-forward {model.feed_forward}, {model.heads} heads of "
        f"{HEAD_DIM} ({model.kv_heads} of keys), vocabulary {model.vocabulary}",
        f"batch: {args.tokens} tokens per GPU and step in one microbatch, context {args.context}",
        f"node link {step.cluster.node_bandwidth / GIGA:g} GB/s each way. {board}",
        f"network link {step.cluster.network_bandwidth / GIGA:g} GB/s each way. "
        + (NETWORK_SOURCE if args.network_bandwidth == NETWORK else "given: --network-bandwidth"),
        f"assumed: collectives reach {assumed.link_efficiency:.0%} of a link (--link-efficiency) "
        f"and wait {assumed.latency * 1e6:g} us per step of log2(ranks) (--latency)",
        f"assumed: weights and gradients are sent {overlap}; the first gather, the last reduction, "
        "the scales' all-reduce and tensor-parallel activations always delay the step",
        f"assumed: gradients are sent as {args.gradients} (--gradients; float8 are summed over "
        "replicas in float32), in both precisions of the table; weights as bf16 or, of the blocks, "
        "as float8",
        f"assumed: Adam's moments take {assumed.moment_bytes:.3g} bytes per parameter "
        "(--optimizer)",
        "assumed: tensor parallel gathers activations as float8 where a float8 layer reads them in "
        "forward; all other activations are sent as bf16",
        f"assumed: blocks keep {kept}; attention reaches {assumed.attention_efficiency:.0%} of the "
        "bf16 peak (--attention-efficiency); norms, SwiGLU and AdamW run at memory bandwidth",
        "assumed: a gathered float8 weight is still charged the cast of the whole (float8.estimate "
        "knows no shards), which overstates float8's compute",
        f"compute on {device.name}, by float8.estimate:",
        *(f"  {line}" for line in device.provenance()),
    ]


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", choices=list(MODELS), help="LLaMA-3 (8b, if no sizes are given)")
    for name in ("layers", "hidden", "feed-forward", "heads", "kv-heads"):
        p.add_argument(f"--{name}", type=_count, help="in place of --model; all or none")
    p.add_argument("--vocabulary", type=_count, help="of either (128256)")
    p.add_argument("--gpus", type=_count, nargs="+", default=[8, 64, 512, 4096, 16384])
    p.add_argument("--device", default="H100", help="as float8.estimate: H100, ..., or a file")
    p.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    p.add_argument("--strategy", choices=("fsdp", "hsdp"), default="fsdp", help="hsdp: shards stay "
                   f"in a node of {NODE}, replicas across")  # fmt: skip
    p.add_argument("--tensor-parallel", type=int, choices=(1, 2, 4, 8), default=1)
    p.add_argument("--tokens", type=_count, default=8192, help="per GPU and step")
    p.add_argument("--context", type=_count, default=8192, help="tokens of a sequence")
    p.add_argument("--gradients", choices=list(GRADIENTS), default="bf16", help="what is sent")
    p.add_argument("--optimizer", choices=list(MOMENTS), default="adamw", help="in both precisions")
    p.add_argument("--node-bandwidth", type=_rate, help="bytes/s of a GPU inside its node, one way")
    p.add_argument("--network-bandwidth", type=_rate, default=NETWORK, help="bytes/s of its port")
    p.add_argument("--memory", type=_rate, help="bytes of a GPU")
    p.add_argument("--link-efficiency", type=_rate, default=Assumptions.link_efficiency)
    p.add_argument("--latency", type=float, default=Assumptions.latency, help="seconds")
    p.add_argument("--attention-efficiency", type=_rate, default=Assumptions.attention_efficiency)
    p.add_argument("--no-overlap", action="store_true", help="communication after compute")
    p.add_argument("--keep-activations", action="store_true", help="recompute nothing")
    return p


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and finite")
    return value


def model_of(args: argparse.Namespace) -> Model:
    """The preset, or the model of the given sizes.

    Raises:
        ValueError: some sizes, not all; sizes in addition to a preset; heads of another size than
        128.
    """
    names = ("layers", "hidden", "feed_forward", "heads", "kv_heads")
    sizes = [getattr(args, name) for name in names]
    vocabulary = {"vocabulary": args.vocabulary} if args.vocabulary else {}
    if not any(sizes):
        return replace(MODELS[args.model or "8b"], **vocabulary)
    if args.model or not all(sizes):
        raise ValueError(
            "a model is --model NAME, or all of "
            + ", ".join(f"--{name.replace('_', '-')}" for name in names)
        )
    blocks, hidden, feed_forward, heads, kv_heads = sizes
    if hidden != heads * HEAD_DIM:
        raise ValueError(
            f"--heads {heads} of {HEAD_DIM}, the one size that is planned here, are not --hidden "
            f"{hidden}: take --heads {max(1, round(hidden / HEAD_DIM))}"
        )
    return Model("given", blocks, hidden, feed_forward, heads, kv_heads, **vocabulary)


def board_of(args: argparse.Namespace, device: Device) -> tuple[float, str]:
    """The memory of a GPU, and where it and the node link come from; fills in the link.

    Raises:
        ValueError: a device that is in no table, without its link and memory.
    """
    link, memory, source = BOARDS.get(device.name, (0.0, 0.0, ""))
    if args.node_bandwidth or args.memory:
        source = f"given: --node-bandwidth or --memory. {source}".strip()
    args.node_bandwidth = args.node_bandwidth or link
    if not args.node_bandwidth or not (args.memory or memory):
        raise ValueError(
            f"no link and memory of device {device.name!r} are known here: give --node-bandwidth "
            "and --memory"
        )
    return args.memory or memory, source


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and its assumptions."""
    args = parser().parse_args(argv)
    scattered, summed = GRADIENTS[args.gradients]
    assumed = Assumptions(
        link_efficiency=args.link_efficiency,
        latency=args.latency,
        attention_efficiency=args.attention_efficiency,
        overlaps=not args.no_overlap,
        gradient_bytes=scattered,
        replica_bytes=summed,
        recomputes=not args.keep_activations,
        moment_bytes=MOMENTS[args.optimizer],
    )
    try:
        device, model = find_device(args.device), model_of(args)
        memory, board = board_of(args, device)
        clusters = [cluster_of(gpus, args, device) for gpus in args.gpus]
    except (TypeError, ValueError) as error:
        sys.exit(f"plan_cluster.py: {error}")
    steps = [Step(model, c, assumed, args.tokens, args.context, args.recipe) for c in clusters]
    rows = [row for step in steps for row in rows_of(step, memory)]
    print("PREDICTED, NOT MEASURED: bytes that one GPU sends, its memory and its time, per step\n")
    align = ["right", "left", "left", *["right"] * (len(HEADERS) - 3)]
    print(tabulate(rows, HEADERS, disable_numparse=True, colalign=align))
    print(f"\n! more than the {memory / GIGA:g} GB of one {device.name}\n\nwhat this rests on")
    print("\n".join(f"  {line}" for line in assumptions(args, steps[0], board)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
