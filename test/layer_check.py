"""One check of a whole layer, used by the tests of recipes and by the planted faults.

`check_layer` trains a layer for two steps on random data with a random ``grad_output`` and compares
output and every gradient with `linear_oracle.expected`.
"""

from __future__ import annotations

from typing import Any

import linear_oracle
import pytest
import torch
from assertions import assert_error_within_baseline
from torch import Tensor, nn

from float8 import (
    Blockwise,
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Rowwise,
    ScaleFormat,
    ScalingType,
    Tensorwise,
    sync_float8_amax_and_scale_history,
)
from float8.kernels.products import MX_PRODUCT, SUPPORT, architecture

Gradients = dict[str, Tensor]


def _emulated() -> dict[str, Float8LinearConfig]:
    e4m3, e5m2, off = torch.float8_e4m3fn, torch.float8_e5m2, CastConfig(ScalingType.DISABLED)

    def cast(*fields: Any, dtype: torch.dtype = e4m3) -> CastConfig:
        return CastConfig(ScalingType.DYNAMIC, fields[0], dtype, *fields[1:])

    tensor, row, x64 = cast(Tensorwise(), dtype=e5m2), cast(Rowwise()), Blockwise(1, 64)
    byte = cast(Tensorwise(), ScaleFormat.E8M0)
    floor = cast(Rowwise(), ScaleFormat.E8M0_FLOOR, dtype=e5m2)
    small = cast(Blockwise(16, 24), ScaleFormat.POWER_OF_TWO)
    operands = {
        "E5M2": (tensor, tensor, tensor),
        "E8M0 with 1x64": (cast(x64, ScaleFormat.E8M0),) * 3,
        "E8M0 of tensors and rows": (byte, floor, floor),
        "1x32 in float32": (cast(Blockwise(1, 32)), small, tensor),
        "weight only": (off, row, off),
        "input only": (cast(Blockwise(1, 128)), off, off),
        "gradient only": (off, off, floor),
    }
    return {name: Float8LinearConfig(*casts, emulate=True) for name, casts in operands.items()}


EMULATED = _emulated()  # the configs of `linear_oracle.EMULATED`


def run(layer: nn.Module, x: Tensor, g: Tensor) -> Gradients:
    """Forward and backward; the results by the names of `linear_oracle.expected`."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(g)
    results = {"output": output.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}
    if layer.bias is not None:
        results["grad_bias"] = layer.bias.grad
    return results


def skip_if_refused(config: Float8LinearConfig) -> None:
    """Skip a test of MX formats on a GPU that does not multiply them."""
    is_mx = config.gemms.output.b is not None and config.gemms.output.b.block[-1] == 32
    if is_mx and (reason := SUPPORT[architecture()][MX_PRODUCT]) is not None:
        pytest.skip(f"{architecture()} {reason}")


def check_layer(
    recipe: str,
    shape: tuple[int, int, int] = (48, 160, 96),
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Output and gradients of a recipe are those of its quantised operands, twice in a row.

    ``recipe`` may be a name in `EMULATED`.

    Raises:
        AssertionError: with the words to run the same case again.
    """
    torch.manual_seed(seed)
    m, k, n = shape
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    x, g = torch.randn(m, k).to(dtype), (torch.randn(m, n) * 1e-3).to(dtype)
    x *= 5.0 ** -(torch.arange(m) % 4).unsqueeze(1)  # rows differ, which separates granularities
    want = linear_oracle.expected(recipe, x, linear.weight.detach(), linear.bias, g)
    layer = Float8Linear.from_float(linear.to(device), EMULATED.get(recipe, recipe))
    for step in range(2):  # delayed: the first step is dynamic, the second uses the history
        found = run(layer, x.to(device), g.to(device))
        replay = f"check_layer({recipe!r}, {shape}, {dtype}, {bias}, {seed}), step {step}"
        for name, result in found.items():
            product = want[name]
            assert_error_within_baseline(
                result.cpu(), product.exact.detach(), product.plain.detach(), 2.0, replay, name
            )
        sync_float8_amax_and_scale_history(layer)
