"""Does every recipe compute the right numbers on this GPU? A minute, with torch and Triton alone.

    python scripts/gpu_first.py

Each row is one recipe, dense (`Float8Linear`) or grouped (`grouped_mm`), eager or compiled, on
random data of a size that fits a GPU's cache. Its output and both gradients are compared with those
of ``emulate=True``, which multiplies the same float8 operands in plain PyTorch on the same GPU:

    error = |found - emulated| / |emulated|        the largest of the three, at most `LIMIT`

Tensor cores that sum all of a contraction (fast accumulation) are 3e-3 off, others less than 1e-3.
A recipe that this GPU does not multiply is "refused", with the reason. The exit status is 1 if a
row failed. On a CPU both sides are the same product, and the program shows that it runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from float8 import Float8Linear, Float8LinearConfig, grouped_mm, sync_float8_amax_and_scale_history
from float8.config import RECIPES
from float8.kernels.products import family_of
from float8.linear.plan import plan_for

LIMIT = 0.01
M, K, N, EXPERTS = 1040, 512, 384, 4
Row = tuple[str, str, str]  # dense or grouped, recipe, eager or compiled


def rows() -> Iterator[Row]:
    """Every row; experts have no history of amaxes, so they take no delayed recipe."""
    for form, recipe, mode in product(("dense", "grouped"), RECIPES, ("eager", "compiled")):
        if (form, recipe) != ("grouped", "delayed"):
            yield form, recipe, mode


def products_of(row: Row, device: torch.device) -> tuple[str | None, str]:
    """Why this device does not multiply what a row asks for, or None; and what multiplies."""
    form, recipe, _ = row
    plan = plan_for(RECIPES[recipe], family_of(device), torch.bfloat16, grouped=form == "grouped")
    refusal = next((gemm.refusal for gemm in plan.gemms if gemm.refusal), None)
    names = dict.fromkeys(gemm.name or "high precision" for gemm in plan.gemms)
    return refusal, ", ".join(names)


def error(row: Row, device: torch.device) -> float:
    """The largest relative error of output, grad_input and grad_weight."""
    form, recipe, mode = row
    torch.manual_seed(0)
    torch.compiler.reset()
    x, g = (torch.randn(M, n, device=device).bfloat16() for n in (K, N))
    run = dense if form == "dense" else grouped
    found = run(RECIPES[recipe], x, g, mode == "compiled")
    emulated = run(replace(RECIPES[recipe], emulate=True), x, g, compiled=False)
    errors = [
        (mine - wanted).float().norm() / wanted.float().norm()
        for mine, wanted in zip(found, emulated, strict=True)
    ]
    return max(e.item() if e.isfinite() else float("inf") for e in errors)


def dense(config: Float8LinearConfig, x: Tensor, g: Tensor, compiled: bool) -> list[Tensor]:
    """Output and gradients of the second step, whose delayed scales follow from the first."""
    torch.manual_seed(1)
    linear = nn.Linear(K, N, bias=False, device=x.device, dtype=torch.bfloat16)
    layer = Float8Linear.from_float(linear, config=config)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    for _ in range(2):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.backward(g)
        sync_float8_amax_and_scale_history(layer)
    return [out.detach(), *(t.grad for t in (leaf, layer.weight) if t.grad is not None)]


def grouped(config: Float8LinearConfig, x: Tensor, g: Tensor, compiled: bool) -> list[Tensor]:
    """Output and gradients of experts, one of which has no token."""
    torch.manual_seed(1)
    w = torch.randn(EXPERTS, N, K, device=x.device).bfloat16() / K**0.5
    offs = torch.tensor([0, 33, 600, M], dtype=torch.int32, device=x.device)

    def experts(x: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(x, w.mT, offs, config)

    leaves = x.clone().requires_grad_(), w.requires_grad_()
    out = (torch.compile(experts, fullgraph=True) if compiled else experts)(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def main() -> int:
    """Print the machine and a line per row; 1 if one failed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {family_of(device)}")
    if device.type == "cuda" and torch.version.hip is None:
        asked = "name,driver_version,clocks.sm,power.draw,power.limit"
        subprocess.run(["nvidia-smi", f"--query-gpu={asked}", "--format=csv"], check=False)
    failed = 0
    for row in rows():
        begin = time.monotonic()
        refusal, gemms = products_of(row, device)
        if refusal is not None:
            print(f"refused  {' '.join(row)}: {refusal}", flush=True)
            continue
        try:
            found = error(row, device)
            result = f"error {found:.1e}"
            good = found <= LIMIT
        except Exception as e:  # the other rows are wanted too
            first, _, _ = str(e).partition("\n")
            good, result = False, f"{type(e).__name__}: {first[:200]}"
        failed += not good
        seconds = time.monotonic() - begin
        name = f"{'pass' if good else 'FAIL'}     {' '.join(row)}"
        print(f"{name}: {result}, {seconds:.1f} s, by {gemms}", flush=True)
    print(f"{failed} of {len(list(rows()))} rows failed")
    return int(failed > 0)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sys.exit(main())
