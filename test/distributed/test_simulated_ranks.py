"""The errors that the docstring of `float8_gradients` states."""

import torch
from simulated_ranks import agreeing, error_on, simulated

from float8.distributed.gradients import float8_gradients
from float8.formats import E4M3, E5M2


def test_the_docstring_states_the_errors():
    text = float8_gradients.__doc__ or ""
    lines = [line.split() for line in text.splitlines()]
    for ranks in (2, 8, 64, 512):
        e4m3, e5m2 = error_on(ranks), error_on(ranks, fmt=E5M2)
        found = (e4m3.all_reduce, e4m3.reduce_scatter, e5m2.all_reduce, e4m3.bfloat16)
        stated = next(line for line in lines if line[:1] == [str(ranks)])[1:]
        for cell, value in zip(stated, found, strict=True):
            assert abs(float(cell) - value) < 0.3, (ranks, stated, found)
    e = error_on(512, agreeing)
    assert f"{e.all_reduce:.1f} dB on 512 ranks,\n    bfloat16 {e.bfloat16:.1f}." in text


def test_the_error_does_not_grow_with_the_number_of_ranks():
    few, many = error_on(2), error_on(64)
    assert many.all_reduce > few.all_reduce - 0.5
    assert many.bfloat16 < few.bfloat16 - 10


def test_a_mean_that_is_much_smaller_than_its_summands_keeps_its_elements():
    # Each element comes from one rank of 64, so the mean is 6 binades below the summands.
    # Magnitudes extend over 16 binades; E4M3 has 18.
    n = 4096
    values = torch.randn(n) * torch.exp2(-16 * torch.rand(n))
    owner = torch.randint(64, (n,))
    summands = [torch.where(owner == rank, values, 0.0) for rank in range(64)]
    whole, half = simulated(summands, E4M3)
    flushed = [((each == 0) & (values != 0)).sum() for each in (whole, half)]
    assert flushed[0] <= flushed[1] < n / 20
