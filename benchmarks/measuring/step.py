"""One training step of a layer or a model, timed; the bytes that it saves, and its launches.

A step is what training does: gradients set to None (they are written, not accumulated), forward,
backward with a random `grad_output`, and for delayed scaling the `sync` that a step owes.

`saved_bytes` are unique storages that autograd holds between forward and backward, parameters
excluded (weights that FSDP2 gathers count). `launches` counts kernels, copies and fills on the CUDA
stream: the cost of a step where the work itself is small. A CPU build has no stream to count on.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.measuring import harness, memory
from benchmarks.measuring.harness import Row, sqnr_db
from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    Float8LinearConfig,
    after_step,
)
from float8.estimate.roofline import Use, passes_of_layer
from float8.linear.plan import LinearPlan
from float8.linear.weight_cache import WeightCache

MODES = ("eager", "compiled", "graphed")
STUBBED = "stubbed"  # eager, inside `stubbed_gpu`
MOST_KERNELS = 40  # of a step, that a row names
ON_THE_STREAM = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a Kineto trace's events


def settled(recipe: str) -> Float8LinearConfig:
    """A recipe's config; delayed scales follow from the history after one step, not after 16."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    if not config.uses_delayed_scaling:
        return config
    return replace(config, delayed_scaling=DelayedScalingConfig(history_len=1))


def compiled(layer: nn.Module, mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What calls a layer in one of `MODES`; ``graphed`` is compiled with CUDA graphs."""
    if mode in ("eager", STUBBED):
        return layer
    how = "reduce-overhead" if mode == "graphed" else None
    run: Any = torch.compile(layer, fullgraph=True, dynamic=False, mode=how)
    return run


@dataclass(frozen=True)
class Step:
    """One training step of `layer`; `run` is what calls it, compiled where asked.

    Args:
        layer: a layer or a model.
        run: what calls it.
        x, grad_output: of every call.
        microbatches: calls of a step.
        cache: of its weights, which a step casts once.
    """

    layer: nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    grad_output: torch.Tensor
    microbatches: int = 1
    cache: WeightCache | None = None
    owes: bool = field(init=False)

    def __post_init__(self) -> None:
        layers = (m for m in self.layer.modules() if isinstance(m, Float8Linear))
        configs = [layer.config for layer in layers]
        owes = any(c.uses_delayed_scaling or c.enable_fsdp_float8_all_gather for c in configs)
        object.__setattr__(self, "owes", owes)

    def __call__(self) -> None:
        for parameter in self.layer.parameters():
            parameter.grad = None
        if self.cache is not None:
            self.cache.refresh()
        for _ in range(self.microbatches):
            self.x.grad = None
            self.run(self.x).backward(self.grad_output)
        if self.owes:
            after_step(self.layer)


def saved_bytes(step: Step) -> int:
    """Bytes that autograd keeps from forward for backward: unique storages, not parameters."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        for storage in (plain.untyped_storage() for plain in memory.plain_tensors(tensor)):
            kept[storage._cdata] = storage.nbytes()  # on the meta device addresses are 0
        return tensor.detach()  # an op that saves its own output would never free it

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = step.run(step.x)  # held, so that no storage is freed and its address used again
    for plain in (part for p in step.layer.parameters() for part in memory.plain_tensors(p)):
        kept.pop(plain.untyped_storage()._cdata, None)
    del output
    return sum(kept.values())


def traced(step: Callable[[], object], device: str) -> list[Row]:
    """The kernels, copies and fills that one step puts on the stream; on a CPU its ops, nested."""
    on_cuda = torch.device(device).type == "cuda"
    activity = torch.profiler.ProfilerActivity
    wait: Callable[[], object] = torch.cuda.synchronize if on_cuda else lambda: None
    wait()
    # Without acc_events torch 2.11 warns that events of earlier cycles are dropped.
    with torch.profiler.profile(
        activities=[activity.CUDA if on_cuda else activity.CPU], acc_events=True
    ) as profile:
        step()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return events_in(trace, ON_THE_STREAM if on_cuda else ("cpu_op",))


def events_in(trace: Path, categories: Collection[str] = ON_THE_STREAM) -> list[Row]:
    """Those of a trace in Chrome's format, which includes events of the host."""
    events: list[Row] = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("cat") in categories]


