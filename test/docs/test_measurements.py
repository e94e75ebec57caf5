"""The numbers on the pages are those of the result files.

Each function makes one table from files of `benchmarks/results/`, and its page must contain exactly
that text. After a new measurement the test fails and prints the table: paste it into the page.
"""

import json
import re
import statistics
from functools import partial
from pathlib import Path

import pytest
from linear.test_autograd import COSTS

from benchmarks import bench_alarms, bench_bert, bench_quality, bench_unit_gpt
from benchmarks.bench_alarms import HEALTHY, STATIC
from benchmarks.quality.contenders import SAVING
from float8.config import RECIPES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PREDICTED = ("predicted_h100", "predicted_b200")
KERNELS, CHECK, EXECUTED = "predicted_kernels", "predicted_kernels_check", "executed_ptx"
FILES = sorted(
    path.stem
    for path in RESULTS.glob("*.json")
    if path.stem not in (*PREDICTED, KERNELS, CHECK, EXECUTED)
)


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
    lines = [f"| {' | '.join(map(str, line))} |".replace("|  |", "| |") for line in body]
    return "\n".join([f"| {header} |", rule, *lines, ""])


def times(ratio, digits=2):
    return f"{ratio:.{digits}f}x"


def spread(values, form="+.2f", unit=" %"):
    """Mean and standard deviation."""
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return f"{mean:{form}} ± {deviation:{form.strip('+')}}{unit}"


def gib(row, *parts):
    return [f"{row[f'{part}_mib'] / 1024:,.1f}" for part in parts]


# --- the files themselves

VERSIONS = {  # the commit of a result that does not name the version of float8 -> that version
    "39b5a18": "0.1.0", "79c545e": "0.2.0", "aef3fd8": "0.3.0", "b1d6a43": "0.3.0",
    "20418ed": "0.3.0", "c7f6d8a": "0.3.0", "e200748": "0.3.0", "bd9ff96": "0.3.0",
    "929869d": "0.5.0", "c9b3b16": "0.5.0", "571dcdc": "0.6.0", "fc72c88": "0.8.0",
    "3713d83": "0.8.0",
}  # fmt: skip
GONE = "no longer in the repository"
CLEAN = {True: "no", False: "yes", None: "not recorded"}


def all_files():
    body = []
    for name in FILES:
        found = result(name)
        where = found.get("environment") or demo_environment(found)
        assert (where["torch"], where["python"]) == ("2.13.0+cpu", "3.11.7"), "the page says so"
        link = f"[`{name}.json`](../benchmarks/results/{name}.json)"
        commit = where["commit"][:7]
        version = where.get("float8") or VERSIONS[commit]
        of_rows = {row["commit"][:7]: None for row in found.get("rows", ()) if "commit" in row}
        commits, clean = ", ".join(of_rows or [commit]), CLEAN[where["dirty"]]
        cpus = ", ".join(dict.fromkeys(of_machines(found))) or where["cpu"]
        body.append([link, cpus, where["threads"], version, commits, clean])
    return markdown("file | CPU | threads | version | commit | clean checkout", body)


def of_machines(found):
    """The machine of each row, in a study that was continued on another one."""
    return [row["device"] for row in found.get("rows", ()) if "run" in row and "device" in row]


def demo_environment(found):
    cpu, threads = found["machine"].removesuffix(" threads").split(", ")
    return found | {"cpu": cpu, "threads": threads, "commit": found["git_commit"], "dirty": None}


# --- speed


def layer(name):
    found = rows(name, "mode", "layer")
    body = []
    for mode, layer in found:
        if mode == "eager" and layer != "nn.Linear":
            ratios = [times(found[m, layer]["ratio"]) for m in ("eager", "compiled")]
            saved = found[mode, layer].get("saved_ratio")
            body.append([f"`{layer}`", *ratios, "" if saved is None else times(saved)])
    return markdown("layer | eager | compiled | saved in eager mode", body)


GROUPED = "cpu_grouped_mm", "cpu_noamx_grouped_mm"


