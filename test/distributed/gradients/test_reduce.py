"""The collectives on two processes, and what float8 must never do to a gradient in them."""

import pytest
from gradient_program import FAULTS
from processes import failures

SIZES = (1, 7, 31, 1000, 4099)
CLAIMS = {
    **{
        f"{fmt} of {dtype} is the mean, to the format's error": ("is_the_mean", fmt, dtype, SIZES)
        for fmt, dtype in (("e4m3", "float32"), ("e5m2", "bfloat16"), ("e4m3", "float16"))
    },
    "the bits are those of one process that plays all ranks": ("has_the_bits_of_the_simulation",),
    **{
        f"{bad} on one rank is seen by all": ("a_bad_value_on_one_rank_is_seen_by_all", float(bad))
        for bad in ("nan", "inf", "-inf")
    },
    "zeros stay zeros": ("zeros_stay_zeros",),
    "an empty gradient is reduced": ("nothing_is_empty_handed",),
    "saturation is counted": ("saturation_is_counted",),
    "underflow is counted": ("underflow_is_counted",),
    "large gradients take 0.51 of bfloat16's bytes": ("float8_travels", 1 << 16, 0.51),
    "small ones at most 0.55": ("float8_travels", 2048, 0.55),
    "no value moves to the host": ("the_device_is_never_asked",),
    **{f"planted: {name}": ("a_planted_fault_is_seen", name) for name in FAULTS},
    "planted: no poison": ("a_bad_value_would_hide_without_the_poison",),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("gradient_program", CLAIMS) == {}