# Kinds of a step's time, and what the names of their kernels (on a CPU, ops) contain; the first
# that fits counts. Inductor names a kernel after its ops, and may name it after a product or
# attention that it only prepares: among its kernels are casts of torchao's, perhaps fused with
# their producer, and what is left, no GEMM. All of float8's are casts but its GEMMs, `_kernel`.
KINDS = {
    "cast_ms": r"^_\w+_kernel|^triton_(poi|red|per)\w*_(amax|abs|clamp)(_|$)|^float8::",
    "other_ms": r"^triton_(poi|red|per)",
    "attention_ms": r"flash|fmha|attention|cudnn",
    "gemm_ms": r"^_kernel|gemm|gemv|nvjet|cutlass|xmma|cublas|splitK|triton_tem|_mm|aten::mm",
}


def kind_of(kernel: str) -> str:
    """The key of `KINDS` of a kernel, by its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel)), "other_ms")


def split_time(events: Sequence[Row], ms: float) -> Row:
    """The milliseconds of one step by kind; ``ms`` is its time without the profiler."""
    found: Row = dict.fromkeys(KINDS, 0.0)
    for event in events:
        found[kind_of(event["name"])] += event["dur"] / 1e3
    largest = Counter[str]()
    for event in events:
        largest[event["name"]] += event["dur"]
    top = {name: us / 1e3 for name, us in largest.most_common(MOST_KERNELS)}
    return {**found, "idle_ms": max(0.0, ms - sum(found.values())), "kernels_ms": top}


def compare(step: Step, baseline: Step, options: argparse.Namespace) -> Row:
    """The bytes that a step saves, its launches, and its output's SQNR to the baseline's."""
    saved = saved_bytes(step)
    row: Row = {"saved_mib": saved / 2**20, "saved_ratio": saved / saved_bytes(baseline)}
    if not harness.on_cpu(options):
        row["launches"] = len(traced(step, options.device))
    if step is not baseline:
        row["sqnr_db"] = sqnr_db(*(each.run(step.x).detach() for each in (baseline, step)))
    return row


def in_turns(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    options: argparse.Namespace,
    split: bool = False,
    **row: Any,
) -> list[Row]:
    """A row per candidate, timed in turns; the first is the baseline.

    Candidates that are a `Step` are compared with it, too, and with ``split`` profiled. Those by
    CUDA graphs are not: an output is overwritten by the next run. Nor are those without a GPU.
    """
    rows: list[Row] = []
    with torch._dynamo.config.patch(recompile_limit=64):  # all share the code of nn.Module's call
        rounds = harness.take_turns(makers, options)
        first = next(iter(makers))
        base = rounds.runs[first]
        for name in makers:
            rows.append({**row, "layer": name, **rounds.row(name, first)})
            mine = rounds.runs.get(name)
            if row.get("mode") in ("graphed", STUBBED):
                continue
            if isinstance(mine, Step) and isinstance(base, Step):
                rows[-1] |= compare(mine, base, options)
                if split:
                    rows[-1] |= split_time(traced(mine, options.device), rows[-1]["ms"])
    return rows


def moved_by_casts(plan: LinearPlan, elements: Sequence[int]) -> tuple[float, int]:
    """The bytes that the casts of one step move on CUDA, and their launches: counted.

    Args:
        plan: of the recipe.
        elements: of input, weight and grad_output.
    """
    operands = passes_of_layer(plan, Use())
    moved = sum(
        size * each.bytes_per_element
        for size, passes in zip(elements, operands, strict=True)
        for each in passes
    )
    return moved, sum(map(len, operands))
