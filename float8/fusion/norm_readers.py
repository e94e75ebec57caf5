"""Who reads what a norm computes: as somebody declares, or as torch.fx sees, never by likeness.

`declared` resolves names. A pattern's ``*`` stands for one part of a name, and a star in a layer's
pattern for what the norm's star stood for::

    {"layers.*.input_norm": ["layers.*.attention.q", "layers.*.attention.k"]}

`traced` runs the model's own forward on proxies (`torch.fx`), the whole model where it can be
traced, else the largest blocks that can, and reads the graph: every use of a norm's result must be
the input of a module, or a question about its shape. Of a block alone one does not see who else
calls its norm, so that the norm must be registered inside of it only. An ``nn.Sequential`` that
cannot be traced has an order still: each reads what is before it. Whatever stays unknown has a
reason.

A trace follows one way through a forward. It is made four times: in training and in evaluation
without gradients, each with all arguments and without those that are None by default (`WAYS`).
A norm is known if no way has anything against it, and its readers are those of all ways.
Not seen are ways that attributes, types of arguments or chance would open later, and a parent that
cannot be traced and reaches past a block for its norm: a reader there raises by name when it runs.

Tracing runs copies of the model that share its tensors, because a forward may write attributes.
"""

from __future__ import annotations

import copy
import difflib
import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn

Pairs = Mapping[str, str | Sequence[str]]
Readers = list[str] | str  # names of modules, or the reason why they are not known

# Questions about a tensor that its values do not answer.
_ASKED_METHODS = ("size", "dim", "ndimension", "numel", "stride", "is_contiguous")
_ASKED_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")


def declared(names: Iterable[str], pairs: Pairs, prefix: str = "") -> dict[str, list[str]]:
    """Norm -> layers, for every name that a pattern of ``pairs`` matches.

    Args:
        names: of all modules of the model.
        pairs: norm pattern -> layer pattern, or several.
        prefix: the name of the module that the patterns start from, with a dot, or "".

    Raises:
        TypeError: a pattern that is no string.
        ValueError: a pattern that matches nothing, or has more stars than its norm's.
    """
    known, found = list(names), dict[str, list[str]]()
    for pattern, value in pairs.items():
        layers = [value] if isinstance(value, str) else list(value)
        if not all(isinstance(each, str) for each in (pattern, *layers)):
            raise TypeError(f"norm pairs are names, got {pattern!r}: {layers!r}")
        expression = re.compile(_expression(prefix + pattern))
        matches = [match for name in known if (match := expression.fullmatch(name))]
        if not matches:
            raise ValueError(_unknown("norm", prefix + pattern, known))
        for match in matches:
            readers = [_filled(prefix + each, prefix + pattern, match.groups()) for each in layers]
            for reader in readers:
                if reader not in known:
                    raise ValueError(_unknown(f"layer (of {match[0]})", reader, known))
            found[match[0]] = readers
    return found


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "([^.]*)")


def _filled(layer: str, norm: str, stars: Sequence[str]) -> str:
    if layer.count("*") > len(stars):
        raise ValueError(f"pair {norm!r}: {layer!r} has more stars, which would match anything")
    parts = layer.split("*")
    return parts[0] + "".join(star + part for star, part in zip(stars, parts[1:], strict=False))


