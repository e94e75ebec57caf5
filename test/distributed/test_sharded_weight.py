"""A `ShardedWeight` behaves as an ordinary tensor, and notices every write to it."""

import io

import pytest
import torch
from torch import nn

from float8.distributed.sharded_weight import ShardedWeight

VIEWS = {
    "t": lambda w: w.t(),
    "view": lambda w: w.view(-1),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "detach": lambda w: w.detach(),
    "chunk": lambda w: w.chunk(2)[1],
    "data": lambda w: w.data,
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1)),
}
COPIES = {
    "clone": lambda w: w.clone(),
    "to": lambda w: w.to(torch.float64),
    "contiguous": lambda w: w.t().contiguous(),
    "new_zeros": lambda w: w.new_zeros(2, 3),
    "empty_like": lambda w: torch.empty_like(w, device="meta"),
}
PLAIN = {
    "zeros_like": torch.zeros_like,
    "arithmetic": lambda w: w * 2 + 1,
    "reduction": lambda w: w.abs().amax(),
    "product": lambda w: torch.nn.functional.linear(torch.ones(2, 5), w),
    "comparison": lambda w: w == 0,
}
WRITES = {
    "in place": lambda w: w.add_(1),
    "through a view": lambda w: w.t()[0].zero_(),
    "foreach": lambda w: torch._foreach_add_([torch.ones(2), w], 1),
    "out": lambda w: torch.add(torch.ones(4, 5), 1, out=w),
    "copy_": lambda w: w.copy_(torch.ones(4, 5)),
    "indices": lambda w: w.__setitem__(0, 3.0),
    "initialisation": nn.init.xavier_uniform_,
    "the stored tensor": lambda w: w.plain.add_(1),
}
READS = {**VIEWS, **COPIES, **PLAIN, "added to another": lambda w: torch.ones(4, 5).add_(w)}


def weight():
    """A weight whose amax is known."""
    w = ShardedWeight(torch.arange(20.0).reshape(4, 5))
    w.known.remember(torch.ones(1, 1), w.plain, [])
    return w


def is_known(w):
    return w.known.of([]) is not None


@pytest.mark.parametrize("name", READS)
def test_a_read_is_no_write_and_views_and_copies_are_weights(name):
    w, op = weight(), READS[name]
    found, expected = op(w), op(w.plain)
    is_alias = name in VIEWS
    assert is_known(w) and is_alias == (isinstance(found, ShardedWeight) and is_known(found))
    assert type(found) is (ShardedWeight if is_alias or name in COPIES else torch.Tensor)
    found = getattr(found, "plain", found)
    assert (found.shape, found.stride(), found.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    if expected.device.type != "meta":
        assert torch.equal(found, expected)
    assert is_alias == (found.untyped_storage().data_ptr() == w.plain.untyped_storage().data_ptr())


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_noticed(name):
    w = weight()
    with torch.no_grad():
        WRITES[name](w)
    assert not is_known(w) and not is_known(w.t())


def test_a_tensor_without_a_version_counter_is_known():
    with torch.inference_mode():
        assert is_known(weight())


def test_gradients_reach_a_parameter():
    w = nn.Parameter(weight())
    x, g = torch.randn(3, 5), torch.randn(3, 4)
    torch.nn.functional.linear(x, w).backward(g)
    assert isinstance(w, ShardedWeight) and type(w.grad) is torch.Tensor
    torch.testing.assert_close(w.grad, g.t() @ x)


def test_it_is_saved_and_loaded():
    file, w = io.BytesIO(), nn.Parameter(weight(), requires_grad=False)
    torch.save(w, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, ShardedWeight) and isinstance(loaded, nn.Parameter)
    assert not loaded.requires_grad
    assert torch.equal(loaded.plain, w.plain)
    assert "ShardedWeight(" in repr(w)


def test_it_compiles_and_writes_of_compiled_code_are_noticed():
    w = weight()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(w):
        w.mul_(2)

    expected = w.plain * 2
    double(w)
    assert torch.equal(w.plain, expected)
    assert not is_known(w)
    assert w._stable_hash_for_caching() != w.t()._stable_hash_for_caching()


def test_data_cannot_be_exchanged_behind_its_back():
    w = nn.Parameter(weight())
    with pytest.raises(RuntimeError, match="copy_"):
        w.data = torch.ones(4, 5)


def test_frameworks_that_tell_parameters_apart_by_their_addresses_can():
    plain = torch.randn(4, 32)
    weights = [nn.Parameter(ShardedWeight(plain)), nn.Parameter(ShardedWeight(plain[2:]))]
    assert [w.data_ptr() for w in weights] == [plain.data_ptr(), plain[2:].data_ptr()]
    assert weights[1].detach().data_ptr() == plain[2:].data_ptr()
