"""The matrix products that benchmarks time, named after the layers they come from.

A linear layer is one product `x_MK @ w_NK.T`: M tokens, K = in_features, N = out_features. The
layers of LLaMA-3 follow from its published dimensions (arXiv:2407.21783, table 3); query, key and
value heads have 128 numbers each:

               hidden  feed-forward  query heads  key/value heads
    8b           4096         14336           32                8
    70b          8192         28672           64                8

    attn.wqkv   K = hidden         N = 128 * (query heads + 2 * key/value heads)   (one product)
    attn.wo     K = hidden         N = hidden
    ffn.w13     K = hidden         N = 2 * feed-forward                (gate and up in one product)
    ffn.w2      K = feed-forward   N = hidden

M = 16384 tokens, two sequences of LLaMA-3's context length 8192. `SQUARES` are M = K = N: where
float8 begins to pay. Names of products ("70b.ffn.w2") and of whole groups ("8b", "squares") may
stand for sizes on the command line.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 128
TOKENS = 2 * 8192


@dataclass(frozen=True)
class Shape:
    """One product `x_MK @ w_NK.T`."""

    M: int
    K: int
    N: int
    name: str = ""

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of M * K * N terms."""
        return 2 * self.M * self.K * self.N

    @property
    def label(self) -> str:
        """The name where there is one, the size of a square, else all sizes: for axes."""
        is_square = self.M == self.K == self.N
        return self.name or (str(self.M) if is_square else f"{self.M},{self.K},{self.N}")

    @property
    def row(self) -> dict[str, Any]:
        """What a row says about its shape."""
        return {"shape": str(self), "M": self.M, "K": self.K, "N": self.N}

    def __str__(self) -> str:
        return f"{self.name} ({self.M},{self.K},{self.N})".strip()


def layers_of(model: str, hidden: int, feed_forward: int, heads: int, kv: int) -> tuple[Shape, ...]:
    return (
        Shape(TOKENS, hidden, (heads + 2 * kv) * HEAD_DIM, f"{model}.attn.wqkv"),
        Shape(TOKENS, hidden, hidden, f"{model}.attn.wo"),
        Shape(TOKENS, hidden, 2 * feed_forward, f"{model}.ffn.w13"),
        Shape(TOKENS, feed_forward, hidden, f"{model}.ffn.w2"),
    )


LLAMA3_8B = layers_of("8b", 4096, 14336, 32, 8)
LLAMA3_70B = layers_of("70b", 8192, 28672, 64, 8)
SQUARES = tuple(Shape(size, size, size) for size in (1024, 2048, 4096, 8192, 16384))
GROUPS = {"8b": LLAMA3_8B, "70b": LLAMA3_70B, "squares": SQUARES}
NAMED = {shape.name: shape for shape in (*LLAMA3_8B, *LLAMA3_70B)}


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """`"2048,1024,4096"`, a name such as `"70b.ffn.w2"` or a group such as `"8b"`; for argparse."""
    if text in GROUPS:
        return GROUPS[text]
    if text in NAMED:
        return (NAMED[text],)
    sizes = [int(size) for size in text.split(",") if size.strip().isdecimal()]
    if len(sizes) != 3 or text.count(",") != 2 or 0 in sizes:
        raise ArgumentTypeError(
            "a shape is three positive numbers M,K,N or one of "
            f"{', '.join((*GROUPS, *NAMED))}, not {text!r}"
        )
    M, K, N = sizes
    return (Shape(M, K, N),)


def add_option(parser: ArgumentParser) -> None:
    """`--shapes`, which `chosen` reads."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shapes,
        metavar="M,K,N",
        help=f"sizes, or names: {', '.join((*GROUPS, *NAMED))}",
    )


def chosen(
    given: Sequence[tuple[Shape, ...]] | None, default: Sequence[Shape]
) -> tuple[Shape, ...]:
    """All shapes that `--shapes` named, in that order; without it the default ones."""
    return tuple(shape for group in given for shape in group) if given else tuple(default)
