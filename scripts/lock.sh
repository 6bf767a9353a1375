#!/usr/bin/env bash
# Writes requirements/constraints-cpu.txt (pip freeze of a fresh environment) and requirements/gpu.txt (pip's resolver,
# nothing installed: the CUDA build is several GB).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
read -ra pip_args <<<"${PIP_ARGS:-}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

header() {
  printf '# Written by `make lock`; do not edit. Intent and reasons are in the .in files.\n'
}

"$python" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip)
"${pip[@]}" install --quiet --disable-pip-version-check --upgrade pip
"${pip[@]}" install --quiet "${pip_args[@]}" -r requirements/cpu.in -r requirements/dev.in
"${pip[@]}" install --quiet "${pip_args[@]}" --no-deps -r requirements/torchrec.in
# A local version such as +cpu names one index's file; the constraint must hold for every build of that release.
{ header; "${pip[@]}" freeze | sed -E 's/\+[a-z0-9.]+$//'; } >"$scratch/constraints-cpu.txt"
mv "$scratch/constraints-cpu.txt" requirements/constraints-cpu.txt

# Folders and constraints of this machine could put a CPU file in the place of the CUDA build, so they are left out.
env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null "${pip[@]}" install --quiet --dry-run --ignore-installed \
  --report "$scratch/gpu.json" -c <(grep -v -i -E '^(torch|fbgemm)' requirements/constraints-cpu.txt) \
  -r requirements/gpu.in -r requirements/dev.in
{
  header
  "$python" - "$scratch/gpu.json" <<'PY'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as report:
    found = json.load(report)["install"]
for name, version in sorted((row["metadata"]["name"], row["metadata"]["version"]) for row in found):
    print(f"{name}=={version.split('+')[0]}")
PY
} >"$scratch/gpu.txt"
mv "$scratch/gpu.txt" requirements/gpu.txt
