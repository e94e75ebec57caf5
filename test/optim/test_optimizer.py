"""Every optimizer of float8.optim has the interface of torch.optim."""

import copy
import math
import pickle

import pytest
import torch
from optim_training import assert_same_models, assert_same_states, loss_of, make, train
from torch import nn

import float8
from float8.optim import SGD, Adam, AdamW, Lion
from float8.optim.moment import Moment

ALL = (AdamW, Adam, SGD, Lion)
SMALL = {"min_size": 64, "lr": 1e-3}


@pytest.mark.parametrize("cls", ALL)
def test_copies_and_pickles_go_on_alike(cls):
    model = make()
    optimizer = cls(model.parameters(), **SMALL)
    train(model, optimizer, 3)
    twins = []
    for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other, twin = again((model, optimizer))
        assert twin.param_groups[0]["params"][0] is other[0].weight
        assert_same_states(twin, optimizer)
        assert twin.param_groups[0].keys() == optimizer.param_groups[0].keys()
        train(other, twin, 2)
        twins.append((other, twin))
    train(model, optimizer, 2)
    for other, twin in twins:
        assert_same_models(other, model)
        assert_same_states(twin, optimizer)


def test_a_scaler_skips_a_step_with_an_infinite_gradient():
    model = make()
    optimizer = AdamW(model.parameters(), **SMALL)
    train(model, optimizer, 1)
    twin_model, twin = copy.deepcopy((model, optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, 1)).backward()
    model[0].weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same_models(model, twin_model)
    assert_same_states(optimizer, twin)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_a_nan_spoils_its_own_element(cls):
    p = nn.Parameter(torch.randn(4, 128))
    q = nn.Parameter(p.detach().clone())
    a, b = cls([p], min_size=0), cls([q], min_size=0)
    p.grad = torch.randn(4, 128)
    q.grad = p.grad.clone()
    p.grad[1, 7], q.grad[1, 7] = math.nan, 0.0
    for _ in range(2):
        a.step()
        b.step()
    same = torch.ones(4, 128, dtype=torch.bool)
    same[1, 7] = False
    assert torch.equal(p[same], q[same])
    assert bool(p[1, 7].isnan()) or cls is Lion  # whose sign of a NaN is one too
    name = next(iter(a.moment_options))
    assert torch.equal(a.state[p][name].dequantize()[same], b.state[q][name].dequantize()[same])


def test_layouts_of_parameters_and_gradients_do_not_matter():
    x, g = torch.randn(20, 30), torch.randn(20, 30)
    results = []
    for turn in (False, True):
        base = x.t().contiguous() if turn else x.clone()
        p = nn.Parameter(base.t() if turn else base)
        p.grad = g.t().contiguous().t() if turn else g
        optimizer = AdamW([p], min_size=0)
        for _ in range(2):
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)
    image = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    image.grad = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    before = image.detach().clone()
    AdamW([image], min_size=0).step()
    assert bool((image != before).all())


@pytest.mark.parametrize("cls", ALL)
def test_capturable_steps_read_nothing_from_the_device(cls):
    """Nor does a branch depend on a value: a tensor without values would raise.

    On "meta", as torch 2.13 without CUDA cannot copy into fake CUDA tensors.
    """
    p = nn.Parameter(torch.empty(64, 256, device="meta"))
    q = nn.Parameter(torch.empty(10, device="meta", dtype=torch.bfloat16))
    lr = torch.tensor(1e-3, device="meta")
    optimizer = cls([p, q], lr=lr, capturable=True, stochastic_rounding=True)
    p.grad, q.grad = torch.empty_like(p), torch.empty_like(q)
    for _ in range(2):
        optimizer.step()
    assert optimizer.state[p]["step"].device.type == "meta"
    optimizer = cls([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"].device.type == "cpu"


def test_fused_without_a_gpu_says_so():
    p = nn.Parameter(torch.randn(64, 64))
    p.grad = torch.randn(64, 64)
    with pytest.raises(ValueError, match=r"fused=True.*CUDA"):
        AdamW([p], fused=True).step()


def test_the_compiled_step_is_one_graph_and_equals_the_eager_one():
    """Traced, made functional, written back; inductor's code would take a minute more.

    Also beside a model whose delayed scaling waits for its first sync, which counts eager steps.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    unsynced = nn.Sequential(nn.Linear(32, 32))
    config = float8.Float8LinearConfig.from_recipe_name("delayed")
    float8.convert_to_float8_training(unsynced, config=config)

    torch._dynamo.reset()  # another test's step would make this one's the second form
    counter = CompileCounterWithBackend("aot_eager")
    models = [nn.Linear(130, 40), nn.Linear(130, 40)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [AdamW(m.parameters(), lr=torch.tensor(1e-2), min_size=64) for m in models]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend=counter)]
    for i in range(3):
        x = torch.randn(16, 130)
        for model, optimizer, step in zip(models, optimizers, steps, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (i + 1))
    assert counter.frame_count == 1
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    eager, compiled = (o.state[m.weight] for o, m in zip(optimizers, models, strict=True))
    assert compiled["step"] == 3
    for name in ("exp_avg", "exp_avg_sq"):
        assert isinstance(compiled[name], Moment)
        codes = [s[name].codes.view(torch.uint8).int() for s in (eager, compiled)]
        assert float((codes[0] != codes[1]).float().mean()) < 0.05, name


def test_named_parameters_draw_their_own_numbers_in_optimizers_of_their_own_too():
    """As in optimizer-in-backward; a resumed run goes on with the same numbers."""

    def start(apart):
        torch.manual_seed(0)
        value = torch.randn(64, 130).bfloat16()
        params = {name: nn.Parameter(value.clone()) for name in ("a.weight", "b.weight")}
        groups = [[pair] for pair in params.items()] if apart else [params.items()]
        return list(params.values()), [AdamW(g, stochastic_rounding=True) for g in groups]

    def step(params, optimizers, number):
        for p in params:
            generator = torch.Generator().manual_seed(number)  # equal gradients
            p.grad = torch.randn(64, 130, generator=generator).bfloat16()
        for optimizer in optimizers:
            optimizer.step()

    together, apart, resumed = start(False), start(True), start(True)
    for number in range(3):
        step(*together, number)
        step(*apart, number)
    for p, q in zip(resumed[0], apart[0], strict=True):
        p.data.copy_(q.data)
    for optimizer, other in zip(resumed[1], apart[1], strict=True):
        optimizer.load_state_dict(other.state_dict())
    for run in (together, apart, resumed):
        step(*run, 3)
    for p, q, r in zip(together[0], apart[0], resumed[0], strict=True):
        assert torch.equal(p, q) and torch.equal(p, r)
    a, b = apart[0]
    assert 0.2 < (a != b).float().mean() < 0.8
    codes = [
        optimizer.state[p]["exp_avg_sq"].codes.float() for p, optimizer in zip(*apart, strict=True)
    ]
    assert not torch.equal(*codes)
