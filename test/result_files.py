"""Result files as the benchmarks write them, of a device whose times the model made up."""

import json
from pathlib import Path

import torch

from float8.config import RECIPES
from float8.estimate.devices import BF16, Device
from float8.estimate.roofline import (
    Shape,
    Use,
    gemm_seconds,
    kinds_of_plan,
    layer_seconds,
    saved_bytes,
)
from float8.linear.plan import plan_for

H100 = "NVIDIA H100 80GB HBM3"


def write(path: Path, benchmark: str, rows: list[dict], device=H100, **fields):
    environment = {"device": device, "capability": None if "Xeon" in device else [9, 0]}
    fields |= {"benchmark": benchmark, "command": "", "environment": environment, "rows": rows}
    path.write_text(json.dumps(fields))
    return path


def matmul_rows(device: Device, shapes: list[Shape]) -> list[dict]:
    return [
        {
            "shape": f"name ({s})", "granularity": kind,
            "ms": gemm_seconds(device, kind, s) * 1e3,
            "baseline_ms": gemm_seconds(device, BF16, s) * 1e3,
        }
        for s in shapes
        for kind in device.products
        if kind != BF16
    ]  # fmt: skip


def linear_rows(device: Device, shapes: list[Shape]) -> list[dict]:
    rows = []
    for shape in shapes:
        plain = layer_seconds(device, shape, None, Use()).total
        kept = saved_bytes(shape, None, Use())
        for recipe, config in RECIPES.items():
            plan = plan_for(config, device.arch, torch.bfloat16, shape.E is not None)
            if not set(kinds_of_plan(plan, Use()).values()) <= set(device.products):
                continue
            seconds = layer_seconds(device, shape, plan, Use()).total
            saved = saved_bytes(shape, plan, Use())
            rows.append(
                {"shape": f"({shape})", "layer": recipe, "ms": seconds * 1e3,
                 "ratio": seconds / plain, "saved_ratio": saved / kept}
            )  # fmt: skip
    return rows
