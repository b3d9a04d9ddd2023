#!/usr/bin/env bash
# All tests, in two halves side by side: those that start Spark wait a good deal, the others compute. What the first
# half says comes after the other's. With arguments: one pytest, with these.
set -uo pipefail
python=${PYTHON:-.venv/bin/python}
if (($#)); then
    exec "$python" -m pytest "$@"
fi
said=$(mktemp)
"$python" -m pytest -m spark -p no:cacheprovider >"$said" 2>&1 &
spark=$!
trap 'kill "$spark" 2>/dev/null; rm -f "$said"' EXIT
"$python" -m pytest -m "not spark"
rest=$?
echo "waiting for the tests on Spark"
wait "$spark"
code=$?
cat "$said"
exit $((code ? code : rest))
