#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The tests of a developer's machine: builds the default preset and runs every CTest entry; where the processor lacks
# AVX-512 BF16 or AMX, builds the AVX-512 and AMX tiers on an emulation too and runs their unit tests there.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$(nproc)

echo "== build (default) =="
cmake --preset default >/dev/null
cmake --build --preset default -j "$jobs"

echo "== tests =="
ctest --test-dir build/default --output-on-failure -j "$jobs"

if ! { grep -q avx512_bf16 /proc/cpuinfo && grep -q amx_bf16 /proc/cpuinfo; } && [ "$(uname -m)" = x86_64 ]; then
    echo "== AVX-512 and AMX tiers on an emulation =="
    cmake --preset emulated >/dev/null
    cmake --build --preset emulated -j "$jobs" --target unit_tile unit_tile_rows unit_quant unit_mqa unit_mha
    ctest --test-dir build/emulated --output-on-failure -j "$jobs" -R '^unit_(tile|tile_rows|quant|mqa|mha)$'
fi
