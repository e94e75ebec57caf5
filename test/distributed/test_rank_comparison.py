"""What ranks say is compared through a store: here one of this process, whose ranks are threads."""

import datetime
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from float8.distributed import rank_comparison
from float8.distributed.rank_comparison import Statement, compare_ranks, said


def differing(first, mine):
    if first.layers != mine.layers:
        return f"rank {first.rank} and rank {mine.rank} differ"
    return None


@pytest.fixture
def verdicts(monkeypatch):
    """The verdict that each of the threads ends with; ranks that are None do not arrive."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=60))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def run(*layers, timeout=60.0, troubles=(), late=None):
        store.set_timeout(datetime.timedelta(seconds=timeout))
        ranks = list(range(len(layers)))

        def verdict(rank, board):
            mine = Statement(rank, "trains", {"layer": {"kind": layers[rank]}})
            trouble = "trouble of its own" if rank in troubles else None
            return board.verdict_on(mine, differing, trouble)

        boards = [rank_comparison._Board(ranks, rank) for rank in ranks]
        here = [rank for rank in ranks if layers[rank] is not None and rank != late]
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = list(pool.map(lambda rank: verdict(rank, boards[rank]), here))
        return found if late is None else [*found, verdict(late, boards[late])]

    return run


def test_ranks_that_agree_go_on(verdicts):
    assert verdicts("a", "a", "a") == [""] * 3


def test_a_difference_is_told_to_all(verdicts):
    assert verdicts("a", "b", "a") == ["rank 0 and rank 1 differ"] * 3


def test_a_difference_is_told_before_all_have_arrived(verdicts):
    assert verdicts("a", "b", None) == ["rank 0 and rank 1 differ"] * 2


def test_what_one_rank_finds_is_told_to_all(verdicts):
    for rank in range(3):
        assert verdicts("a", "a", "a", troubles=[rank]) == ["trouble of its own"] * 3


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_arrive_is_named(verdicts, missing):
    layers = ["a", "a", "a"]
    layers[missing] = None
    found = verdicts(*layers, timeout=0.2)
    assert all(
        f"for rank {missing} to compare float8 layers with ranks [0, 1, 2]" in f for f in found
    )
    assert len(found) == 2


def test_a_rank_that_comes_too_late_is_told_the_same(verdicts):
    *found, last = verdicts("a", "a", "a", timeout=0.2, late=2)
    assert "waited 0 s for rank 2" in last
    assert all("for rank 2" in each for each in found)


def test_a_rank_that_waits_says_for_whom(verdicts, monkeypatch, caplog):
    monkeypatch.setattr(rank_comparison, "NOTICE", 0.05)
    with caplog.at_level(logging.WARNING, "float8"):
        verdicts("a", None, timeout=0.8)
    (record,) = caplog.records
    assert "has waited 0 s for rank 1" in record.getMessage()


def test_one_rank_compares_with_nobody(monkeypatch):
    compare_ranks([0], "trains", {}, differing)
    with pytest.raises(RuntimeError, match="trouble"):
        compare_ranks([0], "trains", {}, differing, "trouble")


def test_many_ranks_are_abbreviated():
    assert said([3]) == "rank 3"
    assert said([0, 2]) == "ranks [0, 2]"
    assert said(list(range(1024))) == "ranks [0, 1, 2, 3, 4, 5, 6, 7, ...] (1024 in all)"
