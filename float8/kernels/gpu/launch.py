"""The host code that kernel files share: registration and launches.

A kernel file holds one op: the ``@triton.jit`` kernel, the function that launches it on CUDA
tensors, the op in plain PyTorch (from ``definition.py``, for CPU tensors), and the shapes that it
returns (for FakeTensors). `register_op` makes an op of them, ``torch.ops.float8.<name>``:
torch.compile, CUDA graphs and FakeTensorMode treat it as one of torch's own.

The ops are opaque to torch.compile, not ``torch.library.triton_op``. Compiling `cast` for sm_90
without a GPU, inductor of torch 2.13 kept the kernels as they are, but not ``enable_fp_fusion``:
each ``mul.rn.f32`` of their PTX became a ``mul.f32``, which ptxas may contract. An operand that two
kernels read (rowwise) was stored twice, and the source of the GEMMs lacked `proxy_fence.stages`.

The files are imported when a CUDA tensor first needs one: importing Triton takes half a second, and
it may not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, driver

from float8.granularity import ceil_div
from float8.kernels.registration import LAUNCHERS, LIBRARY, define_op

TRITON_FORMATS: dict[torch.dtype, Any] = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
}
TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def register_op(
    schema: str,
    *,
    kernel: Callable[..., Any],
    definition: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Make an op of a kernel and its definition.

    Args:
        schema: as ``torch.library`` takes it, without the namespace.
        kernel: launches on CUDA tensors.
        definition: the same op in plain PyTorch, which CPU tensors get.
        fake: returns empty tensors of the right shapes, dtypes and strides.

    Returns:
        the op's only overload, for calling it with the least overhead.
    """
    op = define_op(schema, definition, fake, "CPU")
    register_kernel(schema.partition("(")[0], kernel)
    return op


def register_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """Let an op that is defined elsewhere run a kernel on CUDA tensors; see `register_op`."""
    LAUNCHERS[name] = kernel
    LIBRARY.impl(name, kernel, "CUDA")


# Contracting a * b + c to one rounding would change bits; Triton's own default is about to change.
NO_FUSION = {"enable_fp_fusion": False}

MOST_FORMS = 4096  # that are remembered; sizes that change at every step make many
_forms: dict[tuple[Any, ...], Form] = {}  # of `launch`


