#!/usr/bin/env bash
# The tests, in three processes side by side: those that start Spark wait much of the time, the others compute.
# The processes of the others are heard when they have ended. With arguments: one pytest, with these arguments.
# PENSTOCK_THOROUGH=1, which is `make test-all`, has every test, more seeds and more examples.
set -uo pipefail
python=${PYTHON:-.venv/bin/python}
if (($#)); then
    exec "$python" -m pytest "$@"
fi
limit=300
[[ ${PENSTOCK_THOROUGH:-0} == 0 ]] || limit=3600 # ten times the examples take ten times as long
directory=$(mktemp -d)
names=(unit laws)
declare -A processes
beside() { # name, what to run
    local name=$1
    shift
    "$python" -m pytest -p no:cacheprovider -o timeout=$limit --durations=5 -m "not spark" "$@" >"$directory/$name" 2>&1 &
    processes[$name]=$!
}
trap 'kill "${processes[@]}" 2>/dev/null; rm -rf "$directory"' EXIT
beside unit tests/unit tests/examples tests/crash
beside laws tests/property tests/sim
code=0
"$python" -m pytest -o timeout=$limit -m spark --durations=15 || code=$?
for name in "${names[@]}"; do
    wait "${processes[$name]}" || code=$?
    cat "$directory/$name"
done
exit "$code"
