"""Optimizer states in 8 or 16 bits, and the update rules that read and write them.

A state is seen as a float32 matrix (R, C), its parameter's first dimension by the rest, and
quantised in groups of ``group`` elements along C, G = ceil(C / group) of them a row; the last one
of a row may be shorter. What is kept:

========== ========================== ========================================================
form       per element                per group, float32
========== ========================== ========================================================
linear     code, E4M3 or float16      scale; ``value = code * scale``
expanded   code, E4M3                 scale, exponent; ``value = sign * (|code| / 448)^exponent
                                      * scale``
========== ========================== ========================================================

*Linear* is ``definition.cast`` in blocks of (1, group), scaled by the group's own amax.

*Expanded* is COAT's dynamic range expansion (arXiv 2410.19313, section 4.1). The magnitudes of a
group of second moments span much less, or much more, than the E4M3 codes do (448 / 2^-9, about
2^17.8). Raising them to a power k makes the two ranges equal, so that each group uses every code:

    f(x) = sign(x) * |x|^k,   k = log(448 / 2^-9) / log(largest / smallest)

over the group's nonzero magnitudes. After it the paper divides by the scale ``max|f(x)| / 448``.
Here that division comes first, ``(|x| / largest)^k * 448``, which is the same number and keeps
powers of huge and of tiny values within float32. The paper's centre ``sqrt(largest * smallest)`` is
a constant factor of x, which this normalisation takes out again. ``scale`` is the largest magnitude
(at least 2^-126), ``exponent`` is 1 / k, kept between 1 / 64 (a group of one value, or nearly: it
is coded with k = 64) and 4 (whatever lies below 2^-71 of the largest is raised to it).

Exact in every form: zeros, and in the expanded form the largest magnitude. A nonzero element
becomes 0 only in linear E4M3. An infinite or NaN element is coded as NaN and is left out of the
range of its group, so its neighbours are what they would be beside a zero. That includes the square
of a finite gradient beyond 2^64, which float32 cannot hold: torch keeps inf, which freezes its
weight for good and in silence; here the weight becomes NaN in the next step, which is seen. (Kept
at the largest float32 it would raise its neighbours' moments to 2^57, and freeze them too.)

Codes are rounded to nearest, or, with a ``chance`` per element, up or down so that the expectation
of the value is x (``stochastic.py``).

Linear codes and scales are defined to the bit (see ``definition.py``). Expanded ones depend on the
last bits of ``log2`` and ``exp2``, which each backend has its own of: codes may be neighbours.

Update rules are functions of dense float32 tensors, each step one operation that no compiler may
contract, in the order in which the Triton twins take them. Their bits agree but for the square root
of eager torch on a CPU, which MKL does not round correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from float8.formats import E4M3
from float8.kernels import compiled_coding, cpu, stochastic

E4M3_MAX, SMALLEST_CODE = E4M3.max, E4M3.smallest_subnormal
LOG2_RANGE = math.log2(E4M3_MAX / SMALLEST_CODE)  # of the E4M3 magnitudes
MIN_EXPONENT = 1 / 64
MAX_EXPONENT = 4.0
Number = float | Tensor  # a Python float, or a 0-dim tensor


def _in_whole_groups(
    function: Callable[..., tuple[Tensor, ...]], columns: int, group: int, *matrices: Tensor
) -> tuple[Tensor, ...]:
    """Apply ``function`` to what whole groups cover, and to the rest; put the results together.

    Padding would be shorter and costs a copy; and inductor on a CPU (2.13) gets loops over groups
    that do not divide wrong (see `float8.kernels.cpu`).

    Args:
        columns: of the matrix that is coded.
        matrices: (R, columns) or (R, G).
    """
    whole = columns - columns % group
    if whole in (0, columns):
        return function(*matrices)
    cuts = [whole if x.shape[1] == columns else whole // group for x in matrices]
    left = function(*(x[:, :cut] for x, cut in zip(matrices, cuts, strict=True)))
    right = function(*(x[:, cut:] for x, cut in zip(matrices, cuts, strict=True)))
    return tuple(torch.cat(pair, dim=1) for pair in zip(left, right, strict=True))


def _tiles(x_RC: Tensor, group: int) -> Tensor:
    """(R, G, extent): the matrix with its groups as the last dimension."""
    rows, columns = x_RC.shape
    extent = max(1, min(group, columns))
    return x_RC.reshape(rows, columns // extent, extent)


def encode(
    x_RC: Tensor, group: int, dtype: torch.dtype, chance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Linear codes under a scale per group: nearest even, or at random.

    Args:
        x_RC: float32 (R, C).
        group: elements that share a scale.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float16``. A nonzero element stays nonzero in
            float16, at the cost of half a smallest subnormal, 2^-41 of the group's amax.
        chance: (R, C), uniform in [0, 1): round up or down so that the expectation is x.

    Returns:
        codes (R, C), scale (R, G).
    """

    def whole(x: Tensor, *chance: Tensor) -> tuple[Tensor, Tensor]:
        tiles = _tiles(x, group)
        magnitude = tiles.abs()
        amax = torch.where(magnitude < math.inf, magnitude, 0.0).amax(2, keepdim=True)
        scale = cpu.scale_from_amax(amax, torch.finfo(dtype).max)
        chances = [_tiles(c, group) for c in chance]
        if dtype == torch.float8_e4m3fn and compiled_coding.applies(x):
            y = (magnitude * cpu.reciprocal(scale)).clamp(max=E4M3_MAX)
            rounded = compiled_coding.at_random if chance else compiled_coding.nearest
            codes = compiled_coding.codes_of(rounded(y, *chances), tiles)
        elif chance:
            codes = _cast_at_random(tiles, scale, chances[0], dtype)
        else:
            codes = cpu.cast(tiles, scale, (1, 1, -1), dtype)
        if dtype == torch.float16:
            smallest = torch.where(tiles < 0, -(2.0**-24), 2.0**-24).to(dtype)
            codes = torch.where((codes == 0) & (tiles != 0), smallest, codes)
        return codes.reshape(x.shape), scale.squeeze(2)

    if x_RC.numel() == 0:
        return _no_codes(x_RC, group, dtype)
    compiled_coding.fence(x_RC)
    codes, scale = _in_whole_groups(whole, x_RC.shape[1], group, x_RC, *_given(chance))
    return codes, scale


