#!/bin/bash
# SPDX-License-Identifier: MIT
#
# run.sh [-o FOLDER] [part...]: builds and tests the CUDA plugin on a machine with a GPU and writes what came out as JSON and
# logs into FOLDER (default: $OUT, else build/device/results); parts.jsonl has a line for each step, summary.json the sums.
# Every part but `several` takes at most ten minutes on 16 processors; that one is run with LIMIT and goes on with SKIP.
#
#   build      library, program, plugin and tests, for this machine's GPU alone (BUILD_ARCHS names others, "80;90a")
#   info       what the device is
#   check      the quick cases of every operation with every set of kernels and every profile of shared memory (C107, C111)
#   dense sparse prefill fused mha bytes
#              the full matrix in slices, each by JOBS processes (default: one per processor) that share its cases and MEMORY
#              GiB (default: three quarters of what the machine has). KERNELS=portable,hopper: these sets, in one go, instead
#              of the best; SHARE=K/N: the K-th of N parts of a slice that is to be split further; LIMIT=SECONDS: a check
#              that takes longer is stopped, and tells how many cases it left out; SKIP=N: not the N dearest, to go on with one
#   several single
#              all of these slices in two runs: the operations that have several sets of kernels, and the others with the
#              first of KERNELS
#   ids        the faults of tests/cases.md, with the best kernels and the portable ones (C114); 90 GB of device memory
#   graph      CUDA graphs, streams, devices, FLASHMLA_CHECK
#   sanitize   compute-sanitizer (SANITIZER, else the one on PATH or of the toolkit) over small cases: memcheck, synccheck
#              (C078), and racecheck with a plugin of its own; without one its cases count as not run
#   python     the Python module on CUDA tensors, the published test matrices (SHARE=K/N: that part of them), what a call
#              costs in Python; needs torch and pytest
#   bench      shapes whose name contains SHAPES (default gpu_goals; "" is all but those) with the choices of kernels SETS
#              (default best,portable; 99 and 163 are profiles of the portable ones)
#
# Default: build info check graph ids sanitize bench. PREBUILT=folder takes flashmla, device_graph, libflashmla.so*,
# libflashmla_cuda.so and libflashmla_cuda_racecheck.so from there instead of building. The program needs cJSON: where it is
# not installed, unpack its packages and point CMAKE_PREFIX_PATH and PKG_CONFIG_PATH there (DEPS=folder does both for a folder
# made by `dpkg -x`). Nothing is fetched.
set -u
cd "$(dirname "$0")/../.." || exit 1
results=${OUT:-build/device/results}
if [ "${1:-}" = -o ]; then
    results=$2
    shift 2
fi
[ $# -gt 0 ] || set -- build info check graph ids sanitize bench
mkdir -p "$results" || exit 1
results=$(cd "$results" && pwd)
build=$PWD/build/device
program=$build/tools/flashmla/flashmla
graph_test=$build/tests/device/device_graph
library=$build/src
jobs=${JOBS:-$(nproc)}
rm -f "$results/failures"

if [ -n "${PREBUILT:-}" ]; then
    library=$(cd "$PREBUILT" && pwd) || exit 1
    program=$library/flashmla
    graph_test=$library/device_graph
    chmod +x "$program" "$graph_test"
    export LD_LIBRARY_PATH="$library:${LD_LIBRARY_PATH:-}"
fi
export FLASHMLA_CUDA_PLUGIN=${FLASHMLA_CUDA_PLUGIN:-$library/libflashmla_cuda.so}
if [ -n "${DEPS:-}" ]; then
    deps=$(cd "$DEPS" && pwd)
    export CMAKE_PREFIX_PATH="$deps/usr:${CMAKE_PREFIX_PATH:-}"
    export PKG_CONFIG_SYSROOT_DIR="$deps"
    PKG_CONFIG_PATH="$(find "$deps" -type d -name pkgconfig | paste -sd:):${PKG_CONFIG_PATH:-}"
    export PKG_CONFIG_PATH
    LD_LIBRARY_PATH="$(find "$deps" -name '*.so*' -exec dirname {} + | sort -u | paste -sd:):${LD_LIBRARY_PATH:-}"
    export LD_LIBRARY_PATH
fi
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}

# note STEP COMMAND...: runs it, keeps its log and how it ended. 77: not possible here.
note() {
    local step=$1 start=$SECONDS status
    shift
    "$@" >"$results/$step.log" 2>&1
    status=$?
    printf '== %s: %s\n' "$step" "$(tail -n 1 "$results/$step.log")"
    echo "{\"step\": \"$step\", \"status\": $status, \"seconds\": $((SECONDS - start))}" >>"$results/parts.jsonl"
    [ $status -eq 0 ] || [ $status -eq 77 ] && return
    echo "$step ($status)" >>"$results/failures"
    grep -m 5 -A 1 FAILED "$results/$step.log"
    return 1
}

# together COMMAND...: one of the commands that run side by side; `wait` waits for all of them.
together() {
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do
        wait -n
    done
    "$@" &
}

