"""The arithmetic of a training step on a cluster: bytes per link, memory per GPU, predicted time.

Nothing here is measured. Every number that is neither a published size nor from a datasheet is a
field of `Assumptions`, which `plan_cluster.py` prints.

A cluster is nodes of 8 GPUs. Of n = t * s * r GPUs, t share each layer (tensor parallel, within a
node), s share the parameters and the optimizer's state (FSDP), and r hold copies of them (HSDP).
FSDP has r = 1; HSDP has s * t = 8, so that weights never leave a node. For P parameters and b_w,
b_g and b_r bytes per weight and gradient that is sent, a GPU sends per step

    weights     all-gather, for forward and again for backward   2 (s-1)/s * P/t * b_w
    gradients   reduce-scatter                                     (s-1)/s * P/t * b_g
    replicas    all-reduce of what is left (HSDP)                2 (r-1)/r * P/(t s) * b_r
    activations tensor and sequence parallel, per block: an all-gather before attention and
                feed-forward and a reduce-scatter after each, the same in backward, and the forward
                ones again where blocks are recomputed           (t-1)/t * M C * bytes each

(M: tokens that the t GPUs share, C: hidden size.) Collectives are rings through whole nodes: of a
ring with g GPUs in each node, one in g hops leaves the node, so a GPU's network link carries 1/g of
what it sends and its node link the rest. The time of communication is that of the busier of the two
links, and one latency for each of log2(ranks) steps, as tree-like algorithms take (NCCL's PAT).

Communication of weights and gradients overlaps compute where that is assumed::

    step = max(forward, gather) + max(backward, gather + reduce) + activations
           + first gather + last reduce + optimizer

Compute is `float8.estimate`'s for the linear layers (the head in bf16 always), attention's
operations at an assumed efficiency, and the bytes of everything between at memory bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from benchmarks.measuring.shapes import HEAD_DIM, layers_of
from float8.estimate import Device, estimate

NODE = 8  # GPUs
BF16 = "bf16"
OWNED_BYTES = 4 + 4  # per own parameter: float32 weight and gradient; Adam's moments are extra


@dataclass(frozen=True)
class Model:
    """A LLaMA-like model; `benchmarks/measuring/shapes.py` has the layers of a block."""

    name: str
    blocks: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int = 128_256

    @cached_property
    def products(self) -> list[tuple[int, int]]:
        """(K, N) of a block's linear layers: qkv, attention's output, gate and up, down."""
        layers = layers_of(self.name, self.hidden, self.feed_forward, self.heads, self.kv_heads)
        return [(layer.K, layer.N) for layer in layers]

    @property
    def block_weights(self) -> int:
        """Elements of the weights of one block's linear layers: what float8 gathers."""
        return sum(K * N for K, N in self.products)

    @property
    def other_weights(self) -> int:
        """Embedding, head, and norms: always in high precision."""
        return 2 * self.vocabulary * self.hidden + (2 * self.blocks + 1) * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.blocks * self.block_weights + self.other_weights


# arXiv:2407.21783, table 3; the vocabulary is in its section 3.2.
MODELS = {
    "8b": Model("8b", 32, 4096, 14336, 32, 8),
    "70b": Model("70b", 80, 8192, 28672, 64, 8),
    "405b": Model("405b", 126, 16384, 53248, 128, 8),
}


@dataclass(frozen=True)
class Assumptions:
    """Figures that no datasheet gives; fractions, seconds and bytes.

    Args:
        link_efficiency: of a link's peak, what large collectives reach.
        latency: seconds of one step of a collective.
        attention_efficiency: of the bf16 peak, forward and backward together.
        overlaps: whether communication of weights and gradients overlaps compute.
        gradient_bytes: per gradient that is scattered.
        replica_bytes: per gradient that is summed over replicas.
        recomputes: blocks keep their input only, and run forward again in backward.
        moment_bytes: of Adam's two moments together, per parameter.
    """

    link_efficiency: float = 0.8
    latency: float = 10e-6
    attention_efficiency: float = 0.5
    overlaps: bool = True
    gradient_bytes: float = 2.0
    replica_bytes: float = 2.0
    recomputes: bool = True
    moment_bytes: float = 8.0


@dataclass(frozen=True)
class Cluster:
    """n = tensor * shards * replicas GPUs; bandwidths are bytes per second and direction."""

    device: Device
    gpus: int
    tensor: int
    shards: int
    node_bandwidth: float
    network_bandwidth: float

    @property
    def replicas(self) -> int:
        """Copies of the optimizer's state."""
        return self.gpus // (self.tensor * self.shards)

    @property
    def layout(self) -> str:
        """Such as ``tp 8 x fsdp 64``."""
        names = {"tp": self.tensor, "fsdp": self.shards, "replicas": self.replicas}
        return " x ".join(f"{name} {size}" for name, size in names.items() if size > 1) or "1 GPU"


