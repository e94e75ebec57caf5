"""Statements of ranks compared through a store; the ranks are threads of this process."""

import datetime
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from float8.distributed import rank_comparison
from float8.distributed.rank_comparison import Statement, compare_ranks

DIFFERENT = "layer: kind is a on rank 0 and b on rank 1. remedy"


@pytest.fixture
def verdicts(monkeypatch):
    """The verdict that each rank ends with; ranks whose kind of layer is None do not arrive."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=60))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def run(*kinds, timeout=60.0, own_errors=(), late=None):
        store.set_timeout(datetime.timedelta(seconds=timeout))
        ranks = list(range(len(kinds)))

        def verdict(rank, comparison):
            mine = Statement(rank, "trains", {"layer": {"kind": kinds[rank]}})
            return comparison.verdict_on(mine, "own error" if rank in own_errors else None)

        comparisons = [
            rank_comparison._Comparison(ranks, rank, "layers", "remedy") for rank in ranks
        ]
        here = [rank for rank in ranks if kinds[rank] is not None and rank != late]
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = list(pool.map(lambda rank: verdict(rank, comparisons[rank]), here))
        return found if late is None else [*found, verdict(late, comparisons[late])]

    return run


def test_ranks_that_agree_go_on(verdicts):
    assert verdicts("a", "a", "a") == [""] * 3


@pytest.mark.parametrize("third", ["a", None])  # None: before all ranks have arrived
def test_every_rank_gets_the_difference(verdicts, third):
    found = verdicts("a", "b", third)
    assert len(set(found)) == 1
    assert found[0].endswith(DIFFERENT), found


def test_every_rank_gets_the_error_of_one(verdicts):
    for rank in range(3):
        assert verdicts("a", "a", "a", own_errors=[rank]) == ["own error"] * 3


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_arrive_is_named(verdicts, missing):
    kinds = ["a", "a", "a"]
    kinds[missing] = None
    found = verdicts(*kinds, timeout=0.2)
    assert len(found) == 2
    for message in found:
        assert f"for rank {missing} to compare float8 layers with ranks [0, 1, 2]" in message


def test_a_rank_that_arrives_too_late_gets_the_same_error(verdicts):
    *found, last = verdicts("a", "a", "a", timeout=0.2, late=2)
    assert "waited 0 s for rank 2" in last
    assert all("for rank 2" in each for each in found)


def test_a_waiting_rank_warns_and_names_the_missing_rank(verdicts, monkeypatch, caplog):
    monkeypatch.setattr(rank_comparison, "NOTICE", 0.05)
    with caplog.at_level(logging.WARNING, "float8"):
        verdicts("a", None, timeout=0.3)
    (record,) = caplog.records
    assert "has waited 0 s for rank 1" in record.getMessage()


def test_a_single_rank_raises_its_own_error_only():
    compare_ranks([0], "trains", {})
    with pytest.raises(RuntimeError, match="own error"):
        compare_ranks([0], "trains", {}, own_error="own error")


def test_long_lists_of_ranks_are_abbreviated():
    assert rank_comparison._in_words([3]) == "rank 3"
    assert rank_comparison._in_words([0, 2]) == "ranks [0, 2]"
    many = rank_comparison._in_words(list(range(1024)))
    assert many == "ranks [0, 1, 2, 3, 4, 5, 6, 7, ...] (1024 in all)"
