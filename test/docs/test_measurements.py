"""The numbers on the pages are those of the result files.

Each function makes one table from files of `benchmarks/results/`, and its page must contain exactly
that text. After a new measurement the test fails and prints the table: paste it into the page.
"""

import json
import re
import statistics
from pathlib import Path

import pytest
from linear.test_autograd import COSTS

from benchmarks import bench_alarms, bench_quality, bench_sums
from benchmarks.bench_alarms import HEALTHY
from benchmarks.measuring.shapes import LLAMA3_8B
from benchmarks.quality.contenders import SAVING
from benchmarks.quality.intervals import difference
from float8.config import RECIPES
from float8.estimate import estimate
from scripts import demo

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KERNELS, CHECK, EXECUTED = "predicted_kernels", "predicted_kernels_check", "executed_ptx"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows(name, *fields):
    """The rows of a file, by the values of these fields; a single field is the key itself."""
    keys = [tuple(row[field] for field in fields) for row in result(name)["rows"]]
    return {
        key if len(fields) > 1 else key[0]: row
        for key, row in zip(keys, result(name)["rows"], strict=True)
    }


def markdown(header, body):
    """A table; ``header`` is its first line without the outer bars."""
    columns = header.split(" | ")
    assert all(len(line) == len(columns) for line in body)
    rule = "---".join("|" * (len(columns) + 1))
    lines = [f"| {' | '.join(map(str, line))} |".replace("  |", " |") for line in body]
    return "\n".join([f"| {header} |", rule, *lines, ""])


def times(ratio, digits=2):
    return f"{ratio:.{digits}f}x"


def gib(row, *parts):
    return [f"{row[f'{part}_mib'] / 1024:,.1f}" for part in parts]


# --- speed


LINEAR = "cpu_noamx_bench_linear", "cpu_bench_linear"
GROUPED = "cpu_noamx_grouped_mm", "cpu_grouped_mm"


def layers():
    """Every recipe's layer and grouped GEMM, without AMX and with it."""
    body = []
    for recipe in RECIPES:
        found = [rows(name, "mode", "layer") for name in LINEAR]
        if ("eager", recipe) not in found[0]:  # unit: it needs another model
            continue
        cells = [times(f[mode, recipe]["ratio"]) for f in found for mode in ("eager", "compiled")]
        key = "(4096,512,1024,8)", recipe
        grouped = [rows(name, "shape", "layer").get(key) for name in GROUPED]
        cells += ["" if row is None else times(row["ratio"]) for row in grouped]
        saved = {times(rows(name, "mode", "layer")["eager", recipe]["saved_ratio"])
                 for name in LINEAR}  # fmt: skip
        body.append([f"`{recipe}`", *cells, *saved])
    kinds = ("eager", "compiled", "AMX, eager", "AMX, compiled", "grouped", "AMX, grouped")
    return markdown(" | ".join(["recipe", *kinds, "saved"]), body)


def between(ratios, digits=2):
    """The least and the greatest ratio."""
    return f"{min(ratios):.{digits}f}x to {max(ratios):.{digits}f}x"


def others():
    """A line for each other time on a CPU."""
    narrow = rows("cpu_noamx_narrow_linear", "layer", "shape")
    products = rows("cpu_bench_matmul", "granularity", "shape")
    overhead = [r["overhead"] for r in result("cpu_bench_overhead")["rows"] if "overhead" in r]
    optim = rows("cpu_optim", "optimizer", "mode")
    watched = {}
    for (kind, _), row in rows("cpu_numerics", "watched", "layer").items():
        watched.setdefault(kind, []).append(row["ratio"])
    saved = rows("cpu_checkpoint", "layer")
    of = {name: between([row["ratio"] for (layer, _), row in narrow.items() if layer == name])
          for name in ("tensorwise", "rowwise")}  # fmt: skip
    lines = [
        ("cpu_noamx_narrow_linear", "layers of 128 and 512 features, eager, without AMX",
         f"`tensorwise` {of['tensorwise']}, `rowwise` {of['rowwise']}"),
        ("cpu_bench_matmul", "the product alone, (512,1024,4096), with AMX",
         ", ".join(f"`{name}` {times(row['ratio'])}" for (name, shape), row in products.items()
                   if shape == "(512,1024,4096)")),
        ("cpu_bench_overhead", "Python of a tiny layer, against a hand-written autograd function",
         between(overhead)),
        ("cpu_optim", "AdamW's step, against torch's foreach AdamW",
         f"eager {times(optim['float8', 'eager']['ratio'])}, "
         f"compiled {times(optim['float8', 'compiled']['ratio'])}, a second moment in float16 "
         f"{times(optim['float8 + float16', 'compiled']['ratio'])}"),
        ("cpu_numerics", "a training under `inspect_every(model, n=50)`",
         f"{between(watched['every 50'], 3)}, an inspected step {between(watched['each step'])}"),
        ("cpu_checkpoint", "saving and loading a folder of 0.52 GB (version 0.12)",
         f"memory {times(saved['peak of save']['peak_ratio'])} of the folder, time "
         f"{times(saved['save_pretrained']['ratio'])} of `save_file` with fsync, "
         f"{times(saved['load, float8']['ratio'])} of `load_file`"),
    ]  # fmt: skip
    body = [[what, told, f"[`{name}`](../benchmarks/results/{name}.json)"]
            for name, what, told in lines]  # fmt: skip
    return markdown("what | result | file", body)


