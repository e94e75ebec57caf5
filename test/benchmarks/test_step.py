"""A training step: fresh gradients, the sync of delayed scaling, saved bytes and launches."""

from __future__ import annotations

import json
import os
import weakref

import pytest
import torch
from shapes import DEVICES
from torch import nn

from benchmarks import bench_linear, bench_model
from benchmarks.measuring import alone, step
from benchmarks.measuring.contenders import BASELINE, SCALED, STATIC
from benchmarks.measuring.shapes import Shape

M, K, N = 48, 128, 64


def steps_of(*names: str) -> dict[str, step.Step]:
    operands = bench_linear.Operands.random(Shape(M, K, N), "cpu", 0)
    return {name: bench_linear.step(name, "eager", operands) for name in names}


@pytest.mark.parametrize("name", [BASELINE, *SCALED, STATIC])
def test_a_step_leaves_fresh_gradients(name):
    run = steps_of(name)[name]
    run()
    first = run.layer.weight.grad.clone()
    run()
    assert torch.equal(run.layer.weight.grad, first) or name == "delayed"
    assert run.layer.weight.grad.norm() < 1.5 * first.norm()  # accumulated, it would be 2


def test_what_is_saved_for_backward_is_weighed():
    steps = steps_of(BASELINE, "tensorwise")
    assert step.saved_bytes(steps[BASELINE]) == M * K * 2  # bf16 input; the weight is a parameter
    assert M * K <= step.saved_bytes(steps["tensorwise"]) <= 0.52 * M * K * 2


def test_what_was_weighed_is_freed():
    outputs = []

    def forward(x):
        outputs.append(weakref.ref(y := torch.sigmoid(x)))  # saves its own output
        return y * 2

    x = torch.randn(3, 4, requires_grad=True)
    assert step.saved_bytes(step.Step(nn.Identity(), forward, x, x)) == 3 * 4 * 4
    assert outputs[0]() is None


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_of_a_contender_is_its_own(device, monkeypatch, tmp_path):
    more = torch.ones(2**29, dtype=torch.uint8, device=device)
    measured = []
    monkeypatch.setattr(bench_model, "alone", lambda *a: measured.append(a) or alone.alone(*a))
    sizes = ["--size", "tiny", "--blocks", "1", "--recipes", "tensorwise", "--no-peer"]
    once = ["--repeats", "1", "--warmup", "1", "--device", device]
    assert bench_model.main([*sizes, *once, "-o", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [name for _, name, *_ in measured] == [row["layer"] for row in rows]
    here = alone.peak_bytes(lambda: None, device)
    assert here > more.nbytes
    assert all(0 < row["peak_gib"] * 2**30 < here - more.nbytes / 2 for row in rows), rows


def test_a_process_of_its_own_ends_as_a_row():
    assert alone.alone(os.getpid) != os.getpid()
    broken = alone.alone(json.loads, "{")
    assert broken["refused"] and broken["error"].startswith("JSONDecodeError: ")
    killed = alone.alone(os._exit, 9)
    assert not killed["refused"] and "terminated abruptly" in killed["error"]


def test_static_scales_hold_the_operands():
    operands = bench_linear.Operands.random(Shape(M, K, N), "cpu", 0)
    config = bench_linear.config_of(STATIC, operands)
    largest = operands.x.detach().abs().max().item()
    assert config.cast_config_input.static_scale * 448 == pytest.approx(largest)
    largest = operands.grad_output.abs().max().item()
    assert config.cast_config_grad_output.static_scale * 57344 == pytest.approx(largest)


def test_launches_are_what_stands_on_the_stream(tmp_path):
    categories = ["kernel", "cpu_op", "gpu_memset", "cuda_runtime", "gpu_user_annotation", "kernel"]
    events = [{"cat": category, "ph": "X"} for category in categories] + [{"ph": "M"}]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert len(step.events_in(trace)) == 3


@pytest.mark.cuda
def test_launches_of_a_known_program():
    x = torch.ones(1024, device="cuda")
    events = step.traced(lambda: (x.mul_(2), x.add_(1), x.sin_()), "cuda")
    split = step.split_time(events, 1.0)
    assert len(events) == 3 and split["other_ms"] > 0 and split["idle_ms"] > 0


# As profilers show them: of this library, of inductor (torchao's float8, too), of cuBLAS, CUTLASS,
# DeepGEMM, cuDNN and PyTorch.
@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "cast_ms": "_tiles_kernel _rows_kernel _amax_kernel _cast_weight_kernel _expand_kernel "
        "_columns_kernel _transpose_kernel triton_red_fused_abs_max_2 "
        "triton_red_fused__to_copy_abs_max_mul_silu_view_0 triton_per_fused_abs_amax_1 "
        "triton_per_fused__to_copy_abs_clamp_max_mul_reciprocal_view_1 "
        "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_4",
        "gemm_ms": "_kernel nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT nvjet_qqtst_128x256_128x4 "
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1 "
        "cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<cutlass::gemm::Gemm>> "
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn triton_tem_fused_mm_3 "
        "cublasLt::splitKreduce_kernel<32,16,int> sm90_fp8_gemm_1d2d_impl aten::mm",
        "attention_ms": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_31 "
        "void_pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128,cutlass::bfloat16_t>> "
        "fmha_cutlassB_bf16_aligned_128x64_k128_sm80 "
        "cudnn::fusion::compute_dot_do_o_specialized<__nv_bfloat16>",
        "other_ms": "triton_poi_fused_add_mul_silu_silu_backward_split_7 triton_poi_fused_mm_2 "
        "triton_red_fused__fused_rms_norm_add_3 Memset_(Device) Memcpy_DtoD "
        "triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_2 "
        "at::native::vectorized_elementwise_kernel<4> ncclDevKernel_AllGather_RING_LL",
    }.items(),
)
def test_a_kernel_is_counted_as_what_its_name_says(kind, names):
    assert {step.kind_of(name): name for name in names.split()}.keys() == {kind}


def test_the_time_of_a_step_is_split_by_kind():
    events = [{"name": "nvjet_x", "dur": 2e3}, {"name": "Memset", "dur": 5e2}]
    split = step.split_time([*events, events[0]], 6.0)
    assert split.pop("kernels_ms") == {"nvjet_x": 4.0, "Memset": 0.5}
    named = {"gemm_ms": 4.0, "other_ms": 0.5, "idle_ms": 1.5, "cast_ms": 0, "attention_ms": 0}
    assert split == named
