"""How many functions of the library a training step calls.

Counted, not timed. The calls are those of one warmed-up eager forward and backward of a layer
without bias. Products by powers of two take another path with AMX, so each processor counts both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fresh import facts_of

import float8
from float8 import Float8Linear, sync_float8_amax_and_scale_history
from float8.kernels import cpu

M, K, N = 128, 256, 128
LIBRARY = str(Path(float8.__file__).parent)
CALLS = {"tensorwise": 135, "rowwise": 151, "blockwise": 175, "mxfp8": 215, "delayed": 152}
CALLS_WITH_AMX = CALLS | {"blockwise": 190, "mxfp8": 230}


@pytest.mark.parametrize("recipe", CALLS)
@pytest.mark.parametrize("has_amx", [False, True], ids=["without AMX", "with AMX"])
def test_calls_of_a_step_on_a_cpu(recipe, has_amx, monkeypatch):
    monkeypatch.setattr(cpu, "_has_matrix_units", lambda: has_amx)
    layer = Float8Linear(K, N, bias=False, dtype=torch.bfloat16, config=recipe)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(M, N, dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).backward(g)
        sync_float8_amax_and_scale_history(layer)
    calls = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        layer(x).backward(g)
    finally:
        sys.setprofile(None)
    assert 40 < len(calls) <= (CALLS_WITH_AMX if has_amx else CALLS)[recipe]


def test_a_processor_with_avx2_passes_what_depends_on_the_processor():
    """oneDNN multiplies, and torch's vectors are, as on such a processor."""
    facts_of("""
import contextlib, os, sys
os.environ |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
import pytest
tests = ["test/linear/test_overhead.py::test_calls_of_a_step_on_a_cpu", "test/kernels/test_cpu.py"]
options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-k", "not compiled and not declare"]
with contextlib.redirect_stdout(sys.stderr):
    assert pytest.main([*options, *tests]) == 0
""")
