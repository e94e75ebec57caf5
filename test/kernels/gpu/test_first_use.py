"""The check before a kernel's first launch: a kernel that computes wrong bytes raises."""

from __future__ import annotations

import importlib
import os
import re
import threading
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton
from interpreter import launcher
from meter import CastMeter
from shapes import DEVICES

from float8.kernels.gpu.first_use import _CHECKED, SWITCH, _compiler, check, checked
from float8.kernels.gpu.launch import DEFINITIONS, register

for file in _CHECKED:
    importlib.import_module(f"float8.kernels.gpu.{file.removesuffix('_dynamic')}")

E4M3 = torch.float8_e4m3fn
X, ONE = torch.ones(16, 16), torch.ones(1, 1)
CPU = torch.device("cpu")
# op -> its file of gpu/, and what launches its kernels
LAUNCHERS = {op: (op, "_launch") for op in _CHECKED}
LAUNCHERS |= {"cast": ("cast", "_cast"), "cast_dynamic": ("cast", "_cast_dynamic")}


class Kernel:
    """The definition of an op, which counts its launches, and gets ``wrong`` bytes wrong."""

    def __init__(self, op="cast", wrong=0):
        self.op, self.wrong, self.launches = op, wrong, 0
        self.threads = set()

    def __call__(self, *arguments):
        self.launches += 1
        self.threads.add(threading.get_ident())
        results = DEFINITIONS[self.op](*arguments)
        if self.wrong:
            first = results if isinstance(results, torch.Tensor) else results[0]
            first.view(torch.uint8)[0, : self.wrong] ^= 1
        return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", LAUNCHERS)
def test_the_kernels_pass(op, device):
    check(op, launcher(*LAUNCHERS[op], device), DEFINITIONS[op], torch.device(device))


@pytest.mark.parametrize("op", LAUNCHERS)
def test_one_wrong_byte_raises_at_every_launch(op):
    kernel = Kernel(op, wrong=1)
    launch = checked(op, kernel, DEFINITIONS[op])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"float8::{op}\(.* differs .* 1 of") as raised:
            launch(X)
    for said in (f"Triton {triton.__version__}", "ptxas", "CUDA 13.1 or later", f"{SWITCH}=1"):
        assert said in str(raised.value)
    assert kernel.launches == 2, "the caller's own launch must not happen"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_the_assembler_of_a_gpu_is_named(capability, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    compiler, variable = _compiler(torch.device("cuda", 0))
    path = re.fullmatch(r"ptxas 1\d\.\d \((.*)\) for NVIDIA H200, sm_\d+", compiler)[1]
    assert os.access(path, os.X_OK)
    assert variable == {
        "ptxas": "TRITON_PTXAS_PATH",
        "ptxas-blackwell": "TRITON_PTXAS_BLACKWELL_PATH",
    }.get(os.path.basename(path), variable)


def test_the_launcher_for_cuda_is_registered_with_it():
    kernel = Kernel(wrong=1)
    with (
        mock.patch("float8.kernels.gpu.launch.LIBRARY") as library,
        mock.patch("torch.library.register_fake"),
        mock.patch.dict(DEFINITIONS),
    ):
        register("cast(...)", kernel=kernel, definition=DEFINITIONS["cast"], fake=None)
    launchers = {call.args[2]: call.args[1] for call in library.impl.call_args_list}
    with pytest.raises(RuntimeError, match="float8::cast"):
        launchers["CUDA"](X, ONE, E4M3, True, True)


def test_what_is_not_a_number_may_have_any_of_its_codes():
    def kernel(*arguments):
        data, data_t = DEFINITIONS["cast"](*arguments)
        return data, torch.where(data_t.float().isnan(), -data_t.float(), data_t.float()).to(
            data_t.dtype
        )

    check("cast", kernel, DEFINITIONS["cast"], CPU)


def test_it_runs_once_in_several_threads_and_before_all_of_them():
    kernel = Kernel()
    launch = checked("cast", kernel, DEFINITIONS["cast"])
    launched = []
    threads = [
        threading.Thread(target=lambda: launched.append(launch(X, ONE, E4M3, True, True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launched) == 8
    assert kernel.launches == 8 + 2  # both formats


def test_the_switch_turns_it_off_and_a_capture_is_left_alone(monkeypatch):
    kernel = Kernel(wrong=1)
    launch = checked("cast", kernel, DEFINITIONS["cast"])
    with mock.patch("float8.kernels.gpu.first_use._is_capturing", return_value=True):
        launch(X, ONE, E4M3, True, True)
    with pytest.raises(RuntimeError, match="differs"):
        launch(X, ONE, E4M3, True, True)
    monkeypatch.setenv(SWITCH, "1")
    kernel.launches = 0
    checked("cast", kernel, DEFINITIONS["cast"])(X, ONE, E4M3, True, True)
    assert kernel.launches == 1


def test_no_mode_of_the_caller_sees_it():
    """Neither a default device, nor inference mode, nor a mode that counts ops."""
    kernel, seen = Kernel(), []
    launch = checked("cast", kernel, DEFINITIONS["cast"])
    for _ in range(2):
        with torch.device("meta"), torch.inference_mode(), CastMeter() as meter:
            launch(X, ONE, E4M3, True, True)
        seen.append(meter.ops)
    assert len(kernel.threads) == 2
    assert seen[0] == seen[1]
