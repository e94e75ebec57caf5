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
# output), junit_cuda.xml, junit_other.xml, and a JSON file per benchmark: bench_linear.json is the
# layer of the targets, eager and compiled, bench_linear_sweep.json all layers and squares, eager.
# Parts come in order of importance; benchmarks stop by themselves before their limit and name what
# they left out, as a rule the largest square.
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

# tests NAME SECONDS MARKER WORKERS: the tests that MARKER selects, in parallel where xdist is
# there, by as many workers at the most.
tests() {
    local name=$1 limit=$2 marker=$3 most=$4 parallel=() workers; workers=$(nproc)
    if [ "$workers" -gt 1 ] && python3 -c "import xdist" 2>/dev/null; then
        parallel=(-n $((workers < most ? workers : most)))
    fi
    OMP_NUM_THREADS=1 part "$name tests" "$limit" python3 -m pytest test -m "$marker" \
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

tests cuda 115 "cuda" 8
tests other 85 "not cuda" 16
benchmark bench_linear 80 benchmarks/bench_linear.py --shapes 70b.attn.wo \
    --modes eager compiled --recipes tensorwise static rowwise blockwise --repeats 10
benchmark bench_matmul 30 benchmarks/bench_matmul.py --repeats 10 --stop-after 20
benchmark bench_casts 30 benchmarks/bench_casts.py --repeats 10 --stop-after 20
benchmark bench_model 50 benchmarks/bench_model.py --modes eager compiled \
    --recipes tensorwise --blocks 2 --repeats 5
benchmark bench_unit 25 benchmarks/bench_unit.py --layers 2 --repeats 5
benchmark bench_optim 20 benchmarks/bench_optim.py --options float8 "float8 + float16" --modes eager
benchmark bench_memory 20 benchmarks/bench_memory.py --device cuda --no-demo \
    --models llama2-7b --blocks 4
benchmark bench_linear_aten 20 benchmarks/bench_linear.py --shapes 70b.attn.wo \
    --modes compiled --recipes tensorwise --no-peer --compiled-casts aten --repeats 5
benchmark bench_linear_sweep 25 benchmarks/bench_linear.py --repeats 5 --warmup 2 \
    --shapes 70b 8b squares --stop-after 15
benchmark bench_numerics 12 benchmarks/bench_numerics.py --recipes tensorwise --repeats 3 -n 20
part "predicted against measured" 15 \
    python3 -m float8.estimate --check "$out/bench_linear.json" --device measured
tail -n 60 "$log" | tee -a "$report"
benchmark bench_overhead 10 benchmarks/bench_overhead.py --shapes 16,16,16 --repeats 10

if [ ${#failed[@]} -gt 0 ]; then
    printf -v names '%s, ' "${failed[@]}"
    echo "gpu_check: failed: ${names%, }" | tee -a "$report"
    exit 1
fi
echo "gpu_check: all parts passed" | tee -a "$report"