# "90a" for this machine's GPU: letters belong to the capabilities that have them.
arch() {
    local capability
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    [ "$capability" = 90 ] && capability=90a
    echo "${BUILD_ARCHS:-$capability}"
}

# build FOLDER [-D...]...
build() {
    local folder=$1
    shift
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASHMLA_CUDA=ON "-DFLASHMLA_CUDA_ARCHS=$(arch)" \
        -DFLASHMLA_TESTS=OFF -DFLASHMLA_EXAMPLES=OFF -DFLASHMLA_DEVICE_TESTS=ON "$@" && ninja -C "$folder" -j "$jobs"
}

# The plugin in which racecheck can follow who waits for whom (src/cuda/common/arrive.cuh).
build_racecheck() {
    build "$build/racecheck" -DFLASHMLA_TOOLS=OFF -DFLASHMLA_DEVICE_TESTS=OFF -DFLASHMLA_CUDA_RACECHECK=ON &&
        cp "$build/racecheck/src/libflashmla_cuda.so" "$library/libflashmla_cuda_racecheck.so"
}

check() { # name, then arguments of `flashmla check`
    local name=$1
    shift
    note "check-$name" ${LIMIT:+timeout -k 20 "$LIMIT"} "$program" check --backend cuda --json "$results/check-$name.json" "$@"
}

operations=(dense_decode sparse_decode sparse_prefill fused_prefill fused_decode mha_forward mha_backward quantize dequantize
    convert merge permute_q_b permute_wv indices_convert fp8_cast schedule)

