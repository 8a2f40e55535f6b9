#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Shows that no instruction runs that a processor lacks: the tests on a processor without AVX, and the library built for
# 64-bit Arm, both emulated.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$(nproc)

cmake --preset default >/dev/null
cmake --build --preset default -j "$jobs"
echo "x86-64 without AVX (Nehalem):"
for test in unit_number unit_tile unit_quant; do
    find build/default/tests -name "$test" -type f -exec qemu-x86_64 -cpu Nehalem {} \; >build/qemu.log 2>&1 ||
        { cat build/qemu.log; exit 1; }
    echo "  $test passed"
done
qemu-x86_64 -cpu Nehalem build/default/tools/flashmla/flashmla check --ids=C001,C015,C056,C108 >build/qemu.log 2>&1 ||
    { tail -20 build/qemu.log; exit 1; }
tail -1 build/qemu.log

echo "64-bit Arm:"
cmake -G Ninja -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DFLASHMLA_TOOLS=OFF -DFLASHMLA_TESTS=OFF -DFLASHMLA_CUDA=OFF >/dev/null
cmake --build build/aarch64 -j "$jobs"
qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=build/aarch64/src build/aarch64/examples/example_decode_paged |
    tail -1
