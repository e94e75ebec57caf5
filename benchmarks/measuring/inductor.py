"""What torch.compile makes of a model on an H100, without one: kernels, and the time of each.

Dynamo and AOTAutograd trace on the meta device, with the plans of CUDA (`memory.cuda_plans`).
Inductor's joint passes and its partitioner split the graph, and its scheduler fuses each half, as
it would for an H100. It generates no code, and nothing runs.

A step is then priced by the model of `float8.estimate`: its products; attention by its operations;
every other kernel, inductor's and ours, by the bytes that it reads and writes. Attention is
cuDNN's, which torch prefers on an H100. What the host adds is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from benchmarks.measuring import memory
from benchmarks.measuring.eager import H100, finds_scale, seconds_of
from float8.estimate.devices import ANY_PASS

STATIC = "static inputs"  # in the meta data of a graph: the inputs whose addresses stay
GPU = torch.device("cuda", 0)


@dataclass
class Predicted:
    """Of one step of a block: seconds, bytes of all kernels but products and attention, launches.

    ``launches`` are those of float8's own kernels.
    """

    seconds: float = 0.0
    moved: int = 0
    launches: int = 0


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Scaled dot product attention as CUDA calls it; it takes grouped queries as they are."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out: Tensor = op(q, k, v, None, True, 0.0, is_causal)[0]
    return out


@contextmanager
def tracing(partitioner: CustomPartitionerFn | None = None) -> Iterator[list[GraphModule]]:
    """Compiled code on the meta device is as on an H100; the graphs appear in the list.

    They come in pairs: forward, backward. ``partitioner`` replaces inductor's.
    """
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any, **how: Any) -> Any:
        graph.meta[STATIC] = how.get("static_input_idxs", ())
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with (
        memory.cuda_plans(),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(
            compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=keep)
        ),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        # It would replace results on the meta device by empty tensors.
        inductor_config.patch(
            joint_graph_constant_folding=False, custom_partitioner_fn=partitioner
        ),
    ):
        yield graphs


def predict(graphs: list[GraphModule]) -> Predicted:
    """The step of a block whose graphs these are, which are changed."""
    found = Predicted()
    assert len(graphs) == 2, "blocks that are equal share one graph"
    for graph in graphs:
        sizes = scheduled(graph, is_backward=graph is not graphs[0])
        for node in graph.graph.nodes:
            operands = [each.meta["val"] if isinstance(each, Node) else each for each in node.args]
            if (seconds := seconds_of(node.target, operands)) is not None:
                found.seconds += seconds
            elif getattr(node.target, "namespace", None) == "float8":
                sizes += passes_of(node)
                found.launches += len(passes_of(node))
        found.moved += sum(sizes)
        found.seconds += sum(H100.pass_seconds(ANY_PASS, size) for size in sizes)
    return found


def passes_of(node: Node) -> list[int]:
    """The bytes that each launch of a float8 op moves: one finds a tensor's scale before."""
    read, written = (bytes_of(nodes) for nodes in (node.all_input_nodes, [node]))
    return [read, read + written] if finds_scale(node.target, node.args) else [read + written]


def bytes_of(nodes: Sequence[Node]) -> int:
    """What the results of some nodes take."""
    values = pytree.tree_leaves([node.meta["val"] for node in nodes])
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def scheduled(graph: GraphModule, is_backward: bool) -> list[int]:
    """The bytes that each kernel of inductor's reads and writes."""
    with lowered(graph, is_backward) as found:
        nodes = found.scheduler.nodes
        return [n.get_read_write_buffers_sizes() for n in nodes if not n.is_extern()]


@contextmanager
def lowered(graph: GraphModule, is_backward: bool) -> Iterator[GraphLowering]:
    """A graph as inductor schedules it."""
    on_gpu(graph)
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    fake = inputs[0].fake_mode
    with _gpu(), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()), torch.no_grad():
        compile_fx.record_original_output_strides(graph)
        view_to_reshape(graph)
        post_grad_passes(graph, False)
        found = GraphLowering(graph, inputs, fake.shape_env, is_backward=is_backward)
        with V.set_graph_handler(found), V.set_extern_kernel_nodes([]):
            found.run(*inputs)
            found.init_wrapper_code()
            found._update_scheduler()
            yield found


def on_gpu(graph: GraphModule) -> None:
    """Let the tensors of a graph be on a GPU."""
    for node in graph.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                value.fake_device = GPU
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}


@contextmanager
def _gpu() -> Iterator[None]:
    """To inductor's scheduler this machine has an H100."""
    h100 = SimpleNamespace(
        major=9, minor=0, multi_processor_count=H100.processors, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    )  # fmt: skip
    with (
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(CudaInterface, "get_device_properties", return_value=h100),
    ):
        yield
