#!/bin/bash
# SPDX-License-Identifier: MIT
#
# run.sh [-o FOLDER] [part...]: builds and tests the CUDA plugin on a machine with a GPU, in at most ten minutes for all parts,
# and writes what came out as JSON and logs into FOLDER (default: $OUT, else build/device/results).
#
#   build      library, program and plugin, for this machine's GPU alone (BUILD_ARCHS names others, "80;90a")
#   info       what the device is
#   check      kernels against the oracle: the quick cases, all profiles
#   bytes attention mha        slices of the full matrix
#   ids        the faults of tests/cases.md; 90 GB of device memory for all of them
#   graph      CUDA graphs, devices
#   sanitize   compute-sanitizer over a quick slice: memcheck, racecheck, synccheck
#   bench      shapes of bench/shapes, PROFILE=99 or 163 for the smaller profiles
#
# Default: build info check graph sanitize bench. The program needs cJSON: where it is not installed, unpack its packages and
# point CMAKE_PREFIX_PATH and PKG_CONFIG_PATH there (DEPS=folder does both for a folder made by `dpkg -x`). Nothing is fetched.
set -u
cd "$(dirname "$0")/../.." || exit 1
results=${OUT:-build/device/results}
if [ "${1:-}" = -o ]; then
    results=$2
    shift 2
fi
[ $# -gt 0 ] || set -- build info check graph sanitize bench
mkdir -p "$results" || exit 1
results=$(cd "$results" && pwd)
build=build/device
program=$build/tools/flashmla/flashmla
jobs=${JOBS:-$(nproc)}
failed=0

if [ -n "${DEPS:-}" ]; then
    deps=$(cd "$DEPS" && pwd)
    export CMAKE_PREFIX_PATH="$deps/usr:${CMAKE_PREFIX_PATH:-}"
    export PKG_CONFIG_SYSROOT_DIR="$deps"
    PKG_CONFIG_PATH="$(find "$deps" -type d -name pkgconfig | paste -sd:):${PKG_CONFIG_PATH:-}"
    export PKG_CONFIG_PATH
    LD_LIBRARY_PATH="$(find "$deps" -name '*.so*' -exec dirname {} + | sort -u | paste -sd:):${LD_LIBRARY_PATH:-}"
    export LD_LIBRARY_PATH
fi

# note PART COMMAND...: runs it, keeps its log and how it ended.
note() {
    local part=$1 start=$SECONDS status
    shift
    echo "== $part: $*"
    "$@" >"$results/$part.log" 2>&1
    status=$?
    tail -n 4 "$results/$part.log"
    echo "{\"part\": \"$part\", \"status\": $status, \"seconds\": $((SECONDS - start))}" >>"$results/parts.jsonl"
    [ $status -eq 0 ] || [ $status -eq 77 ] || { failed=1; echo "FAILED: $part ($status)"; }
    return $status
}

# "90a" for this machine's GPU: letters belong to the capabilities that have them.
arch() {
    local capability
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    [ "$capability" = 90 ] && capability=90a
    echo "${BUILD_ARCHS:-$capability}"
}

build_all() {
    cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASHMLA_CUDA=ON "-DFLASHMLA_CUDA_ARCHS=$(arch)" \
        -DFLASHMLA_TESTS=OFF -DFLASHMLA_EXAMPLES=OFF -DFLASHMLA_DEVICE_TESTS=ON && ninja -C $build -j "$jobs"
}

check() { # name, then arguments of `flashmla check`
    local name=$1
    shift
    note "check-$name" "$program" check --backend cuda --json "$results/check-$name.json" "$@"
}

part_check() {
    check quick
    for kib in 99 163; do
        note "check-quick-$kib" env FLASHMLA_CUDA_PROFILE_KIB=$kib "$program" check --backend cuda \
            --json "$results/check-quick-$kib.json"
    done
}

part_sanitize() {
    local tool
    for tool in memcheck racecheck synccheck; do
        note "sanitize-$tool-dense" compute-sanitizer --tool $tool --error-exitcode 9 "$program" check --backend cuda \
            --case "op=dense_decode,s_kv=140,h_q=63,s_q=2,b=2,causal=1,varlen=1"
        note "sanitize-$tool-sparse" compute-sanitizer --tool $tool --error-exitcode 9 "$program" check --backend cuda \
            --case "op=sparse_decode,format=v41,extra=v41-fp4,s_kv=512,e_kv=512,h_q=64,topk=64,e_topk=64,page=5,e_page=69"
        note "sanitize-$tool-mha" compute-sanitizer --tool $tool --error-exitcode 9 "$program" check --backend cuda \
            --case "op=mha_backward,s_q=70,s_kv=140,h_q=4,h_kv=2,d_qk=192,d_v=128,causal=1,varlen=1,b=2"
    done
}

for part in "$@"; do
    case $part in
    build) note build build_all || exit 1 ;;
    info) note info "$program" info --backend cuda ;;
    check) part_check ;;
    bytes)
        for operation in quantize dequantize convert merge permute_q_b permute_wv indices_convert fp8_cast schedule; do
            check "full-$operation" --cases full --operation $operation
        done ;;
    attention)
        for operation in dense_decode sparse_decode sparse_prefill fused_prefill fused_decode; do
            check "full-$operation" --cases full --operation $operation
        done ;;
    mha)
        for operation in mha_forward mha_backward; do
            check "full-$operation" --cases full --operation $operation
        done ;;
    ids) check ids --ids ;;
    graph) note graph env FLASHMLA_CUDA_PLUGIN=$build/src/libflashmla_cuda.so $build/tests/device/device_graph ;;
    sanitize) part_sanitize ;;
    bench) note bench "$program" bench --backend cuda --json "$results/bench${PROFILE:+-$PROFILE}.json" ;;
    *)
        echo "unknown part: $part" >&2
        exit 2 ;;
    esac
done
exit $failed