def _given(chance: Tensor | None) -> tuple[Tensor, ...]:
    return () if chance is None else (chance,)


def _cast_at_random(tiles: Tensor, scale: Tensor, chance: Tensor, dtype: torch.dtype) -> Tensor:
    y = (tiles.abs() * cpu.reciprocal(scale)).clamp(max=torch.finfo(dtype).max)
    return _signed(stochastic.on_grid(y, chance, dtype), tiles).to(dtype)


def _signed(y: Tensor, x: Tensor) -> Tensor:
    """y with the sign of x, NaN where x is NaN or inf."""
    y = y * x.sign()  # a zero has no sign: it stays zero
    if torch.compiler.is_compiling():
        return torch.where(x.abs() < math.inf, y, math.nan)
    return y.add_(x, alpha=0)  # in one fast pass


def decode(codes_RC: Tensor, scale_RG: Tensor, group: int) -> Tensor:
    """``codes * scale``: float32 (R, C) of linear codes."""

    def whole(codes: Tensor, scale: Tensor) -> tuple[Tensor]:
        tiles = _tiles(codes, group)
        if codes.dtype == torch.float8_e4m3fn and compiled_coding.applies(codes):
            x = compiled_coding.values(compiled_coding.numbers(tiles))
        else:
            x = tiles.to(torch.float32)
        return ((x * scale.unsqueeze(2)).reshape(codes.shape),)

    if codes_RC.numel() == 0:
        return codes_RC.to(torch.float32)
    return _in_whole_groups(whole, codes_RC.shape[1], group, codes_RC, scale_RG)[0]