def predicted():
    shapes = [(shape.M, shape.K, shape.N) for shape in LLAMA3_8B]
    found = [estimate(shapes, None, device, list(RECIPES)) for device in ("H100", "B200")]
    body = [[f"`{recipe}`", *(c for each in found for c in of_block(each, recipe))]
            for recipe in RECIPES]  # fmt: skip
    return markdown("recipe | H100 | share of casts | B200 | share of casts", body)


def of_block(found, recipe):
    """The predicted speed-up of all linear layers of a block, and the casts' share of the time."""
    layers = [row.recipes[recipe] for row in found.rows]
    if layers[0].refused is not None:
        return "refused", ""
    total, casts = found.total(recipe), sum(layer.seconds.casts for layer in layers)
    return times(total.speedup), f"{100 * casts / total.seconds.total:.0f} %"


def casts_on_cuda():
    body = []
    for recipe in RECIPES:
        x, g, w, cached, launches = COSTS[recipe]
        assert x == g
        body.append([f"`{recipe}`", x, w, cached, launches])
    return markdown("recipe | input, grad_output | weight | cached weight | launches", body)


def predicted_launches():
    """Those predicted below 0.7 of a copy on an H200, GEMMs aside."""
    found = rows(KERNELS, "device", "kernel", "K")
    sizes = list(dict.fromkeys(K for device, _, K in found if device == "H200"))
    body = []
    for kernel in dict.fromkeys(kernel for device, kernel, _ in found if device == "H200"):
        cells = [found["H200", kernel, K] for K in sizes]
        if min(row["of_limit"] for row in cells) < 0.7 and not cells[0]["tensor"]:
            body.append([kernel, *(f"{row['of_limit']:.2f}" for row in (cells[0], cells[-1]))])
    return markdown(f"launch | K = {sizes[0]:,} | K = {sizes[-1]:,}", body)


def published_launches():
    """How far the model is off published times of kernels."""
    found = {}
    for row in result(CHECK)["rows"]:
        found.setdefault(row["kernel"], []).append(row["error"])
    gemm = statistics.median(found.pop("gemm_1x128_128x128"))
    medians = [statistics.median(errors) for errors in found.values()]
    errors = [error for each in found.values() for error in each]
    return (
        f"off by {100 * min(medians):+.0f} to {100 * max(medians):+.0f} % in the median and by "
        f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} % at most. "
        f"The time of a GEMM is off by {100 * gemm:+.0f} %"
    )


def executed_forms():
    """What executing the compiled kernels found, per version of Triton and architecture."""
    found = {}
    for row in result(EXECUTED)["rows"]:
        found.setdefault((row["triton"], row["arch"]), []).append(row)
    body = []
    for version, arch in sorted(found, key=lambda key: (key[0], int(key[1][3:]))):
        parts = found[version, arch]
        shipped = sum(row["shipped"] for row in parts)
        executed = shipped - sum(len(row["not_executed"]) for row in parts)
        cases, launches, instructions, failed = (
            sum(row[field] for row in parts)
            for field in ("cases", "launches", "instructions", "failed")
        )
        findings = sum(sum(row["findings"].values()) for row in parts)
        counts = cases, launches, f"{instructions / 1e6:.0f} million", failed, findings
        body.append([version, f"`{arch}`", f"{executed} of {shipped}", *counts])
    header = "Triton | architecture | shipped forms executed | cases | launches | instructions"
    return markdown(f"{header} | failed cases | findings", body)


