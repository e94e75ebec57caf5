"""The matrix products that benchmarks time, named after the layers they come from.

A linear layer is one product `x_MK @ w_NK.T`: M tokens, K = in_features, N = out_features.
LLaMA-2-70B's shapes follow from its published dimensions (Touvron et al. 2023, "Llama 2", and the
model's config file): hidden 8192, feed-forward 28672, 64 query heads and 8 key/value heads of
8192 / 64 = 128 numbers each.

    attn.wqkv   K = 8192    N = 64 * 128 + 2 * 8 * 128 = 10240   (q, k and v in one product)
    attn.wo     K = 8192    N = 8192
    ffn.w13     K = 8192    N = 2 * 28672 = 57344                (gate and up in one product)
    ffn.w2      K = 28672   N = 8192

M = 16384 tokens, four sequences of LLaMA-2's context length 4096. One such layer moves far more
bytes than a GPU's caches hold, so that repeated calls do not measure the cache.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 8192, 28672, 64, 8
HEAD_DIM = HIDDEN // HEADS
TOKENS = 4 * 4096


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

    def __str__(self) -> str:
        return f"{self.name} ({self.M},{self.K},{self.N})".strip()


LLAMA2_70B = (
    Shape(TOKENS, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, "attn.wqkv"),
    Shape(TOKENS, HIDDEN, HIDDEN, "attn.wo"),
    Shape(TOKENS, HIDDEN, 2 * FEED_FORWARD, "ffn.w13"),
    Shape(TOKENS, FEED_FORWARD, HIDDEN, "ffn.w2"),
)


def parse_shape(text: str) -> Shape:
    """`"2048,1024,4096"`, or a name such as `"ffn.w13"`, as a Shape; for argparse."""
    named = {shape.name: shape for shape in LLAMA2_70B}
    if text in named:
        return named[text]
    sizes = [int(size) for size in text.split(",") if size.strip().isdecimal()]
    if len(sizes) != 3 or text.count(",") != 2 or 0 in sizes:
        raise ArgumentTypeError(
            f"a shape is three positive numbers M,K,N or one of {', '.join(named)}, not {text!r}"
        )
    M, K, N = sizes
    return Shape(M, K, N)
