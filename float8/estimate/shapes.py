"""A layer's sizes, and how the layer is used: what a time is predicted for."""

from __future__ import annotations

from dataclasses import dataclass

from float8.config import LinearPlan

LARGEST = 2**30  # of any size or count: beyond, sums of bytes exceed 64 bits


def is_count(value: object) -> bool:
    """Whether this is an integer from 1 to `LARGEST`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


@dataclass(frozen=True)
class Shape:
    """A layer and its batch: M tokens, K in_features, N out_features; of E experts, where given.

    With E, the M tokens are rows of the grouped GEMM: a token that two experts read counts twice.
    """

    M: int
    K: int
    N: int
    E: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.M, self.K, self.N) if self.E is None else (self.M, self.K, self.N, self.E)
        if not all(is_count(size) for size in sizes):
            raise ValueError(
                f"a shape is M,K,N (tokens, in, out) or M,K,N,E (with experts), integers >= 1 and "
                f"<= {LARGEST}; got {sizes}"
            )

    @property
    def weights(self) -> int:
        """How many weight matrices there are."""
        return self.E or 1

    def __str__(self) -> str:
        experts = "" if self.E is None else f",{self.E}"
        return f"{self.M},{self.K},{self.N}{experts}"

    def padding(self, multiple: int) -> float:
        """The expected tokens that fill all groups up to multiples of ``multiple``; 0 without E.

        A group's size is uniform over 0 .. q, where q is twice the mean, rounded. Its ceiling to
        multiples of A is then, with n = q // A, on average ::

            A * (A * n * (n + 1) / 2 + (q - n * A) * (n + 1)) / (q + 1)
        """
        if self.E is None:
            return 0.0
        q = max(1, round(2 * self.M / self.E))
        n, rest = divmod(q, multiple)
        filled = multiple * (multiple * n * (n + 1) / 2 + rest * (n + 1)) / (q + 1)
        return self.E * (filled - q / 2)


@dataclass(frozen=True)
class Use:
    """How a layer is used.

    Args:
        training: forward and backward; False is forward alone.
        weight_trains: the weight gradient is computed.
        weights_cached: the weight is cast once per step, in both orientations, instead of in every
            forward and every backward; the casts stay in memory, 2 bytes per element.
        gradient_accumulation: microbatches per step, which share a cached cast.
        converts_weight: the weight is float32 and is rounded to bfloat16 before it is cast.

    Raises:
        ValueError: gradient_accumulation is not an integer from 1 to `LARGEST`.
    """

    training: bool = True
    weight_trains: bool = True
    weights_cached: bool = False
    gradient_accumulation: int = 1
    converts_weight: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.gradient_accumulation):
            raise ValueError(
                f"gradient_accumulation={self.gradient_accumulation!r} must be a count of "
                f"microbatches, at least 1 and at most {LARGEST}"
            )

    def caches_weight(self, plan: LinearPlan) -> bool:
        """Whether the weight is cached: only if both of its GEMMs are in float8."""
        both = plan.output.b is not None and plan.grad_input.b is not None
        return self.weights_cached and both
