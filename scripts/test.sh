#!/usr/bin/env bash
# All tests: first those without Spark, in two halves side by side, then those that start it, which take all there is of
# a small machine. With arguments: one pytest, with these.
set -uo pipefail
python=${PYTHON:-.venv/bin/python}
if (($#)); then
    exec "$python" -m pytest "$@"
fi
said=$(mktemp)
"$python" -m pytest -m "not spark" -p no:cacheprovider tests/crash tests/sim >"$said" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null; rm -f "$said"' EXIT
code=0
"$python" -m pytest -m "not spark" --ignore=tests/crash --ignore=tests/sim || code=$?
echo "waiting for the tests in tests/crash and tests/sim"
wait "$beside" || code=$?
cat "$said"
"$python" -m pytest -m spark --durations=12 || code=$?
exit "$code"
