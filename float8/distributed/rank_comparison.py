"""Compare the float8 layers of the ranks, and raise the same error on every rank if they differ.

Ranks reduce the amaxes of many casts in one collective, gather the weights of many layers in one,
and average gradients. All of these combine values by position. If one rank's model had another
layer or another config, values of different tensors would be mixed without an error, or a rank
would wait for a collective that never comes. So every rank makes a statement about its layers
before the first collective. If the statements differ, every rank raises an error that names the
first layer that differs, and no collective runs.

**Statements travel through the store** of ``init_process_group``. A collective would hang where a
rank does not take part, and would be matched with another rank's next collective. With the store,
each rank writes its statement and compares it with that of the first rank of the group. All ranks
then wait for a verdict. The first rank that finds a difference writes it as the verdict, so every
rank raises the same error at once, whether or not the others have arrived.

A rank that has not arrived may be compiling or loading. Waiting ranks name it in a warning after
`NOTICE` seconds. They raise after the timeout of ``init_process_group``, which limits the wait in
the following collective too.

Each rank counts its comparisons in the store. A process that replaces another one continues with
the count of its rank. A new store starts at zero. One comparison costs each rank about six requests
to the store, and one for each poll.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from float8.config import CastConfig, Float8LinearConfig
from float8.convert.conversion import own_config
from float8.experts.modules import Float8Experts
from float8.linear.delayed import DelayedCast
from float8.linear.layer import Float8Linear
from float8.linear.registration import WEIGHT_RULES, stacked_weights

logger = logging.getLogger("float8")
LAYERS = (Float8Linear, Float8Experts)
NOTICE = 30.0  # seconds after which a waiting rank names the ranks that it waits for
Facts = dict[str, str]  # of one layer: name of a property -> its value
PLACE = "place among the layers of "  # starts the name of a fact about the order of layers
SAME_LAYERS = "Convert the same model with the same config on each of them"
_ORDER = (
    "Register the layers in the same order (a Python set of names has another order in each "
    "process). "
)


class Statement(NamedTuple):
    """The statement of one rank.

    ``entry`` is the call that it makes ("calls sync ..."). ``facts`` has the facts of each layer by
    name.
    """

    rank: int
    entry: str
    facts: dict[str, Facts]


def is_one_of_many() -> bool:
    """Whether there is another process to compare with."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return dist.get_backend() != "fake"  # its other ranks do not exist


def compare_ranks(
    ranks: list[int],
    entry: str,
    facts: dict[str, Facts],
    remedy: str = SAME_LAYERS,
    own_error: str | None = None,
    subject: str = "layers",
) -> None:
    """Raise the same error on every rank if their statements differ.

    Args:
        ranks: global ranks, this one among them; all of them must call this.
        entry, facts: of this rank's `Statement`.
        remedy: ends the message about facts that differ.
        own_error: an error that this rank has found by itself, for all ranks to raise.
        subject: what the facts are about, for the message.

    Raises:
        RuntimeError: names the first difference, or the ranks that did not arrive in time.
    """
    if len(ranks) > 1 and is_one_of_many():
        mine = Statement(dist.get_rank(), entry, facts)
        comparison = _Comparison(ranks, mine.rank, subject, remedy)
        own_error = comparison.verdict_on(mine, own_error)
    if own_error:
        raise RuntimeError(own_error)


