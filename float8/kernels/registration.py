"""`define_op`: a function on plain tensors becomes an op, one node to torch.compile.

The ops of ``gpu/`` exist once `load_kernels` has imported their files, which needs Triton.

torch's dispatcher calls what an op runs, which is a fifth of an eager cast's host time on a GPU. So
eager code asks `op_on` what to call: past the dispatcher where nothing else has to see the op.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

LIBRARY = torch.library.Library("float8", "FRAGMENT")
LAUNCHERS: dict[str, Callable[..., Any]] = {}  # op -> what it runs on CUDA tensors


def define_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    key: str = "CompositeExplicitAutograd",
) -> Any:
    """Define ``torch.ops.float8.<name>``; returns its only overload, the fastest to call.

    Args:
        schema: as ``torch.library`` takes it, without the namespace.
        run: the op.
        fake: returns empty tensors of the right shapes, dtypes and strides.
        key: the dispatch key of ``run``: every device, or "CPU".
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"float8::{name}", fake, lib=LIBRARY)
    if key != "CPU":
        LAUNCHERS[name] = run
    return getattr(torch.ops.float8, name).default


def load_kernels(*files: str) -> None:
    """Import files of gpu/, which registers their ops; torch.compile runs this while tracing."""
    for name in files:
        try:
            importlib.import_module(f"float8.kernels.gpu.{name}")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "float8 casts on a GPU are Triton kernels, and triton is not installed: "
                "`pip install triton`, or set emulate=True to run plain PyTorch"
            ) from error


# The effect of torch.compiler.assume_constant_result, whose import of dynamo would take a second.
load_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


_on_gpu = operator.attrgetter("is_cuda")
_PLAIN = (Tensor, torch.nn.Parameter)
# The dispatch keys that are on in every thread, and in inference mode. Modes (FakeTensorMode, those
# that trace or count), and the transforms of torch.func have keys of their own.
_INFERENCE = DispatchKeySet(DispatchKey.BackendSelect)
_USUAL = {each.raw_repr() for each in (_INFERENCE, _INFERENCE.add(DispatchKey.ADInplaceOrView))}


def op_on(name: str, x: Tensor) -> Callable[..., Any]:
    """``torch.ops.float8.<name>``, or what it runs on x, where no one else has to see the op.

    Others that see ops are compilers, modes, tensor subclasses, autograd and profilers.
    """
    if (
        torch.compiler.is_compiling()
        or not _on_gpu(x)
        or type(x) not in _PLAIN
        or torch._C._dispatch_tls_local_include_set().raw_repr() not in _USUAL
        or torch._C._is_torch_function_mode_enabled()
        or (x.requires_grad and torch.is_grad_enabled())
        or torch._C._autograd._profiler_enabled()
    ):
        return getattr(torch.ops.float8, name).default
    return LAUNCHERS[name]