def _unknown(what: str, pattern: str, known: list[str]) -> str:
    near = difflib.get_close_matches(pattern, known, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"the model has no {what} {pattern!r}{hint}"


class Way(NamedTuple):
    """Under what circumstances a forward is traced."""

    training: bool
    bare: bool  # without the arguments that are None by default

    def __str__(self) -> str:
        mode = "" if self.training else ", in eval mode"
        return mode + (", called without optional arguments" if self.bare else "")


WAYS = tuple(Way(training, bare) for training in (True, False) for bare in (False, True))
_UNCALLED, _UNREAD = "no forward calls it", "nobody reads its result"


def traced(
    model: nn.Module, norms: Iterable[str], is_leaf: Callable[[nn.Module], bool]
) -> dict[str, Readers]:
    """Norm -> the modules that read it, or the reason why nobody can tell.

    Args:
        model: left as it is.
        norms: names, each the first of its module's.
        is_leaf: modules whose forward is not looked into; norms and layers among them.
    """
    norms = list(norms)
    with torch.random.fork_rng(devices=[]):  # a forward may draw numbers that are no proxies
        found = {way: _traced_one_way(model, norms, is_leaf, way) for way in WAYS}
    return {fqn: _joined({way: found[way][fqn] for way in WAYS}) for fqn in norms}


def _joined(found: dict[Way, Readers]) -> Readers:
    """What is known of a norm after all ways: a reason of any, or the readers of all."""
    readers: dict[str, None] = {}
    for way, each in found.items():
        if not isinstance(each, str):
            readers |= dict.fromkeys(each)
        elif each not in (_UNCALLED, _UNREAD):
            return f"{each}{way}"
    return list(readers) or min(str(each) for each in found.values())


def _traced_one_way(
    model: nn.Module, norms: list[str], is_leaf: Callable[[nn.Module], bool], way: Way
) -> dict[str, Readers]:
    try:
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        twin = copy.deepcopy(model, shared)
    except Exception as error:  # an attribute of the user's may refuse in any way
        return dict.fromkeys(norms, f"the model cannot be copied for tracing: {_said(error)}")
    for module in twin.modules():
        module.training = way.training  # not train(): one of its own may merge shared weights
        if is_leaf(module):
            module.forward = _refuse_direct_call
    search = _Search(twin, dict.fromkeys(norms), is_leaf, way.bare)
    with torch.set_grad_enabled(way.training):
        search.visit("", twin)
    return search.answers()


def _refuse_direct_call(*_: Any, **__: Any) -> None:
    raise TypeError("the forward of a norm or layer is called past the module")


class _Search:
    """Blocks are traced from the outermost one inwards, until every norm is seen."""

    def __init__(
        self,
        model: nn.Module,
        norms: dict[str, str | None],
        is_leaf: Callable[[nn.Module], bool],
        bare: bool,
    ) -> None:
        self.open, self.is_leaf, self.bare = norms, is_leaf, bare  # norm -> the latest reason
        self.found: dict[str, Readers] = {}
        self.names = {module: name for name, module in model.named_modules()}
        self.all_names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.all_names.setdefault(module, []).append(name)

    def answers(self) -> dict[str, Readers]:
        """What is known of every norm."""
        unknown = {fqn: reason or _UNCALLED for fqn, reason in self.open.items()}
        return unknown | self.found

    def visit(self, name: str, block: nn.Module) -> None:
        """Trace a block, and the blocks in it for the norms that this does not show."""
        inside = {
            fqn: module
            for module, fqn in self.names.items()
            if fqn in self.open and fqn not in self.found and _is_inside(fqn, name)
        }
        if not inside or self.is_leaf(block):
            return
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            self._look(name, block, inside)
        for child_name, child in block.named_children():
            self.visit(f"{name}.{child_name}" if name else child_name, child)

    def _look(self, name: str, block: nn.Module, inside: dict[str, nn.Module]) -> None:
        tracer = _Tracer(self.is_leaf)
        try:
            if "forward" in block.__dict__:  # torch.fx would trace the one of its class
                raise TypeError("its forward was replaced by a function")
            with _without_garbage():
                graph = tracer.trace(block, _without_optional(block) if self.bare else None)
        except Exception as error:  # whatever a forward raises on a proxy
            graph = None
            reason = f"{name or 'the model'} cannot be traced by torch.fx: {_said(error)}"
            self.open.update(dict.fromkeys(inside, reason))
        for fqn, norm in inside.items():
            readers = self._readers(tracer, graph, block, norm)
            if readers is not None:
                outside = [n for n in self.all_names[norm] if not _is_inside(n, name)]
                if outside:
                    readers = f"{outside[0]} is the same module, and outside of the block seen"
                self.found[fqn] = readers

    def _readers(
        self, tracer: _Tracer, graph: fx.Graph | None, block: nn.Module, norm: nn.Module
    ) -> Readers | None:
        """The modules that read a norm of this block; None if it does not show."""
        if graph is None:
            return self._next_in_order(block, norm)
        calls = [
            node
            for node in graph.nodes
            if node.op == "call_module" and block.get_submodule(node.target) is norm
        ]
        readers: dict[str, None] = {}
        for call in calls:
            if tracer.outlives(call):
                return "its result is kept beyond the forward, as in an attribute"
            for user in call.users:
                if _only_asks(user):
                    continue
                if user.op != "call_module" or not _reads_alone(user, call):
                    return f"its result is read by {_described(user)}"
                readers[self.names[block.get_submodule(user.target)]] = None
        if calls and (holder := self._hidden_holder(graph, block, norm)):
            return f"it is a part of {holder} too, which is not looked into"
        return (list(readers) or _UNREAD) if calls else None

    def _hidden_holder(self, graph: fx.Graph, block: nn.Module, norm: nn.Module) -> str:
        """A module of torch's that is called as a whole and might call the norm that it has."""
        called = {block.get_submodule(n.target) for n in graph.nodes if n.op == "call_module"}
        return next((self.names[m] for m in called - {norm} if norm in m.modules()), "")

    def _next_in_order(self, block: nn.Module, norm: nn.Module) -> Readers | None:
        children = list(block) if type(block) is nn.Sequential else []
        if norm not in children:
            return None
        if len(self.all_names[norm]) > 1 or norm is children[-1]:
            return "its result leaves the nn.Sequential that it is in"
        return [self.names[children[children.index(norm) + 1]]]


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # or a forward that counts in a buffer would really count

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf
        self._proxies: list[weakref.ref[fx.Proxy]] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """See ``fx.Tracer``."""
        made = super().proxy(node)
        self._proxies.append(weakref.ref(made))
        return made

    def outlives(self, node: fx.Node) -> bool:
        """Whether somebody still has, after the forward, what this node computed."""
        return any((left := ref()) is not None and left.node is node for ref in self._proxies)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """See ``fx.Tracer``."""
        return self._is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See ``fx.Tracer``; a hook might do anything with what it sees, here on proxies."""
        if (m._forward_hooks or m._forward_pre_hooks) and not self._is_leaf(m):
            raise TypeError(f"{self.path_of_module(m)} has forward hooks")
        return super().call_module(m, forward, args, kwargs)


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Objects of this block that nobody has are gone after it, in cycles too, on every rank."""
    enabled = gc.isenabled()
    gc.disable()  # so that all are young
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


def _without_optional(block: nn.Module) -> dict[str, None]:
    parameters = inspect.signature(block.forward).parameters
    return {name: None for name, p in parameters.items() if p.default is None}


def _is_inside(fqn: str, block: str) -> bool:
    return not block or fqn == block or fqn.startswith(f"{block}.")


def _only_asks(user: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target in _ASKED_METHODS
    return (user.op, user.target) == ("call_function", getattr) and (
        user.args[1] in _ASKED_ATTRIBUTES
    )


def _reads_alone(user: fx.Node, node: fx.Node) -> bool:
    return [*user.args, *user.kwargs.values()] == [node]


def _described(user: fx.Node) -> str:
    if user.op == "output":
        return "whoever called the model or block: it is a result of its forward"
    name = getattr(user.target, "__name__", str(user.target))
    return f"{name}, with other arguments" if user.op == "call_module" else name


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.120}"