def grouped_gemms():
    with_amx, without = (rows(name, "shape", "layer") for name in GROUPED)
    body = [
        [f"`{layer}`", *(times(found[shape, layer]["ratio"]) for found in (with_amx, without)),
         times(row["saved_ratio"])]
        for (shape, layer), row in with_amx.items()
        if shape == "(4096,512,1024,8)" and "saved_ratio" in row and layer != "F.grouped_mm"
    ]  # fmt: skip
    return markdown("grouped GEMM | with AMX | without | saved", body)


def grouped_gemms_of_models():
    small = {
        (row["layer"], row["shape"].removeprefix("small.").partition(".")[0]): row
        for row in result(GROUPED[1])["rows"]
        if row["shape"].startswith("small") and row["layer"] != "F.grouped_mm"
    }
    return by_shape("grouped GEMM", small, "ratio")


def by_shape(header, found, field):
    shapes = list(dict.fromkeys(shape for _, shape in found))
    names = dict.fromkeys(name for name, shape in found if field in found[name, shape])
    body = [[f"`{name}`", *(times(found[name, s][field]) for s in shapes)] for name in names]
    return markdown(" | ".join([header, *shapes]), body)


def inspection():
    found = rows("cpu_numerics", "watched", "layer")
    body = [
        [f"`{layer}`", times(found["every 50", layer]["ratio"], 3), times(row["ratio"])]
        for (watched, layer), row in found.items()
        if watched == "each step"
    ]
    return markdown("recipe | a run with `inspect_every(model, n=50)` | an inspected step", body)


def alarms():
    """The healthy trainings, then those with a fault."""
    lines = bench_alarms.lines(result("cpu_alarms")["rows"])
    body = [
        [
            "healthy" if line["layer"] == HEALTHY else f"`{line['layer']}`",
            line["recipe"] if line["recipe"] in STATIC else f"`{line['recipe']}`",
            line["runs"],
            line["looks"],
            line["false_alarms"],
            line.get("rule", ""),
            line.get("missed", ""),
            line.get("looks_until", "none" if "allowed" in line else ""),
            line.get("allowed", ""),
        ]
        for line in sorted(lines, key=lambda line: line["layer"] != HEALTHY)
    ]
    header = "training | recipe | runs | looks | false alarms | expected alarm | missed"
    return markdown(f"{header} | looks until it started | at most", body)


def predicted():
    body = [[f"`{recipe}`", *(c for name in PREDICTED for c in of_block(name, recipe))]
            for recipe in RECIPES]  # fmt: skip
    return markdown("recipe | H100 | share of casts | B200 | share of casts", body)


def of_block(name, recipe):
    """The predicted speed-up of all linear layers of a block, and the casts' share of the time."""
    found = result(name)["rows"]
    if "refused" in found[0][recipe]:
        return "refused", ""
    products, casts = (sum(row[recipe][key] for row in found) for key in ("gemms_s", "casts_s"))
    plain = sum(row["bf16_s"] for row in found)
    return times(plain / (products + casts)), f"{100 * casts / (products + casts):.0f} %"


def casts_on_cuda():
    body = []
    for recipe in RECIPES:
        x, g, w, cached, launches = COSTS[recipe]
        assert x == g
        body.append([f"`{recipe}`", x, w, cached, launches])
    return markdown("recipe | input, grad_output | weight | cached weight | launches", body)


def predicted_launches():
    """Those predicted below 0.9 of a copy on an H200, GEMMs aside."""
    found = rows(KERNELS, "device", "kernel", "K")
    sizes = list(dict.fromkeys(K for device, _, K in found if device == "H200"))
    body = []
    for kernel in dict.fromkeys(kernel for device, kernel, _ in found if device == "H200"):
        cells = [found["H200", kernel, K] for K in sizes]
        if min(row["of_limit"] for row in cells) < 0.9 and not cells[0]["tensor"]:
            fractions = [f"{row['of_limit']:.2f}" for row in cells]
            body.append([kernel, *fractions, cells[-1]["resident"], cells[-1]["pipe"]])
    header = " | ".join(f"K = {K:,}" for K in sizes)
    return markdown(f"launch | {header} | programs | busiest pipe", body)


