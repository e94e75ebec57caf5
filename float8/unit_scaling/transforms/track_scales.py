"""`track_scales`: a graph of the calls that a model made, with the scale of every tensor.

`track_scales` returns a copy of a model that records its calls. Afterwards
``model.scales_graph()`` is a `torch.fx.Graph` of the latest forward:

* a *placeholder* for each tensor among the arguments, by the argument's name;
* a *get_attr* for each parameter and buffer, by its qualified name, where it is first used; also,
  with targets ``_tensor_constant0``, ..., for tensors of unknown origin;
* a *call_function* for each function that returned a tensor, a *call_method* for each method of
  one, as the model called it: ``U.linear`` is one call, and so is ``F.linear`` under `unit_scale`;
* an *output* of the results that no call read.

Each node has, in ``meta``,

======================== ========================================================================
``metrics``              `Metrics` of the tensor and, after a backward pass, of its gradient, where
                         the tensor is of floating point
``outputs_float_tensor`` whether it is
``requires_grad``        whether the node is a parameter that is trained
``clean_name``           the node's name
======================== ========================================================================

A torch function mode sees each call and its result; a tensor hook sees the gradient with respect
to that result, summed over all its users. Statistics are kept, tensors are not: the map from
tensors to nodes is weak. Other transforms do not see the calls that compute the statistics. The
random state, results and gradients do not change in any bit. The model waits for its device at each
call.

An input that requires no gradient gets one for the statistics: the forward reads an alias of it, on
the same memory, that requires a gradient, and so does the output then. The caller's tensor stays as
it is. Under ``torch.no_grad`` there are no gradients to record. Calls inside ``torch.vmap`` and
``torch.func`` are not recorded: their tensors have no values of their own.

**Metrics** are six numbers that say where in a format's range a tensor lies:

============ ==================== =================================================
name         long name            of a tensor x of n elements
============ ==================== =================================================
``mean_abs`` mean absolute value  sum |x| / n
``abs_mean`` absolute mean value  |sum x| / n
``std``      standard deviation   sqrt(sum (x - mean)^2 / (n - 1)), 0 for n = 1
``abs_max``  absolute maximum     max |x|: beyond a format's largest value, it saturates
``abs_min``  absolute minimum     min |x|: below its smallest value, it becomes zero
``numel``    number of elements   n
============ ==================== =================================================

They are computed in float32, of a float64 tensor in float64, and are NaN for n = 0.
"""

from __future__ import annotations

import inspect
import math
import operator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from float8.tensor import Float8Tensor
from float8.unit_scaling.registry import decomposition_of, respelt
from float8.unit_scaling.transforms.transformed import Mode, Transform, Transformed, transformed

M = TypeVar("M", bound=nn.Module)