class _Comparison:
    """One comparison: its keys in the store."""

    def __init__(self, ranks: list[int], rank: int, subject: str, remedy: str) -> None:
        self.ranks, self.subject, self.remedy = ranks, subject, remedy
        self.store: Any = dist.distributed_c10d._get_default_store()
        group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        number = self.store.add(f"float8/{group}/comparisons of {rank}", 1)
        self.prefix = f"float8/{group}/{number}/"

    def verdict_on(self, mine: Statement, own_error: str | None) -> str:
        """The verdict of all ranks: an error message, or empty if they agree."""
        self._set(f"here {mine.rank}", mine.entry.encode())
        if mine.rank == self.ranks[0]:
            self._set("first", _packed(mine))
        elif self._wait_for("first", mine.entry) and not own_error:
            own_error = self._difference(_unpacked(self._get("first")), mine)
        if own_error:
            self._set("verdict", own_error.encode())
        elif not self._has("verdict") and self._add("agreed") == len(self.ranks):
            self._set("verdict", b"")
        self._wait_for("verdict", mine.entry)
        return self._get("verdict").decode()

    def _difference(self, first: Statement, mine: Statement) -> str | None:
        """A message that says how two statements differ, or None."""
        a, b = sorted((first, mine), key=lambda statement: statement.rank)
        if a.entry != b.entry:
            return (
                f"rank {a.rank} {a.entry} where rank {b.rank} {b.entry}: all of "
                f"{_in_words(self.ranks)} must call the same functions at the same point of a step"
            )
        name = _first_difference(a.facts, b.facts)
        if name is None:
            return None
        if name in a.facts and name in b.facts:
            differing = "; ".join(
                f"{key} is {a.facts[name].get(key)} on rank {a.rank} and "
                f"{b.facts[name].get(key)} on rank {b.rank}"
                for key in {**a.facts[name], **b.facts[name]}
                if a.facts[name].get(key) != b.facts[name].get(key)
            )
        else:
            has, has_not = (a, b) if name in a.facts else (b, a)
            differing = f"rank {has.rank} has such a float8 layer, and rank {has_not.rank} has none"
        order = _ORDER if PLACE in differing else ""
        return (
            f"{_in_words(self.ranks)} share float8 scales or gradients, and their {self.subject} "
            f"differ. {name or 'the model itself'}: {differing}. {order}{self.remedy}"
        )

    def _wait_for(self, key: str, entry: str) -> bool:
        """Wait until the store has ``key`` or a verdict; return whether it has ``key``."""
        began, pause, noticed = time.monotonic(), 0.001, False
        while not self._has(key):
            if self._has("verdict"):
                return False
            waited = time.monotonic() - began
            if waited > self.store.timeout.total_seconds():
                # Ranks that arrive later read this verdict too.
                self._set("verdict", self._missing(entry, waited).encode())
            elif waited > NOTICE and not noticed:
                logger.warning("%s", self._missing(entry, waited))
                noticed = True
            time.sleep(pause)  # Store.wait prints when it times out, and holds a lock
            pause = min(2 * pause, 0.25)
        return True

    def _missing(self, entry: str, waited: float) -> str:
        missing = [rank for rank in self.ranks if not self._has(f"here {rank}")]
        return (
            f"rank {dist.get_rank()} {entry}, and has waited {waited:.0f} s for "
            f"{_in_words(missing)} to compare float8 layers with {_in_words(self.ranks)}. A rank "
            "that is still loading or compiling needs more time; one that has not converted its "
            "model, or does not make the same calls, never arrives"
        )

    def _set(self, key: str, value: bytes) -> None:
        self.store.set(self.prefix + key, value)

    def _get(self, key: str) -> bytes:
        value: bytes = self.store.get(self.prefix + key)
        return value

    def _add(self, key: str) -> int:
        count: int = self.store.add(self.prefix + key, 1)
        return count

    def _has(self, key: str) -> bool:
        return bool(self.store.check([self.prefix + key]))


def _packed(statement: Statement) -> bytes:
    return zlib.compress(json.dumps(statement).encode())


def _unpacked(data: bytes) -> Statement:
    return Statement(*json.loads(zlib.decompress(data)))


def _in_words(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks [{shown}]" if len(ranks) <= 8 else f"ranks [{shown}, ...] ({len(ranks)} in all)"


# --- the facts of layers


def facts_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Facts]:
    """The facts of each float8 layer and each delayed cast, by name."""
    found: dict[str, Facts] = {}
    for name, module in modules:
        if isinstance(module, LAYERS):
            found[name] = _layer_facts(module)
        elif isinstance(module, DelayedCast):
            found[name] = {
                "cast": _cast_fact(module.config),
                "format": module.format.name,
                "delayed_scaling": repr(module.delayed),
            }
    return found


def weights_of(layer: Any) -> dict[str, Any]:
    """The weights of a float8 layer, by name."""
    if not isinstance(layer, Float8Linear):
        return stacked_weights(layer)
    weight = layer._parameters.get("weight")  # a wrapper may have put a property in its place
    return {} if weight is None else {"weight": weight}


def _layer_facts(layer: Any) -> Facts:
    names = ("in_features", "out_features")
    facts = {name: str(getattr(layer, name)) for name in names if isinstance(layer, Float8Linear)}
    if not facts:
        facts = {name: str(tuple(w.shape)) for name, w in weights_of(layer).items()}
    config = own_config(layer)
    assert config is not None
    facts |= config_facts(config)
    if config.enable_fsdp_float8_all_gather:
        facts["a weight that is gathered in float8"] = str(is_gathered_in_float8(layer))
    return facts


def config_facts(config: Float8LinearConfig) -> Facts:
    """The fields of a config."""
    facts: Facts = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.init:  # the others follow from these
            facts[field.name] = _cast_fact(value) if isinstance(value, CastConfig) else repr(value)
    return facts


def _cast_fact(config: CastConfig) -> str:
    return config.summary.replace(" default", "")


def is_gathered_in_float8(layer: Any) -> bool:
    """Whether conversion stored the layer's weights so that FSDP2 gathers them in float8."""
    return any(rule.is_stored(w) for w in weights_of(layer).values() for rule in WEIGHT_RULES)


def _first_difference(a: dict[str, Facts], b: dict[str, Facts]) -> str | None:
    # Places are compared last: a missing layer changes the places of all layers after it.
    for left, right in ((_without_places(a), _without_places(b)), (a, b)):
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                return name
    return None


def _without_places(layers: dict[str, Facts]) -> dict[str, Facts]:
    return {
        name: {key: fact for key, fact in facts.items() if not key.startswith(PLACE)}
        for name, facts in layers.items()
    }