# --- quality


def of_bert(model, mode):
    """Of several seeds: the mean loss, and the paired gap to fp32 with its interval."""
    named = [[row for row in result("cpu_bert")["rows"] if (row["layer"], row["mode"]) == key]
             for key in ((model, mode), (model, "fp32"))]  # fmt: skip
    loss = statistics.fmean(row["loss"] for row in named[0])
    return f"{loss:.3f}", str(difference(*named))


def bert():
    body = []
    for model, name in (("base", "base"), ("unit", "unit-scaled")):
        cells = ["{} ({})".format(*of_bert(model, mode)) for mode in ("fp16", "fp8")]
        body.append([name, of_bert(model, "fp32")[0], *cells])
    return markdown("model | fp32 | fp16 | fp8, scale 1", body)


def gpt_gap(name, base):
    """Of the last segment of a training of nanoGPT to that of another, in per cent."""
    last = {row["run"]["contender"]: row["loss"] for row in result("cpu_unit_gpt")["rows"]}
    return f"{100 * (last[name] / last[base] - 1):.2f} %"


def quality():
    lines, _ = bench_quality.summary(result("cpu_quality")["rows"])
    body = [
        [f"`{line['layer']}`", f"{line['loss']:.4f}" if "loss" in line else "",
         *(line.get(gap, "").removesuffix(" %") for gap in ("gap", "bf16_gap"))]
        for line in lines
    ]  # fmt: skip
    return markdown("contender | held-out loss | gap to its base, % | evaluated in bf16, %", body)


SUMS = f"{bench_sums.OF_MODEL} after 400 steps"


def sums_of_gradients():
    lines = {
        line["terms"]: line
        for line in bench_sums.summary(result("cpu_sums")["rows"])[0]
        if line.get("operands") == SUMS and line["terms"] not in (512, 16384)
    }
    body = [
        [f"{terms:,}", *(f"{line[key]:.2f}" for key in ("cast", "precise", "fast"))]
        for terms, line in lines.items()
    ]
    return markdown("tokens | casts | precise sum | fast sum", body)


# --- memory and communication

MEMORY = rows("cpu_memory", "mode", "layer")
SOME = ("bf16", "bf16+float8_adamw", "tensorwise+saved_activations", SAVING)


LEFT_OUT = (
    *("bf16+fp32_master", "bf16+bf16_adamw", "bf16+float8_adamw_v16"),
    *("torchao AdamWFp8", "tensorwise+O1"),
)


def memory_of_llama2():
    body = [
        [run.replace("+", " + "), *memory(row)]
        for (model, run), row in MEMORY.items()
        if model == "llama2-7b" and "error" not in row and run not in LEFT_OUT
    ]
    return markdown(f"run | {SIZES}", body)


def memory_of_llama3():
    models = {"llama3-8b": "Llama-3-8B", "llama3-70b": "Llama-3-70B"}
    body = [
        [label, run.replace("+", " + "), *memory(MEMORY[model, run])]
        for model, label in models.items()
        for run in SOME
    ]
    return markdown(f"model | run | {SIZES}", body)


SIZES = "optimizer | activations | peak | per GPU"


def memory(row):
    optimizer, activations, peak = gib(row, "optimizer", "activations", "peak")
    ratios = times(row["smaller"]), times(row["smaller_per_gpu"])
    return [optimizer, activations, f"{peak} ({ratios[0]})", ratios[1]]


def communication():
    body = []
    for (processes, form), row in rows("cpu_comm", "processes", "form").items():
        if processes == 4:
            ratios = [row.get("weights_ratio"), row.get("gradients_ratio")]
            cells = ["" if ratio is None else times(ratio, 3) for ratio in ratios]
            body.append([form, *cells, row["collectives"], row["scale_collectives"]])
    return markdown("form | weights | gradients | collectives | for scales", body)


