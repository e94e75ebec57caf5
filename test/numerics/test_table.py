"""The table is at most 100 columns wide, and says which cast is worst."""

from dataclasses import replace

import pytest

from float8.numerics.rows import Row
from float8.numerics.table import WIDTH, common_prefix, shortened, table

ROW = Row(
    "model.layers.11.self_attention.query_key_value_projection", "grad_output", "grad_weight",
    "e5m2", "delayed", "tensorwise", 10, 1, 0, 0, 123456.0, 1.234e-05, 1.234e-05, 1.0, 0.12345,
    -12.34, 12345.6, -12.3,
)  # fmt: skip


def test_a_table_fits_a_terminal():
    rows = [ROW, replace(ROW, layer="model.layers.0.mlp.up", sqnr=None, staleness=-0.01)]
    text = table(rows, {"head": "it was not called"})
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "grad_output.T" in lines[2] and "-12.3" in lines[2] and "12.35" in lines[2]
    assert lines[3].split()[-1] == "0.0"
    assert lines[-3:] == [
        "layer names begin with 'model.layers.'",
        ".T: the cast that the product over the operand's other dimension reads",
        "not seen: head: it was not called",
    ]


def test_notes_on_long_names_are_wrapped():
    long = "language_model.decoder." * 3
    rows = [replace(ROW, layer=f"{long}attention"), replace(ROW, layer=f"{long}feed_forward")]
    reason = "it ran in high precision: float8.high_precision(model) was open"
    text = table(rows, {f"{long}projection": reason})
    assert max(map(len, text.splitlines())) <= WIDTH
    assert f"not seen: {long}projection: {reason}" in " ".join(text.split())


def test_inf_and_nan_are_said_though_no_number_shows_them():
    rows = [replace(ROW, layer="a", nonfinite=7, sqnr=None), replace(ROW, layer="b", nonfinite=1)]
    assert "inf or NaN in 2 casts; a, grad_output.T: 7 of 10 elements" in table(rows, {})
    assert "inf or NaN in 1 cast; b" in table(rows[1:], {})
    assert "inf or NaN" not in table([ROW], {})


def test_top_says_how_many_are_left():
    text = table([ROW] * 5, {}, top=2)
    assert text.count("grad_output") == 2
    assert "and 3 more" in text


def test_no_rows_say_why():
    assert "not seen: (the module itself): why not" in table([], {"": "why not"})


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["a.b.c", "a.b.d"], "a.b."),
        (["a.b", "a.bc"], "a."),
        (["a.b"], ""),
        (["a.b", "a.b"], ""),
        (["a.b", "a"], ""),
        (["", "a"], ""),
        ([], ""),
    ],
)
def test_what_all_names_begin_with(names, prefix):
    assert common_prefix(names) == prefix


def test_a_long_name_keeps_its_ends():
    name = "blocks.11.feed_forward.gate_projection"
    assert len(shortened(name, 20)) == 20
    assert shortened(name, 20).startswith("blocks..") and shortened(name, 20).endswith("projection")
    assert shortened("blocks.1", 20) == "blocks.1"
