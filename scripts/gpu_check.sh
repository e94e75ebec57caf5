#!/usr/bin/env bash
# All that needs a GPU, in one call of under nine minutes:
#
#     bash scripts/gpu_check.sh OUTDIR
#
# Runs the CUDA tests and the benchmarks with the python3 and the torch that are there; installs
# nothing and needs no network. Without pytest the tests are left out, without pytest-xdist they run
# one after the other, and without hypothesis those that draw their inputs are left out; everything
# else is attempted. The exit status is that of the whole: 0 if all succeeded.
#
# On an AMD GPU the kernels' tests and benchmarks are left out, and grouped and blockwise products,
# because the library launches none of them there. Where there is a second GPU, a model trains on one
# and then on two of them, over NCCL, which takes up to a minute more.
#
# Each part has its own time limit, so that a slow one cannot starve the next. Parts come in order of
# importance. Benchmarks write down each row as they measure it and begin nothing new after a while;
# eager comes before compiled, and every kernel with a copy before its comparisons.
#
# OUTDIR holds results.tar.gz, written anew after every part: report.txt (how each part ended, all
# tables), a log and a JUnit file for each run of tests, and a JSON file per benchmark:
# bench_linear.json is one layer in each mode, bench_linear_sweep.json all layers and squares. The
# same files lie in OUTDIR. The archive stays below 16 MiB, of the report and the tables if need be.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
set -uo pipefail

