"""`bench_outliers`: the planted channel, one process of the study, and the summary."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import studies
import torch
from torch.nn import functional as F

from benchmarks import bench_outliers as bench
from benchmarks.quality import outlier_picture, outliers
from benchmarks.quality.contenders import contender
from benchmarks.quality.outlier_run import base_of, train
from float8 import Float8Linear
from scripts.training import corpus, gpt

SIZES = gpt.Sizes(layers=1, width=32, heads=2, context=16)
BYTE = ord("?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(3):
        lines = (f"line {7 * i * j % 13}: is it{'?' * (j % 3 == 0)} no.\n" for j in range(300))
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def text(folder):
    return corpus.load(folder)


def planted(text):
    """A model whose hidden values are as large as a trained one's, and its planted channel."""
    torch.manual_seed(0)
    model = gpt.GPT(SIZES)
    with torch.no_grad():
        model.blocks[0].feed_forward.gate_up.weight.mul_(60)
    tokens = outliers.windows(text, BYTE, seed=0, context=16)
    channel = outliers.plant(model, tokens, BYTE)
    with torch.no_grad():  # what settling would learn
        model.blocks[0].feed_forward.down.weight[:, channel] = 0.01
    return model, channel, tokens


def hidden(model, tokens):
    """The input of ``down`` in float64, from the weights: (tokens, channels)."""
    block = model.double().blocks[0]
    h = model.embedding(tokens)
    h = h + block.attention(block.attention_norm(h), model.rotary)
    x = block.feed_forward_norm(h).flatten(0, 1)
    gate, up = (x @ block.feed_forward.gate_up.weight.t()).chunk(2, -1)
    found = (F.silu(gate) * up).detach()
    model.float()
    return found


@pytest.mark.parametrize("exponent", [0, 4, 12, 20])
def test_outlier_has_the_size_and_is_in_the_tokens_of_its_byte(text, exponent):
    model, channel, tokens = planted(text)
    outliers.grow(model, channel, exponent)
    values = hidden(model, tokens).abs()
    rest = values[:, [i for i in range(values.shape[1]) if i != channel]]
    assert (values[:, channel].max() / rest.max()).log2().item() == pytest.approx(exponent, abs=0.1)
    is_byte = (tokens == BYTE).flatten()
    assert values[is_byte, channel].min() > values[~is_byte, channel].max()


def test_growth_leaves_what_down_returns(text):
    model, channel, tokens = planted(text)
    down = model.blocks[0].feed_forward.down

    def output():
        return hidden(model, tokens) @ down.weight.double().t()

    def difference(found):
        return ((found - before).norm() / before.norm()).item()

    before = output()
    outliers.grow(model, channel, 12)
    assert difference(output()) < 1e-3
    with torch.no_grad():
        down.weight[:, channel] *= 2.0**12  # the fault: a column that is not divided
    assert difference(output()) > 10


@pytest.mark.parametrize("column", [False, True])
def test_held_weights_stay_and_others_do_not(text, column):
    model, channel, tokens = planted(text)
    ff = model.blocks[0].feed_forward
    outliers.hold(model, channel, column=column)
    model(tokens, tokens).backward()
    rows = [channel, channel + ff.down.in_features]
    moved_rows = ff.gate_up.weight.grad.count_nonzero(1) > 0
    assert moved_rows.logical_not().nonzero().flatten().tolist() == rows
    assert (ff.down.weight.grad[:, channel].count_nonzero() == 0) == column
    assert ff.down.weight.grad[:, channel - 1].count_nonzero()


def test_text_without_the_byte_is_refused(text):
    with pytest.raises(ValueError, match="no byte '~'"):
        outliers.windows(text, ord("~"), seed=0, context=16)


@pytest.mark.parametrize("name", bench.CONTENDERS)
def test_contenders_convert_the_blocks_and_not_the_head(name):
    model = gpt.GPT(SIZES)
    contender(name, model)
    converted = {n for n, m in model.named_modules() if isinstance(m, Float8Linear)}
    parts = {"blocks.0." + n for n in ("attention.qkv", "attention.proj", "feed_forward.gate_up")}
    down = "blocks.0.feed_forward.down"
    expected = (
        set()
        if name in ("bf16", "bf16 rounded")
        else parts
        if name == "down in bf16"
        else parts | {down}
    )
    assert converted == expected
    smooth = model.get_submodule(down).config.smooth_input if down in converted else False
    assert smooth == name.startswith("smooth")


def run_of(**fields):
    first = bench.runs(bench.parse(["--quick", "--outliers", "rare"]))[0]
    return replace(first, **fields)