@dataclass(frozen=True)
class Traffic:
    """What a GPU sends over its link inside the node and over its network link, and the waits."""

    node: float = 0.0
    network: float = 0.0
    hops: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.node + other.node, self.network + other.network, self.hops + other.hops)

    def times(self, factor: float) -> Traffic:
        """The traffic of that many such collectives."""
        return Traffic(self.node * factor, self.network * factor, self.hops * factor)

    def seconds(self, cluster: Cluster, assumed: Assumptions) -> float:
        """The busier link's time, and the latencies."""
        node = self.node / cluster.node_bandwidth
        network = self.network / cluster.network_bandwidth
        return max(node, network) / assumed.link_efficiency + self.hops * assumed.latency


def ring(whole: float, ranks: int, per_node: int) -> Traffic:
    """An all-gather to, or reduce-scatter of, so many bytes over a ring of ranks.

    Args:
        whole: bytes of the gathered, or not yet scattered, tensor.
        ranks: of the group.
        per_node: how many of them a node holds.
    """
    if ranks == 1:
        return Traffic()
    sent, hops = whole * (ranks - 1) / ranks, math.log2(ranks)
    leaves = 1 / per_node if ranks > per_node else 0.0
    return Traffic(sent * (1 - leaves), sent * leaves, hops)


