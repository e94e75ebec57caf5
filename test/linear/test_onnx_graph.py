"""What torch.onnx.export makes of float8 layers: files that onnx accepts and onnxruntime runs."""

from __future__ import annotations

import logging

import linear_oracle
import oracle
import pytest
import torch
from assertions import assert_error_within_baseline
from torch import Tensor, nn

import float8
from float8 import Float8LinearConfig, convert_to_float8_inference

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own exporter
E4M3 = torch.float8_e4m3fn
FLOAT8E4M3FN = onnx.TensorProto.FLOAT8E4M3FN
# name -> recipe, static scale, shape of the input, dtype. K=304 and N=144 end in a part of a block.
CASES = {
    "static": ("tensorwise", 0.03125, (3, 4, 304), torch.float32),
    "tensorwise": ("tensorwise", None, (6, 304), torch.float16),
    "rowwise": ("rowwise", None, (3, 4, 304), torch.float32),
    "blockwise": ("blockwise", None, (3, 4, 304), torch.float32),
    "delayed": ("delayed", None, (304,), torch.float32),
}


@pytest.fixture(autouse=True)
def quiet():
    """torch's exporter warns of torchvision, which is not installed."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def layer_of(recipe: str, scale: float | None, dtype: torch.dtype, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Linear(304, 144, bias=bias)
    plain.weight.data *= torch.logspace(-2, 1, 144).unsqueeze(1)  # scales must matter
    model = nn.Sequential(plain).to(dtype)
    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "delayed":  # with the scale of another batch, which this one exceeds
        float8.convert_to_float8_training(model, config=config)
        model(torch.randn(8, 304).clamp(-1, 1)).sum().backward()
        float8.sync_float8_amax_and_scale_history(model)
    scales = None if scale is None else {"0": scale}
    return convert_to_float8_inference(model, scales, config=config).eval()


def input_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.logspace(-1, 1, shape[-1])
    return x.to(dtype)


def exported(model: nn.Module, x: Tensor, path: str, dynamic: bool = True):
    """The bytes of the file, checked by onnx."""
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch},) if dynamic else None
    options = {"opset_version": 21, "verbose": False, "external_data": False}
    torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=shapes, **options)
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(path: str, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if i > 1 else ()) for i, n in enumerate(CASES)]
)
def test_onnxruntime_computes_the_product_of_the_oracles_codes(name, tmp_path):
    recipe, static, shape, dtype = CASES[name]
    (_, x_block, scale_format), (_, w_block, _) = linear_oracle.GEMMS[recipe]["output"]
    model, path = layer_of(recipe, static, dtype), str(tmp_path / "model.onnx")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = input_of(shape, dtype)
    if static is not None:  # saturates
        x[0, 0], x[0, 1, 3], x[1, 0, 7] = 0.0, 1e30, -1e30
    proto = exported(model, x, path, dynamic=len(shape) > 1)
    stored = [i for i in proto.graph.initializer if i.data_type == FLOAT8E4M3FN]
    assert [list(tensor.dims) for tensor in stored] == [[144, 304]]
    codes = torch.frombuffer(bytearray(stored[0].raw_data), dtype=torch.uint8).reshape(144, 304)
    assert torch.equal(codes, model[0].weight.float8_data.view(torch.uint8))
    assert sum(len(i.raw_data) for i in proto.graph.initializer) < 1.07 * 144 * 304
    for rows in (None, 2):  # as exported, and another batch
        part = x if rows is None or len(shape) == 1 else x[:rows]
        matrix = part.reshape(-1, 304).float()
        scale = oracle.scales(matrix, x_block, E4M3, scale_format)
        if static is not None or recipe == "delayed":
            scale.fill_(static or model[0].cast_input.scale)
        x8 = oracle.values(oracle.cast(matrix, scale, x_block, E4M3), scale, x_block, E4M3)
        w8 = oracle.values(model[0].weight.float8_data, model[0].weight.scale, w_block)
        bias = model[0].bias
        exact = (x8 @ w8.t() + bias.double()).reshape(*part.shape[:-1], 144)
        plain = (x8.float() @ w8.t().float() + bias.float()).reshape(exact.shape).to(dtype)
        assert_error_within_baseline(run(path, part), exact, plain, replay=(name, rows))
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_scales_of_inputs_are_exact_powers_of_two(tmp_path):
    """Rows whose largest value is on, just below and just above 448 times a power of two."""
    model, path = layer_of("rowwise", None, torch.float32, bias=False), str(tmp_path / "m.onnx")
    edges = torch.tensor([448.0, 448 * (1 - 2**-24), 448 * (1 + 2**-23)]).float()
    x = torch.zeros(9, 304)
    x[:, 0] = torch.cat([edges, edges * 2.0**-100, edges * 2.0**90])
    x[:, 1] = x[:, 0] / 3  # which shows the scale: it is no code
    proto = exported(model, x, path)
    casts = [node.output[0] for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    scale = next(node.input[1] for node in proto.graph.node if node.output[0] == casts[0])
    proto.graph.output.append(onnx.helper.make_tensor_value_info(scale, 1, [None]))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (found,) = session.run([scale], {session.get_inputs()[0].name: x.numpy()})
    expected = oracle.scales(x, (1, -1), E4M3, "power_of_two")
    assert torch.equal(torch.from_numpy(found), expected[:, 0])


def test_inputs_stay_in_high_precision_under_high_precision(tmp_path):
    model, path = layer_of("blockwise", None, torch.float32), str(tmp_path / "m.onnx")
    x = input_of((4, 304), torch.float32)
    with float8.high_precision(model):
        proto = exported(model, x, path)
        plain = model(x)
    assert not any(node.op_type == "QuantizeLinear" for node in proto.graph.node)
    assert [i.data_type for i in proto.graph.initializer].count(FLOAT8E4M3FN) == 1
    w = oracle.values(model[0].weight.float8_data, model[0].weight.scale, (128, 128))
    exact = x.double() @ w.t() + model[0].bias.double()
    assert_error_within_baseline(run(path, x), exact, plain)


def test_what_onnx_cannot_say_is_refused_with_the_way_out(tmp_path):
    path, x = str(tmp_path / "m.onnx"), input_of((4, 304), torch.float32)
    for recipe in ("mxfp8", "mxfp8_2d"):
        mx = layer_of(recipe, None, torch.float32)
        with pytest.raises(torch.onnx.OnnxExporterError, match=r"scales of torch\.float8_e8m0fnu"):
            exported(mx, x, path)
    model = float8.convert_to_float8_training(nn.Sequential(nn.Linear(304, 144)))
    words = r"0: .*call float8\.convert_to_float8_inference\(model\)"
    with pytest.raises(torch.onnx.OnnxExporterError, match=words):
        exported(model, x, path)
