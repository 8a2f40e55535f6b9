#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Compiles the CUDA plugin and fails on register spills and stack frames in its kernels. Architectures: those named in
# FLASHMLA_CUDA_ARCHS, by default the two that are held to that rule today (sm_80, sm_90a).
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset cuda -DFLASHMLA_CUDA_ARCHS="${FLASHMLA_CUDA_ARCHS:-80;90a}" >/dev/null
time cmake --build --preset cuda -j "$(nproc)" --target flashmla_cuda
