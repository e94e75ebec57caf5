"""The passes over memory that cast a layer's operands, and the bytes that each moves.

Each operand enters two GEMMs, once row-major and once transposed, because tensor cores read the
contraction last. The kernels of this library move, in bytes per bfloat16 element:

==================================== ========== ========== ======================================
cast                                 row-major  transposed both orientations together
==================================== ========== ========== ======================================
dynamic tensorwise                   2 + 3 = 5  2 + 3 = 5  2 + 4 = 6
delayed or static tensorwise         3          3          4
dynamic rowwise                      3          2 + 3 = 5  2 + 4 = 6
dynamic 1x128, 128x128, 1x32 (mx)    3          3          4
==================================== ========== ========== ======================================

3 is 2 read and 1 written; 4 is 2 read and 1 written in each orientation. A leading 2 is a separate
pass that computes amaxes: the scale of a tensor, or of a column, depends on elements that no single
thread block reads. A delayed cast records its amax on the way. Forward casts the weight row-major,
backward transposed; if both casts are equal, backward reuses forward's scale (3 bytes). With cached
weights the microbatches of a step share both casts.

Every pass is one launch. Column amaxes are accumulated atomically into zeros that another launch
writes: a rowwise cast in both orientations is three launches. A float32 weight is assumed to run
under autocast to bfloat16; each cast of it first converts it, 6 bytes per element. Scales count in
blocks along one dimension, as 1/32 byte per element and orientation: 4 bytes per 128 elements, or
one byte (E8M0) per 32. Other scales, reads of scales by GEMMs, and launches that fill or repeat a
scale are ignored.

**Casts by the compiler** (`Device.compiled_casts`), as torchao's are, differ in two things. An amax
of a tensor is two launches, and a rowwise cast of columns first writes the operand transposed in
bfloat16: 5 + 3 bytes for both orientations, 4 + 3 for the transposed one. torchao's own cost model
counts the same (torchao/testing/training/roofline_utils.py).

**The plain PyTorch reference**, which emulates float8, always computes amaxes in a separate pass,
also for delayed casts. It multiplies a transposed view and needs no second copy of equal data.
"""

from __future__ import annotations

from dataclasses import dataclass

from float8.config import LinearPlan, OperandCast, ScalingType
from float8.estimate.shapes import Use
from float8.granularity import WHOLE, Block
from float8.kernels.scaled_mm import ROWWISE, TENSORWISE

READ = 2  # bytes of a bfloat16 element
WRITE = 1  # bytes of a float8 element
CONVERT = 4 + 2  # bytes read and written per element to round float32 to bfloat16
GIVEN = "given"  # the scale is known before the cast: delayed and static
ROW_BLOCKS, SQUARE_BLOCKS, MX_BLOCKS = "1x128", "128x128", "1x32"
_SCALES = {ROW_BLOCKS: 1 / 32, MX_BLOCKS: 1 / 32}  # bytes of scales per element

# Whether a fused kernel needs a separate pass to compute amaxes: (row-major, transposed).
_NEEDS_AMAX_PASS: dict[str, tuple[bool, bool]] = {
    TENSORWISE: (True, True),
    ROWWISE: (False, True),
    ROW_BLOCKS: (False, False),
    SQUARE_BLOCKS: (False, False),
    MX_BLOCKS: (False, False),
    GIVEN: (False, False),
}


@dataclass(frozen=True)
class MemoryPass:
    """One pass over an operand's memory: its name, and the bytes it moves per element."""

    name: str
    bytes_per_element: float


FILL = MemoryPass("fill", 0)  # a launch that writes a few zeros


def kind_of_block(block: Block) -> str:
    """The row of the table that a block belongs to; blocks without hardware count as 1x128."""
    kinds: dict[Block, str] = {
        (WHOLE, WHOLE): TENSORWISE,
        (1, WHOLE): ROWWISE,
        (128, 128): SQUARE_BLOCKS,
        (1, 32): MX_BLOCKS,
    }
    return kinds.get(block, ROW_BLOCKS)


def pass_name(operation: str, kind: str, transposed: bool) -> str:
    """Such as ``amax rowwise transposed``: the key of `float8.estimate.devices.Device.passes`."""
    return f"{operation} {kind} transposed" if transposed else f"{operation} {kind}"


