#!/usr/bin/env bash
# All tests: those that start Spark, which mostly wait, and beside them all others, which give way to them. The others:
# first those that keep every core busy by themselves, then the rest in two halves side by side. With arguments: one
# pytest, with these.
set -uo pipefail
python=${PYTHON:-.venv/bin/python}
if (($#)); then
    exec "$python" -m pytest "$@"
fi

others() {
    # In a session of its own: where Linux shares its cores between sessions first, a process is nice only within its own.
    echo 19 2>/dev/null >/proc/self/autogroup
    renice -n 19 "$BASHPID" >/dev/null
    local code=0 rest="not spark and not all_cores" half said
    said=$(mktemp)
    "$python" -m pytest -m all_cores --durations=2 tests/sim || code=$?
    "$python" -m pytest -m "$rest" -p no:cacheprovider tests/crash tests/sim >"$said" 2>&1 &
    half=$!
    "$python" -m pytest -m "$rest" -p no:cacheprovider --ignore=tests/crash --ignore=tests/sim || code=$?
    wait "$half" || code=$?
    cat "$said"
    rm -f "$said"
    return "$code"
}
export -f others
export python

code=0
said=$(mktemp)
"$python" -c 'import os; os.setsid(); os.execvp("bash", ["bash", "-c", "others"])' >"$said" 2>&1 &
beside=$!
trap 'kill -- "-$beside" 2>/dev/null; rm -f "$said"' EXIT
"$python" -m pytest -m spark --durations=12 || code=$?
echo "waiting for the tests without Spark"
wait "$beside" || code=$?
cat "$said"
exit "$code"
