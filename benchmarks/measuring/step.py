"""One training step of a layer or a model, timed; the bytes that it saves, and its launches.

A step is what training does: gradients set to None (they are written, not accumulated), forward,
backward with a random `grad_output`, and for delayed scaling the `sync` that a step owes.

`saved_bytes` are unique storages that autograd holds between forward and backward, parameters
excluded. `launches` counts kernels, copies and fills on the CUDA stream: the cost of a step
where the work itself is small. A CPU build has no stream to count on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.measuring import harness
from benchmarks.measuring.harness import Row, sqnr_db
from float8 import (
    DelayedScalingConfig,
    Float8Linear,
    Float8LinearConfig,
    sync_float8_amax_and_scale_history,
)
from float8.config import LinearPlan
from float8.estimate.roofline import Use, passes_of_layer

MODES = ("eager", "compiled")
ON_THE_STREAM = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a Kineto trace's events


def settled(recipe: str) -> Float8LinearConfig:
    """A recipe's config; delayed scales follow from the history after one step, not after 16."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    if not config.uses_delayed_scaling:
        return config
    return replace(config, delayed_scaling=DelayedScalingConfig(history_len=1))


@dataclass(frozen=True)
class Step:
    """One training step of `layer`; `run` is what calls it, compiled where asked."""

    layer: nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    grad_output: torch.Tensor
    syncs: bool = field(init=False)

    def __post_init__(self) -> None:
        layers = (m for m in self.layer.modules() if isinstance(m, Float8Linear))
        delayed = any(layer.config.uses_delayed_scaling for layer in layers)
        object.__setattr__(self, "syncs", delayed)

    def __call__(self) -> None:
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        self.run(self.x).backward(self.grad_output)
        if self.syncs:
            sync_float8_amax_and_scale_history(self.layer)


def saved_bytes(step: Step) -> int:
    """Bytes that autograd keeps from forward for backward: unique storages, not parameters."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an op that saves its own output would never free it

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = step.run(step.x)  # held, so that no storage is freed and its address used again
    for parameter in step.layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del output
    return sum(kept.values())


def launches(step: Callable[[], object], device: str) -> int | None:
    """How many kernels, copies and fills one step puts on the stream; None without a stream."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    # Without acc_events torch 2.11 warns that events of earlier cycles are dropped.
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return launches_in(trace)


def launches_in(trace: Path) -> int:
    """The same from a trace in Chrome's format, which includes events of the host."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return sum(event.get("cat") in ON_THE_STREAM for event in events)


def compare(step: Step, baseline: Step, device: str) -> Row:
    """The bytes that a step saves, its launches, and its output's SQNR to the baseline's."""
    saved = saved_bytes(step)
    row: Row = {"saved_mib": saved / 2**20, "saved_ratio": saved / saved_bytes(baseline)}
    if (launched := launches(step, device)) is not None:
        row["launches"] = launched
    if step is not baseline:
        row["sqnr_db"] = sqnr_db(*(each.run(step.x).detach() for each in (baseline, step)))
    return row


def in_turns(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    options: argparse.Namespace,
    **row: Any,
) -> list[Row]:
    """A row per candidate, timed in turns; the first is the baseline.

    Candidates that are a `Step` are compared with it, too.
    """
    rows: list[Row] = []
    with torch._dynamo.config.patch(recompile_limit=64):  # all share the code of nn.Module's call
        rounds = harness.take_turns(makers, options)
        first = next(iter(makers))
        base = rounds.runs[first]
        for name in makers:
            rows.append({**row, "layer": name, **rounds.row(name, first)})
            mine = rounds.runs.get(name)
            if isinstance(mine, Step) and isinstance(base, Step):
                rows[-1] |= compare(mine, base, options.device)
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
