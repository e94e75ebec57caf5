#!/usr/bin/env bash
# Make or reuse the repository's .venv with the package and one of its extras:
#
#     bash scripts/setup_env.sh demo|docs|test|dev
#
# Needs a Python >= 3.10 (PYTHON=python3.12 to choose one) and pip. A stamp per extra remembers what
# was installed, so a second run takes no time until setup.py, version.py or constraints.txt change.
# Other versions than those have environments of their own: scripts/versions.sh.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=${1:?usage: bash scripts/setup_env.sh demo|docs|test|dev}
base=${PYTHON:-python3}
python=.venv/bin/python

"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "setup_env.sh: $base is not a Python >= 3.10: name one, as in PYTHON=python3.12" >&2
    exit 1
}

if ! "$python" -c '' 2>/dev/null; then
    # Debian and Ubuntu split ensurepip off into python3-venv: without it, use the pip outside.
    "$base" -m venv --clear .venv 2>/dev/null || "$base" -m venv --clear --without-pip .venv
fi
pip=("$python" -m pip)
"${pip[@]}" --version >/dev/null 2>&1 || pip=("$base" -m pip --python "$python")

# Larger extras include smaller ones: with one of those installed nothing else is needed.
case $extra in
    demo) enough=(demo test dev) ;;
    docs) enough=(docs test dev) ;;
    test) enough=(test dev) ;;
    dev) enough=(dev) ;;
    *) echo "setup_env.sh: no extra '$extra': take demo, docs, test or dev" >&2 && exit 1 ;;
esac
wanted=$("$python" -c '
import hashlib, pathlib, sys
names = "setup.py", "float8/version.py", "constraints.txt"
text = "".join(pathlib.Path(name).read_text() for name in names)
print(sys.version_info[:2], hashlib.sha256(text.encode()).hexdigest())')
for larger in "${enough[@]}"; do
    if [ "$(cat ".venv/installed-$larger" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
done
echo "setup_env.sh: installing float8[$extra] into .venv"
rm -f .venv/installed-*
"${pip[@]}" install --constraint constraints.txt --editable ".[$extra]"
echo "$wanted" >".venv/installed-$extra"