# Methods of tensors that are spelt as functions of `operator`.
_OPERATORS = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}
# Arguments of these types are in the graph as they are; of others, their types.
_SHOWN = (
    *(int, float, bool, complex, str, type(None), type(Ellipsis), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Metrics:
    """The numbers of a tensor, ``fwd``, and of its gradient, ``bwd``: None before a backward.

    Args:
        fwd_tensor: any shape, floating point. It is not kept.
    """

    @dataclass
    class Data:
        """The numbers of one tensor; the metadata are the long names."""

        mean_abs: float = field(metadata={"long": "mean absolute value"})
        abs_mean: float = field(metadata={"long": "absolute mean value"})
        std: float = field(metadata={"long": "standard deviation"})
        abs_max: float = field(metadata={"long": "absolute maximum"})
        abs_min: float = field(metadata={"long": "absolute minimum"})
        numel: int = field(metadata={"long": "number of elements"})

    def __init__(self, fwd_tensor: Tensor) -> None:
        self.fwd = self.from_tensor(fwd_tensor)
        self.bwd: Metrics.Data | None = None

    def set_bwd(self, bwd_tensor: Tensor) -> None:
        """Stores the numbers of the gradient in place of those of an earlier backward pass."""
        self.bwd = self.from_tensor(bwd_tensor)

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def from_tensor(t: Tensor) -> Metrics.Data:
        """The numbers of a tensor; waits for its device once. Transforms do not see these calls."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            x = t.dequantize() if isinstance(t, Float8Tensor) else t
            x = x if x.layout == torch.strided else x.to_dense()
            x = x if x.dtype == torch.float64 else x.float()
            if x.numel() == 0:
                return Metrics.Data(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
            size, std = x.abs(), x.std(correction=min(x.numel() - 1, 1))
            found = torch.stack([size.mean(), x.mean().abs(), std, size.max(), size.min()])
            mean_abs, abs_mean, deviation, abs_max, abs_min = found.tolist()
            return Metrics.Data(mean_abs, abs_mean, deviation, abs_max, abs_min, x.numel())

    @staticmethod
    def names() -> list[str]:
        """The names of the numbers, as attributes of `Data`."""
        return [number.name for number in fields(Metrics.Data)]

    @staticmethod
    def full_names() -> list[str]:
        """The long names, in the order of `names`."""
        return [number.metadata["long"] for number in fields(Metrics.Data)]

    @staticmethod
    def get_full_name(short_name: str) -> str:
        """The long name of a number; a KeyError if no number has this name."""
        return dict(zip(Metrics.names(), Metrics.full_names(), strict=True))[short_name]


def track_scales(module: M) -> M:
    """A copy of a model that records the scales of its tensors, and of their gradients.

    Args:
        module: any module.

    Returns:
        the copy, with one method more: ``scales_graph()``, the graph of its latest forward, empty
        before the first. It composes with the other transforms in any order, and with deepcopy and
        pickle: copies start with nothing recorded.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: it is tracked already, or is compiled.
    """
    transform = TrackScales()
    tracked = transformed(module, transform)
    tracked.scales_graph = transform.scales_graph  # type: ignore[assignment]
    return tracked


class TrackScales(Transform):
    """The transform of `track_scales`: the latest graph, and the hooks that wait for gradients."""

    depth: ClassVar[int] = 0

    def __init__(self) -> None:
        self.graph = Graph()
        self.hooks: list[Any] = []  # those of leaves, which would keep them

    def __reduce__(self) -> Any:
        return TrackScales, ()

    def scales_graph(self) -> Graph:
        """The graph of the latest forward."""
        return self.graph

    def mode(self, model: nn.Module, args: Any, kwargs: Any) -> Mode:
        """The mode that records one forward; refuses one that is being compiled."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "track_scales records a model that runs in Python, and this one is being compiled: "
                "call it without torch.compile"
            )
        for hook in self.hooks:
            hook.remove()
        self.graph, self.hooks = Graph(), []
        return _RecordingMode(self, model)


class _RecordingMode(Mode):
    """Records the calls of one forward; a function of ``U`` is one call."""

    def __init__(self, recorded: TrackScales, model: nn.Module) -> None:
        super().__init__({})
        self.recorded, self.graph, self.model = recorded, recorded.graph, model
        self.names = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self.nodes = WeakIdKeyDictionary()  # tensor -> its node
        self.hooked = WeakIdKeyDictionary()  # tensors with a gradient hook -> their metrics
        self.constants = 0

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Add a placeholder for each tensor; the forward reads aliases that require gradients."""
        plain = super(Transformed, self.model).forward  # type: ignore[misc]
        bound = inspect.signature(plain).bind(*args, **kwargs)
        aliases: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunction():
            for name, value in bound.arguments.items():
                leaves, spec = tree_flatten(value)
                read = list(leaves)
                for index, leaf in enumerate(leaves):
                    if isinstance(leaf, Tensor):
                        label = name if leaf is value else f"{name}_{index}"
                        read[index] = aliases.setdefault(id(leaf), _aliased(leaf))
                        self._add_tensor(self.graph.placeholder(label), read[index])
                if any(new is not old for new, old in zip(read, leaves, strict=True)):
                    bound.arguments[name] = tree_unflatten(read, spec)
        return bound.args, bound.kwargs

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if decomposition_of(respelt(func)) is not None:
            return super().__torch_function__(func, types, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # in torch.vmap, torch.func
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            shown = map_aggregate((tuple(args), dict(kwargs)), self._shown)
        output = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            result = args[0] if func is Tensor.__setitem__ else output
            if any(isinstance(x, Tensor) for x in tree_leaves(result)):
                self._add_call(respelt(func), shown, result)
        return output

    def finish(self, result: Any) -> None:
        """Close the graph."""
        # The results of the forward are still alive; so are few other tensors that no call read.
        alive, leaves = set(self.nodes.values()), ("get_attr", "placeholder")
        unread = [n for n in self.graph.nodes if n in alive and not n.users and n.op not in leaves]
        output = self.graph.output(unread[0] if len(unread) == 1 else tuple(unread))
        self._describe(output, None)

    def _shown(self, value: Any) -> Any:
        """An argument as it is in the graph, a tensor as its node."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, _SHOWN):
            return value
        return getattr(value, "__name__", f"<{type(value).__name__}>")

    def _node_of(self, x: Tensor) -> Node:
        node = self.nodes.get(x)
        if node is None:
            name = self.names.get(id(x), f"_tensor_constant{self.constants}")
            self.constants += id(x) not in self.names
            return self._add_tensor(self.graph.create_node("get_attr", name), x)
        # What an autograd function returns requires a gradient after modes have seen it.
        self._hook(x, node)
        return node

    def _add_call(self, func: Any, shown: Any, result: Any) -> None:
        node = self.graph.create_node(*_target(func, *shown))
        if isinstance(result, Tensor):
            self._add_tensor(node, result)
            return
        self._describe(node, result)
        for index, part in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if isinstance(part, Tensor):
                self._add_tensor(self.graph.call_function(operator.getitem, (node, index)), part)

    def _add_tensor(self, node: Node, x: Tensor) -> Node:
        """Records a tensor as the result of a node."""
        self._describe(node, x)
        self.nodes[x] = node
        if x.is_floating_point():
            node.meta["metrics"] = Metrics(x)
            self.hooked.pop(x, None)
            self._hook(x, node)
        return node

    def _describe(self, node: Node, value: Any) -> None:
        node.meta |= {
            "clean_name": node.name,
            "outputs_float_tensor": isinstance(value, Tensor) and value.is_floating_point(),
            "requires_grad": isinstance(value, nn.Parameter) and value.requires_grad,
        }

    def _hook(self, x: Tensor, node: Node) -> None:
        if x.requires_grad and x not in self.hooked and "metrics" in node.meta:
            self.hooked[x] = node
            handle = x.register_hook(node.meta["metrics"].set_bwd)
            if x.is_leaf:
                self.recorded.hooks.append(handle)


class _Alias(torch.autograd.Function):
    """An alias of an input on the same memory; its gradient goes no further."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # not a view: views cannot be written to here

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


def _aliased(x: Tensor) -> Tensor:
    if x.requires_grad or not x.is_floating_point() or not torch.is_grad_enabled():
        return x
    return _Alias.apply(x.detach().requires_grad_())


def _target(func: Any, args: Any, kwargs: Any) -> tuple[str, Any, Any, Any]:
    """Operation, target, args and kwargs of a node that calls ``func``."""
    name = func.__name__
    if name == "__get__":  # x.T
        return "call_function", getattr, (args[0], func.__self__.__name__), {}
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args, kwargs
    owner = getattr(func, "__qualname__", name).partition(".")[0]
    if owner in ("Tensor", "TensorBase", "_TensorBase"):
        return "call_method", name, args, kwargs
    return "call_function", func, args, kwargs
