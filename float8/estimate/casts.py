"""What casting costs: which passes over memory turn an operand into float8, and what they move.

An operand of E elements, 2 bytes each (bfloat16), enters two GEMMs: once as it lies in memory and
once transposed, because tensor cores read the contraction last. Bytes moved per element by the
fused kernels, one row per way of casting:

==================================== ============ ========== ==================================
cast                                 as it lies   transposed both at one time
==================================== ============ ========== ==================================
dynamic tensorwise                   2 + 3 = 5    2 + 3 = 5  2 + 4 = 6
delayed or static tensorwise         3            3          4
dynamic rowwise                      3            2 + 3 = 5  3 + 3 = 6
dynamic 1x128, 128x128               3            3          4
==================================== ============ ========== ==================================

3 = 2 read + 1 written; 4 = 2 read + 1 written in each orientation. The 2 before a plus is a pass of
its own that finds scales: a tensor's scale, or a column's, needs elements that no one processor
sees. A row, or a block of 128, is read once and scaled on the chip; a delayed cast notes its amax
on the way, and a cast of rows the amaxes of the columns for the pass that follows. A weight is cast
in forward as it lies and in backward transposed, with forward's scale where the two are the same
cast (3 bytes), unless a step's microbatches share cached casts.

The reference (plain PyTorch, where float8 is emulated) finds scales in a pass of its own always,
for delayed casts too, and needs no second copy for a transpose that has the same bytes.

Every pass is one launch. Amaxes of columns are gathered by many processors, into zeros that a
launch of its own writes: a rowwise cast that includes columns is three launches.

A float32 weight is taken to run under autocast to bfloat16, and is rounded before it is cast: a
pass of 6 bytes, in forward and again in backward, or once for a cached cast.

Scales themselves are left out: at most 4 bytes per 128 elements. So are the launches that fill in a
static scale, or repeat a tensor's scale for every row beside a rowwise one, and the conversion that
``nn.Linear`` needs of a float32 weight too.
"""

from __future__ import annotations

from dataclasses import dataclass

from float8.config import LinearPlan, OperandCast, ScalingType
from float8.granularity import WHOLE, Block
from float8.kernels.scaled_mm import ROWWISE, TENSORWISE

READ = 2  # bytes of a bfloat16 element
WRITE = 1  # bytes of a float8 element
LARGEST = 2**30  # of any size or count: beyond, sums of bytes leave the range of 64 bits
GIVEN = "given"  # the scale is known before the cast: delayed and static
BY_LINE, BY_SQUARE = "1x128", "128x128"
CONVERT = 4 + 2  # bytes read and written per element to round float32 to bfloat16

# Does a fused kernel need a pass of its own to find scales? (as it lies, transposed)
_SEARCHES: dict[str, tuple[bool, bool]] = {
    TENSORWISE: (True, True),
    ROWWISE: (False, True),
    BY_LINE: (False, False),
    BY_SQUARE: (False, False),
    GIVEN: (False, False),
}


@dataclass(frozen=True)
class Pass:
    """One pass over an operand's memory: its name, and the bytes it moves per element."""

    name: str
    bytes_per_element: int


FILL = Pass("fill", 0)  # a launch that writes a few zeros


@dataclass(frozen=True)
class Use:
    """How a layer is used.

    Args:
        training: forward and backward; False is forward alone.
        weight_trains: whether the weight gradient is wanted.
        weights_cached: the weight is cast once per step, in both orientations, instead of in every
            forward and again in every backward; the casts stay in memory, 2 bytes per element.
        gradient_accumulation: microbatches per step, which share a cached cast.
        converts_weight: the weight is float32 and is rounded to bfloat16 before it is cast.

    Raises:
        ValueError: gradient_accumulation is not a count, or absurdly large.
    """

    training: bool = True
    weight_trains: bool = True
    weights_cached: bool = False
    gradient_accumulation: int = 1
    converts_weight: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.gradient_accumulation):
            raise ValueError(
                f"gradient_accumulation={self.gradient_accumulation!r} must be a count of "
                f"microbatches, at least 1 and at most {LARGEST}"
            )

    def caches_weight(self, plan: LinearPlan) -> bool:
        """Whether the weight is cached: only one whose two GEMMs are both in float8 is."""
        both = plan.output.b is not None and plan.grad_input.b is not None
        return self.weights_cached and both