if [ $# -ne 1 ]; then
    echo "usage: bash scripts/gpu_check.sh OUTDIR" >&2
    exit 2
fi
python3 - <<'PYTHON' || exit 1
import sys

try:
    import torch
except ModuleNotFoundError:
    sys.exit(f"gpu_check: this python3 ({sys.executable}) lacks torch")
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch {torch.__version__} sees no CUDA device: nothing to check here")
PYTHON

mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

seconds_in_all=540
most_bytes=$((16 * 1024 * 1024))
archive=$out/results.tar.gz
report=$out/report.txt
log=$(mktemp)
trap 'rm -f "$log" "$log.pt" "$archive.part"' EXIT
failed=()
status=0
: >"$report"

has() { python3 -c "import $1" 2>/dev/null; }

say() { echo "$@" | tee -a "$report"; }

# holds PYTHON: whether an assertion about torch holds.
holds() { python3 -c "import torch; assert $1" 2>/dev/null; }

# unlaunched WORD...: whether it is a benchmark of what an AMD GPU does not run.
unlaunched() { [ -n "$amd" ] && [[ "$*" =~ bench_(grouped_mm|casts) ]]; }

# pack: all results so far as one file; where they are too large, the report and the tables.
pack() {
    tar -czf "$archive.part" -C "$out" --exclude='results.tar.gz*' . 2>/dev/null
    if [ "$(wc -c <"$archive.part")" -gt "$most_bytes" ]; then
        (cd "$out" && find . -name report.txt -o -name '*.json' -size -1024k) |
            tar -czf "$archive.part" -C "$out" -T -
    fi
    mv "$archive.part" "$archive"
}

# part NAME SECONDS COMMAND...: run one part, its output in $log, and note how it ended.
part() {
    local name=$1 limit=$2 begin=$SECONDS ending=passed left=$((seconds_in_all - SECONDS))
    shift 2
    status=0
    if [ "$left" -lt "$limit" ]; then limit=$left; fi
    if [ "$limit" -le 0 ]; then
        status=1
        : >"$log"
        ending="FAILED: no time left"
    else
        # An interrupt first: pytest then still says what failed, and how.
        timeout --signal=INT --kill-after=10 "$limit" "$@" >"$log" 2>&1 || status=$?
        if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
            ending="FAILED: stopped after $limit s"
        elif [ "$status" -ne 0 ]; then
            ending="FAILED: exit status $status"
        fi
    fi
    [ "$status" -eq 0 ] || failed+=("$name")
    say "== $name: $ending, $((SECONDS - begin)) s"
}

# tests NAME SECONDS WORKERS MARKER FILE...: the tests of these files that MARKER selects, by as many
# workers at the most. Every test is a line of the log as soon as it has ended.
tests() {
    local name=$1 limit=$2 most=$3 marker=$4 parallel=() without=() workers
    workers=$(nproc)
    shift 4
    if ! has pytest; then
        failed+=("tests_$name")
        say "== tests_$name: FAILED: left out, python3 lacks pytest"
        return
    fi
    workers=$((workers < most ? workers : most))
    if [ "$workers" -gt 1 ] && has xdist; then parallel=(-n "$workers"); fi
    if ! has hypothesis; then
        mapfile -t without < <(grep -rlE '^(from|import) hypothesis' test | sed 's/^/--ignore=/')
    fi
    OMP_NUM_THREADS=1 part "tests_$name" "$limit" python3 -m pytest "$@" -m "$marker" -v \
        -p no:cacheprovider -p no:benchmark --durations=10 --continue-on-collection-errors \
        "${parallel[@]}" "${without[@]}" -o addopts="-ra --strict-markers --import-mode=importlib" \
        --junitxml="$out/tests_$name.xml"
    cp "$log" "$out/tests_$name.log"
    say "   passed: $(grep -cE '\] PASSED | PASSED +\[' "$log")," \
        "failed: $(grep -cE '\] (FAILED|ERROR) | (FAILED|ERROR) +\[' "$log")"
    grep -E "^(FAILED|ERROR) " "$log" | cut -c 1-200 | head -n 40 | tee -a "$report"
    tail -n 1 "$log" | tee -a "$report"
    pack
}

# benchmark NAME SECONDS COMMAND...: one benchmark, its table and its JSON.
benchmark() {
    local name=$1 limit=$2
    shift 2
    if unlaunched "$name"; then
        say "== $name: left out on AMD GPUs"
        return
    fi
    part "$name" "$limit" python3 "$@" -o "$out/$name.json"
    if [ "$status" -eq 137 ]; then # killed: the table is what it had written down
        python3 -c 'import json, sys; print(*json.load(open(sys.argv[1]))["table"], sep="\n")' \
            "$out/$name.json" >>"$log" 2>&1
    fi
    tail -n 60 "$log" | tee -a "$report"
    pack
}

amd="" blocks=(blockwise) kernels=(test/kernels test/test_kernel_path.py)
if ! holds "torch.version.hip is None"; then
    amd=yes blocks=() kernels=(test/kernels --ignore=test/kernels/gpu)
fi

part environment 20 python3 -c \
    'from benchmarks.measuring import report; print(*report.environment("cuda").items(), sep="\n")'
tee -a "$report" <"$log"
nvidia-smi 2>&1 | tee -a "$report"
for package in pytest xdist hypothesis tabulate triton torchao; do
    has "$package" || say "   not installed: $package"
done

# While the tests run, every recipe is compared with emulation, and one round of the benchmarks
# fills the compilers' caches: grouped products recipe by recipe, for each of their tiles compiles.
warm() {
    if unlaunched "$@"; then return; fi
    OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 timeout 120 python3 "$@" >/dev/null 2>&1 &
}
once=(--repeats 1 --warmup 1)
linear=(benchmarks/bench_linear.py --shapes 70b.attn.wo --modes eager compiled
    --recipes tensorwise delayed static rowwise "${blocks[@]}")
grouped=(benchmarks/bench_grouped_mm.py --shapes mixtral.gate_up qwen3-30b.gate_up
    --recipes tensorwise rowwise blockwise)
casts=(benchmarks/bench_casts.py --shapes 16384,8192 --contenders kernel)
model=(benchmarks/bench_model.py --modes eager compiled --recipes tensorwise rowwise --blocks 2)
for each in linear casts model; do
    declare -n words=$each
    warm "${words[@]}" "${once[@]}"
done
for recipe in tensorwise rowwise blockwise; do
    warm benchmarks/bench_grouped_mm.py --shapes 16384,4096,2048,8 16384,2048,1536,128 \
        --recipes "$recipe" "${once[@]}"
done

OMP_NUM_THREADS=2 timeout 150 python3 scripts/gpu_first.py >"$out/first.log" 2>&1 &
tests cuda 120 10 cuda "${kernels[@]}" test/activations/test_ops.py test/benchmarks/test_step.py \
    test/tensor/dispatch/test_copies.py test/numerics/test_statistics.py test/fusion/test_producers.py \
    test/linear/test_layer.py test/optim/test_gradients.py
wait
part first 5 grep '^0 of' "$out/first.log"
tee -a "$report" <"$out/first.log"
benchmark bench_linear 45 "${linear[@]}" --repeats 10 --stop-after 35
benchmark bench_grouped_mm 60 "${grouped[@]}" --repeats 5 --warmup 2 --stop-after 50
benchmark bench_casts 30 "${casts[@]}" --repeats 5 --warmup 2 --stop-after 25
benchmark bench_model 60 "${model[@]}" --repeats 5 --stop-after 50
if ! holds "torch.cuda.device_count() < 2"; then
    seconds_in_all=$((seconds_in_all + 60))
    for nproc in 1 2; do # the losses of both are nearly equal
        part "training by $nproc" 40 python3 scripts/train_gpt.py --recipe tensorwise --nproc "$nproc" \
            --layers 2 --steps 20 --eval-interval 20 --eval-batches 2 --checkpoint "$log.pt" \
            --out "$out/training_by_$nproc.json"
        tail -n 2 "$log" | tee -a "$report"
    done
fi
benchmark bench_matmul 20 benchmarks/bench_matmul.py --repeats 10 --stop-after 12
benchmark bench_optim 25 benchmarks/bench_optim.py --options float8 "float8 + float16" --modes eager \
    --repeats 5 --warmup 2
benchmark bench_memory 45 benchmarks/bench_memory.py --device cuda --models llama2-7b --blocks 4
benchmark bench_unit 20 benchmarks/bench_model.py --unit --blocks 2 --repeats 5 \
    --recipes tensorwise delayed unit --stop-after 15
# Timings, so alone.
tests timing 15 1 cuda test/benchmarks/test_harness.py test/benchmarks/test_check_estimate.py
benchmark bench_linear_sweep 20 benchmarks/bench_linear.py --repeats 5 --warmup 2 \
    --shapes 70b 8b squares --stop-after 12
benchmark bench_numerics 25 benchmarks/bench_numerics.py --recipes tensorwise --repeats 3 -n 20
# First by the figures that were there before this run, then by those of this machine.
part "predicted beside measured" 6 python3 benchmarks/check_estimate.py "$out/bench_linear.json" \
    "$out/bench_matmul.json"
tee -a "$report" <"$log"
part "predicted against measured" 20 \
    python3 benchmarks/check_estimate.py "$out/bench_linear.json" --device measured
tail -n 60 "$log" | tee -a "$report"

if [ ${#failed[@]} -gt 0 ]; then
    printf -v names '%s, ' "${failed[@]}"
    say "gpu_check: failed: ${names%, }"
else
    say "gpu_check: all parts passed"
fi
pack
[ ${#failed[@]} -eq 0 ]
