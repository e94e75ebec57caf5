#!/usr/bin/env bash
# Train a GPT in bf16 and in float8, as it is and unit-scaled, and compare the recipes, on a machine
# that has Python >= 3.10 and pip. Options go to scripts/demo.py, whose --help lists them:
#
#     bash scripts/demo.sh --steps 50 --seeds 0 1
#     bash scripts/demo.sh --nproc 2    # in one process, then in two: torchrun, FSDP2, float8 gathers
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh demo
# Threads that spin while they wait slow each other down many times over when cores are shared.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec .venv/bin/python scripts/demo.py "$@"  # exec: Ctrl-C is then the trainer's to handle
