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

Tracing runs a copy of the model that shares its tensors, because a forward may write attributes.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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


def traced(
    model: nn.Module, norms: Iterable[str], is_leaf: Callable[[nn.Module], bool]
) -> dict[str, Readers]:
    """Norm -> the modules that read it, or the reason why nobody can tell.

    Args:
        model: left as it is.
        norms: names, each the first of its module's.
        is_leaf: modules whose forward is not looked into; norms and layers among them.
    """
    try:
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        twin = copy.deepcopy(model, shared)
    except Exception as error:  # an attribute of the user's may refuse in any way
        return dict.fromkeys(norms, f"the model cannot be copied for tracing: {_said(error)}")
    search = _Search(twin, dict.fromkeys(norms), is_leaf)
    search.visit("", twin)
    return search.answers()


class _Search:
    """Blocks are traced from the outermost one inwards, until every norm is seen."""

    def __init__(
        self, model: nn.Module, norms: dict[str, str | None], is_leaf: Callable[[nn.Module], bool]
    ) -> None:
        self.open, self.is_leaf = norms, is_leaf  # norm -> the latest reason
        self.found: dict[str, Readers] = {}
        self.names = {module: name for name, module in model.named_modules()}
        self.all_names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.all_names.setdefault(module, []).append(name)

    def answers(self) -> dict[str, Readers]:
        """What is known of every norm."""
        unknown = {fqn: reason or "no forward calls it" for fqn, reason in self.open.items()}
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
            graph = tracer.trace(block)
        except Exception as error:  # whatever a forward raises on a proxy
            graph = None
            reason = f"{name or 'the model'} cannot be traced by torch.fx: {_said(error)}"
            self.open.update(dict.fromkeys(inside, reason))
        for fqn, norm in inside.items():
            readers = self._readers(graph, block, norm)
            if readers is not None:
                outside = [n for n in self.all_names[norm] if not _is_inside(n, name)]
                if outside:
                    readers = f"{outside[0]} is the same module, and outside of the block seen"
                self.found[fqn] = readers

    def _readers(self, graph: fx.Graph | None, block: nn.Module, norm: nn.Module) -> Readers | None:
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
            for user in call.users:
                if _only_asks(user):
                    continue
                if user.op != "call_module" or not _reads_alone(user, call):
                    return f"its result is read by {_described(user)}"
                readers[self.names[block.get_submodule(user.target)]] = None
        return (list(readers) or "nobody reads its result") if calls else None

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
