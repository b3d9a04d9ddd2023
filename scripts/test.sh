#!/usr/bin/env bash
# All tests: first those that keep every core busy by themselves, then the others without Spark, in two halves side by
# side, then those that start it, which take all there is of a small machine. With arguments: one pytest, with these.
set -uo pipefail
python=${PYTHON:-.venv/bin/python}
if (($#)); then
    exec "$python" -m pytest "$@"
fi
code=0
"$python" -m pytest -m all_cores --durations=2 tests/sim || code=$?
rest="not spark and not all_cores"
said=$(mktemp)
"$python" -m pytest -m "$rest" -p no:cacheprovider tests/crash tests/sim >"$said" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null; rm -f "$said"' EXIT
"$python" -m pytest -m "$rest" --ignore=tests/crash --ignore=tests/sim || code=$?
echo "waiting for the tests in tests/crash and tests/sim"
wait "$beside" || code=$?
cat "$said"
"$python" -m pytest -m spark --durations=12 || code=$?
exit "$code"
