#!/usr/bin/env bash
# Run the test suite on a machine that has Python >= 3.10 and pip, without the tests that are slow by
# nature (marker `slow`: compiled kernels of every form, frameworks, pages, studies). Options go to
# pytest, whose own are those of `.venv/bin/python -m pytest --help`:
#
#     bash scripts/test.sh --all            # every test, as CI
#     bash scripts/test.sh test/scripts -k resume
#     bash scripts/test.sh --cov=float8     # coverage; takes about three times as long
#
# A worker process per core, eight at most, and one more, because many tests wait for processes that
# they start; -n 0 runs all in one process.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh test
# Threads that spin while they wait slow each other down many times over when cores are shared.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
workers=$(env -u OMP_NUM_THREADS nproc)  # which otherwise counts threads, not cores
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the cores are taken by the workers
marker="not slow"
for argument in "$@"; do
    shift
    if [ "$argument" = --all ]; then marker=""; else set -- "$@" "$argument"; fi
done
exec .venv/bin/python -m pytest -n $(((workers < 8 ? workers : 8) + 1)) -m "$marker" "$@"