part_check() {
    local operation set sets=(portable)
    "$program" info --backend cuda | grep -q 'kernels hopper' && sets+=(hopper)
    for operation in "${operations[@]}"; do
        for set in "${sets[@]}"; do
            together check "quick-$set-$operation" --operation "$operation" --kernels "$set"
        done
    done
    if [ ${#sets[@]} -gt 1 ]; then # the relay where others are chosen, and both orders of tiles
        together check quick-unpaired-sparse_decode --operation sparse_decode --kernels unpaired
        for operation in dense_decode sparse_decode sparse_prefill; do
            together check "quick-leader-$operation" --operation "$operation" --kernels leader
            together check "quick-turns-$operation" --operation "$operation" --kernels turns
        done
    fi
    for operation in dense_decode sparse_decode sparse_prefill fused_prefill fused_decode; do
        for kib in 99 163; do
            together check "quick-$kib-$operation" --operation "$operation" --kernels portable --profile $kib
        done
    done
    wait
}

# slice NAME OPERATION...: their full cases, in one run.
slice() {
    local name=full-$1${KERNELS:+-${KERNELS//,/-}}${SHARE:+-${SHARE/\//of}} operations
    shift
    operations=$*
    check "$name" --cases full --operation "${operations// /,}" --jobs "$jobs" ${MEMORY:+--memory "$MEMORY"} \
        ${SHARE:+--share "$SHARE"} ${KERNELS:+--sets "$KERNELS"} ${SKIP:+--skip "$SKIP"}
}

# under TOOL COMMAND...: runs it under a tool of compute-sanitizer. 77: the tool did not get through it, so nothing is known.
under() {
    local tool=$1 output status
    shift
    echo "case: ${*: -1}"
    [ -z "${OPTIONS:-}" ] || echo "options: $OPTIONS"
    output=$(timeout -k 5 "${SANITIZE_SECONDS:-240}" "$sanitizer" --tool "$tool" --error-exitcode 9 ${OPTIONS:-} "$@" 2>&1)
    status=$?
    echo "$output"
    if [ $status -eq 124 ] || [ $status -eq 137 ]; then
        echo "not run: no end after ${SANITIZE_SECONDS:-240} seconds"
        return 77
    fi
    if ! grep -q 'SUMMARY:' <<<"$output" || grep -qi 'not supported' <<<"$output"; then
        echo "not run: $(grep -iE -m 1 'not supported|error|no such file' <<<"$output" || echo "no summary, status $status")"
        return 77
    fi
    return $status
}

sanitizer_version() {
    "$sanitizer" --version || return 77
}

# racecheck_options SET: what racecheck is told beside. Since 2026.4 it asks for fences between proxies and counts one for
# what its own thread has accessed; the portable kernels have theirs in the threads that copy, behind the barrier.
racecheck_options() {
    local option=--racecheck-fence-proxy-async
    if [ "$1" = portable ] && "$sanitizer" --help 2>/dev/null | grep -q -- $option; then
        echo $option no
    fi
}

# missing FILE CASE: a case that cannot be run without a file.
missing() {
    printf 'case: %s\nnot run: no %s\n' "$2" "$(basename "$1")"
    return 77
}

part_sanitize() {
    local tool set sets=(portable) cases i plugin options racecheck=$library/libflashmla_cuda_racecheck.so
    [ -n "${PREBUILT:-}" ] || note build-racecheck build_racecheck || rm -f "$racecheck"
    note sanitizer sanitizer_version
    "$program" info --backend cuda | grep -q 'kernels hopper' && sets+=(hopper)
    cases=("op=dense_decode,s_kv=140,h_q=63,s_q=2,b=2,causal=1,varlen=1"
        "op=dense_decode,dtype=f16,format=f16,s_kv=900,h_q=128,b=1,again=1"
        "op=dense_decode,s_kv=330,h_q=128,s_q=2,b=2,varlen=1"
        "op=sparse_decode,format=v32,d_qk=576,s_kv=300,h_q=128,s_q=2,topk=192,lengths=1,sink=1"
        "op=sparse_decode,format=v41,extra=v41-fp4,s_kv=512,e_kv=512,h_q=64,topk=64,e_topk=64,page=5,e_page=69"
        "op=sparse_decode,format=v32,d_qk=576,s_kv=700,h_q=16,s_q=2,b=2,topk=400"
        "op=sparse_decode,format=v32,d_qk=576,s_kv=900,h_q=64,b=1,topk=700"
        "op=sparse_prefill,s_q=9,s_kv=300,h_q=128,topk=200,sink=1"
        "op=sparse_prefill,d_qk=512,s_q=140,s_kv=300,h_q=64,topk=130"
        "op=fused_decode,format=v41,s_q=5,h_q=64,s_kv=90,topk=90,norm=1,group=8"
        "op=mha_forward,s_q=70,s_kv=140,h_q=4,h_kv=2,d_qk=192,d_v=128,causal=1,varlen=1,b=2"
        "op=mha_backward,s_q=70,s_kv=140,h_q=4,h_kv=2,d_qk=192,d_v=128,causal=1,varlen=1,b=2"
        "op=quantize,format=v4,count=100" "op=merge,topk=3,count=20")
    for tool in memcheck racecheck synccheck; do
        plugin=$FLASHMLA_CUDA_PLUGIN
        [ $tool = racecheck ] && plugin=$racecheck # the ordinary one would report what is in order
        for set in "${sets[@]}"; do
            options=
            [ $tool = racecheck ] && options=$(racecheck_options "$set")
            for i in "${!cases[@]}"; do
                if [ ! -e "$plugin" ]; then
                    note "sanitize-$tool-$set-$i" missing "$plugin" "${cases[$i]}"
                    continue
                fi
                OPTIONS=$options FLASHMLA_CUDA_PLUGIN=$plugin together note "sanitize-$tool-$set-$i" under $tool \
                    "$program" check --backend cuda --kernels "$set" --case "${cases[$i]}"
            done
        done
    done
    wait
}

part_python() {
    local workers=() run
    python3 -c "import xdist" 2>/dev/null && workers=(-n 6 -p no:benchmark)
    run=(env "FLASHMLA_LIBRARY=$(ls "$library"/libflashmla.so* | head -1)" FLASHMLA_TEST_CUDA=1 OMP_NUM_THREADS=1
        "FLASHMLA_TEST_SHARE=${SHARE:-1/1}" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True PYTHONPATH=python python3)
    note python "${run[@]}" -m pytest -q -p no:cacheprovider "${workers[@]}" tests/python -k "cuda or plans"
    note python-overhead "${run[@]}" bench/python_overhead.py --json "$results/python-overhead.json"
    note python-published "${run[@]}" -m pytest -q -p no:cacheprovider "${workers[@]}" \
        tests/python/test_published_{mha,sparse,prefill,dense,fused}.py --slices "$results/python-published.json"
}

part_bench() {
    local shapes=${SHAPES-gpu_goals} name
    name=bench${shapes:+-$(echo "$shapes" | tr -c 'a-z0-9_\n' '-')}
    note "$name" "$program" bench --backend cuda --shapes bench/shapes --json "$results/$name.json" \
        --sets "${SETS:-best,portable}" ${shapes:+--shape "$shapes"}
}

for part in "$@"; do
    case $part in
    build) [ -n "${PREBUILT:-}" ] || note build build "$build" || exit 1 ;;
    info) note info "$program" info --backend cuda ;;
    check) part_check ;;
    dense) slice dense dense_decode ;;
    sparse) slice sparse sparse_decode ;;
    prefill) slice prefill sparse_prefill fused_prefill ;;
    fused) slice fused fused_decode ;;
    mha) slice mha mha_forward mha_backward ;;
    bytes) slice bytes "${operations[@]:7}" ;;
    several) slice several "${operations[@]:0:3}" ;;
    single) KERNELS=${KERNELS:+${KERNELS%%,*}} slice single "${operations[@]:3}" ;;
    ids)
        together check ids --ids
        together check ids-portable --ids --kernels portable
        wait ;;
    graph) note graph "$graph_test" ;;
    sanitize) part_sanitize ;;
    python) part_python ;;
    bench) part_bench ;;
    *)
        echo "unknown part: $part" >&2
        exit 2 ;;
    esac
done
[ -e "$results/parts.jsonl" ] && python3 tests/device/summary.py "$results" >"$results/summary.json"
if [ -s "$results/failures" ]; then
    echo "failed:"
    cat "$results/failures"
    exit 1
fi
