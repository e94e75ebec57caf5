#!/usr/bin/env bash
# Build the documentation into site/, on a machine that has Python >= 3.10 and pip. A broken link, a
# page that is not in the table of contents or an undocumented public name is an error.
#
#     bash scripts/docs.sh           # then open site/index.html; the search needs a server:
#     bash scripts/docs.sh serve     # at http://127.0.0.1:8000, built again at every change
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh docs
export NO_MKDOCS_2_WARNING=1  # constraints.txt pins 1.6
exec .venv/bin/python -m mkdocs "${1:-build}"
