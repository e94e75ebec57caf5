"""What kernel files share: registration, and refusing pointers into other devices."""

import pytest
import torch

pytest.importorskip("triton")

from float8.kernels.gpu import cast
from float8.kernels.gpu.launch import (
    LIBRARY,
    REFERENCES,
    check_device,
    new_codes,
    on_device_of,
    register,
)
from scripts.kernel_report import variants


def test_a_registered_op_runs_its_reference_on_a_cpu_and_its_fake_on_meta():
    op = register(
        "launch_test(Tensor x) -> Tensor",
        kernel=lambda x: x * 3,
        reference=lambda x: x * 2,
        fake=torch.empty_like,
    )
    assert op is torch.ops.float8.launch_test.default
    assert op(torch.ones(2)).tolist() == [2.0, 2.0]
    assert op(torch.ones(2, device="meta")).device.type == "meta"
    assert REFERENCES.pop("launch_test")(torch.ones(())) == 2
    torch.library.opcheck(op, (torch.ones(2),))
    with pytest.raises(RuntimeError, match="launch_test"):
        LIBRARY.define("launch_test(Tensor x) -> Tensor")


def test_every_op_has_a_reference():
    assert {"cast", "cast_dynamic"} <= set(REFERENCES)
    assert cast.cast is torch.ops.float8.cast.default


def test_tensors_of_another_device_are_refused_by_name():
    x = torch.ones(2)
    check_device("op", x, scale=torch.ones(1), amax=None)
    with pytest.raises(ValueError, match=r"float8::op: scale is on meta and the operand on cpu"):
        check_device("op", x, scale=torch.ones(1, device="meta"))


def test_codes_that_nobody_wants_take_no_memory():
    x = torch.ones(2, 3)
    assert new_codes(x, 2, 3, True, torch.float8_e4m3fn).shape == (2, 3)
    assert new_codes(x, 2, 3, False, torch.float8_e4m3fn).numel() == 0


def test_cpu_tensors_need_no_device():
    with on_device_of(torch.ones(1)):
        pass


def test_variants_say_everything_that_a_kernel_asks():
    for variant in variants():
        said = {**variant.types, **variant.constants}
        assert set(said) == set(variant.kernel.arg_names), variant.name
        assert "enable_fp_fusion" in variant.options, "Triton's default is about to change"
        assert not set(variant.types) & set(variant.constants)
    names = [variant.name for variant in variants()]
    assert len(set(names)) == len(names)
