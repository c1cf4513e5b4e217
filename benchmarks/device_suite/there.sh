#!/bin/sh
# Run the suite on the device machine, in the repository's root: there.sh RUN SECONDS [FLAG OF THE SUITE]...
# OUT: the folder whose files come back. What the machine lacks and what earlier runs left is in build/device/carry.
set -eu
run=$1 seconds=$2
shift 2
: "${OUT:?set OUT to the folder whose files come back}"
carry=build/device/carry
place=${TMPDIR:-/tmp}/device-suite
if [ -d "$carry/wheels" ] && [ ! -e "$place/site.done" ]; then
    python3 -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$place/site" "$carry"/wheels/*.whl
    touch "$place/site.done"
fi
if [ -d "$carry/results" ]; then cp -R "$carry/results/." "$OUT"; fi
export PYTHONPATH="$place/site:$PWD" PYTHONUNBUFFERED=1
python3 -m benchmarks.device_suite --run "$run" --seconds "$seconds" --out "$OUT" --work "$place/work" "$@" 2>&1 |
    tee "$OUT/$run.log"
