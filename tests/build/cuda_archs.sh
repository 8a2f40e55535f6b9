#!/bin/sh
# SPDX-License-Identifier: MIT
# cuda_archs.sh <source> <folder>: what a choice of CUDA architectures compiles, read from what CMake plans; nothing is built.
# C115: one architecture alone is enough. C116: Hopper's kernels are compiled for sm_90a alone, and only where it is asked
# for. C118: of the toolkit the sources include what every version since 12.8 keeps at its place.
set -eu
source=$1
folder=$2
mkdir -p "$folder"
fail() {
    echo "cuda_archs: $*" >&2
    exit 1
}

for archs in 86 90a "80;90a;120"; do
    build=$folder/$(echo "$archs" | tr ';' '-')
    rm -rf "$build"
    cmake -S "$source" -B "$build" -G Ninja -DFLASHMLA_CUDA=ON "-DFLASHMLA_CUDA_ARCHS=$archs" -DFLASHMLA_TESTS=OFF \
        -DFLASHMLA_TOOLS=OFF -DFLASHMLA_EXAMPLES=OFF >"$folder/log" 2>&1 || { cat "$folder/log" >&2; fail "$archs: does not configure"; }
    plan=$build/compile_commands.json
    grep '"command"' "$plan" | grep -F 'sm80/mqa_bf16.cu' >"$folder/portable" || fail "$archs: no portable kernels (C115)"
    for arch in $(echo "$archs" | tr ';' ' '); do
        grep -q "sm_${arch%a}" "$folder/portable" || fail "$archs: the portable kernels lack $arch (C115)"
    done
    case $archs in
    *90a*)
        grep '"command"' "$plan" | grep -F '/sm90a/' >"$folder/hopper" || fail "$archs: no Hopper kernels (C115)"
        grep -v 'code=\[sm_90a\]' "$folder/hopper" && fail "$archs: Hopper kernels for something else (C116)"
        grep -E 'sm_(80|86|89|100|120)' "$folder/hopper" && fail "$archs: Hopper kernels for something else (C116)"
        grep -q 'FMLAC_HAVE_HOPPER=1' "$plan" || fail "$archs: the host does not know of the Hopper kernels (C116)" ;;
    *)
        grep -F '/sm90a/' "$plan" && fail "$archs: compiles Hopper kernels (C116)"
        grep -F 'FMLAC_HAVE_HOPPER=1' "$plan" && fail "$archs: the host believes in Hopper kernels (C116)" ;;
    esac
done

grep -rhoE '#include <[^>]+>' "$source/src/cuda" | sort -u | grep -vE '<(std(arg|bool|def|int|io|lib)|string|limits|math|stddef)\.h>' |
    grep -vE '<(cuda|cuda_runtime|cuda_runtime_api|cuda_bf16|cuda_fp16)\.h>' && fail "an include that may move (C118)"
exit 0