def test_contenders_start_from_one_base_and_size_makes_no_difference_to_bf16(folder, tmp_path):
    rows = {n: train(run_of(contender=n), tmp_path, folder) for n in ("bf16", "tensorwise")}
    weights, channel = base_of(run_of(), corpus.load(folder), tmp_path, "cpu")
    assert [path.name for path in tmp_path.glob("*.pt")] == [f"0_{BYTE}.pt"]
    assert weights["blocks.0.feed_forward.down.weight"][:, channel].count_nonzero()
    json.dumps(rows, allow_nan=False)
    small, large = rows["bf16"]["sizes"]
    assert (small["exponent"], large["exponent"]) == (12, 16)
    assert large["converted"] == pytest.approx(small["converted"], rel=1e-4)
    assert "casts" not in small or not small["casts"]
    small, large = (
        {(cast["operand"], cast["gemm"]): cast for cast in size["casts"]}
        for size in rows["tensorwise"]["sizes"]
    )
    assert set(large) == {("input", "output"), ("weight", "output"), ("grad_output", "grad_input")}
    assert all(cast["inspected"] == 1 for cast in large.values())
    key = "input", "output"
    assert large[key]["flushed"] > 2 * small[key]["flushed"]
    assert large[key]["sqnr"] > 30  # of the outlier's energy: it does not tell


def test_divergence_is_an_error_of_its_size(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.quality.outlier_run.train_step", lambda *_: float("nan"))
    sizes = train(run_of(), tmp_path, folder)["sizes"]
    assert [size["error"] for size in sizes] == ["diverged: loss not finite at step 0"] * 2


def row_of(name, seed, converted, losses, **size):
    sizes = [{"exponent": 12, "converted": converted, "loss": losses[-1], "train_loss": losses}]
    sizes[0] |= size
    return {"run": asdict(run_of(contender=name, seed=seed, exponents=(12,))), "sizes": sizes}


def test_lines_pair_each_size_with_bf16(monkeypatch):
    cast = {"operand": "input", "gemm": "output", "inspected": 4, "saturates": 1}
    cast |= {"flushed": 0.5, "sqnr": 33.0}
    rows = [row_of("bf16", seed, 2.0, [4.0, 2.0]) for seed in (0, 1)]
    rows += [row_of("delayed", seed, 2.2, [4.0, 2.1], casts=[cast]) for seed in (0, 1)]
    one = replace(bench.OUTLIERS["rare"], exponents=(12,))
    monkeypatch.setattr(bench, "OUTLIERS", {"rare": one})
    (line,) = bench.lines(rows)
    assert (line["outlier"], line["layer"], line["size"]) == ("rare", "delayed", "2^12")
    assert (line["converted"], line["trained"]) == ("+10.00 ± 0.00 %", "+5.00 ± 0.00 %")
    assert line["steps"] == "+1.67 ± 0.00 %"  # from 3.0 to 3.05
    assert line["worst"] == pytest.approx(5)
    assert (line["flushed"], line["saturates"], line["sqnr"]) == (0.5, 0.25, 33)


def test_command_writes_what_it_ran(folder, tmp_path, monkeypatch):
    studies.made_here(monkeypatch)
    file = tmp_path / "out.json"
    argv = ["--quick", "--data", str(folder), "--outliers", "rare", "--jobs", "1", "-o", str(file)]
    assert bench.main([*argv, "--contenders", "bf16", "smooth delayed"]) == 0
    written = json.loads(file.read_text())
    assert [row["run"]["contender"] for row in written["rows"]] == ["bf16", "smooth delayed"]
    assert all("error" not in size for row in written["rows"] for size in row["sizes"])
    assert "smooth delayed" in written["table"][2]


def test_picture_has_a_line_per_contender_and_smooth_ones_are_dashed():
    lines = [
        {"outlier": outlier, "layer": name, "size": size, "converted_gap": gap}
        for outlier, name, size, gap in (
            ("often", "rowwise", "2^0", 0.1),
            ("often", "rowwise", "2^12", 3.0),
            ("often", "smooth rowwise", "2^12", 0.2),
            ("rare", "rowwise", "2^12", 9.0),
        )
    ]
    lines[1]["trained_gap"] = 4.0
    converted, trained = outlier_picture.draw(lines).axes
    _, plain, smooth = converted.get_lines()
    assert plain.get_xydata().tolist() == [[0, 0.1], [12, 3.0]]
    assert (plain.get_linestyle(), smooth.get_linestyle()) == ("-", "--")
    assert plain.get_color() == smooth.get_color()
    assert trained.get_lines()[1].get_xydata().tolist() == [[12, 4.0]]
