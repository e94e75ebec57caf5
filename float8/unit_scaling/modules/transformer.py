"""A unit-scaled transformer: `MLP`, `TransformerLayer`, `TransformerStack`, `TransformerDecoder`.

The input and the result of every branch f have unit scale. A residual layer weights the branch
relative to the skip by ``tau`` (u-muP, arXiv 2407.17465, appendix G); the sum has unit scale too:

    x' = (tau f(x) + x) / sqrt(1 + tau**2)

The norm begins or ends the branch:

    norm="pre"        f(x) = branch(norm(x))    arXiv 2002.04745; u-muP
    norm="res-post"   f(x) = norm(branch(x))    muS, arXiv 2502.05967: makes the branch's scale 1

Gradients in a branch have unit scale too: its factor tau / sqrt(1 + tau**2) is applied where the
gradient leaves the branch (`functional.residual_split`).

Scales are derived for independent values. Attention averages, which makes positions more similar
with each layer, and it amplifies their common part by up to ``sqrt(S / log S)`` for S positions.
With norm="pre" the residual stream of a deep model is therefore up to about 1.6 times too large at
the start (width 64, 16 layers, S = 32); with norm="res-post" it is within 5 % of 1 at every depth.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.core.functional import (
    ResidualScalingFn,
    transformer_residual_scaling_rule,
)
from float8.unit_scaling.modules.attention import MHSA, Attention
from float8.unit_scaling.modules.depth import DepthSequential
from float8.unit_scaling.modules.layers import Embedding, Linear, LinearReadout, RMSNorm

Norm = Literal["pre", "res-post"]


class MLP(nn.Module):
    """A unit-scaled feed-forward network, ``linear_2(linear_1(x) silu(linear_gate(x)))`` (SwiGLU).

    Args:
        hidden_size: features of input and output.
        expansion_factor: features between the layers, relative to ``hidden_size``.
    """

    def __init__(self, hidden_size: int, expansion_factor: int = 4) -> None:
        super().__init__()
        inner = hidden_size * expansion_factor
        # No constraint: the factors of linear_2 are those of the other two in reverse, so their
        # product is the same in both directions.
        self.linear_1 = Linear(hidden_size, inner, constraint=None)
        self.linear_gate = Linear(hidden_size, inner, constraint=None)
        self.linear_2 = Linear(inner, hidden_size, constraint=None)

    def forward(self, input: Tensor) -> Tensor:
        """(..., hidden_size) -> the same."""
        out: Tensor = self.linear_2(U.silu_glu(self.linear_1(input), self.linear_gate(input)))
        return out


class TransformerLayer(nn.Module):
    """Two unit-scaled residual layers: attention, then feed-forward.

    Args:
        hidden_size: features of input and output.
        heads: the number of heads.
        mhsa_tau: the weight of the attention branch relative to the skip.
        mlp_tau: the weight of the feed-forward branch relative to the skip.
        is_causal: whether a position sees earlier ones only.
        dropout_p: the probability of dropout on attention weights and on both branches.
        norm: where the norm of a branch f is. "pre": ``f(x) = branch(norm(x))``, as in u-muP.
            "res-post": ``f(x) = norm(branch(x))``, as in muS (arXiv 2502.05967), which makes the
            branch's scale 1.
        rotary_base, attention: as for `MHSA`.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        mhsa_tau: float,
        mlp_tau: float,
        is_causal: bool,
        dropout_p: float = 0.0,
        norm: Norm = "pre",
        rotary_base: float | None = None,
        attention: Attention = "softmax",
    ) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.mhsa_tau = mhsa_tau
        self.mlp_tau = mlp_tau
        self.norm: Norm = norm
        self.mhsa_norm = RMSNorm(hidden_size)
        options: dict[str, Any] = {"rotary_base": rotary_base, "attention": attention}
        self.mhsa = MHSA(hidden_size, heads, is_causal, dropout_p, **options)
        self.mlp_norm = RMSNorm(hidden_size)
        self.mlp = MLP(hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        """(..., sequence, hidden_size) -> the same."""
        x = self._residual_layer(input, self.mhsa, self.mhsa_norm, self.mhsa_tau)
        return self._residual_layer(x, self.mlp, self.mlp_norm, self.mlp_tau)

    def _residual_layer(
        self, input: Tensor, branch: nn.Module, norm: nn.Module, tau: float
    ) -> Tensor:
        x, skip = U.residual_split(input, tau)
        first, second = {"pre": (norm, branch), "res-post": (branch, norm)}[self.norm]
        x = U.dropout(second(first(x)), self.dropout_p, self.training)
        return U.residual_add(x, skip, tau)


class TransformerStack(DepthSequential):
    """A stack of transformer layers, whose residual weights follow from a rule.

    Args:
        layers: the number of transformer layers.
        residual_scaling: ``tau(index, branches)`` of residual branch ``index``, attention first, of
            ``2 * layers``; by default ``transformer_residual_scaling_rule()``.
        kwargs: of `TransformerLayer`.
    """

    def __init__(
        self, layers: int, residual_scaling: ResidualScalingFn | None = None, **kwargs: Any
    ) -> None:
        tau = residual_scaling or transformer_residual_scaling_rule()
        super().__init__(
            *(
                TransformerLayer(
                    **kwargs,
                    mhsa_tau=tau(2 * i, 2 * layers),
                    mlp_tau=tau(2 * i + 1, 2 * layers),
                )
                for i in range(layers)
            )
        )


class TransformerDecoder(nn.Sequential):
    """A unit-scaled decoder: embedding, causal layers, norm, readout.

    It maps input ids (batch, sequence) to logits (batch, sequence, vocab_size).

    Args:
        hidden_size: the width.
        vocab_size: the number of tokens.
        layers, residual_scaling: as for `TransformerStack`.
        heads, dropout_p: as for `TransformerLayer`.
        kwargs: of `TransformerLayer`: ``norm``, ``rotary_base``, ``attention``.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        layers: int,
        heads: int,
        dropout_p: float = 0.0,
        residual_scaling: ResidualScalingFn | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, hidden_size)
        self.layers = TransformerStack(
            layers,
            residual_scaling,
            hidden_size=hidden_size,
            heads=heads,
            is_causal=True,
            dropout_p=dropout_p,
            **kwargs,
        )
        self.final_norm = RMSNorm(hidden_size)
        self.projection = LinearReadout(hidden_size, vocab_size)

    def loss(self, input_ids: Tensor) -> Tensor:
        """The mean cross entropy, in float32, of each token given those before it.

        Args:
            input_ids: (batch, sequence), with a sequence of 2 at least.

        Returns:
            A scalar; the gradient at the logits has unit scale.
        """
        # The last position's logits are computed and dropped: float8 products need a multiple of 16
        # rows, and the caller chose the number of positions.
        logits_BSV = self(input_ids)[..., :-1, :].float()
        return U.cross_entropy(logits_BSV.flatten(end_dim=-2), input_ids[..., 1:].flatten())