def rollout():
    found, body = rows("cpu_rollout", "layer", "engine"), []
    noise = found["bfloat16", "float32"]["logp_difference"]
    assert f"bf16 and float32 differ by {noise:.4f}" in read("checkpoints")
    for recipe in [layer for layer, engine in found if engine == "load"]:
        name, comma, changed = recipe.partition(",")
        file, loaded, plain = (found[recipe, by] for by in ("Transformers", "load", "bfloat16"))
        cells = [f"{file['logp_difference']:.4f}", f"{file['largest']:.4f}", f"{file['kl']:.5f}"]
        cells += [f"{row['logp_difference']:.4f}" for row in (loaded, plain)]
        body.append([f"`{name}`{comma}{changed}", *cells])
    return markdown("recipe | Transformers | largest | KL | `load` | bf16 weights", body)


def learning_rates():
    """The largest distance between the best rates of three widths."""
    found = result("cpu_mup_transfer")["targets"]
    spreads = {t["layer"]: f"{t['measured']:.1f}" for t in found if t["mode"] == "spread"}
    body = [
        [layer, spreads[layer], spreads[f"{layer} {recipe}"]]
        for layer, recipe in (("standard", "tensorwise"), ("u-mup", "unit"), ("mus", "unit"))
    ]
    return markdown("parametrisation | float32 | float8", body)


TABLES = {
    "measurements": (
        *(layers, others, memory_of_llama3, communication),
        *(predicted_launches, published_launches),
    ),
    "quality": (quality, bert, learning_rates, sums_of_gradients),
    "checkpoints": (rollout,),
    "memory": (memory_of_llama2,),
    "ptx": (executed_forms,),
    "speed": (predicted, casts_on_cuda),
}


@pytest.mark.parametrize(
    ("page", "table"), [(page, table) for page, tables in TABLES.items() for table in tables]
)
def test_table_is_that_of_the_result_files(page, table):
    expected = table()
    said = read(page) if "\n" in expected else " ".join(read(page).split())
    assert expected in said, f"docs/{page}.md lacks this:\n\n{expected}"


def read(page):
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_sentences_quote_the_result_files():
    quality, measurements, text = (
        " ".join(read(page).split()) for page in ("quality", "measurements", "memory")
    )
    runs = result("cpu_noamx_demo")["runs"]
    naive = statistics.fmean(x["gap_to_base_percent"] for x in runs if x["recipe"] == "naive")
    assert f"With scale 1 for all casts +{naive:.0f} %" in quality
    control = [
        abs(run["gap_to_bf16_percent"])
        for run in result("cpu_noamx_demo_control")["runs"]
        if run["recipe"] == demo.CONTROL
    ]
    assert len(control) == 8
    apart, most = f"{statistics.fmean(control):.1f} %", f"{max(control):.1f} %"
    assert f"ends {apart} away in the mean of eight seeds and [up to {most}]" in quality
    assert f"ended {apart} apart in the mean and up to {most}" in demo.USUAL_NOISE
    plain, unit = gpt_gap("naive", "bf16"), gpt_gap("unit", "unit_bf16")
    itself = gpt_gap("unit_bf16", "bf16")
    assert f"scale 1 ends {plain} above bf16" in quality
    assert f"ends {unit} above the unit-scaled model in bf16, which itself ends {itself}" in quality
    lines, _ = bench_sums.summary(result("cpu_sums")["rows"])
    gaps = {line["layer"]: line["gap"] for line in lines if "gap" in line}
    for name in bench_sums.CONTENDERS[1:]:
        assert gaps[name] in quality, (name, gaps[name])
    lines = bench_alarms.lines(result("cpu_alarms")["rows"])
    healthy, faults = ([x for x in lines if (x["layer"] == HEALTHY) == kind] for kind in (1, 0))
    alarms, looks, n = (sum(x[key] for x in healthy) for key in ("false_alarms", "looks", "runs"))
    assert f"{n} healthy trainings of all recipes raised {alarms} alarms in {looks:,} looks" in (
        quality
    )
    n, missed = (sum(x[key] for x in faults) for key in ("runs", "missed"))
    assert f"{n - missed} of {n} trainings with a planted fault" in quality
    for run in result("cpu_noamx_demo_nproc2")["runs"]:
        if run["processes"] == 2:
            assert f"{run['gap_to_alone_percent']:+.2f} % (`{run['recipe']}`)" in quality
    stable = rows("cpu_mus_stability", "log2_lr", "layer")
    mus, default = (f"{stable[6, layer]['val_loss']:.2f}" for layer in ("mus", "u-mup"))
    assert f"µnit scaling ends at {mus} nats and u-muP at {default}" in quality

    peaks = {row["layer"]: row["peak_mib"] / 1024 for row in result("cpu_memory_recipes")["rows"]}
    assert {f"{peaks[run]:.1f}" for run in ("bf16", "rowwise_with_gw_hp")} == {"84.1"}
    others = [f"{peak:.1f}" for run, peak in peaks.items() if "+" not in run and peak < 84]
    assert f"of {min(others)} to {max(others)} GiB with the others" in measurements
    plain, least = (f"{MEMORY['demo GPT', run]['peak_rss_mib']:,.1f}" for run in ("bf16", SAVING))
    assert f"a peak of {plain} MiB in bf16, and of {least} MiB" in measurements
    unit = {row["layer"]: row for row in result("cpu_unit")["rows"]}
    moved = [f"{unit[name]['cuda_mib']:.1f}" for name in ("unit", "tensorwise", "high precision")]
    assert "move {} MiB per step outside of GEMMs (`tensorwise` {}, bf16 {})".format(*moved) in (
        measurements
    )

    gaps = {}
    for row in result("cpu_memory_quality")["rows"]:
        if "gap_percent" in row:
            gaps.setdefault(row["layer"], []).append(row["gap_percent"])
    means = [statistics.fmean(each) for each in gaps.values()]
    assert f"change by {min(means):+.2f} to {max(means):+.2f} %" in text
    seeds = [
        row["val_loss"] for row in result("cpu_memory_quality")["rows"] if row["layer"] == "bf16"
    ]
    noise = 100 * statistics.stdev(seeds) / statistics.fmean(seeds)
    assert f"lie ± {noise:.2f} % apart" in text

    llama2, llama3 = (MEMORY[model, SAVING] for model in ("llama2-7b", "llama3-8b"))
    assert f"take {times(llama2['states_ratio'], 3)} of float32 AdamW's" in text
    block2, block3 = (times(row["block_ratio"], 3) for row in (llama2, llama3))
    assert f"take {block2} of bf16's, and {block3} for Llama-3-8B" in text

    sent = rows("cpu_comm", "form", "processes")
    for form, what, ratio in (
        ("FSDP2, tensorwise", "weights", "weights_ratio"),
        ("FSDP2, float8 gradients", "gradients", "gradients_ratio"),
        ("DDP, float8 gradients", "gradients", "gradients_ratio"),
    ):
        most = max(sent[form, processes][ratio] for processes in (2, 4))
        assert f"| {what}: {times(most)}" in read("many_gpus"), form


