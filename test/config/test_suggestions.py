"""The nearest known name is suggested."""

import pytest

from float8.config.suggestions import did_you_mean

KNOWN = ("amax_history_len", "margin", "Rowwise")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("amax_history_length", "amax_history_len"),
        ("MARGIN", "margin"),
        ("margn", "margin"),
        ("rowise", "Rowwise"),  # in its own case
    ],
)
def test_a_near_miss_is_named(word, nearest):
    assert did_you_mean(word, KNOWN) == f"; did you mean {nearest!r}?"


@pytest.mark.parametrize("word", ["", "zzz", 3, None])
def test_what_is_near_nothing_suggests_nothing(word):
    assert did_you_mean(word, KNOWN) == ""
