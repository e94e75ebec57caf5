"""The plan of a cluster against numbers computed by hand, and published sizes."""

import math
from dataclasses import replace

import pytest

from float8.estimate import DEVICES
from scripts.training.cluster import BF16, MODELS, Assumptions, Cluster, Model, Step, Traffic, ring

H100 = DEVICES["H100"]
SMALL = Model("small", blocks=3, hidden=256, feed_forward=512, heads=2, kv_heads=1, vocabulary=1024)
BLOCK = 256 * 512 + 256 * 256 + 256 * 1024 + 512 * 256  # qkv of 2 + 2 heads of 128, o, w13, w2
OTHER = 2 * 1024 * 256 + 7 * 256


def step(gpus: int, tensor: int = 1, shards: int | None = None, recipe: str = BF16) -> Step:
    cluster = Cluster(H100, gpus, tensor, shards or gpus // tensor, 100e9, 10e9)
    return Step(SMALL, cluster, Assumptions(), tokens=512, context=128, recipe=recipe)


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("70b", 70.55), ("405b", 405.85)])
def test_the_presets_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_models_weights_are_counted_by_hand() -> None:
    assert SMALL.block_weights == BLOCK
    assert SMALL.parameters == 3 * BLOCK + OTHER


def test_a_ring_sends_all_but_its_own_part_and_leaves_a_node_once_in_a_nodes_length() -> None:
    assert ring(800.0, 4, 8) == Traffic(600.0, 0.0, 2.0)
    assert ring(1600.0, 16, 8) == Traffic(1500.0 * 7 / 8, 1500.0 / 8, 4.0)
    assert ring(1600.0, 16, 1) == Traffic(0.0, 1500.0, 4.0)
    assert ring(1600.0, 1, 8) == Traffic()


def test_fsdp_gathers_twice_and_reduces_once() -> None:
    within = step(8)
    assert within.gather == Traffic(7 / 8 * 2 * (3 * BLOCK + OTHER), 0.0, 4 * 3)
    assert within.reduce == within.gather
    assert within.activations == Traffic()
    # 16 GPUs: 15/16 of it, an eighth of which over the network
    across = step(16)
    assert across.gather.network == pytest.approx(15 / 16 * 2 * (3 * BLOCK + OTHER) / 8)
    assert across.gather.node == pytest.approx(7 * across.gather.network)


def test_float8_halves_what_the_blocks_gather_and_nothing_else() -> None:
    half, whole = step(16, recipe="tensorwise"), step(16)
    saved = whole.gather.network - half.gather.network
    assert saved == pytest.approx(15 / 16 * 3 * BLOCK / 8)
    assert half.reduce == whole.reduce
    assert whole.scales.hops == 0
    assert half.scales == Traffic(0.0, 0.0, 2 * 4)


def test_hsdp_keeps_weights_in_the_node_and_sums_gradients_over_replicas() -> None:
    hsdp = step(32, shards=8)
    assert hsdp.cluster.replicas == 4
    assert hsdp.cluster.layout == "fsdp 8 x replicas 4"
    assert hsdp.gather.network == 0
    # each GPU all-reduces its eighth of the gradients with 3 others: 2 * 3/4 * P/8 * 2 bytes
    assert hsdp.reduce.network == pytest.approx(2 * 3 / 4 * (3 * BLOCK + OTHER) / 8 * 2)
    summed = replace(hsdp, assumed=Assumptions(gradient_bytes=1.0, replica_bytes=4.0)).reduce
    assert summed.network == pytest.approx(2 * hsdp.reduce.network)
    assert summed.node == pytest.approx(hsdp.reduce.node / 2)
    assert hsdp.memory["state"] == step(8).memory["state"] == 16 * SMALL.parameters / 8


