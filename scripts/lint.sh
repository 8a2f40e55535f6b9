#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Everything that can be judged without running the library: house rules, static analysis, shell syntax.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 scripts/house.py

python3 scripts/benchmarks.py --check

echo "cppcheck"
cppcheck --quiet --error-exitcode=1 --std=c11 --inline-suppr --enable=warning,portability \
    --suppressions-list=scripts/cppcheck.suppress \
    --library=posix -j "$(nproc)" -I include -I src -D__x86_64__ \
    src/api src/format src/plan src/oracle src/cpu/mqa src/cpu/mha src/cpu/quant src/cpu/*.c tools

for script in scripts/*.sh .ci/run tests/device/*.sh; do
    [ -f "$script" ] && bash -n "$script"
done
echo "lint: clean"
