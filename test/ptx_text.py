"""PTX for tests: a kernel from a few statements, and its run on numpy arrays.

``assemble("add.f32 %f3, %f1, %f2;", ...)`` wraps statements in a kernel. `run` executes a PTX text
with arrays and numbers as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.kernel_tools.ptx import GlobalMemory, Report, execute, parse

REGISTERS = {"%p": "pred", "%h": "b16", "%r": "b32", "%f": "f32", "%d": "b64", "%e": "f64"}


def assemble(body: str, parameters: Sequence[str] = (), threads: int = 32) -> str:
    """A kernel with the statements ``body`` and 64 registers of each of `REGISTERS`.

    ``%r0`` holds the thread's number. ``parameters`` are PTX types; ``p0`` is the first one.
    """
    declared = "".join(f"\t.reg .{t} \t{name}<64>;\n" for name, t in REGISTERS.items())
    arguments = ",\n".join(f"\t.param .{t} p{i}" for i, t in enumerate(parameters))
    return (
        ".version 8.7\n.target sm_90a\n.address_size 64\n"
        ".extern .shared .align 16 .b8 smem[];\n"
        f".visible .entry kernel(\n{arguments}\n)\n.reqntid {threads}\n{{\n{declared}"
        f"\tmov.u32 %r0, %tid.x;\n{body}\n\tret;\n}}\n"
    )


def run(text: str, *arguments: Any, grid: Sequence[int] = (1,), **options: Any) -> Report:
    """Execute a PTX text; arrays among the arguments are buffers, and are written back."""
    memory = GlobalMemory()
    values = [
        memory.add(a.reshape(-1).view(np.uint8)) if isinstance(a, np.ndarray) else a
        for a in arguments
    ]
    memory.upload()
    report = execute(parse(text), grid, values, memory, **options)
    memory.download()
    return report


def compute(statement: str, *inputs: np.ndarray, output: Any) -> np.ndarray:
    """Run one statement on arrays: its result is ``$0``, its operands ``$1``, ``$2``, ...

    Args:
        statement: such as ``add.f32 $0, $1, $2;``.
        inputs: arrays of one length.
        output: the dtype of the result.
    """
    count = -(-len(inputs[0]) // 32) * 32
    arrays = [np.zeros(count, output), *(np.resize(a, count) for a in inputs)]
    body = "mov.u32 %r60, %ctaid.x;\nmad.lo.s32 %r61, %r60, 32, %r0;\n"
    for i, array in enumerate(arrays):
        name, size = f"{_register(array.dtype)}{10 + i}", array.dtype.itemsize
        statement = statement.replace(f"${i}", name)
        body += f"ld.param.u64 %d{i}, [p{i}];\nmad.wide.u32 %d{i}, %r61, {size}, %d{i};\n"
        if i:
            body += f"ld.global.b{8 * size} {name}, [%d{i}];\n"
    dtype = arrays[0].dtype
    body += f"{statement}\nst.global.b{8 * dtype.itemsize} [%d0], {_register(dtype)}10;"
    text = assemble(body, ["u64"] * len(arrays))
    run(text, *arrays, grid=(count // 32,), batch=1 << 20).check()
    return arrays[0][: len(inputs[0])]


def _register(dtype: np.dtype) -> str:
    """The registers that hold a dtype."""
    if dtype.kind == "f" and dtype.itemsize > 2:
        return {4: "%f", 8: "%e"}[dtype.itemsize]
    return {1: "%h", 2: "%h", 4: "%r", 8: "%d"}[dtype.itemsize]
