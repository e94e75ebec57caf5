"""Conversion of a model that was trained in bf16 to float8, without training: which scales?

A cast of a weight or an input takes one scale per tensor, per output channel (weights), per token
(inputs) or per block. The scale comes from

============== ===================================================================================
method         scale s
============== ===================================================================================
"amax"         ``amax / 448``: nothing saturates
"pow2"         the same, rounded up to a power of two, as the recipe ``rowwise`` does
"percentile"   from the 99.99th percentile of magnitudes in place of the largest
"mse"          the least squared error ``sum (x - s q(x / s))^2`` of 49 scales, 16 per octave, from
               a quarter to twice the amax scale
"sqnr"         the library's search of static input scales, among powers of two and the amax scale
============== ===================================================================================

Weights have their own scales in a resident `Float8Tensor`. Inputs are cast with dynamic scales, or
with static ones that `float8.calibrate` finds on training text. ``inputs="bf16"`` casts weights
alone: the loss of the dequantised weights.

Small models have no outliers, and large ones do: single channels whose activations are some 100
times those of the others (SmoothQuant, arXiv 2211.10438, section 3). They are planted without a
change of the function, the other way round than SmoothQuant removes them: one weight of each norm
is multiplied by a power of two, and the column of the next layer that reads it is divided by it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.measuring.harness import Row, sqnr_db
from benchmarks.quality import pretrained
from benchmarks.quality.contenders import all_but_the_head
from benchmarks.quality.run import Run, autocast, evaluate, text_of
from float8 import (
    E4M3,
    CastConfig,
    Float8LinearConfig,
    Float8Tensor,
    Rowwise,
    ScaleFormat,
    Tensorwise,
    calibrate,
    convert_to_float8_inference,
    high_precision,
)
from float8.numerics.calibration import Calibration
from scripts.training import corpus, gpt

PLAIN = "bf16"
WEIGHT_METHODS = ("amax", "pow2", "percentile", "mse")
INPUT_METHODS = ("amax", "percentile", "sqnr", "mse")
PERCENTILE = 99.99  # the default of `float8.calibrate`
FACTORS = torch.exp2(torch.arange(-32, 17) / 16)  # of the amax scale
CALIBRATION_BATCHES = 64
_ROW = CastConfig(granularity=Rowwise())
CASTS = {"tensor": CastConfig(), "channel": _ROW, "token": _ROW}  # what shares a scale
BLOCKS = {"128x128": "blockwise", "1x32": "mxfp8"}  # weights whose recipe casts inputs to match


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What decides a conversion.

    Args:
        weights: what shares a scale, and the method: "channel mse"; or "bf16".
        inputs: the same, with dynamic scales by "amax" or "pow2": "token amax"; "static" and a
            method of calibration: "static percentile"; or "bf16".
        outliers: the power of two by which one channel of each norm is larger; 1 plants none.
        seed: of the pretrained model.
        start: the run that pretrains; it has the size of the evaluation too.
    """

    weights: str
    inputs: str
    seed: int
    outliers: int
    start: Run


def convert(run: Conversion, folder: Path, data: Path | None = None, device: str = "cpu") -> Row:
    """Convert the pretrained model and evaluate it on held-out text.

    Args:
        run: whose pretrained model is in the folder.
        folder: of `pretrained`.
        data: the text.
        device: to evaluate on.

    Returns:
        ``loss`` in nats, ``weights_sqnr`` in dB, the mean over layers, and that of static inputs.
    """
    text = text_of(data)
    model = pretrained.load(run.start, folder, text).to(device).requires_grad_(False)
    plant_outliers(model, run.outliers)
    row = {} if run.weights == PLAIN else _converted(model, run, text, device)
    with high_precision(model) if run.inputs == PLAIN else nullcontext():
        row["loss"] = evaluate(model, run.start.context, text, run.start.held_out, device)
    return row


def _converted(model: gpt.GPT, run: Conversion, text: corpus.Corpus, device: str) -> Row:
    weights = {name: layer.weight.clone() for name, layer in layers(model).items()}
    row: Row = {}
    scales = None
    if run.inputs.startswith("static"):
        found = calibrated(model, run, text, device)
        scales = static_scales(found, run.inputs.split()[1])
        row["inputs_sqnr"] = statistics.fmean(
            float(found.inputs[name].sqnr(torch.tensor([scale]), E4M3))
            for name, scale in scales.items()
        )
    config = config_of(run.weights, run.inputs)
    convert_to_float8_inference(model, scales, config=config, module_filter_fn=all_but_the_head)
    shared, method = run.weights.split()
    if method in ("percentile", "mse"):
        searched = {name: scale_of(w, shared, method) for name, w in weights.items()}
        load_scales(model, weights, searched)
    row["weights_sqnr"] = statistics.fmean(
        sqnr_db(weights[name], layer.weight.dequantize()) for name, layer in layers(model).items()
    )
    return row


