"""What kernel files share: registration, launches, and refusing pointers into other devices."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from float8.kernels.gpu import cast
from float8.kernels.gpu.launch import (
    DEFINITIONS,
    LIBRARY,
    check_device,
    launch,
    meta,
    new_data,
    on_device_of,
    register,
    variant,
)
from scripts.kernel_report import variants


def test_a_registered_op_runs_its_definition_on_a_cpu_and_its_fake_on_meta():
    op = register(
        "launch_test(Tensor x) -> Tensor",
        kernel=lambda x: x * 3,
        definition=lambda x: x * 2,
        fake=torch.empty_like,
    )
    assert op is torch.ops.float8.launch_test.default
    assert op(torch.ones(2)).tolist() == [2.0, 2.0]
    assert op(torch.ones(2, device="meta")).device.type == "meta"
    assert DEFINITIONS.pop("launch_test")(torch.ones(())) == 2
    torch.library.opcheck(op, (torch.ones(2),))
    with pytest.raises(RuntimeError, match="launch_test"):
        LIBRARY.define("launch_test(Tensor x) -> Tensor")


def test_every_op_has_a_definition():
    assert {"cast", "cast_dynamic"} <= set(DEFINITIONS)
    assert cast.cast is torch.ops.float8.cast.default


def test_tensors_of_another_device_are_refused_by_name():
    x = torch.ones(2)
    check_device("op", x, scale=torch.ones(1), amax=None)
    with pytest.raises(ValueError, match=r"float8::op: scale is on meta and the operand on cpu"):
        check_device("op", x, scale=torch.ones(1, device="meta"))


def test_data_that_is_not_wanted_takes_no_memory():
    x = torch.ones(2, 3)
    assert new_data(x, 2, 3, True, torch.float8_e4m3fn).shape == (2, 3)
    assert new_data(x, 2, 3, False, torch.float8_e4m3fn).numel() == 0


def test_cpu_tensors_need_no_device():
    with on_device_of(torch.ones(1)):
        pass


def test_a_launch_on_the_meta_device_is_a_variant():
    """Types of the arguments, a constant for a 1, and options apart from compile-time arguments."""
    kernel = SimpleNamespace(arg_names=["x_ptr", "n", "stride", "eps", "TILE"])
    found = variant(
        "name", lambda x: launch(kernel, 3, x, 16, 1, 0.5, TILE=4, num_warps=2), meta(8)
    )
    assert (found.name, found.kernel) == ("name", kernel)
    assert found.types == {"x_ptr": "*bf16", "n": "i32", "eps": "fp32"}
    assert (found.constants, found.options) == ({"stride": 1, "TILE": 4}, {"num_warps": 2})


def test_variants_say_everything_that_a_kernel_asks():
    for form in variants():
        said = {**form.types, **form.constants}
        assert set(said) == set(form.kernel.arg_names), form.name
        assert "enable_fp_fusion" in form.options, "Triton's default is about to change"
        assert not set(form.types) & set(form.constants)
    names = [form.name for form in variants()]
    assert len(set(names)) == len(names)