@dataclass(frozen=True)
class Step:
    """One training step of a model on a cluster, in bf16 or in a float8 recipe.

    Args:
        tokens: per GPU; the GPUs that share a layer have theirs together.
        context: tokens that attention sees, at most.
        recipe: `BF16`, or a recipe of `float8` whose weights are gathered as float8.
    """

    model: Model
    cluster: Cluster
    assumed: Assumptions
    tokens: int
    context: int
    recipe: str = BF16

    @property
    def weight_bytes(self) -> int:
        """Bytes per block weight when it is sent and gathered."""
        return 2 if self.recipe == BF16 else 1

    def _gathered(self, weights: float, bytes_each: float) -> Traffic:
        c = self.cluster
        return ring(weights / c.tensor * bytes_each, c.shards, NODE // c.tensor)

    @cached_property
    def gather(self) -> Traffic:
        """All weights once: one collective per block, and one for the rest."""
        block = self._gathered(self.model.block_weights, self.weight_bytes)
        return block.times(self.model.blocks) + self._gathered(self.model.other_weights, 2)

    @cached_property
    def reduce(self) -> Traffic:
        """All gradients: scattered within the shards, then summed over the replicas."""
        c, each = self.cluster, self.assumed.gradient_bytes
        block = self._gathered(self.model.block_weights, each)
        scattered = block.times(self.model.blocks) + self._gathered(self.model.other_weights, each)
        # A GPU's replicas are on other nodes: its ring has one GPU in each.
        own = self.model.parameters / (c.tensor * c.shards) * self.assumed.replica_bytes
        count = self.model.blocks + 1
        replicas = ring(own / count, c.replicas, 1).times(2 * count)
        return scattered + replicas

    @cached_property
    def scales(self) -> Traffic:
        """One all-reduce for the scales of all gathered weights: latency alone."""
        hops = 2 * math.log2(self.cluster.shards)
        return Traffic(hops=0.0 if self.recipe == BF16 else hops)

    @cached_property
    def activations(self) -> Traffic:
        """Tensor and sequence parallel: float8 where forward gathers what float8 products read."""
        t = self.cluster.tensor
        values = self.tokens * t * self.model.hidden
        gathers = ring(values * self.weight_bytes, t, NODE)  # of forward
        others = ring(values * 2, t, NODE)
        forward = gathers.times(2) + others.times(2)
        passes = forward.times(2 if self.assumed.recomputes else 1) + others.times(4)
        return passes.times(self.model.blocks)

    @cached_property
    def forward_seconds(self) -> float:
        """Compute of the forward pass."""
        return self._compute(training=False)

    @cached_property
    def backward_seconds(self) -> float:
        """Compute of the backward pass, recomputation included; the head is not recomputed."""
        again = self._blocks(training=False) if self.assumed.recomputes else 0.0
        return self._compute(training=True) - self.forward_seconds + again

    def _compute(self, training: bool) -> float:
        t = self.cluster.tensor
        head = (self.tokens * t, self.model.hidden, -(-self.model.vocabulary // t))
        return self._blocks(training) + self._linear([head], BF16, training)

    def _blocks(self, training: bool) -> float:
        one = self._linear(self.block_shapes, self.recipe, training)
        return self.model.blocks * (one + self._attention(training) + self._between(training))

    @property
    def block_shapes(self) -> list[tuple[int, int, int]]:
        """(M, K, N) of a block's products on one GPU: column- and row-parallel in turns."""
        t = self.cluster.tensor
        (k0, n0), (k1, n1), (k2, n2), (k3, n3) = self.model.products
        M = self.tokens * t
        return [(M, k0, n0 // t), (M, k1 // t, n1), (M, k2, n2 // t), (M, k3 // t, n3)]

    def _linear(self, shapes: list[tuple[int, int, int]], recipe: str, training: bool) -> float:
        name = "tensorwise" if recipe == BF16 else recipe
        device = self.cluster.device
        table = estimate(shapes, device=device, recipes=name, training=training)
        total = table.total(name)
        return total.bf16_s if recipe == BF16 else total.seconds

    def _attention(self, training: bool) -> float:
        """Two causal products of 2 * tokens * context * width / 2 operations.

        Backward has five of them where forward has two (FlashAttention-2, arXiv:2307.08691).
        """
        width = self.model.heads * HEAD_DIM
        flops = 2 * self.tokens * self.context * width * (3.5 if training else 1)
        peak = self.cluster.device.products[BF16].peak.value
        return flops / (peak * self.assumed.attention_efficiency)

    def _between(self, training: bool) -> float:
        """Norms, rotations, SwiGLU and residual additions: bfloat16 read and written once each.

        Per token, forward and then backward: two norms (4, 6 bytes per element of C), two additions
        (6, 6), rotations of queries and keys (4, 4), SwiGLU (6, 10 per element of F).
        """
        m = self.model
        rotated = (m.heads + m.kv_heads) * HEAD_DIM
        moved = 20 * m.hidden + 4 * rotated + 6 * m.feed_forward
        if training:
            moved += 24 * m.hidden + 4 * rotated + 10 * m.feed_forward
        return self.tokens * moved / self.cluster.device.bytes_per_second

    @property
    def optimizer_seconds(self) -> float:
        """A fused AdamW over what this GPU owns: all of it is read, all but gradients written."""
        owned = self.model.parameters / (self.cluster.tensor * self.cluster.shards)
        moved = OWNED_BYTES + 4 + 2 * self.assumed.moment_bytes
        return owned * moved / self.cluster.device.bytes_per_second

    @cached_property
    def communication_seconds(self) -> float:
        """The time of all communication, without overlap."""
        total = self.gather.times(2) + self.reduce + self.scales
        return self._seconds(total) + self._seconds(self.activations)

    @cached_property
    def seconds(self) -> float:
        """The step; see the top of this file."""
        gather, reduce = self._seconds(self.gather), self._seconds(self.reduce)
        compute = self.forward_seconds + self.backward_seconds
        exposed = self._seconds(self.activations) + self._seconds(self.scales)
        exposed += self.optimizer_seconds
        if not self.assumed.overlaps:
            return compute + 2 * gather + reduce + exposed
        forward = max(self.forward_seconds, gather)
        backward = max(self.backward_seconds, gather + reduce)
        return forward + backward + exposed + (gather + reduce) / (self.model.blocks + 1)

    def _seconds(self, traffic: Traffic) -> float:
        return traffic.seconds(self.cluster, self.assumed)

    @property
    def memory(self) -> dict[str, float]:
        """Bytes on one GPU, by what holds them."""
        m, t = self.model, self.cluster.tensor
        two_blocks = 2 * m.block_weights * self.weight_bytes  # one in use, one prefetched
        gradients = m.block_weights * self.assumed.gradient_bytes
        return {
            "state": self._state_bytes * m.parameters / (t * self.cluster.shards),
            "gathered": (two_blocks + gradients + 2 * m.other_weights) / t,
            "activations": self._activation_bytes(),
            "logits": 6.0 * self.tokens * m.vocabulary,  # bfloat16, and float32 for the loss
        }

    @property
    def _state_bytes(self) -> float:
        return OWNED_BYTES + self.assumed.moment_bytes

    def _activation_bytes(self) -> float:
        """Per token of a block: what backward keeps, in bytes; see `plan_cluster.py --help`."""
        m = self.model
        kv = 2 * m.kv_heads * HEAD_DIM
        linear = 2 * m.hidden + m.feed_forward  # inputs of qkv, gate and up; of down
        shared = 4 * m.hidden + 2 * (m.hidden + kv) + 2 * m.hidden + 4 * m.feed_forward
        # Attention keeps its result in bfloat16; a float8 layer keeps a copy of its own.
        kept = shared + (2 * linear if self.recipe == BF16 else linear + m.hidden)
        if not self.assumed.recomputes:
            return float(self.tokens * m.blocks * kept)
        return float(self.tokens * (m.blocks * 2 * m.hidden + kept))