def published_launches():
    """How far the model is off published times, per kernel."""
    found = {}
    for row in result(CHECK)["rows"]:
        found.setdefault((row["kernel"], row["source"].split("/")[4]), []).append(row["error"])
    body = [
        [
            f"`{kernel}`",
            library,
            len(errors),
            *(f"{100 * e:+.0f} %" for e in (min(errors), statistics.median(errors), max(errors))),
        ]
        for (kernel, library), errors in found.items()
    ]
    return markdown("kernel | published by | sizes | least error | median | greatest", body)


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


def demo():
    runs = result("cpu_noamx_demo")["runs"]
    body = []
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        losses, gaps, speed, saved = (
            [run[field] for run in runs if run["recipe"] == recipe] for field in DEMO
        )
        loss, gap = spread(losses, ".3f", ""), spread(gaps) if any(gaps) else ""
        mean = f"{statistics.fmean(speed):,.0f}", f"{statistics.fmean(saved):.1f}"
        body.append([f"`{recipe}`", loss, gap, *mean])
    return markdown("recipe | validation loss | gap to its base | tokens/s | saved MiB", body)


DEMO = ("final_val_loss", "gap_to_base_percent", "tokens_per_second", "saved_for_backward_mib")


def stability():
    found = rows("cpu_mus_stability", "log2_lr", "layer")
    body = []
    for power in (0, 3, 6):
        cells = []
        for layer in ("u-mup", "mus"):
            row = found[power, layer]
            cells += [f"{row['val_loss']:.2f}", f"{row['last_std']:,.1f}"]
            cells.append(f"{row['operand_max']:,.0f}")
        body.append([2**power, *cells])
    one = "{0} loss | {0} stream | {0} largest"
    return markdown(f"learning rate | {one.format('u-muP')} | {one.format('muS')}", body)


def bert():
    """Of several seeds: the mean loss, and the paired gap to fp32 with its interval."""
    lines = bench_bert.lines(result("cpu_bert")["rows"])
    found = {(line["layer"], line["mode"]): line for line in lines}
    body = []
    for model, name in (("base", "base"), ("unit", "unit-scaled")):
        rest = [found[model, mode] for mode in ("fp16", "fp8")]
        cells = [f"{line['loss']:.3f} ({line['gap']})" for line in rest]
        body.append([name, f"{found[model, 'fp32']['loss']:.3f}", *cells])
    return markdown("model | fp32 | fp16 | fp8, scale 1", body)


def quality():
    lines, _ = bench_quality.summary(result("cpu_quality")["rows"])
    body = [
        [f"`{line['layer']}`", f"{line['loss']:.4f}" if "loss" in line else "", line.get("gap", ""),
         line.get("bf16_gap", ""), line.get("alarmed", ""), line["seeds"]]
        for line in lines
    ]  # fmt: skip
    header = "contender | held-out loss | gap to its base | evaluated in bf16 | runs with an alarm"
    return markdown(f"{header} | seeds", body)


def unit_gpt():
    names = {"unit_bf16": "unit-scaled, bf16", "unit": "unit-scaled, float8 with scale 1"}
    names |= {"naive": "float8 with scale 1"}
    body = [
        [names.get(line["layer"], line["layer"]), f"{line['loss']:.3f}", line.get("bf16_gap", ""),
         line.get("gap", "") if line["layer"] == "unit" else ""]
        for line in bench_unit_gpt.lines(result("cpu_unit_gpt")["rows"])
    ]  # fmt: skip
    return markdown("nanoGPT | held-out loss | gap to bf16 | gap to unit-scaled, bf16", body)


# --- memory and communication

MEMORY = rows("cpu_memory", "mode", "layer")
SOME = ("bf16", "bf16+float8_adamw", "tensorwise+saved_activations", SAVING)


