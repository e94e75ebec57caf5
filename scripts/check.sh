#!/usr/bin/env bash
# What must hold before a change lands: lint, format, types, documentation, all tests. CI runs
# exactly this.
#
#     bash scripts/check.sh
#
# Makes or reuses .venv. All five are run even if one fails; arguments go to scripts/test.sh.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh dev

failed=()
for tool in "ruff check" "ruff format --check" "mypy"; do
    echo "== $tool"
    # shellcheck disable=SC2086  # a tool and its arguments
    .venv/bin/python -m $tool || failed+=("$tool")
done
echo "== documentation"
bash scripts/docs.sh || failed+=("documentation")
echo "== tests"
bash scripts/test.sh --all "$@" || failed+=("tests")

if [ ${#failed[@]} -gt 0 ]; then
    printf -v names '%s, ' "${failed[@]}"
    echo "check.sh: failed: ${names%, }" >&2
    exit 1
fi
