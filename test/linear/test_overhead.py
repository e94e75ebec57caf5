"""How long the way of a call is: calls into the library, their depth, and the files they enter.

Counted, not timed, for a warmed-up eager layer without bias. Products by powers of two take another
path with AMX, so each processor counts both.
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
# calls of a forward, their depth, files; and calls of a step, forward and backward
MOST = {
    "tensorwise": (26, 7, 9, 56),
    "rowwise": (32, 8, 9, 69),
    "delayed": (33, 7, 9, 65),
    "blockwise": (39, 8, 9, 88),
    "mxfp8": (37, 8, 9, 83),
}


def counted(run):
    """Calls into the library while ``run`` runs, the depth of their stack, and their files."""
    calls = depth = deepest = 0
    files = set()

    def profile(frame, event, argument):
        nonlocal calls, depth, deepest
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return
        if event == "call":
            calls, depth = calls + 1, depth + 1
            deepest = max(deepest, depth)
            files.add(frame.f_code.co_filename)
        elif event == "return":
            depth -= 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls, deepest, len(files)


@pytest.mark.parametrize("recipe", MOST)
@pytest.mark.parametrize("has_amx", [False, True], ids=["without AMX", "with AMX"])
def test_the_way_of_a_call_on_a_cpu(recipe, has_amx, monkeypatch):
    cpu._has_matrix_units.cache_clear()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    layer = Float8Linear(K, N, bias=False, dtype=torch.bfloat16, config=recipe)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(M, N, dtype=torch.bfloat16)
    for _ in range(3):
        layer(x).backward(g)
        sync_float8_amax_and_scale_history(layer)
    found = *counted(lambda: layer(x)), counted(lambda: layer(x).backward(g))[0]
    cpu._has_matrix_units.cache_clear()
    most = MOST[recipe]
    assert found[0] > 10
    assert all(n <= limit for n, limit in zip(found, most, strict=True)), f"{found} > {most}"


@pytest.mark.slow
def test_a_processor_with_avx2_passes_what_depends_on_the_processor():
    """oneDNN multiplies, and torch's vectors are, as on such a processor."""
    facts_of("""
import contextlib, os, sys
os.environ |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
import pytest
tests = ["test/linear/test_overhead.py", "test/kernels/test_cpu.py"]
options = ["-n", "0", "-q", "-p", "no:cacheprovider"]
options += ["-k", "not compiled and not declare and not avx2"]
with contextlib.redirect_stdout(sys.stderr):
    assert pytest.main([*options, *tests]) == 0
""")