def memory_of_llama2():
    gaps = {}
    for row in result("cpu_memory_quality")["rows"]:
        if "gap_percent" in row:
            gaps.setdefault(row["layer"], []).append(row["gap_percent"])
    body = []
    for (model, run), row in MEMORY.items():
        if model == "llama2-7b" and "error" not in row:
            loss = spread(gaps[run], unit="") if run in gaps else ""
            body.append([run.replace("+", " + "), *memory(row), loss])
    return markdown(f"run | {SIZES} | loss, %", body)


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


def memory_of_recipes():
    found = rows("cpu_memory_recipes", "layer").items()
    body = [[f"`{run}`", *memory(row)] for run, row in found if "+" not in run]
    return markdown(f"recipe | {SIZES}", body)


def communication():
    body = []
    for (processes, form), row in rows("cpu_comm", "processes", "form").items():
        ratios = [row.get("weights_ratio"), row.get("gradients_ratio")]
        cells = ["" if ratio is None else times(ratio, 3) for ratio in ratios]
        counts = row["collectives"], row["scale_collectives"]
        body.append([processes, form, f"{row['sent_kib']:,.0f}", *cells, *counts])
    header = "processes | form | sent KiB | weights | gradients | collectives | for scales"
    return markdown(header, body)


def checkpoints():
    body = []
    for what, row in rows("cpu_checkpoint", "layer").items():
        peak = times(row["peak_ratio"], 3) if "peak_ratio" in row else ""
        speed = f"{row['mb_per_s']:,.0f}" if "mb_per_s" in row else ""
        ratio = f"{times(row['ratio'])} `{row['against']}`" if "ratio" in row else ""
        body.append([f"`{what}`" if speed else what, peak, speed, ratio])
    return markdown("what | peak / checkpoint | MB/s | time relative to", body)


# header -> file, fields of the key, cells as formats of all fields
PLAIN = {
    "layer | µs | time / `nn.Linear`": ("stub_gpu_overhead", "`{layer}`|{us:.0f}|{ratio:.2f}x"),
    "mode | linear layers | time / `unit`'s | MiB moved | launches": (
        "cpu_unit", "{mode}|{layer}|{ratio_to_unit:.2f}x|{cuda_mib:.1f}|{cuda_launches}"),
    "states | mode | time / foreach's | state bytes per parameter | bytes moved per parameter": (
        "cpu_optim", "{optimizer}|{mode}|{ratio:.2f}x|{state_bytes:.2f}|{moved_bytes:.1f}"),
    "weights of the engine | its inputs | mean difference of log p | largest | KL": (
        "cpu_rollout", "{weights}|{inputs}|{logp_difference:.4f}|{largest:.4f}|{kl:.4f}"),
}  # fmt: skip


def plain(header):
    name, cells = PLAIN[header]
    return markdown(header, [cells.format(**row).split("|") for row in result(name)["rows"]])


# header of the first column -> file, field of the row, field of the cell; a column per shape
SHAPES = {
    "layer": ("cpu_noamx_narrow_linear", "layer", "ratio"),
    "scales": ("cpu_bench_matmul", "granularity", "ratio"),
    "recipe": ("cpu_bench_overhead", "layer", "overhead"),
}


def shapes(header):
    name, field, cell = SHAPES[header]
    found = rows(name, field, "shape").items()
    return by_shape(header, {k: row for k, row in found if k[0] != "nn.Linear"}, cell)


def demo_in_two_processes():
    body = [
        [f"`{run['recipe']}`", f"{run['gap_to_alone_percent']:+.2f} %"]
        for run in result("cpu_noamx_demo_nproc2")["runs"]
        if run["processes"] == 2
    ]
    return markdown("recipe | loss in two processes, against one", body)


def learning_rates():
    best = {
        (row["layer"], row["width"]): f"{round(row['optimum'], 1) + 0.0:.1f}"
        for row in result("cpu_mup_transfer")["rows"]
        if "optimum" in row
    }
    targets = result("cpu_mup_transfer")["targets"]
    body = [
        [t["layer"], *(best[t["layer"], width] for width in (64, 128, 256)), f"{t['measured']:.1f}"]
        for t in targets
        if t["mode"] == "spread"
    ]
    return markdown("parametrisation | width 64 | 128 | 256 | spread", body)


