#!/usr/bin/env bash
# Runs make targets one after another, prints the time of each and stops at the first failure: ci.sh TARGET...
set -uo pipefail
cd "$(dirname "$0")/.."

times=()
status=0
for step in "$@"; do
  printf '\n== %s\n' "$step"
  begin=$SECONDS
  ${MAKE:-make} --no-print-directory "$step" || status=$?
  times+=("$(printf '%-12s %5d s  %s' "$step" $((SECONDS - begin)) "$([ "$status" = 0 ] && echo ok || echo failed)")")
  [ "$status" = 0 ] || break
done

printf '\n== times\n'
printf '%s\n' "${times[@]}"
printf '%-12s %5d s\n' total "$SECONDS"
exit "$status"
