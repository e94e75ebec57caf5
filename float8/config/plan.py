"""The three GEMMs that a config means, and which casts of them are one.

Every operand is stated in the orientation in which its GEMM reads it. A second use with no config
of its own takes the first one's, in its own orientation: rowwise stays one scale per row of what
that GEMM reads. ``None`` in place of an `OperandCast` means high precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from float8.arguments import check_bool
from float8.config.casts import OperandCast
from float8.formats import E5M2, Format
from float8.granularity import WHOLE


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM runs.

    Args:
        use_fast_accum: accumulate in the tensor core's reduced-precision accumulator instead of
            promoting partial sums to float32 (a Hopper option). Products whose scales change along
            the contraction (blockwise) are promoted at each change, so they have no such option
            and ignore it, as the plan shows. The reference path ignores it too.
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        check_bool(self.use_fast_accum, "use_fast_accum")


@dataclass(frozen=True)
class Gemm:
    """One product ``a @ b.T``.

    Args:
        a, b: the casts of the operands; both None where the product is in high precision.
        use_fast_accum: see `GemmConfig`.
    """

    a: OperandCast | None
    b: OperandCast | None
    use_fast_accum: bool = False


@dataclass(frozen=True)
class LinearPlan:
    """The three GEMMs of a layer, and which second uses share the first use's bytes.

    For M tokens, K input features and N output features:

    Args:
        output: a = x_MK, b = w_NK.
        grad_input: a = g_MN, b = w_KN.
        grad_weight: a = g_NM, b = x_KM.
        reuses_input: x_KM of grad_weight is the transpose of the float8 x_MK of output.
        reuses_weight: w_KN of grad_input is the transpose of the float8 w_NK of output.
        reuses_grad_output: g_NM of grad_weight is the transpose of grad_input's g_MN.
        smooth_input: x and w are multiplied by factors before their casts.
    """

    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    reuses_input: bool
    reuses_weight: bool
    reuses_grad_output: bool
    smooth_input: bool = False


_PLANS: dict[str, tuple[LinearPlan, bool, bool]] = {}


def key_of_plan(plan: LinearPlan, emulate: bool, pad: bool) -> str:
    """A string that stands for a plan and how it runs: equal for equal ones, quick to compare."""
    key = repr((plan, emulate, pad))
    _PLANS.setdefault(key, (plan, emulate, pad))
    return key


def plan_of_key(key: str) -> tuple[LinearPlan, bool, bool]:
    """The inverse of `key_of_plan`: the plan, ``emulate`` and ``pad``."""
    return _PLANS[key]


def same_bytes(first: OperandCast | None, second: OperandCast | None) -> bool:
    """Whether the second use of an operand reads the transpose of the first use's bytes."""
    return first is not None and second is not None and first.transposed() == second


def gemm(
    names: tuple[str, str, str], a: OperandCast | None, b: OperandCast | None, config: GemmConfig
) -> Gemm:
    """The product of two resolved casts; ValueError if no hardware multiplies the two.

    ``names`` are the product's and the fields of its two operands, for the message.
    """
    product, name_a, name_b = names
    if (a is None) != (b is None):
        off, on = (name_a, name_b) if a is None else (name_b, name_a)
        raise ValueError(
            f"the {product} GEMM has one operand in high precision ({off}) and one in float8 "
            f"({on}); no hardware multiplies the two. Disable both, or give {off} a float8 cast"
        )
    if a is not None and b is not None and _is_e5m2(a.format) and _is_e5m2(b.format):
        raise ValueError(
            f"the {product} GEMM would multiply E5M2 by E5M2 ({name_a}, {name_b}), which no "
            "hardware does; set target_dtype=torch.float8_e4m3fn for one of them"
        )
    has_fast_accum = a is None or b is None or a.block[1] == b.block[1] == WHOLE
    return Gemm(a, b, config.use_fast_accum and has_fast_accum)


def _is_e5m2(fmt: Format) -> bool:
    return fmt.name.startswith(E5M2.name)
