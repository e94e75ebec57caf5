"""`Float8Tensor`: float8 data, its scale, and the high-precision dtype that it stands for.

``value = data.float() * scale``, with one scale per ``block`` (see `float8.granularity`). The
tensor reports the high-precision dtype that it was made from, so autograd, modules and optimizers
accept it as a tensor of that dtype. It stores one byte per element.

A Float8Tensor is for data that leaves a layer or stays between calls: gathered weights, activations
between tensor-parallel ranks, float8 parameters, inspection. Within `Float8Linear`, data and scale
are plain tensors. Both forms use the same kernels.

Its operations are registered in ``float8/tensor/dispatch/``. Any other raises an error that names
the operation and the remedy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.arguments import described
from float8.formats import FORMATS, HIGH_PRECISION_DTYPES, Format, ScaleFormat, format_of
from float8.granularity import WHOLE, Block, Granularity, Tensorwise, scale_shape

_DATA: Any = vars(torch._C.TensorBase)["data"]  # torch's property
# The dtype of scales -> the values of the `ScaleFormat`s that have it, the default first.
_SCALE_FORMATS = {
    dtype: [f.value for f in ScaleFormat if f.dtype == dtype]
    for dtype in (ScaleFormat.FLOAT32.dtype, ScaleFormat.E8M0.dtype)
}
REMEDY_OF_WEIGHTS = (
    ". If it is the weight of a layer, leave the layer out by float8.filters.skip_names, or call "
    "float8.convert_from_float8_training(model) first"
)
# aten overload -> implementation; filled by float8.tensor.dispatch through `implements`.
OP_TABLE: dict[Any, Callable[..., Any]] = {}


class Float8Tensor(Tensor):
    """A tensor stored in float8.

    Args:
        data: float8, of the tensor's shape.
        scale: float32 or E8M0, of shape ``ceil(shape / block)``; ``value = data * scale``.
        block: one extent per dimension, -1 for the whole dimension.
        dtype: the high-precision dtype that the tensor reports and dequantises to.
        data_t: the transposed copy of ``data``, row-major, or None: (K, M) for data (..., K), whose
            leading dimensions are flattened to M. The GEMM that contracts M reads it. The results
            of ops on the tensor have none.
        scale_format: which numbers scales may be that ops like ``copy_`` compute: a `ScaleFormat`
            or its value. The default is that of the scale's dtype, ``FLOAT32`` or ``E8M0``.

    Raises:
        TypeError: data is not float8, or dtype not a high-precision one.
        ValueError: scale has another dtype or shape.
    """

    # torch.compile reads the parts that `__tensor_flatten__` names, and constants; no properties.
    float8_data: Tensor
    """The float8 data, of the tensor's shape; ``.data`` is torch's attribute."""
    scale: Tensor
    """The dequantisation scale, of shape ``ceil(shape / block)``."""
    data_t: Tensor | None
    """The transposed copy of the data, row-major, or None if the tensor was made without it."""
    block: Block
    """The extent per dimension that shares a scale; -1 is the whole dimension."""
    scale_format: str
    """Which numbers new scales may be: the value of a `ScaleFormat`."""

    @staticmethod
    def __new__(
        cls, data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, *_: Any, **__: Any
    ) -> Float8Tensor:
        """See the class."""
        # A view of a tensor from outside inference_mode is, like its base, no inference tensor.
        if torch.is_inference_mode_enabled() and not data.is_inference():
            with torch.inference_mode(False):
                return Float8Tensor.__new__(cls, data, scale, block, dtype)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=dtype,
            layout=data.layout,
            device=data.device,
            requires_grad=False,
        )

    def __init__(
        self,
        data: Tensor,
        scale: Tensor,
        block: Block,
        dtype: torch.dtype,
        data_t: Tensor | None = None,
        scale_format: str = "",
    ) -> None:
        format_of(data.dtype)
        check_high_precision(dtype)
        check_scale(scale, data.shape, block)
        self.float8_data = data
        self.scale = scale
        self.block = tuple(block)
        self.data_t = data_t
        known = _SCALE_FORMATS[scale.dtype]
        self.scale_format = scale_format if scale_format in known else known[0]

    @staticmethod
    def from_high_precision(
        x: Tensor,
        format_or_dtype: Format | torch.dtype,
        granularity: Granularity | None = None,
        scale: Tensor | float | None = None,
        scale_format: ScaleFormat = ScaleFormat.FLOAT32,
    ) -> Float8Tensor:
        """Cast ``x`` to float8. Gradients pass straight through, unrounded.

        Args:
            x: float32, bfloat16 or float16.
            format_or_dtype: `E4M3`, `E5M2` or a torch float8 dtype.
            granularity: which elements share a scale; `Tensorwise` by default.
            scale: the scale to use, a float, or a float32 or E8M0 tensor of shape
                ``ceil(shape / block)``; None computes it from x.
            scale_format: which numbers a computed scale may be.

        Raises:
            TypeError: x is of no high-precision dtype.
            ValueError: scale has another dtype or shape, or is a float that is not finite and > 0.
        """
        check_high_precision(x.dtype)
        fmt = format_of(format_or_dtype)
        block = (granularity or Tensorwise()).block_of(x.shape)
        if scale is None:
            amax = kernels.amax(x.detach(), block)
            scale_tensor = kernels.scale_from_amax(amax, fmt.max, scale_format.value)
        else:
            scale_tensor = given_scale(scale, x, block)
        return _ToFloat8.apply(x, scale_tensor, block, fmt.dtype, scale_format.value)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """``data * scale`` in ``dtype`` (the original one by default). Gradients pass through."""
        return _Dequantize.apply(self, dtype or self.dtype)

    def _set_data(self, value: Float8Tensor) -> None:
        # torch's setter would change shape and dtype, and keep the float8 data and the scale.
        if not isinstance(value, Float8Tensor):
            raise TypeError(
                f"x.data of a Float8Tensor x cannot become {described(value)}: write values with "
                "x.copy_(values), which casts them, or replace the parameter, as in "
                "module.weight = nn.Parameter(values)"
            )
        _DATA.__set__(self, value)
        for name in Float8Tensor.__annotations__:
            setattr(self, name, getattr(value, name))

    data = property(_DATA.__get__, _set_data, doc="As torch's: x without autograd history.")

    @property
    def format(self) -> Format:
        """The float8 format of the data."""
        return FORMATS[self.float8_data.dtype]

    def _replace(
        self,
        data: Tensor | None = None,
        scale: Tensor | None = None,
        block: Block | None = None,
        dtype: torch.dtype | None = None,
    ) -> Float8Tensor:
        """A new Float8Tensor with some parts replaced; all ops make their results by it."""
        return Float8Tensor(
            self.float8_data if data is None else data,
            self.scale if scale is None else scale,
            self.block if block is None else block,
            self.dtype if dtype is None else dtype,
            scale_format=self.scale_format,
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Block, torch.dtype, str]]:
        parts = ["float8_data", "scale"] + ([] if self.data_t is None else ["data_t"])
        return parts, (self.block, self.dtype, self.scale_format)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: tuple[Block, torch.dtype, str], *_: Any
    ) -> Float8Tensor:
        block, dtype, scale_format = meta
        data, scale, data_t = inner["float8_data"], inner["scale"], inner.get("data_t")
        return cls(data, scale, block, dtype, data_t, scale_format)

    def __coerce_tangent_metadata__(self) -> Tensor:
        """Raise an error: the gradient of a float8 result cannot enter a compiled graph.

        torch.compile calls this for each result that requires grad. It traces a backward with
        gradients of the type of the results, and gradients of a float8 result are not float8.
        """
        raise NotImplementedError(
            "a float8 tensor that requires grad leaves a compiled graph. Compile the caller of the "
            "compiled module, so that what makes the tensor (PrepareFloat8ModuleInput, a fused "
            "norm) and what reads it are in one graph"
        )

    def _stable_hash_for_caching(self) -> str:
        """A key for torch.compile's cache on disk, of everything that its graphs depend on."""
        tensors = [getattr(self, name) for name in self.__tensor_flatten__()[0]]
        parts = [(t.dtype, t.device, tuple(t.shape), t.stride()) for t in tensors]
        return repr((parts, self.block, self.dtype, self.scale_format, self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Plain float8 tensors cannot be pickled outside torch.save; uint8 tensors can.
        bytes_ = self.float8_data.detach().view(torch.uint8)
        scale = self.scale.view(torch.uint8) if is_e8m0(self.scale) else self.scale
        parts = (bytes_, self.float8_data.dtype, scale, self.block, self.dtype)
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (*parts, self.requires_grad, is_parameter, self.scale_format)

    def share_memory_(self) -> Float8Tensor:
        """Raise an error: torch's would end the process at the wrapper, which has no storage."""
        raise NotImplementedError("Float8Tensor.share_memory_: share .float8_data and .scale")

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Tensor:
        memo[id(self)] = result = _rebuild(*copy.deepcopy(self.__reduce_ex__(2)[1], memo))
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, format, granularity, scale and data."""
        return (
            f"Float8Tensor({self.format}, shape={tuple(self.shape)}, block={self.block}, "
            f"dtype={self.dtype}, device='{self.device}', requires_grad={self.requires_grad}, "
            f"scale={self.scale.detach()!r}, data={self.float8_data.detach()!r})"
        )

    # Operations are handled by __torch_dispatch__ only.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the implementation that ``float8/tensor/dispatch/`` registered for the operation."""
        if func in OP_TABLE:
            return OP_TABLE[func](func, *args, **(kwargs or {}))
        # Under inference_mode, composite operations arrive before torch has decomposed them.
        if isinstance(func, torch._ops.OpOverload):
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        message = f"{func} is not defined for Float8Tensor; call .dequantize() on it first"
        if func._schema.is_mutable:
            message += " and write into it with x.copy_(values), which casts them"
        raise NotImplementedError(message + REMEDY_OF_WEIGHTS)


class Differentiable(torch.autograd.Function):
    """``apply(carrier, data, data_t, scale)``: the result of an op that computes float8 data.

    Its gradient is that of the carrier, a tensor of one element expanded to the shape of the
    result, in its high-precision dtype. ``data`` has as many elements. ``data_t`` is its transposed
    copy, or None. ``scale`` has one element. The op's own function computes the data, and receives
    the gradient by the carrier. A single function would not do: torch.compile traces a backward
    with gradients of the type of the forward's output, a Float8Tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, data: Tensor, data_t: Tensor | None, scale: Tensor
    ) -> Tensor:
        """See the class."""
        shape, dims = carrier.shape, carrier.dim()
        scale, block = scale.reshape((1,) * dims), (WHOLE,) * dims
        return Float8Tensor(data.reshape(shape), scale, block, carrier.dtype, data_t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient as it is."""
        return g, None, None, None


# --- checks of the parts


def check_high_precision(dtype: torch.dtype) -> None:
    """Raise TypeError unless float8 is cast from this dtype, and dequantised to it."""
    if dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise TypeError(f"float8 stands for one of {known}, not {dtype}: convert or .dequantize()")


def is_e8m0(scale: Tensor) -> bool:
    """Whether scales are exponents of one byte."""
    return scale.dtype == torch.float8_e8m0fnu


def check_scale(scale: Tensor, shape: torch.Size, block: Block) -> None:
    """Raise ValueError unless these are the scales of a tensor of this shape."""
    expected = scale_shape(shape, block)
    is_scale = scale.dtype == torch.float32 or is_e8m0(scale)
    if not is_scale or tuple(scale.shape) != expected:
        raise ValueError(
            f"scale must be float32 or torch.float8_e8m0fnu of shape {expected} for shape "
            f"{tuple(shape)} and block {tuple(block)}, got {scale.dtype} {tuple(scale.shape)}"
        )


def given_scale(scale: Tensor | float, x: Tensor, block: Block) -> Tensor:
    """A scale that the caller gives, of the shape that ``x`` needs."""
    if not isinstance(scale, Tensor):
        # Below 2^-126 the reciprocal is infinite, and zeros would become NaN.
        if not kernels.MIN_SCALE <= scale <= torch.finfo(torch.float32).max:
            raise ValueError(f"scale must be finite and > 0 (at least 2^-126), got {scale}")
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    scale = scale.expand(scale_shape(x.shape, block)) if scale.dim() == 0 else scale
    check_scale(scale, x.shape, block)
    return scale.clone(memory_format=torch.contiguous_format)  # the caller's may change


def implements(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the implementation of aten overloads on Float8Tensor.

    The function is called as ``f(func, *args, **kwargs)``.
    """

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        OP_TABLE.update(dict.fromkeys(funcs, implementation))
        return implementation

    return register


class _ToFloat8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, scale_format: str
    ) -> Float8Tensor:
        data = kernels.cast_by_scale(x, scale, block, dtype)
        return Float8Tensor(data, scale, block, x.dtype, None, scale_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad, None, None, None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Float8Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return kernels.dequantize(x.float8_data, x.scale, x.block, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _rebuild(
    bytes_: Tensor,
    data_dtype: torch.dtype,
    scale: Tensor,
    block: Block,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    scale_format: str = "",  # of files that version 1.0.0 wrote
) -> Float8Tensor:
    """Unpickle a Float8Tensor."""
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    tensor = Float8Tensor(bytes_.view(data_dtype), scale, block, dtype, None, scale_format)
    tensor.requires_grad_(requires_grad)
    # A parameter of a tensor subclass is an instance with an attribute that nn.Parameter sets.
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor  # type: ignore[return-value]


torch.serialization.add_safe_globals([Float8Tensor, _rebuild])
