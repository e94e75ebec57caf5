"""The shapes that benchmarks time are those of the models whose names they bear."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.measuring.shapes import (
    LLAMA3_8B,
    LLAMA3_70B,
    SQUARES,
    Shape,
    add_option,
    chosen,
    parse_shapes,
)

VOCABULARY = 128_256


@pytest.mark.parametrize(
    ("layers", "blocks", "hidden", "published"),
    [(LLAMA3_8B, 32, 4096, 8_030_261_248), (LLAMA3_70B, 80, 8192, 70_553_706_496)],
)
def test_llama_shapes_add_up_to_the_published_parameter_count(layers, blocks, hidden, published):
    per_block = sum(shape.K * shape.N for shape in layers) + 2 * hidden  # and two norms
    assert blocks * per_block + 2 * VOCABULARY * hidden + hidden == published


def test_squares_double_from_1024_to_16384():
    assert [shape.label for shape in SQUARES] == ["1024", "2048", "4096", "8192", "16384"]
    assert all(shape.M == shape.K == shape.N for shape in SQUARES)


def test_shapes_are_parsed_by_size_name_or_group():
    assert parse_shapes("2048,1024,4096") == (Shape(2048, 1024, 4096),)
    assert parse_shapes("70b.ffn.w2") == LLAMA3_70B[-1:]
    assert parse_shapes("8b") == LLAMA3_8B
    assert parse_shapes("squares") == SQUARES


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "1,2,x", "1,-2,3", "0,1,2", "1,2,3,"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"three positive numbers M,K,N .*70b"):
        parse_shapes(text)


def test_the_option_chains_what_it_is_given():
    parser = argparse.ArgumentParser()
    add_option(parser)
    given = parser.parse_args(["--shapes", "8b", "16,16,16"]).shapes
    assert chosen(given, SQUARES) == (*LLAMA3_8B, Shape(16, 16, 16))
    assert chosen(parser.parse_args([]).shapes, SQUARES) == SQUARES


def test_a_shape_says_what_it_costs_and_how_it_is_called():
    shape = Shape(2, 3, 5, "ffn")
    assert shape.flops == 2 * 2 * 3 * 5
    assert shape.row == {"shape": "ffn (2,3,5)", "M": 2, "K": 3, "N": 5}
    assert (shape.label, Shape(2, 3, 5).label) == ("ffn", "2,3,5")
