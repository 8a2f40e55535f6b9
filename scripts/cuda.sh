#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Compiles the CUDA plugin for every architecture and holds its kernels' registers, shared memory, stack and spills
# against the committed table.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset cuda >/dev/null
time cmake --build --preset cuda -j "$(nproc)" --target flashmla_cuda