def memory_in_bytes():
    fields = ("optimizer_mib", "activations_mib", "peak_rss_mib")
    body = [
        [run.replace("+", " + "), *(f"{row[field]:,.1f}" for field in fields)]
        for (model, run), row in MEMORY.items()
        if model == "demo GPT"
    ]
    return markdown("run | optimizer MiB | activations MiB | resident MiB", body)


HOST, UNIT, OPTIM, ROLLOUT = (partial(plain, header) for header in PLAIN)
NARROW, PRODUCTS, OVERHEAD = (partial(shapes, header) for header in SHAPES)
LAYERS = [partial(layer, name) for name in ("cpu_noamx_bench_linear", "cpu_bench_linear")]
TABLES = {
    "measurements": (
        all_files,
        *(*LAYERS, NARROW, PRODUCTS, OVERHEAD, HOST),
        *(grouped_gemms, grouped_gemms_of_models),
        *(UNIT, OPTIM, inspection),
        *(predicted_launches, published_launches),
        *(memory_of_recipes, memory_of_llama3, memory_in_bytes, communication),
        checkpoints,
    ),
    "quality": (
        *(demo, demo_in_two_processes, learning_rates, stability, bert, ROLLOUT),
        *(quality, unit_gpt, alarms),
    ),
    "checkpoints": (ROLLOUT,),
    "memory": (memory_of_llama2,),
    "ptx": (executed_forms,),
    "speed": (predicted, casts_on_cuda),
}


@pytest.mark.parametrize(
    ("page", "table"), [(page, table) for page, tables in TABLES.items() for table in tables]
)
def test_table_is_that_of_the_result_files(page, table):
    expected = table()
    assert expected in read(page), f"docs/{page}.md lacks this table:\n\n{expected}"


def read(page):
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_sentences_quote_the_result_files():
    runs = result("cpu_noamx_demo")["runs"]
    naive = statistics.fmean(x["gap_to_base_percent"] for x in runs if x["recipe"] == "naive")
    assert f"`naive` ends {naive:.0f} % above" in " ".join(read("quality").split())

    seeds = [
        row["val_loss"] for row in result("cpu_memory_quality")["rows"] if row["layer"] == "bf16"
    ]
    noise = 100 * statistics.stdev(seeds) / statistics.fmean(seeds)
    assert f"lie ± {noise:.2f} % apart" in read("memory")

    llama2, llama3 = (MEMORY[model, SAVING] for model in ("llama2-7b", "llama3-8b"))
    text = " ".join(read("memory").split())
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
    lines = bench_bert.lines(result("cpu_bert")["rows"])
    gaps = {line["layer"]: line["gap"].lstrip("+") for line in lines if line["mode"] == "fp8"}
    assert f"its loss ends {gaps['base']} above that of float32" in page
    assert f"the unit-scaled one ends {gaps['unit']} above its own" in page
    gpt = {x["layer"]: x["gap"] for x in bench_unit_gpt.lines(result("cpu_unit_gpt")["rows"])[1:]
           if "gap" in x}  # fmt: skip
    naive, unit = (gpt[name].lstrip("+") for name in ("naive", "unit"))
    assert f"nanoGPT ends {naive} above bf16, and unit-scaled {unit} above its own" in page


@pytest.mark.parametrize("name", FILES)
def test_file_stands_with_its_command(name):
    """A section links the file, and its command is the one that wrote it, if it is still there."""
    written = re.sub(r" (-o|--plot|--out-dir) \S+| --no-demo", "", result(name)["command"])
    pages = read("measurements") + read("quality")
    sections = re.split(r"^##+ ", pages, flags=re.MULTILINE)
    sections = [text.replace("\\\n", "") for text in sections if f"results/{name}.json" in text]
    sections = [" ".join(text.split()) for text in sections]
    assert any(written.replace("'", '"') in text or GONE in text for text in sections), written
