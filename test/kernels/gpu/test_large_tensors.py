"""Tensors of more than 2^31 elements: a fault that other libraries' kernels have had (ao#4201).

On a CPU the kernels' sources run interpreted in a process of their own (`kernel_program.py`), and
so does a copy of the library with offsets of 32 bits. On a GPU the compiled kernels cast a tensor
of 4 GiB.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise

from float8 import kernels
from float8.formats import ScaleFormat
from float8.kernels import definition
from float8.kernels.casts import KERNELS
from float8.kernels.gpu.blockwise_mm import blockwise_mm

for file in KERNELS["sm_90"].values():
    importlib.import_module(f"float8.kernels.gpu.{file}")

ROOT = Path(__file__).resolve().parents[3]
E4M3, POWER_OF_TWO = torch.float8_e4m3fn, ScaleFormat.POWER_OF_TWO.value
WHOLE, ROW, BY_128, SQUARE = (-1, -1), (1, -1), (1, 128), (128, 128)


def run(library: Path = ROOT) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(path) for path in (library, ROOT / "test"))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "test" / "kernel_program.py")]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_interpreted_kernels_write_where_they_should():
    done = run()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_offsets_of_32_bits_are_seen(tmp_path):
    """The program finds other bits, or it crashes because the kernel writes outside its memory."""
    shutil.copytree(ROOT / "float8", tmp_path / "float8", ignore=shutil.ignore_patterns("*.pyc"))
    planted = 0
    for path in (tmp_path / "float8" / "kernels" / "gpu").glob("*.py"):
        text, count = re.subn(r"\btl\.int64\b", "tl.int32", path.read_text())
        path.write_text(text)
        planted += count
    assert planted, "no kernel says tl.int64: plant the fault in what it says now"
    done = run(tmp_path)
    assert done.returncode < 0 or (done.returncode and "differ" in done.stderr)


# --- on a GPU

LARGE = (3 * 2**23 + 64, 128)  # half as much again as 32 bits count; the bfloat16 takes 6 GiB
GPU_MEMORY = 40 * 2**30


@pytest.mark.cuda
def test_a_gpu_takes_more_than_2_to_the_31_elements():
    """One test, so that one worker alone has the memory.

    Zeros but for the last rows, whose columns' scales are those of the whole.
    """
    if torch.cuda.mem_get_info()[0] < GPU_MEMORY:
        pytest.skip(f"needs {GPU_MEMORY >> 30} GiB")
    x = torch.zeros(LARGE, dtype=torch.bfloat16, device="cuda")
    x[-64:] = torch.randn(64, LARGE[1], device="cuda").bfloat16()
    for block in (WHOLE, ROW, BY_128, SQUARE):
        kernel = kernels.kernel_for(kernels.family_of(x.device), block)
        how = kernels.CastSpec(block, E4M3, POWER_OF_TWO, kernel)
        got, got_t, _ = kernels.cast(x, how, transposed=True)
        assert not got.data[:-64].view(torch.uint8).count_nonzero()
        rows = 64 if block[0] == 1 else 1  # of scales
        for data, scale, source in (
            (got.data[-64:], got.scale[-rows:], x[-64:]),
            (got_t.data[:, -64:], got_t.scale[:, -1:], x[-64:].t()),
        ):
            expected, expected_scale = definition.cast_dynamic(source, block, E4M3, POWER_OF_TWO)
            assert_bitwise(scale, expected_scale, block, "scales")
            assert_bitwise(data, expected, block)
        del got, got_t
    how = kernels.CastSpec(BY_128, E4M3, POWER_OF_TWO, "cast")
    a, a_scale, _ = kernels.cast(x, how).row_major
    b, b_scale, _ = kernels.cast(x[-128:], how).row_major
    out = blockwise_mm(a, a_scale, b, b_scale, 1, 1, None, torch.bfloat16)
    parts = a[-64:], a_scale[-64:], b, b_scale
    exact = definition.scaled_mm(*parts, BY_128, BY_128, None, torch.float32)
    assert (out[-64:].float() - exact).norm() <= 0.01 * exact.norm()
    assert not out[:-64].count_nonzero()
