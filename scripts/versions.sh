#!/usr/bin/env bash
# Make an environment with other versions than those of constraints.txt, and run the tests that they
# concern: for torch those of what builds on its internals, else all files that name the package.
#
#     bash scripts/versions.sh torch==2.15.0
#     bash scripts/versions.sh transformers==5.24.0 compressed-tensors==0.20.1
#     bash scripts/versions.sh torch==2.15.0 -- test/linear -k compile    # these tests instead
#
# The environment is .venv-VERSIONS, several GB with a CUDA build of torch, which a second run uses
# again. Without tests marked `slow`.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    versions+=("$1")
    shift
done
[ ${#versions[@]} -gt 0 ] || { echo "usage: bash scripts/versions.sh PACKAGE==VERSION ..." >&2 && exit 2; }
tests=("${@:2}")
venv=".venv-$(IFS=_ && echo "${versions[*]}")"
python=$venv/bin/python

"$python" -c '' 2>/dev/null || "${PYTHON:-python3}" -m venv "$venv"
cp constraints.txt "$venv/constraints.txt"
for version in "${versions[@]}"; do
    name=${version%%[=<>~!]*}
    sed -i "s/^$name==.*/$version/" "$venv/constraints.txt"
    if [ $# -gt 1 ]; then continue; fi
    if [ "$name" = torch ]; then
        tests+=(test/{activations,distributed,experts,fusion,kernels,linear,optim,tensor})
    else
        mapfile -t found < <(grep -rlwE --include='test_*.py' "${name//[-_]/[-_]}" test)
        tests+=("${found[@]}")
    fi
done
"$python" -m pip install -q --constraint "$venv/constraints.txt" --editable '.[test]' "${versions[@]}"

export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -n "$(env -u OMP_NUM_THREADS nproc)" -m "not slow" "${tests[@]}"