def test_the_page_of_unit_scaling_quotes_the_result_files():
    page = " ".join(read("unit_scaling").split())
    targets = result("cpu_mup_transfer")["targets"]
    spreads = {t["layer"]: f"{t['measured']:.1f}" for t in targets if t["mode"] == "spread"}
    pattern = r"within ([\d.]+) powers of two .* parametrisation within ([\d.]+)"
    assert re.search(pattern, page).groups() == (spreads["u-mup"], spreads["standard"])
    found = rows("cpu_mus_stability", "layer", "log2_lr")
    mus, default = ([found[name, power] for power in (0, 6)] for name in ("mus", "u-mup"))
    for text in (
        f"deviation of {mus[0]['last_std']:.1f}, that of the default variant "
        f"{default[0]['last_std']:.1f}. At 64 times that rate it ends at {mus[1]['val_loss']:.1f} "
        f"nats, the default variant at {default[1]['val_loss']:.1f}.",
        f"up to {mus[0]['operand_max']:.0f} at rate 1",
    ):
        assert text in page, text
    base, unit = (of_bert(model, "fp8")[1].lstrip("+") for model in ("base", "unit"))
    assert f"its loss ends {base} above that of float32" in page
    assert f"the unit-scaled one ends {unit} above its own" in page
    naive, unit = gpt_gap("naive", "bf16"), gpt_gap("unit", "unit_bf16")
    assert f"nanoGPT ends {naive} above bf16, and unit-scaled {unit} above its own" in page


def test_every_file_is_on_a_page():
    pages = "".join(read(page) for page in ("measurements", "quality", "memory", "speed", "ptx"))
    names = [path.stem for path in RESULTS.glob("*.json")]
    assert [name for name in names if f"results/{name}.json" not in pages] == []


def test_the_machine_is_that_of_the_page():
    for path in RESULTS.glob("cpu_*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        where = found.get("environment", found)
        assert (where["torch"], where["python"]) == ("2.13.0+cpu", "3.11.7"), path.name
