#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Compiles the CUDA plugin for every architecture (or those named in FLASHMLA_CUDA_ARCHS), fails on register spills and
# stack frames in its kernels, and compares registers and shared memory with src/cuda/resources.txt
# (FLASHMLA_WRITE_RESOURCES=1 rewrites the table instead).
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset cuda -DFLASHMLA_CUDA_ARCHS="${FLASHMLA_CUDA_ARCHS:-80;86;89;90a;100;120}" >/dev/null
time cmake --build --preset cuda -j "$(nproc)" --target flashmla_cuda
cmake --build --preset cuda --target flashmla_cuda_resources
