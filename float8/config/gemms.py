"""The three GEMMs that a config asks for, and the casts of their operands.

Every operand is stated in the orientation in which its GEMM reads it. A second use with no config
of its own takes the first one's, in its own orientation: rowwise stays one scale per row of what
that GEMM reads. ``None`` in place of an `OperandCast` means high precision.
`float8.linear.plan.plan_for` makes the plan of a device from these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from float8.arguments import check_bool
from float8.config.casts import OperandCast
from float8.formats import E5M2, Format


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM runs.

    Args:
        use_fast_accum: accumulate in the tensor core's reduced-precision accumulator instead of
            promoting partial sums to float32 (a Hopper option); the error grows with the number of
            terms (docs/quality.md). None is False for a linear layer. For experts it is True where
            a sum has at most 4,096 terms: features, or for the weight's gradient the mean number of
            tokens of an expert. With 4,096 terms an emulated fast sum of a weight's gradient has a
            seventh of the error of its casts, with 28,672 as much as they. Products whose scales
            change along the contraction (blockwise) are promoted at each change, so they have no
            such option and ignore it, as the plan shows. The reference path ignores it too.
    """

    use_fast_accum: bool | None = None

    def __post_init__(self) -> None:
        if self.use_fast_accum is not None:
            check_bool(self.use_fast_accum, "use_fast_accum")


GEMM_NAMES = ("output", "grad_input", "grad_weight")


@dataclass(slots=True, unsafe_hash=True)
class GemmCasts:
    """What a config says of one product ``a @ b.T``.

    Args:
        a, b: the casts of the operands; both None where the product is in high precision. With
            ``emulate`` one may be: the other is dequantised to the compute dtype.
        use_fast_accum: see `GemmConfig`.
    """

    a: OperandCast | None
    b: OperandCast | None
    use_fast_accum: bool | None = None


@dataclass(slots=True, unsafe_hash=True)
class ThreeGemms:
    """The products of a layer. For M tokens, K input features and N output features:

    Args:
        output: a = x_MK, b = w_NK.
        grad_input: a = g_MN, b = w_KN.
        grad_weight: a = g_NM, b = x_KM.

    Attributes:
        all: the three, in the order of `GEMM_NAMES`.
    """

    output: GemmCasts
    grad_input: GemmCasts
    grad_weight: GemmCasts
    all: tuple[GemmCasts, GemmCasts, GemmCasts] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.all = self.output, self.grad_input, self.grad_weight


_MX = ((1, 32), (32, 32))
_OR = "or set emulate=True to run them in plain PyTorch"


def check_hardware(
    names: tuple[str, str, str], a: OperandCast | None, b: OperandCast | None
) -> None:
    """Raise ValueError if no hardware multiplies two resolved casts.

    ``names`` are the product's and the fields of its two operands, for the message.
    """
    product, name_a, name_b = names
    for name, cast in ((name_a, a), (name_b, b)):
        if cast is not None and (cast.block in _MX) != cast.scale_format.is_e8m0:
            raise ValueError(
                f"the {product} GEMM has blocks {cast.block} with {cast.scale_format} ({name}), "
                "which no hardware multiplies: give Blockwise(1, 32) or (32, 32) with "
                "ScaleFormat.E8M0 (OCP MX), another granularity with FLOAT32 or POWER_OF_TWO, "
                f"{_OR}"
            )
    if (a is None) != (b is None):
        off, on = (name_a, name_b) if a is None else (name_b, name_a)
        raise ValueError(
            f"the {product} GEMM has one operand in high precision ({off}) and one in float8 "
            f"({on}); no hardware multiplies the two. Disable both, give {off} a float8 cast, {_OR}"
        )
    if a is not None and b is not None and _is_e5m2(a.format) and _is_e5m2(b.format):
        raise ValueError(
            f"the {product} GEMM would multiply E5M2 by E5M2 ({name_a}, {name_b}), which no "
            f"hardware does; set target_dtype=torch.float8_e4m3fn for one of them, {_OR}"
        )


def _is_e5m2(fmt: Format) -> bool:
    return fmt.name.startswith(E5M2.name)
