"""Compare what ranks say, through the store by which the processes found each other.

A comparison that were a collective would hang where a rank does not take part, and would take
another rank's collective for its own. The store of ``init_process_group`` has neither fault: a rank
writes what it has to say, reads what the first rank of the group says, and all of them wait for a
verdict. The first rank to find a difference writes it as the verdict, so that every rank raises the
same error at once, whether or not the others have arrived.

A rank that does not arrive is not an error yet: it may be compiling or loading. Waiting ranks name
it in a warning after `NOTICE` seconds, and raise after the timeout of ``init_process_group``: the
collective that follows a comparison would not wait longer either.

Comparisons have numbers, which each rank counts in the store: a process that replaces another one
goes on with the numbers of its rank, and a new store begins anew.

One comparison costs each rank about six requests to the store, and one for each poll.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

logger = logging.getLogger("float8")
NOTICE = 30.0  # seconds after which a waiting rank tells for whom it waits
Facts = dict[str, str]


class Statement(NamedTuple):
    """What one rank says.

    ``entry`` is what it does ("calls sync ..."), ``layers`` are the facts of each layer by name.
    """

    rank: int
    entry: str
    layers: dict[str, Facts]


def is_one_of_many() -> bool:
    """Whether there is another process to compare with."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return dist.get_backend() != "fake"  # whose other ranks do not exist


def compare_ranks(
    ranks: list[int],
    entry: str,
    layers: dict[str, Facts],
    explain: Callable[[Statement, Statement], str | None],
    trouble: str | None = None,
) -> None:
    """Raise, on every rank, if ``explain`` finds a difference to the first of ``ranks``.

    Args:
        ranks: global ranks, this one among them; all of them call this.
        entry, layers: of this rank's `Statement`.
        explain: (statement of ``ranks[0]``, own statement) -> how they differ, or None.
        trouble: what this rank has found by itself, for all ranks to raise.

    Raises:
        RuntimeError: with what ``explain`` said, or naming the ranks that did not arrive in time.
    """
    if len(ranks) > 1 and is_one_of_many():
        mine = Statement(dist.get_rank(), entry, layers)
        trouble = _Board(ranks, mine.rank).verdict_on(mine, explain, trouble)
    if trouble:
        raise RuntimeError(trouble)


class _Board:
    """The keys of one comparison in the store."""

    def __init__(self, ranks: list[int], rank: int) -> None:
        self.ranks = ranks
        self.store: Any = dist.distributed_c10d._get_default_store()
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        number = self.store.add(f"float8/{name}/comparisons of {rank}", 1)
        self.prefix = f"float8/{name}/{number}/"

    def verdict_on(
        self,
        mine: Statement,
        explain: Callable[[Statement, Statement], str | None],
        trouble: str | None,
    ) -> str:
        """The verdict of all ranks: empty if they agree."""
        self._set(f"here {mine.rank}", mine.entry.encode())
        if mine.rank == self.ranks[0]:
            self._set("first", _packed(mine))
        elif self._wait_for("first", mine.entry) and not trouble:
            trouble = explain(_unpacked(self._get("first")), mine)
        if trouble:
            self._set("verdict", trouble.encode())
        elif not self._has("verdict") and self._agree() == len(self.ranks):
            self._set("verdict", b"")
        self._wait_for("verdict", mine.entry)
        return self._get("verdict").decode()

    def _agree(self) -> int:
        count: int = self.store.add(self.prefix + "agreed", 1)
        return count

    def _wait_for(self, key: str, entry: str) -> bool:
        """Wait until ``key`` is there, or a verdict: whether it is the key."""
        began, pause, noticed = time.monotonic(), 0.001, False
        while not self._has(key):
            if self._has("verdict"):
                return False
            waited = time.monotonic() - began
            if waited > self.store.timeout.total_seconds():
                # For ranks that come later yet, too.
                self._set("verdict", self._missing(entry, waited).encode())
            elif waited > NOTICE and not noticed:
                logger.warning("%s", self._missing(entry, waited))
                noticed = True
            time.sleep(pause)  # not Store.wait, which prints when it times out, and holds a lock
            pause = min(2 * pause, 0.25)
        return True

    def _missing(self, entry: str, waited: float) -> str:
        missing = [rank for rank in self.ranks if not self._has(f"here {rank}")]
        return (
            f"rank {dist.get_rank()} {entry}, and has waited {waited:.0f} s for {said(missing)} to "
            f"compare float8 layers with {said(self.ranks)}. A rank that is still loading or "
            "compiling needs patience; one that has not converted its model, or does not make the "
            "same calls, never comes"
        )

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(self.prefix + key, value)

    def _get(self, key: str) -> bytes:
        value: bytes = self.store.get(self.prefix + key)
        return value

    def _has(self, key: str) -> bool:
        return bool(self.store.check([self.prefix + key]))


def said(ranks: list[int]) -> str:
    """Ranks in a message: ``ranks [0, 1]``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks [{shown}]" if len(ranks) <= 8 else f"ranks [{shown}, ...] ({len(ranks)} in all)"


def _packed(statement: Statement) -> bytes:
    return zlib.compress(json.dumps(statement).encode())


def _unpacked(data: bytes) -> Statement:
    return Statement(*json.loads(zlib.decompress(data)))