def test_tensor_parallel_sends_activations_in_the_node() -> None:
    parallel = step(16, tensor=2)
    # Per block 4 collectives forward, again when recomputed, and 4 backward, of 2 * 512 tokens.
    assert parallel.activations.node == pytest.approx(3 * 12 * (1 / 2) * 1024 * 256 * 2)
    assert parallel.activations.network == 0
    # Float8 gathers half of the forward ones in one byte: 2 of 4, in both forward passes.
    saved = parallel.activations.node - step(16, 2, recipe="tensorwise").activations.node
    assert saved == pytest.approx(3 * 4 * (1 / 2) * 1024 * 256 * 1)
    # 8 shards of half the weights, 4 in each node
    sent = 7 / 8 * (3 * BLOCK + OTHER) / 2 * 2
    assert parallel.gather.network == pytest.approx(sent / 4)
    assert parallel.block_shapes == [
        (1024, 256, 256),
        (1024, 128, 256),
        (1024, 256, 512),
        (1024, 256, 256),
    ]


def test_time_is_that_of_the_busier_link_and_the_latencies() -> None:
    cluster, assumed = step(8).cluster, Assumptions(link_efficiency=0.5, latency=1e-3)
    assert Traffic(100e9, 1e9, 3.0).seconds(cluster, assumed) == pytest.approx(2 + 3e-3)
    assert Traffic(10e9, 10e9, 0.0).seconds(cluster, assumed) == pytest.approx(2)


def test_communication_hides_behind_compute_only_where_that_is_assumed() -> None:
    slow = replace(step(16), cluster=Cluster(H100, 16, 1, 16, 100e9, 10e3))
    compute = slow.forward_seconds + slow.backward_seconds
    gather = slow.gather.seconds(slow.cluster, slow.assumed)
    reduce = slow.reduce.seconds(slow.cluster, slow.assumed)
    exposed = (gather + reduce) / 4 + slow.optimizer_seconds
    assert slow.seconds == pytest.approx(2 * gather + reduce + exposed)  # the network is all
    after = replace(slow, assumed=Assumptions(overlaps=False))
    assert after.seconds == pytest.approx(compute + 2 * gather + reduce + slow.optimizer_seconds)
    alone = step(1)
    compute = alone.forward_seconds + alone.backward_seconds
    assert alone.seconds == pytest.approx(compute + alone.optimizer_seconds)


def test_recomputation_costs_one_more_forward_of_the_blocks_and_saves_activations() -> None:
    once = step(8)
    kept = replace(once, assumed=Assumptions(recomputes=False))
    head = once._linear([(512, 256, 1024)], BF16, training=False)
    again = once.backward_seconds - kept.backward_seconds
    assert again == pytest.approx(once.forward_seconds - head)
    per_block = 512 * (12 * 256 + 2 * 256 + 6 * 512)  # keys and values: 256 together
    assert kept.memory["activations"] == 3 * per_block
    assert once.memory["activations"] == 512 * 3 * 2 * 256 + per_block
    in_float8 = replace(kept, recipe="tensorwise").memory["activations"]
    assert in_float8 == 3 * 512 * (11 * 256 + 2 * 256 + 5 * 512)


def test_attention_and_the_rest_are_counted_by_hand() -> None:
    alone = step(1)
    forward = 4 * 512 * 128 * 256 / 2  # two products, half of them masked
    assert alone._attention(False) == pytest.approx(forward / (989.4e12 * 0.5))
    assert alone._attention(True) == pytest.approx(3.5 * alone._attention(False))
    moved = 512 * (44 * 256 + 8 * 384 + 16 * 512)
    assert alone._between(True) == pytest.approx(moved / (3.35e12 * 0.92))


def test_more_gpus_never_need_more_memory_each() -> None:
    needed = [sum(step(8 * 2**k).memory.values()) for k in range(12)]
    assert needed == sorted(needed, reverse=True)
    assert math.isfinite(needed[-1])


def test_float8_moments_shrink_what_a_gpu_owns_and_what_its_optimizer_moves() -> None:
    plain = step(8)
    small = replace(plain, assumed=replace(plain.assumed, moment_bytes=2.0))
    owned = SMALL.parameters / 8
    assert plain.memory["state"] - small.memory["state"] == 6 * owned
    # 4 + 4 read of weight and gradient, 4 written; moments read and written
    seconds = owned / H100.bytes_per_second
    assert plain.optimizer_seconds == pytest.approx(28 * seconds)
    assert small.optimizer_seconds == pytest.approx(16 * seconds)
