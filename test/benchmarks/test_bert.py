"""The BERTs of `bench_bert`: masking, attention to both sides, and the dtypes of their GEMMs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models import bert
from benchmarks.models.bert import IGNORED, MASK
from float8 import Float8Linear

WIDTH, LAYERS, CONTEXT = 128, 1, 32


def hidden(shape=(64, 512), seed=0):
    bytes_BT = torch.randint(bert.BYTES, shape)
    return bytes_BT, *bert.hide(bytes_BT, torch.Generator().manual_seed(seed))


def share(mask_BT):
    return mask_BT.double().mean().item()


def test_fifteen_per_cent_are_targets_and_most_of_them_masked():
    bytes_BT, tokens_BT, targets_BT = hidden()
    counts_BT = targets_BT != IGNORED
    # Five standard deviations of a mean over 32768 positions, or over the 15 % of them.
    assert share(counts_BT) == pytest.approx(0.15, abs=0.01)
    chosen, was = tokens_BT[counts_BT], bytes_BT[counts_BT]
    assert share(chosen == MASK) == pytest.approx(0.8, abs=0.03)
    assert share((chosen != MASK) & (chosen != was)) == pytest.approx(0.1, abs=0.022)
    assert share(chosen == was) == pytest.approx(0.1, abs=0.022)


def test_targets_are_what_was_there_and_other_bytes_stay():
    bytes_BT, tokens_BT, targets_BT = hidden()
    counts_BT = targets_BT != IGNORED
    assert torch.equal(targets_BT[counts_BT], bytes_BT[counts_BT])
    assert torch.equal(tokens_BT[~counts_BT], bytes_BT[~counts_BT])


def test_what_is_hidden_depends_on_the_seed_alone():
    batches = [(torch.randint(bert.BYTES, (2, 16)), None)] * 3
    first, again, other = (list(bert.masked(batches, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0][1], first[1][1])  # each batch hides other places


@pytest.mark.parametrize("kind", bert.KINDS)
def test_a_position_sees_both_sides(kind):
    torch.manual_seed(0)
    model = bert.build(kind, "fp32", WIDTH, LAYERS, CONTEXT)
    tokens = torch.randint(bert.BYTES, (1, CONTEXT))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % bert.BYTES
    assert not torch.equal(model(tokens)[0, 0], model(changed)[0, 0])


@pytest.mark.parametrize("kind", bert.KINDS)
def test_a_position_sees_the_order_of_the_others(kind):
    torch.manual_seed(0)
    model = bert.build(kind, "fp32", WIDTH, LAYERS, CONTEXT)
    tokens = torch.randint(bert.BYTES, (1, CONTEXT))
    other = torch.cat((tokens[:, :1], tokens[:, 1:].flip(1)), dim=1)
    assert not torch.allclose(model(tokens)[0, 0], model(other)[0, 0], rtol=1e-4)


def test_each_pair_of_a_head_turns_at_a_rate_of_its_own():
    model = bert.BaseBert(WIDTH, LAYERS, CONTEXT)
    assert model.rotary.shape == (2, CONTEXT, bert.HEAD // 2)


@pytest.mark.parametrize("kind", bert.KINDS)
def test_all_formats_start_from_the_same_weights(kind):
    def weights(fmt):
        torch.manual_seed(0)
        return list(bert.build(kind, fmt, WIDTH, LAYERS, CONTEXT).parameters())

    for fmt in bert.FORMATS:
        shared = zip(weights("fp32"), weights(fmt), strict=True)
        assert all(torch.equal(a, b) for a, b in shared)


@pytest.mark.parametrize("kind", bert.KINDS)
def test_float8_is_in_every_layer_but_the_readout(kind):
    model = bert.build(kind, "fp8", WIDTH, LAYERS, CONTEXT)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    plain = [n for n, m in linears.items() if not isinstance(m, Float8Linear)]
    assert plain == ["readout"]
    assert len(linears) > 1


@pytest.mark.parametrize("kind", bert.KINDS)
@pytest.mark.parametrize("fmt", bert.FORMATS)
def test_a_format_changes_the_products_and_neither_parameters_nor_loss(kind, fmt):
    torch.manual_seed(0)
    model = bert.build(kind, fmt, WIDTH, LAYERS, CONTEXT)
    dtypes = []
    first = next(m for m in model.layers.modules() if isinstance(m, nn.Linear))
    first.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    _, tokens, targets = hidden((2, CONTEXT))
    loss = bert.loss_of(kind, fmt, model)(tokens, targets)
    loss.backward()
    assert dtypes == [torch.float16 if fmt == "fp16" else torch.float32]
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_both_models_multiply_by_as_many_weights():
    def multiplied(kind):
        model = bert.build(kind, "fp32", WIDTH, LAYERS, CONTEXT)
        return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))

    assert multiplied("base") == multiplied("unit")


def test_only_float16_on_a_cpu_takes_the_detour_of_its_products():
    taken = {
        (fmt, device)
        for fmt in bert.FORMATS
        for device in ("cpu", "cuda")
        if isinstance(bert.products(fmt, device), bert.HalfProducts)
    }
    assert taken == {("fp16", "cpu")}


def test_padding_changes_no_other_token():
    torch.manual_seed(0)
    model = bert.BaseBert(WIDTH, 2, CONTEXT)
    short = torch.randint(bert.BYTES, (3, 11))
    padded = torch.cat((short, torch.full((3, 10), bert.PADDING)), dim=1)
    # In float64: torch computes a masked attention by another kernel.
    alone, among = model.double()(short), model(padded)[:, :11]
    torch.testing.assert_close(among, alone, rtol=1e-6, atol=1e-6)
    other = padded.clone()
    other[:, 11:] = MASK  # a token like any other
    assert not torch.allclose(model(other)[:, :11], alone, rtol=1e-3)
