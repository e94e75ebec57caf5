#!/usr/bin/env bash
# All that needs a GPU, in one call of under nine minutes:
#
#     bash scripts/gpu_check.sh OUTDIR
#
# Runs the tests and then the benchmarks with the python3 and the torch that are there; installs
# nothing and needs no network. Each part has its own time limit, so that a slow one cannot starve
# the next, and every part is attempted. The exit status is that of the whole: 0 if all succeeded.
#
# OUTDIR holds: report.txt (how each part ended, all tables), pytest.log (the end of the tests'
# output), junit_cuda.xml, junit_other.xml, bench_matmul.json, bench_linear.json and
# bench_linear_compile.json.
set -uo pipefail

if [ $# -ne 1 ]; then
    echo "usage: bash scripts/gpu_check.sh OUTDIR" >&2
    exit 2
fi
python3 - <<'PYTHON' || exit 1
import importlib.util
import sys

needed = ("torch", "pytest", "hypothesis", "tabulate")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"gpu_check: this python3 ({sys.executable}) lacks {', '.join(missing)}")
import torch

if not torch.cuda.is_available():
    sys.exit(f"gpu_check: torch {torch.__version__} sees no CUDA device: nothing to check here")
PYTHON

mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

report=$out/report.txt
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=()
: >"$report"
: >"$out/pytest.log"

# part NAME SECONDS COMMAND...: run one part, its output in $log, and note how it ended.
part() {
    local name=$1 limit=$2 status=0 begin=$SECONDS ending=passed
    shift 2
    # An interrupt first: pytest and the benchmarks then still write down what they have.
    timeout --signal=INT --kill-after=5 "$limit" "$@" >"$log" 2>&1 || status=$?
    if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
        ending="FAILED: stopped after $limit s"
    elif [ "$status" -ne 0 ]; then
        ending="FAILED: exit status $status"
    fi
    [ "$status" -eq 0 ] || failed+=("$name")
    echo "== $name: $ending, $((SECONDS - begin)) s" | tee -a "$report"
}

# tests NAME SECONDS MARKER: the tests that MARKER selects, in parallel where xdist is there.
tests() {
    local name=$1 limit=$2 marker=$3 parallel=() workers=$(($(nproc) / 2))
    if [ "$workers" -gt 1 ] && python3 -c "import xdist" 2>/dev/null; then
        parallel=(-n $((workers < 8 ? workers : 8)))
    fi
    OMP_NUM_THREADS=2 part "$name tests" "$limit" python3 -m pytest test -m "$marker" \
        -p no:cacheprovider -p no:benchmark --durations=10 "${parallel[@]}" \
        -o addopts="-ra --strict-markers --import-mode=importlib" --junitxml="$out/junit_$name.xml"
    { echo "== $name tests"; tail -n 150 "$log"; } >>"$out/pytest.log"
    tail -n 1 "$log" | tee -a "$report"
}

# benchmark NAME SECONDS COMMAND...: one benchmark, its table and its JSON.
benchmark() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" python3 "$@" -o "$out/$name.json"
    tail -n 60 "$log" | tee -a "$report"
}

tests cuda 140 "cuda"
tests other 120 "not cuda"
benchmark bench_matmul 55 benchmarks/bench_matmul.py
benchmark bench_linear 75 benchmarks/bench_linear.py
benchmark bench_linear_compile 100 \
    benchmarks/bench_linear.py --compile --shapes attn.wqkv ffn.w13

if [ ${#failed[@]} -gt 0 ]; then
    printf -v names '%s, ' "${failed[@]}"
    echo "gpu_check: failed: ${names%, }" | tee -a "$report"
    exit 1
fi
echo "gpu_check: all parts passed" | tee -a "$report"