class Form:
    """The launches of a kernel on operands of the same sizes.

    Triton's own launch works out anew each time which compiled kernel it needs, which takes longer
    than all else that a cast does. A form remembers it, for all dtypes and alignments of tensors.

    Args:
        kernel: the ``@triton.jit`` function, without defaults.
        read_as: the place of an argument -> the dtype as which the kernel reads its bytes.
        numbers: the runtime arguments that come last.
        constants: the compile-time arguments, which end the signature, and Triton's options.
    """

    def __init__(
        self, kernel: Any, read_as: Mapping[int, torch.dtype], *numbers: Any, **constants: Any
    ) -> None:
        self.kernel, self.read_as = kernel, read_as
        self.numbers, self.constants = numbers, constants
        self.compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def launch(self, programs: int | tuple[int, int], *arguments: Any) -> None:
        """Run the kernel on the device of the first argument.

        ``programs`` is the size of the grid: of its only dimension, or of both. ``arguments`` are
        the others of the signature, in its order: tensors or None; and numbers that the kernel does
        not specialise.
        """
        grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        if not isinstance(self.kernel, JITFunction):  # it is interpreted
            self.kernel[grid](*self.as_read(arguments), *self.numbers, **self.constants)
            return
        current, device = driver.active.get_current_device(), arguments[0].device
        if device.type == "cuda" and device.index != current:  # Triton launches on the current one
            with torch.cuda.device(device):
                self.launch(programs, *arguments)
            return
        known = current, *[
            None if a is None else (a.data_ptr() % 16, a.dtype) if isinstance(a, Tensor)
            else -(2**31) <= a < 2**31 for a in arguments  # a number of 64 bits is another kernel's
        ]  # fmt: skip
        if found := self.compiled.get(known):
            compiled, last = found
            # As kernel[grid](...), but without Triton's hooks, whose preparation takes as long.
            compiled.run(
                *grid, driver.active.get_current_stream(current), compiled.function,
                compiled.packed_metadata, None, None, None, *arguments, *last,
            )  # fmt: skip
            return
        names = self.kernel.arg_names[len(arguments) + len(self.numbers) :]
        constants = [self.constants[name] for name in names]
        views = self.as_read(arguments)
        compiled = self.kernel[grid](*views, *self.numbers, **self.constants)
        self.compiled[known] = compiled, (*self.numbers, *constants)

    def as_read(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments as Triton compiles for them."""
        views = list(arguments)
        for place, dtype in self.read_as.items():
            views[place] = None if views[place] is None else views[place].view(dtype)
        return views


def launch(
    kernel: Any, programs: int | tuple[int, int], x: Tensor, *arguments: Any, **constants: Any
) -> None:
    """`Form.launch` of the form of these arguments, for launchers that keep none.

    ``x`` and ``arguments`` are all runtime arguments, in the order of the signature. Sizes are
    compared as they are, so that no rule of Triton's about those that it compiles in (1, multiples
    of 16, 64 bits) is repeated here; arguments that the kernel does not specialise must be
    integers.
    """
    kinds = [
        a if isinstance(a, int) else None if isinstance(a, Tensor) else type(a) for a in arguments
    ]
    for name in getattr(kernel, "do_not_specialize", ()):  # other values are no other form
        kinds[kernel.arg_names.index(name) - 1] = None
    key = (id(kernel), *kinds, *constants.items())
    if (form := _forms.get(key)) is None:
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        # It keeps the kernel, whose id no other object then has.
        form = _forms[key] = Form(kernel, {}, **constants)
    form.launch(programs, x, *arguments)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes x's device the current one, on which Triton launches."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def check_device(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors of another device than x's, whose pointers a kernel would follow."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(
                f"float8::{op}: {name} is on {other.device} and the operand on {x.device}; "
                f"move it with .to({str(x.device)!r})"
            )


def tiles_of(shape: Sequence[int], tile: Mapping[str, int]) -> int:
    """How many tiles, of COLS columns and of ROWS or 4 ROWS_BY_4 rows, cover a matrix."""
    rows = tile["ROWS"] if "ROWS" in tile else 4 * tile["ROWS_BY_4"]
    return ceil_div(shape[-2], rows) * ceil_div(shape[-1], tile["COLS"])


# Casts take a matrix (M, K), or a stack of them (E, M, K) such as the weights of experts: each is
# cast by itself, in the same launches. The second dimension of the grid is E.


def count_of(shape: Sequence[int]) -> int:
    """How many matrices there are."""
    return shape[0] if len(shape) == 3 else 1


def strides_of(strides: Sequence[int]) -> tuple[int, int, int]:
    """The strides between matrices, rows and columns."""
    return strides[0] if len(strides) == 3 else 0, strides[-2], strides[-1]


def groups_constant(groups: int) -> int:
    """How many ends of groups a program reads, at least 16, so that few forms are compiled."""
    return 0 if groups == 0 else max(16, triton.next_power_of_2(groups))


# data, scale, data_t, scale_t: of a matrix and of its transpose; of no elements if not wanted.
BothOrientations = tuple[Tensor, Tensor, Tensor, Tensor]


def row_major(x: Tensor) -> Tensor:
    """A matrix whose rows are contiguous: x itself, or a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


def new_data(x: Tensor, rows: int, cols: int, wanted: bool, dtype: torch.dtype) -> Tensor:
    """Empty row-major matrices, as many as x has; no elements if they are not wanted."""
    return torch.empty(
        (*x.shape[:-2], rows, cols) if wanted else (0, 0), dtype=dtype, device=x.device
    )


def pointer(x: Tensor | None, packed: bool = False) -> Tensor | None:
    """What `launch` takes: float8 data as uint8, or int32 of four bytes each; None of nothing."""
    if x is None or x.numel() == 0:
        return None
    codes = x.view(torch.uint8) if x.element_size() == 1 else x
    return codes.view(torch.int32) if packed else codes


def format_constants(dtype: torch.dtype, power_of_two: bool) -> dict[str, Any]:
    """The compile-time arguments of every cast."""
    return {
        "FORMAT": TRITON_FORMATS[dtype],
        "FORMAT_MAX": torch.finfo(dtype).max,
        "POWER_OF_TWO": power_of_two,
    }


def one_scale_arguments(
    data: Tensor, data_t: Tensor, scale: Tensor, given: Tensor | None, partials: Tensor | None,
    record: Tensor | None, power_of_two: bool,
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:  # fmt: skip
    """The arguments of fused casts by one scale; see `jit.scale_of_tensor` and `jit.write_codes`.

    The pointers are those from ``given_ptr`` to ``data_t_ptr``. A scale that is given is written to
    ``scale`` too; ``partials`` are int32 bits of amaxes.
    """
    amax = None if record is None else record.view(torch.int32)
    codes = pointer(data), pointer(data_t, data_t.shape[-1] % 16 == 0)
    count = 0 if partials is None else partials.shape[-1]
    constants = format_constants(data.dtype, power_of_two and given is None)
    return (given, scale, partials, amax, *codes), {"PARTIALS": count, **constants}