def config_of(weights: str, inputs: str) -> Float8LinearConfig:
    """The config of a conversion; methods that search weights' scales replace them afterwards."""
    shared, method = weights.split()
    if shared in BLOCKS:
        return Float8LinearConfig.from_recipe_name(BLOCKS[shared])
    dynamic = inputs if inputs.startswith(("tensor", "token")) else "tensor amax"
    return Float8LinearConfig(_cast(*dynamic.split()), _cast(shared, method))


def _cast(shared: str, method: str) -> CastConfig:
    cast = CASTS[shared]
    return replace(cast, scale_format=ScaleFormat.POWER_OF_TWO) if method == "pow2" else cast


def layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the blocks, by name."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: m for name, m in found.items() if name != "head"}


@torch.no_grad()
def plant_outliers(model: gpt.GPT, factor: int) -> None:
    """Multiply the first channel of each norm in the blocks, and divide what reads it."""
    for block in model.blocks:
        assert isinstance(block, gpt.Block)
        for norm, reader in (
            (block.attention_norm, block.attention.qkv),
            (block.feed_forward_norm, block.feed_forward.get_submodule("gate_up")),
        ):
            norm.weight[0] *= factor
            assert isinstance(reader, nn.Linear)
            reader.weight[:, 0] /= factor


def calibrated(model: nn.Module, run: Conversion, text: corpus.Corpus, device: str) -> Calibration:
    """The inputs of a model's layers on training text that no training step drew."""
    steps = range(run.start.steps, run.start.steps + CALIBRATION_BATCHES)
    batches = (run.start.batch_of(text, step, device) for step in steps)
    with autocast(device):
        return calibrate(model, batches, percentile=PERCENTILE, module_filter_fn=all_but_the_head)


def static_scales(found: Calibration, method: str) -> Mapping[str, float]:
    """Layer name -> the scale of its inputs."""
    if method != "mse":
        return found.static_scales(method)
    scales = {}
    for name, values in found.inputs.items():
        tried = values.amax_scale(E4M3) * FACTORS
        scales[name] = float(tried[values.sqnr(tried, E4M3).argmax()])
    return scales


def scale_of(weight_NK: Tensor, shared: str, method: str) -> Tensor:
    """The scale of a weight per "tensor", (1, 1), or per "channel", (N, 1)."""
    groups_GE = weight_NK if shared == "channel" else weight_NK.reshape(1, -1)
    magnitudes_GE = groups_GE.abs().float()
    if method == "percentile":
        largest_G1 = magnitudes_GE.quantile(PERCENTILE / 100, dim=1, keepdim=True)
        return largest_G1 / E4M3.max
    amax_scale_G1 = magnitudes_GE.amax(1, keepdim=True) / E4M3.max
    best_G1, least_G1 = amax_scale_G1, torch.full_like(amax_scale_G1, math.inf)
    for factor in FACTORS.tolist():
        tried_G1 = amax_scale_G1 * factor
        cast = Float8Tensor.from_high_precision(groups_GE, E4M3, Rowwise(), tried_G1)
        error_G1 = (cast.dequantize() - groups_GE).double().square().sum(1, keepdim=True)
        best_G1 = torch.where(error_G1 < least_G1, tried_G1, best_G1)
        least_G1 = torch.minimum(least_G1, error_G1)
    return best_G1


def load_scales(
    model: nn.Module, weights: Mapping[str, Tensor], scales: Mapping[str, Tensor]
) -> None:
    """Cast weights with other scales, and load them as a checkpoint of them loads."""
    state = model.state_dict()
    for name, weight in weights.items():
        granularity = Rowwise() if len(scales[name]) > 1 else Tensorwise()
        cast = Float8Tensor.from_high_precision(weight, E4M3, granularity, scales[name])
        state[f"{name}.weight"] = cast.float8_data.unsqueeze(-1)
        state[f"{name}.weight_scale"] = cast.scale
    model.load_state_dict(state)