def encode_expanded(
    x_RC: Tensor, group: int, chance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 codes of COAT's dynamic range expansion.

    Args:
        x_RC: float32 (R, C), of any sign.
        group: elements that share a scale and an exponent.
        chance: (R, C), uniform in [0, 1): round up or down so that the expectation is x, but never
            to 0.

    Returns:
        codes (R, C), scale (R, G), exponent (R, G).
    """

    def whole(x: Tensor, *chance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tiles = _tiles(x, group)
        scale, exponent = _range_of(tiles)
        codes = _expand(tiles, scale, exponent, *(_tiles(c, group) for c in chance))
        return codes.reshape(x.shape), scale.squeeze(2), exponent.squeeze(2)

    if x_RC.numel() == 0:
        codes, scale = _no_codes(x_RC, group, torch.float8_e4m3fn)
        return codes, scale, scale.clone()
    compiled_coding.fence(x_RC)
    matrices = (x_RC, *_given(chance))
    codes, scale, exponent = _in_whole_groups(whole, x_RC.shape[1], group, *matrices)
    return codes, scale, exponent


def _no_codes(x_RC: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x_RC.shape
    return torch.empty_like(x_RC, dtype=dtype), x_RC.new_ones(rows, -(-columns // group))


def _log2(x: Tensor) -> Tensor:
    # In float64, rounded once: on a CPU, torch's float32 logarithm and exponential of a number may
    # differ by an ulp with the number of elements beside it, and a shard of a state has to equal
    # the same rows of the whole.
    return x.to(torch.float64).log2().to(torch.float32)


def _exp2(x: Tensor) -> Tensor:
    return x.to(torch.float64).exp2().to(torch.float32)


def _range_of(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """scale and exponent (R, G, 1) of the nonzero finite magnitudes of each group."""
    magnitude = tiles.abs()
    finite = torch.where(magnitude < math.inf, magnitude, 0.0)
    largest = finite.amax(2, keepdim=True).clamp(min=2.0**-126)
    smallest = torch.where(finite > 0, finite, math.inf).amin(2, keepdim=True)
    log2_range = _log2(largest) - _log2(smallest)  # -inf for a group of zeros
    return largest, (log2_range * (1 / LOG2_RANGE)).clamp(MIN_EXPONENT, MAX_EXPONENT)


def _expand(tiles: Tensor, scale: Tensor, exponent: Tensor, chance: Tensor | None = None) -> Tensor:
    factor = cpu.reciprocal(scale)
    if chance is not None:
        factor = factor * (1 + 2.0**-22)  # the largest must not come out just below 448
    ratio = (tiles.abs() * factor).clamp(max=1.0)
    y = _exp2(_log2(ratio) * cpu.reciprocal(exponent)) * E4M3_MAX
    y = y.clamp(SMALLEST_CODE, E4M3_MAX)
    if compiled_coding.applies(tiles):
        return _expand_compiled(y, tiles, exponent, chance)
    if chance is not None:
        y = stochastic.on_expanded_grid(y, chance, exponent)
    return _signed(y, tiles).to(torch.float8_e4m3fn)


def _expand_compiled(y: Tensor, x: Tensor, exponent: Tensor, chance: Tensor | None) -> Tensor:
    if chance is None:
        n = compiled_coding.nearest(y)
    else:
        n = compiled_coding.at_random_expanded(y, chance, exponent)
    return compiled_coding.codes_of(torch.where(x == 0, 0.0, n), x)


def decode_expanded(codes_RC: Tensor, scale_RG: Tensor, exponent_RG: Tensor, group: int) -> Tensor:
    """``sign * (|codes| / 448)^exponent * scale``: float32 (R, C) of expanded codes."""

    def whole(codes: Tensor, scale: Tensor, exponent: Tensor) -> tuple[Tensor]:
        tiles = _tiles(codes, group)
        if compiled_coding.applies(codes):
            n = compiled_coding.numbers(tiles)
            value = compiled_coding.expanded_values(n, exponent.unsqueeze(2))
        else:
            x = tiles.to(torch.float32)
            log2_ratio = _log2(x.abs() * (1 / E4M3_MAX))
            value = _exp2(log2_ratio * exponent.unsqueeze(2)).copysign(x)
        value = value * scale.unsqueeze(2)
        return (value.reshape(codes.shape),)

    if codes_RC.numel() == 0:
        return codes_RC.to(torch.float32)
    return _in_whole_groups(whole, codes_RC.shape[1], group, codes_RC, scale_RG, exponent_RG)[0]


def adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Number,
    decoupled: bool = True,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam (arXiv 1412.6980, algorithm 1), its decay decoupled (arXiv 1711.05101).

    Args:
        p, g, m, v: float32 parameter, gradient, first and second moment, of one shape.
        lr, step: Python numbers, or 0-dim tensors, which do not recompile; step counts from 1.
        decoupled: decay the parameter (AdamW); otherwise add ``weight_decay * p`` to g (Adam).
        maximize: ascend.

    Returns:
        new p, m and v; NaN and inf gradients go where they go in ``torch.optim``.
    """
    g = -g if maximize else g
    if decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay != 0:
        g = g + p * weight_decay
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    step_size, root = adam_factors(lr, beta1, beta2, step)
    return p - (m / (v.sqrt() * root + eps)) * step_size, m, v


def adam_factors(lr: Number, beta1: float, beta2: float, step: Number) -> tuple[Number, Number]:
    """``lr / (1 - beta1^step)`` and ``1 / sqrt(1 - beta2^step)``, computed in float64."""
    if not isinstance(step, Tensor):
        step_size = lr / (1 - beta1**step)
        root: Number = 1 / math.sqrt(1 - beta2**step)
        return step_size, root
    # The largest of 16 copies: inductor stores what a reduction gives, and would otherwise repeat
    # the powers for every element (2.13 on a CPU: half of the time of a step).
    step64 = step.to(torch.float64).expand(16)
    size64 = lr / (1 - torch.pow(beta1, step64))
    root64 = (1 - torch.pow(beta2, step64)).rsqrt()
    return size64.to(torch.float32).amax(0), root64.to(torch.float32).amax(0)


def sgd_momentum(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: Number,
    momentum: float,
    step: Number,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """One step of SGD with momentum, as ``torch.optim.SGD`` defines it.

    Args:
        p, g, m: float32 parameter, gradient and momentum, of one shape; m is 0 before step 1.
        step: counts from 1: the first gradient enters the momentum undampened.

    Returns:
        new p and m.
    """
    g = -g if maximize else g
    if weight_decay != 0:
        g = g + p * weight_decay
    kept: Number = 1 - dampening
    if isinstance(step, Tensor):
        kept = torch.where(step == 1, 1.0, kept).to(torch.float32)
    elif step == 1:
        kept = 1.0
    m = m * momentum + g * kept
    update = g + m * momentum if nesterov else m
    return p - update * lr, m


def lion(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """One step of Lion (arXiv 2302.06675, algorithm 2), its decay decoupled.

    Returns:
        new p and m.
    """
    g = -g if maximize else g
    p = p * (1 - lr * weight_decay)
    mixed = m * beta1 + g * (1 - beta1)
    direction = torch.where(mixed.isnan(), mixed, mixed.sign())  # sign() makes 0 of NaN
    return p - direction * lr, m * beta2 + g * (1 - beta2)