def is_count(value: object) -> bool:
    """Whether this is an integer from 1 to `LARGEST`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


def kind_of(block: Block) -> str:
    """Which row of the table a block belongs to; blocks that no hardware takes count as 1x128."""
    names: dict[Block, str] = {
        (WHOLE, WHOLE): TENSORWISE,
        (1, WHOLE): ROWWISE,
        (128, 128): BY_SQUARE,
    }
    return names.get(block, BY_LINE)


def pass_name(what: str, kind: str, transposed: bool) -> str:
    """Such as ``amax rowwise transposed``: the key of `float8.estimate.devices.Device.passes`."""
    return f"{what} {kind} transposed" if transposed else f"{what} {kind}"


def one_cast(
    cast: OperandCast | None, transposed: bool, emulates: bool, scale_known: bool = False
) -> list[Pass]:
    """The passes that make one float8 copy; none for an operand in high precision."""
    if cast is None:
        return []
    copy = Pass(pass_name("cast", _rate_kind(cast), transposed), READ + WRITE)
    return [copy] if scale_known else [*_search(cast, transposed, emulates), copy]


def both_casts(
    first: OperandCast | None, second: OperandCast | None, same_bytes: bool, emulates: bool
) -> list[Pass]:
    """The passes for an operand that is wanted as it lies and transposed, at one time."""
    if emulates and same_bytes:  # the transpose is a view, which the reference multiplies as well
        return one_cast(first, False, emulates)
    together = first is not None and second is not None and _rate_kind(first) == _rate_kind(second)
    if emulates or not together:
        return one_cast(first, False, emulates) + one_cast(second, True, emulates)
    assert first is not None
    if _rate_kind(first) == ROWWISE:
        names = [pass_name("cast", ROWWISE, transposed) for transposed in (False, True)]
        return [FILL, *(Pass(name, READ + WRITE) for name in names)]
    copies = Pass(pass_name("cast", _rate_kind(first), False), READ + 2 * WRITE)
    return [*_search(first, False, emulates), copies]


def _rate_kind(cast: OperandCast) -> str:
    return kind_of(cast.block) if cast.scaling_type is ScalingType.DYNAMIC else GIVEN


def _search(cast: OperandCast, transposed: bool, emulates: bool) -> list[Pass]:
    if emulates:
        searches = cast.scaling_type is not ScalingType.STATIC
    else:
        searches = _SEARCHES[_rate_kind(cast)][transposed]
    name = pass_name("amax", kind_of(cast.block), transposed)
    if not searches:
        return []
    fills = not emulates and transposed and _rate_kind(cast) == ROWWISE
    return [*([FILL] if fills else []), Pass(name, READ)]


def passes_of_layer(
    plan: LinearPlan, use: Use, emulates: bool
) -> tuple[list[Pass], list[Pass], list[Pass], float]:
    """The passes over input, weight and grad_output of one layer for one batch of tokens.

    Returns:
        the three lists, and how many times per batch the weight's passes run: 1, or a fraction
        where several microbatches share them.
    """
    weighs = use.training and use.weight_trains
    x = both_casts(
        plan.output.a,
        plan.grad_weight.b if weighs else None,
        weighs and plan.reuses_input,
        emulates,
    )
    g: list[Pass] = []
    if use.training:
        g = both_casts(
            plan.grad_input.a,
            plan.grad_weight.a if weighs else None,
            weighs and plan.reuses_grad_output,
            emulates,
        )
    times = 1 / use.gradient_accumulation if use.caches_weight(plan) else 1.0
    return x, _weight_passes(plan, use, emulates), g, times


def _weight_passes(plan: LinearPlan, use: Use, emulates: bool) -> list[Pass]:
    first, second = plan.output.b, plan.grad_input.b
    converted = [Pass("convert", CONVERT)] if use.converts_weight else []
    if use.caches_weight(plan):
        return converted + both_casts(first, second, plan.reuses_weight, emulates)
    forward = converted + one_cast(first, False, emulates)
    if not use.training:
        return forward
    again = one_cast(second, True, emulates, scale_known=plan.reuses_weight)
    return forward + converted + again