def passes_of_layer(
    plan: LinearPlan, use: Use, emulates: bool, compiled: bool = False
) -> tuple[list[MemoryPass], list[MemoryPass], list[MemoryPass], float]:
    """The passes over input, weight and grad_output of one layer for one batch of tokens.

    Args:
        plan: of the layer.
        use: of the layer.
        emulates: by the plain PyTorch reference.
        compiled: by kernels that the compiler makes, as torchao's are.

    Returns:
        the three lists, and how many times per batch the weight's passes run: 1, or a fraction
        where several microbatches share them.
    """
    weight_gradient = use.training and use.weight_trains
    x = _both_casts(
        plan.output.a,
        plan.grad_weight.b if weight_gradient else None,
        weight_gradient and plan.reuses_input,
        emulates,
    )
    g: list[MemoryPass] = []
    if use.training:
        g = _both_casts(
            plan.grad_input.a,
            plan.grad_weight.a if weight_gradient else None,
            weight_gradient and plan.reuses_grad_output,
            emulates,
        )
    runs_per_batch = 1 / use.gradient_accumulation if use.caches_weight(plan) else 1.0
    w = _weight_passes(plan, use, emulates)
    if compiled:
        x, w, g = (_by_the_compiler(passes) for passes in (x, w, g))
    return x, w, g, runs_per_batch


def _by_the_compiler(passes: list[MemoryPass]) -> list[MemoryPass]:
    """The same casts by the compiler's kernels, which accumulate no column amaxes."""
    own: list[MemoryPass] = []
    for each in passes:
        if each.name == pass_name("amax", TENSORWISE, False):
            own += [each, FILL]
        elif each.name == pass_name("amax", ROWWISE, True):
            own.append(MemoryPass("transpose", READ + READ))
        elif each.name == pass_name("amax", ROWWISE, False):  # rows are cast by this pass
            own.append(MemoryPass("cast and transpose", READ + WRITE + READ))
        elif each == MemoryPass(pass_name("cast", ROWWISE, False), READ + 2 * WRITE):
            own.append(MemoryPass(pass_name("cast", ROWWISE, True), READ + WRITE))
        elif each is not FILL:
            own.append(each)
    return own


def _weight_passes(plan: LinearPlan, use: Use, emulates: bool) -> list[MemoryPass]:
    first, second = plan.output.b, plan.grad_input.b
    convert = [MemoryPass("convert", CONVERT)] if use.converts_weight else []
    if use.caches_weight(plan):
        return convert + _both_casts(first, second, plan.reuses_weight, emulates)
    forward = convert + _one_cast(first, False, emulates)
    if not use.training:
        return forward
    return forward + convert + _one_cast(second, True, emulates, scale_known=plan.reuses_weight)


def _one_cast(
    cast: OperandCast | None, transposed: bool, emulates: bool, scale_known: bool = False
) -> list[MemoryPass]:
    """The passes that make one float8 copy; none for an operand in high precision."""
    if cast is None:
        return []
    kind = _kind_of_cast(cast)
    copy = MemoryPass(pass_name("cast", kind, transposed), READ + _written(kind, emulates))
    return [copy] if scale_known else [*_amax_passes(cast, transposed, emulates), copy]


def _both_casts(
    first: OperandCast | None, second: OperandCast | None, same_bytes: bool, emulates: bool
) -> list[MemoryPass]:
    """The passes for an operand that is cast row-major and transposed in one call."""
    if emulates and same_bytes:  # the reference multiplies a transposed view
        return _one_cast(first, False, emulates)
    if emulates or first is None or second is None or _kind_of_cast(first) != _kind_of_cast(second):
        return _one_cast(first, False, emulates) + _one_cast(second, True, emulates)
    kind = _kind_of_cast(first)
    amaxes = _amax_passes(first, False, emulates)
    if kind == ROWWISE:  # amaxes of columns, and of rows with them
        amaxes = [FILL, MemoryPass(pass_name("amax", ROWWISE, False), READ)]
    copies = MemoryPass(pass_name("cast", kind, False), READ + 2 * _written(kind, emulates))
    return [*amaxes, copies]


def _written(kind: str, emulates: bool) -> float:
    """Bytes written per element in one orientation; rates of emulated passes leave out scales."""
    return WRITE if emulates else WRITE + _SCALES.get(kind, 0)


def _kind_of_cast(cast: OperandCast) -> str:
    return kind_of_block(cast.block) if cast.scaling_type is ScalingType.DYNAMIC else GIVEN


def _amax_passes(cast: OperandCast, transposed: bool, emulates: bool) -> list[MemoryPass]:
    kind = _kind_of_cast(cast)
    if emulates:
        needed = cast.scaling_type is not ScalingType.STATIC
    else:
        needed = _NEEDS_AMAX_PASS[kind][transposed]
    if not needed:
        return []
    amax = MemoryPass(pass_name("amax", kind_of_block(cast.block), transposed), READ)
    fills = not emulates and transposed and kind == ROWWISE
    return [FILL, amax] if fills else [amax]
