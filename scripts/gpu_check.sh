#!/usr/bin/env bash
# All that needs a GPU, in one call of under nine minutes:
#
#     bash scripts/gpu_check.sh OUTDIR
#
# Compares every recipe with emulation (scripts/gpu_first.py), runs the CUDA tests, and spends the
# time that is left on the queue of experiments (benchmarks/gpu.py), by the python3 and the torch
# that are there. It installs nothing and needs no network; without pytest the tests are left out,
# without pytest-xdist they run one after the other, and without hypothesis those that draw their
# inputs are left out. The exit status is 0 if all succeeded. To go on with the queue:
#
#     python3 benchmarks/gpu.py run -o OUTDIR
#
# OUTDIR gets the logs, a JUnit file, the result file of each experiment, queue.json, which says how
# each ended, and results.tar.gz, all of it in less than 16 MiB.
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
seconds_in_all=540 seconds_of_tests=150
failed=()

has() { python3 -c "import $1" 2>/dev/null; }

python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
OMP_NUM_THREADS=2 timeout "$seconds_of_tests" python3 scripts/gpu_first.py >"$out/first.log" 2>&1 &
first=$!

# Files of CUDA tests; the kernels' are NVIDIA's. To collect all files would take longer than they do.
mapfile -t files < <(grep -rlE --include='test_*.py' \
    'pytest\.mark\.cuda|^from shapes import .*\bDEVICES\b' test | sort)
options=()
if has xdist; then options+=(-n "$(($(nproc) < 10 ? $(nproc) : 10))"); fi
if ! has hypothesis; then
    mapfile -t without < <(grep -rlE '^(from|import) hypothesis' test | sed 's/^/--ignore=/')
    options+=("${without[@]}")
fi
if ! python3 -c 'import torch; assert torch.version.hip is None' 2>/dev/null; then
    options+=(--ignore=test/kernels/gpu --ignore=test/test_kernel_path.py)
fi
if has pytest; then
    # An interrupt first: pytest then still says what failed, and how.
    OMP_NUM_THREADS=1 timeout --signal=INT --kill-after=10 "$seconds_of_tests" python3 -m pytest \
        "${files[@]}" -m cuda -v -p no:cacheprovider -p no:benchmark --durations=10 \
        --continue-on-collection-errors "${options[@]}" --junitxml="$out/tests.xml" \
        -o addopts="-ra --strict-markers --import-mode=importlib" >"$out/tests.log" 2>&1 ||
        failed+=("tests")
    grep -E "^(FAILED|ERROR) " "$out/tests.log" | cut -c 1-200 | head -n 40
    tail -n 1 "$out/tests.log"
else
    echo "gpu_check: no tests: python3 lacks pytest"
    failed+=("tests")
fi
wait "$first" || failed+=("first numbers")
cat "$out/first.log"

python3 benchmarks/gpu.py run --seconds "$((seconds_in_all - SECONDS))" -o "$out" || failed+=("queue")
if [ ${#failed[@]} -gt 0 ]; then
    printf -v names '%s, ' "${failed[@]}"
    echo "gpu_check: failed: ${names%, }"
    exit 1
fi
echo "gpu_check: all passed"
