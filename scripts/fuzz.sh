#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Runs every fuzz target for the given number of seconds: `fuzz.sh 20`. Findings are written to build/fuzz/findings/.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz -j "$(nproc)" --target fuzz_targets
mkdir -p build/fuzz/findings
for target in build/fuzz/tests/fuzz/fuzz_*; do
    [ -x "$target" ] && [ -f "$target" ] || continue
    name=$(basename "$target")
    mkdir -p "build/fuzz/corpus/$name"
    echo "$name: $seconds s"
    "$target" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -print_final_stats=0 -verbosity=0 -seed=1 \
        -artifact_prefix=build/fuzz/findings/ "build/fuzz/corpus/$name"
done
echo "fuzz: no findings"
