#!/usr/bin/env bash
# Builds .venv: `setup.sh run` installs what a mesh needs, `setup.sh dev` adds linters and test tools; `setup.sh check`
# refuses a PYTHON that .venv is not of.
# Called by make, whose stamps decide whether it is needed at all.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:?usage: setup.sh run|dev|check}
python=${PYTHON:-python3.11}
variant=${VARIANT:-cpu}
read -ra pip_args <<<"${PIP_ARGS:-}"

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

case $variant in
  cpu) constraints=requirements/constraints-cpu.txt ;;
  gpu) constraints=requirements/gpu.txt ;;
  *) die "VARIANT is cpu or gpu, not '$variant'" ;;
esac

command -v "$python" >/dev/null ||
  die "'$python' not found. rankmesh needs Python 3.11; name another one with: make setup PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "'$python' does not run"
[ "$version" = 3.11 ] || die "'$python' is Python $version; rankmesh needs 3.11 (make setup PYTHON=/path/to/python3.11)"

if [ "$what" = check ]; then
  base='import os, sys; print(os.path.realpath(sys._base_executable))'
  asked=$("$python" -c "$base")
  built=$(.venv/bin/python -c "$base")
  [ "$asked" = "$built" ] ||
    die "PYTHON is $asked, .venv is of $built: remove .venv to build it anew, or leave PYTHON away"
  exit 0
fi

# A venv without pip is what an interrupted or failed creation leaves behind.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  echo "setup: creating .venv with $python"
  "$python" -m venv --clear .venv ||
    die "'$python -m venv' failed (on Debian and Ubuntu it is in the package python3.11-venv)"
fi

pip_install() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input "${pip_args[@]}" "$@"
}

case $what in
  run)
    echo "setup: installing the $variant requirements (about a minute the first time)"
    pip_install --constraint "$constraints" --requirement "requirements/$variant.in"
    # On CUDA machines torchrec's own metadata would be right; --no-deps there too keeps one recipe.
    pip_install --no-deps --requirement requirements/torchrec.in
    ;;
  dev)
    echo "setup: installing the development tools"
    pip_install --constraint "$constraints" --requirement requirements/dev.in
    ;;
  *) die "unknown part '$what': run, dev or check" ;;
esac
