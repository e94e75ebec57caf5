"""Transformers: attention, feed-forward network, layers, stacks that know their depth, a decoder.

**Attention.**
A head of d features attends with logits ``mult * q k / d`` and not ``/ sqrt(d)`` (u-muP, arXiv
2407.17465, appendix B): as training correlates queries and keys, their products grow like d. The
result is divided by the scale of attention's output. With muS's square-root softmax it has unit
scale without a factor. `float8.unit_scaling.functional.attention` derives both.

Rotary embedding (arXiv 2104.09864) takes features i and i + d/2 of a head as a point of a plane. At
position s the point turns by the angle ``s * base ** (-2 i / d)``, so that a product of a query and
a key depends on their distance only:

    y_i       = x_i cos - x_(i + d/2) sin
    y_(i+d/2) = x_i sin + x_(i + d/2) cos

A rotation keeps the length of vectors, forward and backward, so it needs no scale. The S x d/2
angles are computed in each call, not cached. A cache could be too short for a sequence, would be
uninitialised after construction on the meta device, and would appear in checkpoints.

**Residual layers.**
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

**Depth.**
The updates of L residual layers add up in the residual stream, so each parameter in a stack of L
trains with a learning rate divided by ``sqrt(L)`` (u-muP, arXiv 2407.17465, table 2, "residual").
A stack sets ``mup_scaling_depth = L`` on all its parameters; `optim.lr_scale_for_depth` reads it.

L is the number of layers of one stack at construction; layers added later get no depth. A parameter
cannot be in two stacks, so stacks do not nest. A transformer layer counts once, though it has two
branches: that is a constant, which the global learning rate absorbs. A slice of a stack is a plain
module, whose parameters keep their depth.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.core.functional import ResidualScalingFn, transformer_residual_scaling_rule
from float8.unit_scaling.modules.layers import Embedding, Linear, LinearReadout, RMSNorm
from float8.unit_scaling.parameter import has_parameter_data, set_parameter_data

Attention = Literal["softmax", "sqrt_softmax"]

_ATTENTIONS = {
    "softmax": U.scaled_dot_product_attention,
    "sqrt_softmax": U.sqrt_softmax_attention,
}
NormPlace = Literal["pre", "res-post"]


class DepthModuleList(nn.ModuleList):
    """An ``nn.ModuleList`` of residual layers; a layer that is given twice counts twice.

    Raises:
        ValueError: a parameter has no ``mup_type``, or is in a stack already.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        _set_depth(self, len(self))

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return nn.ModuleList(list(self)[idx])
        return super().__getitem__(idx)


class DepthSequential(nn.Sequential):
    """An ``nn.Sequential`` of residual layers, or of one ordered dict of them.

    Raises:
        ValueError: a parameter has no ``mup_type``, or is in a stack already.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _set_depth(self, len(self))

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return nn.Sequential(*list(self)[idx])
        return super().__getitem__(idx)


def _set_depth(stack: nn.Module, depth: int) -> None:
    """Set the depth of all parameters, or of none if one is refused."""
    parameters: dict[str, Any] = dict(stack.named_parameters())
    for name, parameter in parameters.items():
        if not has_parameter_data(parameter) or parameter.mup_scaling_depth is not None:
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} has no mup_type, or is in a "
                "stack already: build the layers of unit-scaled modules or with uu.Parameter, and "
                "do not nest stacks"
            )
    for parameter in parameters.values():
        set_parameter_data(parameter, parameter.mup_type, depth)


class MHSA(nn.Module):
    """Unit-scaled multi-head self-attention, (..., sequence, hidden_size) -> the same.

    Args:
        hidden_size: features of input and output, a multiple of ``heads``.
        heads: the number of heads.
        is_causal: whether a position sees earlier ones only.
        dropout_p: the probability of dropping an attention weight, in training.
        mult: the inverse temperature of the softmax (a hyperparameter of u-muP).
        rotary_base: of rotary position embedding (arXiv 2104.09864), for example 10000.0; None
            for no position embedding.
        attention: "softmax", or muS's "sqrt_softmax" (arXiv 2502.05967).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        is_causal: bool,
        dropout_p: float = 0.0,
        mult: float = 1.0,
        rotary_base: float | None = None,
        attention: Attention = "softmax",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.is_causal = is_causal
        self.dropout_p = dropout_p
        self.mult = mult
        self.rotary_base = rotary_base
        self.attention = attention
        self.linear_qkv = Linear(hidden_size, 3 * hidden_size)
        self.linear_o = Linear(hidden_size, hidden_size)

    def forward(self, input: Tensor) -> Tensor:
        """(..., sequence, hidden_size) -> the same."""
        qkv: Tensor = self.linear_qkv(input)
        qkv = qkv.unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        q_HSD, k_HSD, v_HSD = qkv.unbind(0)
        if self.rotary_base is not None:
            q_HSD, k_HSD = [rotary(x, self.rotary_base) for x in (q_HSD, k_HSD)]
        dropout_p = self.dropout_p if self.training else 0.0
        heads_HSD = _ATTENTIONS[self.attention](
            q_HSD, k_HSD, v_HSD, None, dropout_p, self.is_causal, self.mult
        )
        return self.linear_o(heads_HSD.transpose(-3, -2).flatten(-2))


def rotary(x_SD: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate the features of every position, see the module's docstring.

    ``x_SD`` (..., S, d) has heads of S positions and d features; the result has its shape and
    dtype. Angles and products are computed in float32 or better. The wavelengths are ``2 pi`` to
    ``2 pi base`` positions. d is even.
    """
    positions, features = x_SD.shape[-2:]
    wide = torch.promote_types(x_SD.dtype, torch.float32)
    exponents = torch.arange(0, features, 2, device=x_SD.device, dtype=wide) / -features
    places = torch.arange(positions, device=x_SD.device, dtype=wide)
    angles = places[:, None] * base**exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = x_SD.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x_SD.dtype)


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
        return self.linear_2(U.silu_glu(self.linear_1(input), self.linear_gate(input)))


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
        kwargs: of `MHSA`: ``mult``, ``rotary_base``, ``attention``.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        mhsa_tau: float,
        mlp_tau: float,
        is_causal: bool,
        dropout_p: float = 0.0,
        norm: NormPlace = "pre",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.mhsa_tau = mhsa_tau
        self.mlp_tau = mlp_tau
        self.norm: NormPlace = norm
        self.mhsa_norm = RMSNorm(hidden_size)
        self.mhsa = MHSA(hidden_size, heads, is_causal, dropout_p, **kwargs)
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
        rule = residual_scaling or transformer_residual_scaling_rule()
        taus = [rule(i, 2 * layers) for i in range(2 * layers)]
        pairs = zip(taus[::2], taus[1::2], strict=True)
        super().__init__(*[TransformerLayer(**kwargs, mhsa_tau=a, mlp_tau=b) for a, b in pairs])


class TransformerDecoder(nn.Sequential):
    """A unit-scaled decoder: embedding, causal layers, norm, readout.

    It maps input ids (batch, sequence) to logits (batch, sequence, vocab_size).

    Args:
        hidden_size: the width.
        vocab_size: the number of tokens.
        layers, residual_scaling: as for `TransformerStack`.
        heads, dropout_p: as for `TransformerLayer`.
        kwargs: of `TransformerLayer`: ``norm``, and those of `MHSA`.
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
        kwargs |= {"hidden_size": hidden_size, "heads": heads, "dropout_p": dropout_p}
        self.layers = TransformerStack(layers, residual_scaling, is_causal=True, **kwargs)
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
