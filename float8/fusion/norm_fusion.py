"""`fuse_norms`: norms that return float8, where only float8 layers read their result.

After conversion a norm writes bfloat16, and every layer that reads that casts it and keeps its own
copy: q, k and v three. A fused norm casts its result itself, and the layers multiply one float8
tensor, of which one copy is kept::

    convert_to_float8_training(model, config=config)
    pairs = {
        "model.layers.*.input_layernorm": [
            f"model.layers.*.self_attn.{name}_proj" for name in ("q", "k", "v")
        ],
        "model.layers.*.post_attention_layernorm": [
            f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up")
        ],
    }
    register_norm(LlamaRMSNorm, RMSNormCast, eps=lambda norm: norm.variance_epsilon)
    print(fuse_norms(model, pairs))  # the norms that were fused, and why others were not

This is Hugging Face's Llama, whose norms have a type of their own; Qwen2, Qwen3 and Mistral have
the same names. Which layers read a norm is declared, never guessed. Types, sizes and configs of
declared layers are checked. Anything else that reads the result raises an error at the first
forward, except a float8 layer with the same input cast, and sums and copies into plain tensors,
which read its values.

Every reader has to be a `Float8Linear`, all with one tensorwise input cast. Fused are modules whose
type is exactly ``nn.RMSNorm`` or ``nn.LayerNorm``, or was registered (`register_norm`).

Values and gradients are equal to those of norm and layers without fusion, except for the rounding
of float32 within the norm. Parameters and their names stay, so plain checkpoints load;
`convert_from_float8_training` makes the norms plain again. Under delayed scaling the layers'
``cast_input`` becomes one module, with the largest amaxes and scale of the layers' histories, and
the norm casts with it. So checkpoints of the fused and of the converted model load into each other,
and no history is left without amaxes.

Fuse after converting and before wrapping, compiling and ``fully_shard``; compile a norm and its
readers in one graph.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from float8.arguments import check_module, check_type
from float8.convert.conversion import replace_children
from float8.convert.inference import hide_from_ddp
from float8.convert.reasons import runs_something_else
from float8.fusion.norm_casts import LayerNormCast, NormCast, RMSNormCast, reason_against_config
from float8.linear.casts import DelayedCast
from float8.linear.layer import Float8Linear

logger = logging.getLogger("float8")
Attributes = Callable[[nn.Module], dict[str, Any]]
Pairs = Mapping[str, str | Sequence[str]]

# A norm's type -> the type that it becomes, and the attributes of torch's norm that it lacks.
NORM_RULES: dict[type[nn.Module], tuple[type[NormCast], Attributes | None]] = {
    nn.RMSNorm: (RMSNormCast, None),
    nn.LayerNorm: (LayerNormCast, None),
}


def register_norm(
    norm_type: type[nn.Module], cast_type: type[NormCast], eps: Callable[[Any], float]
) -> None:
    """Let `fuse_norms` fuse norms of another type, which must compute what torch's does.

    Args:
        norm_type: exactly this type. Its parameters are ``weight`` (K,), and for a `LayerNormCast`
            ``bias`` or none; a norm that multiplies by ``1 + weight`` is another norm.
        cast_type: `RMSNormCast` or `LayerNormCast`.
        eps: (norm) -> what it adds to the mean square or the variance.
    """

    def attributes(norm: nn.Module) -> dict[str, Any]:
        shape = tuple(norm.get_parameter("weight").shape)
        found = {"normalized_shape": shape, "eps": eps(norm), "elementwise_affine": True}
        return found if hasattr(norm, "bias") else found | {"bias": None}

    NORM_RULES[norm_type] = cast_type, attributes


@dataclass
class Fusion:
    """The report of `fuse_norms`, or of `float8.fuse_feed_forwards`.

    Args:
        kind: what was fused, for the text.
        fused: (norm, the layers that read it), or (feed-forward, its layers), by their names.
        skipped: norm or feed-forward -> why it was left alone.
    """

    kind: str
    fused: list[tuple[str, list[str]]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"fused with the casts beside them: {len(self.fused)} {self.kind}"]
        lines += [f"  {norm} -> {', '.join(layers)}" for norm, layers in self.fused]
        lines += [f"  left alone: {fqn}: {reason}" for fqn, reason in self.skipped.items()]
        return "\n".join(lines)


def fuse_norms(model: nn.Module, pairs: Pairs) -> Fusion:
    """Have norms return float8 where converted layers alone read them, in place.

    Args:
        model: converted. Fusing again fuses the norms that were left.
        pairs: norm -> the layer or all layers that read it: names in the model, in which ``*``
            stands for one part, the same one on both sides.

    Returns:
        the fused norms, and the reasons why the others were not fused; both are logged too.

    Raises:
        ValueError: pairs that name no module; nothing has been changed then.
    """
    check_module(model, "fuse_norms")
    check_type(pairs, Mapping, "fuse_norms", "pairs", "a mapping of norms to their readers")
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {module: fqn for fqn, module in model.named_modules()}
    readers: dict[nn.Module, dict[nn.Module, None]] = {}
    for norm_name, layer_names in resolved(modules, pairs).items():
        known = readers.setdefault(modules[norm_name], {})  # a norm may have two names
        known |= dict.fromkeys(modules[name] for name in layer_names)
    fusion = Fusion("norms")
    for norm, fqn in names.items():
        if not _may_be_norm(norm) and norm not in readers:
            continue
        layers: dict[str, Any] = {names[layer]: layer for layer in readers.get(norm, ())}
        problem = next(filter(None, _problems(fqn, norm, layers)), None)
        if problem is not None:
            fusion.skipped[fqn] = problem
        else:
            _fuse(model, fqn, norm, list(layers.values()))
            fusion.fused.append((fqn, list(layers)))
    hide_from_ddp(model)
    logger.info("%s", fusion)
    return fusion


def resolved(names: Iterable[str], pairs: Pairs) -> dict[str, list[str]]:
    """Norm -> layers, for every name that a pattern of ``pairs`` matches.

    ``names`` are those of all modules of the model. A star in a layer's pattern stands for what the
    norm's star stands for. Raises ValueError for a pattern that matches nothing.
    """
    known, found = dict.fromkeys(names), dict[str, list[str]]()
    for pattern, value in pairs.items():
        layers = [value] if isinstance(value, str) else value
        expression = re.compile(re.escape(pattern).replace(r"\*", "([^.]*)"))
        matches = [match for name in known if (match := expression.fullmatch(name))]
        # A star that has no star of the norm to stand for stays, and is in no layer's name.
        by_norm = {
            match[0]: [functools.reduce(_filled, match.groups(), name) for name in layers]
            for match in matches
        }
        readers = [name for names in by_norm.values() for name in names]
        missing = [name for name in readers if name not in known]
        if missing or not matches:
            what = f"layer {missing[0]!r}" if missing else f"norm {pattern!r}"
            raise ValueError(f"norm pair {pattern!r}: the model has no {what}")
        found |= by_norm
    return found


def _filled(layer: str, star: str) -> str:
    return layer.replace("*", star, 1)


def _may_be_norm(module: nn.Module) -> bool:
    """Whether the report mentions a module; nothing is fused because of its name."""
    return (
        type(module) in NORM_RULES
        or isinstance(module, (nn.RMSNorm, nn.LayerNorm))
        or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    )


def _problems(fqn: str, norm: nn.Module, layers: dict[str, Any]) -> Iterator[str | None]:
    """The reasons why the norm cannot return float8 to these layers; what follows one may fail."""
    if isinstance(norm, NormCast):
        yield "it writes float8 already"
    if type(norm) not in NORM_RULES:
        yield (
            f"its type is {type(norm).__name__}, not nn.RMSNorm or nn.LayerNorm; if it computes "
            "the same, declare it with float8.fusion.register_norm"
        )
    attributes = NORM_RULES[type(norm)][1]
    if len((attributes(norm) if attributes else vars(norm))["normalized_shape"]) != 1:
        yield "it normalises more than the last dimension"
    if norm._forward_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        yield "it has hooks, which would see a Float8Tensor"
    weight = norm._parameters.get("weight")
    if weight is not None and type(weight) not in (Tensor, nn.Parameter):
        yield f"its weight is a {type(weight).__name__}; fuse before sharding the model"
    yield runs_something_else(norm, fqn)
    if not layers:
        yield (
            "the layers that read it are not declared: pass "
            f"pairs={{{fqn!r}: [names of layers]}}, with * for a part that differs between blocks"
        )
    for name, layer in layers.items():
        if type(layer) is not Float8Linear:
            yield f"{name} reads it, a {type(layer).__name__}, not a Float8Linear"
        if layer._forward_hooks or layer._forward_pre_hooks:
            yield f"{name} reads it and has forward hooks, which would see a Float8Tensor"
        if (reason := runs_something_else(layer, name)) is not None:
            yield f"{name} reads it: {reason}"
        if (reason := reason_against_config(layer.config)) is not None:
            yield f"{name} reads it, and a norm {reason}"
    fields = ("cast_config_input", "delayed_scaling", "enable_amax_init", "emulate")
    if len({tuple(getattr(m.config, name) for name in fields) for m in layers.values()}) > 1:
        yield f"{' and '.join(layers)} read it, and cast their inputs by different configs"


def _fuse(model: nn.Module, fqn: str, norm: nn.Module, layers: list[Any]) -> None:
    cast_type, attributes = NORM_RULES[type(norm)]
    given = None if attributes is None else attributes(norm)
    cast = cast_type.from_float(norm, layers[0].config, fqn, given)
    cast.evaluates_in_high_precision = layers[0].evaluates_in_high_precision
    replace_children(model, {norm: cast})
    if cast.cast_output is not None:
        _share(model, cast, [layer.cast_input for layer in layers])


def _share(model: nn.Module, norm: NormCast, casts: list[DelayedCast]) -> None:
    """Let a norm and its readers, and all that share a cast with them, use one cast."""
    kept = casts[0]
    with torch.no_grad():
        for name, buffer in kept.named_buffers():
            buffer.copy_(torch.stack([cast.get_buffer(name) for cast in casts]).amax(0))
    kept.history_ready = any(cast.history_ready for cast in casts)
    kept.synced = any(cast.synced for cast in casts)
    norm.share_cast(kept)
    merged = set(casts)
    for module in list(model.modules()):
        if module._modules.get("cast_input") in merged:
            module._modules["cast_input"] = kept
        if isinstance(module, NormCast) and module.cast_output in merged:
            module.share_cast(kept)
