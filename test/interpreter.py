"""Run a Triton kernel's own source on the CPU, bit for bit: Triton's interpreter, casts mended.

``interpreted("cast")._launch(x, ...)`` calls the launcher that a CUDA tensor gets, on CPU
tensors, in a child process: Triton decides when it is imported whether it interprets, and the same
test session also compiles kernels. Tensors keep their strides and offsets on the way, and what the
kernel wrote into an argument is written into the caller's.

Triton's interpreter rounds float32 -> float8 and bfloat16 wrongly (lost carries, truncated
subnormals), and reads the NaN of E4M3 as 480. Those conversions are replaced by torch's, which
`oracle.py` has checked against the 256-code table; on a GPU the same tests compare what the
hardware converts.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = "float8.kernels.gpu"
ROOT = Path(__file__).resolve().parents[1]


class interpreted:
    """A module of ``float8/kernels/gpu/`` whose functions run interpreted."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _call(self.module, name, args, kwargs)


def launcher(module: str, function: str, device: str) -> Callable[..., Any]:
    """A function of a kernel file: interpreted for the CPU, compiled for CUDA.

    Inside `executed.executed`, the CPU executes its compiled form.
    """
    import executed  # not where a process only interprets, with another library on its path

    if device == "cpu" and not executed.is_active():
        return getattr(interpreted(module), function)
    found = getattr(importlib.import_module(_path(module)), function)
    return executed.launcher(found) if device == "cpu" else found


def _path(module: str) -> str:
    return module if module.startswith("probe") else f"{PACKAGE}.{module}"


def _call(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    child = _child()
    _send(child.stdin, (module, name, args, kwargs))
    error, result, args_after, kwargs_after = _receive(child.stdout)
    if error is not None:
        raise error
    pairs = [*zip(args, args_after, strict=True), *((kwargs[k], kwargs_after[k]) for k in kwargs)]
    for mine, after in pairs:
        if isinstance(mine, torch.Tensor) and not torch.equal(_bytes(mine), _bytes(after)):
            _bytes(mine).copy_(_bytes(after))
    return result


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x if x.element_size() > 1 or not x.is_floating_point() else x.view(torch.uint8)


@cache
def _child() -> subprocess.Popen[bytes]:
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'test'}",
    }
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)


def _send(pipe: Any, message: object) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)  # pickle alone refuses float8 tensors
    pickle.dump(buffer.getvalue(), pipe)
    pipe.flush()


def _receive(pipe: Any) -> Any:
    return torch.load(io.BytesIO(pickle.load(pipe)), weights_only=False)


def _serve() -> None:
    """The child: answer calls until the parent is gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not be taken for an answer
    launch = importlib.import_module(f"{PACKAGE}.launch")
    launch.register_op = lambda schema, *, kernel, **_: kernel
    _mend_float8_casts()
    while True:
        try:
            module, name, args, kwargs = _receive(sys.stdin.buffer)
        except EOFError:
            return
        error = result = None
        try:
            result = getattr(importlib.import_module(_path(module)), name)(*args, **kwargs)
        except Exception as raised:  # the test decides what an error means
            error = raised
        _send(answers, (error, result, args, kwargs))


def _mend_float8_casts() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    formats: Any = {
        tl.bfloat16: torch.bfloat16,  # rounded half up, lost carries
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5b16: torch.float8_e5m2fnuz,
    }
    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source in formats and source != tl.bfloat16 and target == tl.float32:
            codes = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy())
            values = codes.view(formats[source]).to(torch.float32)
            return values.numpy().view(np.uint32).reshape(data.shape)
        if target not in formats or source != tl.float32:
            return original(data, source, target, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        codes = values.to(formats[target])
        bits = codes.view(torch.uint8 if codes.element_size() == 1 else torch.uint16)
        return bits.numpy().reshape(data.shape)

    interpreter._convert_float = convert

    # Triton 3.6 turns one-element arrays into integers in a way that numpy 2.4 has ended.
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch

    # Triton replaces its language's functions again in each call of a device function, which takes
    # half of the time. A process that only interprets needs it once for each file.
    patch_lang, done = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> Any:
        if fn.__module__ not in done:
            done.add(fn.__module__)
            patch_lang(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch_once


if __name__ == "__main__":
    _serve()
