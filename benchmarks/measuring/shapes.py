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
float8 begins to pay.

A grouped product has M tokens among E experts. The routed experts of four models, from their papers
and configurations:

                   hidden  expert  experts  per token
    DeepSeek-V3      7168    2048      256          8   arXiv:2412.19437, section 4.2
    Qwen3-30B-A3B    2048     768      128          8   config.json of Qwen/Qwen3-30B-A3B
    Llama-4-Scout    5120    8192       16          1   config.json of Llama-4-Scout-17B-16E
    Mixtral-8x7B     4096   14336        8          2   arXiv:2401.04088, table 1

    gate_up   K = hidden   N = 2 * expert      (gate and up in one product)
    down      K = expert   N = hidden

for 8192 tokens on a GPU, M = 8192 * experts per token. DeepSeek-V3's experts are shared among eight
GPUs, so that a GPU holds 32 of them and sees as many tokens as it sends.

Names of products ("70b.ffn.w2") and of whole groups ("8b", "squares", "mixtral") may stand for
sizes on the command line.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

HEAD_DIM = 128
TOKENS = 2 * 8192


@dataclass(frozen=True)
class Shape:
    """One product `x_MK @ w_NK.T`, of E experts if there are any."""

    M: int
    K: int
    N: int
    E: int = 0
    name: str = ""

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of M * K * N terms."""
        return 2 * self.M * self.K * self.N

    @property
    def row(self) -> dict[str, Any]:
        """What a row says about its shape."""
        sizes = {"M": self.M, "K": self.K, "N": self.N}
        if self.E:
            sizes = {"T": self.M, "K": self.K, "N": self.N, "E": self.E}
        return {"shape": str(self), **sizes}

    def __str__(self) -> str:
        sizes = (self.M, self.K, self.N, *([self.E] if self.E else []))
        return f"{self.name} ({','.join(map(str, sizes))})".strip()


Group = tuple[Shape, ...]


def layers_of(model: str, hidden: int, feed_forward: int, heads: int, kv: int) -> Group:
    sizes = {
        "attn.wqkv": (hidden, (heads + 2 * kv) * HEAD_DIM),
        "attn.wo": (hidden, hidden),
        "ffn.w13": (hidden, 2 * feed_forward),
        "ffn.w2": (feed_forward, hidden),
    }
    return tuple(Shape(TOKENS, K, N, name=f"{model}.{name}") for name, (K, N) in sizes.items())


def experts_of(model: str, hidden: int, expert: int, experts: int, top_k: int) -> Group:
    """The two grouped products of a model's experts."""
    M = 8192 * top_k
    return (
        Shape(M, hidden, 2 * expert, experts, f"{model}.gate_up"),
        Shape(M, expert, hidden, experts, f"{model}.down"),
    )


LLAMA3_8B = layers_of("8b", 4096, 14336, 32, 8)
LLAMA3_70B = layers_of("70b", 8192, 28672, 64, 8)
SQUARES = tuple(Shape(size, size, size) for size in (1024, 2048, 4096, 8192, 16384))
LINEAR = {"8b": LLAMA3_8B, "70b": LLAMA3_70B, "squares": SQUARES}
EXPERTS = {
    "deepseek-v3": experts_of("deepseek-v3", 7168, 2048, 32, 8),
    "qwen3-30b": experts_of("qwen3-30b", 2048, 768, 128, 8),
    "llama4-scout": experts_of("llama4-scout", 5120, 8192, 16, 1),
    "mixtral": experts_of("mixtral", 4096, 14336, 8, 2),
}


def parse_shapes(text: str, groups: Mapping[str, Group], numbers: int = 3) -> Group:
    """`"2048,1024,4096"`, a name such as `"70b.ffn.w2"` or a group such as `"8b"`; for argparse."""
    named = {shape.name: (shape,) for group in groups.values() for shape in group if shape.name}
    known: dict[str, Group] = {**named, **groups}
    if text in known:
        return known[text]
    parts = text.split(",")
    if len(parts) != numbers or not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentTypeError(
            f"a shape is {numbers} positive numbers or one of {', '.join(known)}, not {text!r}"
        )
    M, K, N, E = (*map(int, parts), 0)[:4]
    return (Shape(M, K, N, E),)


def add_option(parser: ArgumentParser, groups: Mapping[str, Group], letters: str = "M,K,N") -> None:
    """`--shapes`, which `chosen` reads."""
    parse = partial(parse_shapes, groups=groups, numbers=len(letters.split(",")))
    text = f"sizes, or names of layers or groups: {', '.join(groups)}"
    parser.add_argument("--shapes", nargs="+", type=parse, metavar=letters, help=text)


def chosen(given: Sequence[Group] | None, default: Sequence[Shape]) -> Group:
    """All shapes that `--shapes` named, in that order; without it the default ones."""
    return tuple(shape for group in given for shape in group) if given else tuple(default)
