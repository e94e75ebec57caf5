"""The model of a kernel's time: its parts on small examples, its form, and the committed table."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from scripts.kernel_tools.predict.devices import DEVICES
from scripts.kernel_tools.predict.instructions import INTEGER, ISSUE, MEMORY, work_of
from scripts.kernel_tools.predict.launches import predict_launch, resident_programs
from scripts.kernel_tools.predict.model import rates
from scripts.kernel_tools.predict.requests import Access, Loop, Program, program_of
from scripts.kernel_tools.predict.traffic import Launch, traffic_of
from scripts.kernel_tools.report import SIZES
from scripts.kernel_tools.shipped import variants

TTIR, SASS = (Path(__file__).with_name(f"loops.{kind}").read_text() for kind in ("ttir", "sass"))
TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "predicted_kernels.json"


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [
        (128, 0, 4, 4),  # 128 * 128 registers of 65536
        (168, 0, 4, 3),
        (255, 0, 8, 1),
        (32, 0, 4, 16),  # 64 warps
        (16, 0, 1, 32),  # 32 programs
        (32, 132 << 10, 4, 1),  # 133 KiB of 228
    ],
)
def test_programs_of_a_multiprocessor(registers, shared, warps, programs):
    assert resident_programs(registers, shared, warps) == programs


def test_rates_end_in_littles_law_and_the_roofline():
    delay, queues = 9.0, [1.0, 0.5]
    found = rates(200, delay, queues)
    assert found[0] == pytest.approx(1 / 10.5)
    assert all(more > 0.999999 * less for less, more in pairwise(found))
    assert found[-1] == pytest.approx(1 / max(queues), rel=1e-3)
    assert all(x <= min(n / 10.5, 1.0) + 1e-12 for n, x in enumerate(found, 1))


def test_a_program_is_followed():
    found = program_of(TTIR, ("x", "y", "n"), {"x": "x", "y": "y", "n": 19}, (8, 1), 3)
    loop = Loop(0, 4)  # of 3, 7, 11, 15
    assert found.loops == ((loop,),)
    assert found.accesses == (
        Access("x", 64, 2, False, (loop,), 16),
        Access("y", 32, 1, True, (), 0),
    )
    assert found.accesses[0].bytes == 64 * 2 * 4


def test_an_unknown_bound_has_the_trips_that_are_assumed():
    """As of tokens, whose groups' sizes the host does not know."""
    ttir = TTIR.replace("%pid to %n", "%pid to %unknown")
    found = program_of(ttir, ("x", "y", "n"), {"x": "x", "y": "y", "n": 19}, (8, 1), 3, 7)
    assert found.accesses[0].times == 7


def test_instructions_count_as_often_as_their_loops():
    loop = Loop(0, 10)
    work = work_of(SASS, [(loop,)])
    assert work.pipes[INTEGER] == 20
    assert work.pipes[MEMORY] == 2 + 2 * 10
    assert work.memory_clocks == 4 + 2 + 10 * (1 + 4)  # bytes of 32 threads by 128
    assert "special" not in work.pipes  # of rare operands
    clocks = work.clocks(warps=4)
    assert clocks[INTEGER] == 20 * 4 / 2
    assert clocks[ISSUE] == work.issued == 1 + 2 + 6 * 10 + 4


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_second_read_comes_from_l2_as_far_as_it_fits():
    """4 of 64 programs are resident; each reads 16 KiB twice, and all share the weight."""
    first, second = Loop(0, 8), Loop(1, 8)
    program = Program(
        (
            Access("x", 1024, 2, False, (first,), 0),
            Access("x", 1024, 2, False, (second,), 0),
            Access("w", 1024, 2, False, (second,), 0),
            Access("out", 1024, 1, True, (second,), 0),
        ),
        ((first,), (second,)),
    )
    x, w, out = meta(64, 8192), meta(8192), meta(64, 8192, dtype=torch.uint8)
    arguments = {"x": x, "w": w, "out": out}
    size, weight = 64 * 8192 * 2, 8192 * 2
    fits = traffic_of(Launch(program, arguments, 64, 4, 64 << 10))
    assert fits.needed == fits.dram == size + weight + size // 2
    assert fits.l2 == 3 * size + size // 2
    assert fits.from_dram[(first,)] == 1

    half = traffic_of(Launch(program, arguments, 64, 4, 32 << 10))  # half of the second reads
    assert half.dram == fits.dram + size / 2


def test_tokens_leave_programs_without_work():
    program = Program((Access("x", 1024, 2, False, (), 0),), ())
    found = traffic_of(Launch(program, {"x": meta(64, 1024)}, 80, 8, 1 << 20))
    assert found.active == 0.8
    assert found.dram == 64 * 1024 * 2


def test_one_kernel_is_predicted():
    """The transpose of bytes: what it moves, and that it nears a copy."""
    (variant,) = variants(("transpose",), 4096, 8192)
    found = predict_launch(variant, "H200")
    copy = 2 * 4096 * 8192 / DEVICES["H200"].copy
    assert found.memory == pytest.approx(copy, rel=1e-3)
    assert 0.7 < found.of_limit < 1
    assert found.seconds == pytest.approx(copy / found.of_limit, rel=1e-6)


def test_the_table_has_every_launch_that_ships():
    """For each GPU in it, and all sizes."""
    table = json.loads(TABLE.read_text())
    rows, names = table["rows"], [variant.name for variant in variants()]
    known = {(row["device"], row["kernel"], row["M"], row["K"]) for row in rows}
    assert "H200" in table["devices"]
    missing = {
        (d, name, M, K) for d in table["devices"] for name in names for M, K in SIZES
    } - known
    assert not missing, "scripts.kernel_tools report --predict writes it again"
    assert all(0 < row["of_limit"] < 1.01 and math.isfinite(row["seconds"]) for row in rows)
