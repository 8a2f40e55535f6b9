#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Compiles the CUDA plugin for every architecture (or those named in FLASHMLA_CUDA_ARCHS), fails on register spills and
# stack frames in its kernels, compares registers and shared memory with src/cuda/resources.txt
# (FLASHMLA_WRITE_RESOURCES=1 rewrites the table instead), and looks for arrivals that overtake loads (arrivals.py).
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset cuda -DFLASHMLA_CUDA_ARCHS="${FLASHMLA_CUDA_ARCHS:-80;86;89;90a;100;120}" >/dev/null
time cmake --build --preset cuda -j "$(nproc)" --target flashmla_cuda
cmake --build --preset cuda --target flashmla_cuda_resources

# The toolkit's disassembler, where it is not installed, from its maker's Python packages.
if ! command -v cuobjdump >/dev/null; then
    tools=$PWD/build/disassembler
    [ -d "$tools" ] || { python3 -m venv "$tools" && "$tools/bin/pip" install -q nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm; } || true
    PATH=$(find "$tools" -name cuobjdump -type f -printf '%h:' -quit 2>/dev/null || true)$PATH
fi
find build/cuda/src/cuda -name '*.o' -path '*sm[89]0*' -print0 | xargs -0 python3 scripts/arrivals.py || [ $? -eq 77 ]
