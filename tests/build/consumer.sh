#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Installs into a scratch prefix and builds one small program against it twice. Arguments: build folder, compiler, this folder.
set -euo pipefail
build=$1 cc=$2 here=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/prefix" >/dev/null
libdir=$(dirname "$(find "$scratch/prefix" -name 'libflashmla.so' | head -1)")

cmake -G Ninja -S "$here/consumer" -B "$scratch/cmake" -DCMAKE_PREFIX_PATH="$scratch/prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null
cmake --build "$scratch/cmake" >/dev/null
"$scratch/cmake/consumer"

export PKG_CONFIG_PATH="$libdir/pkgconfig"
# shellcheck disable=SC2046
"$cc" -o "$scratch/consumer" "$here/consumer/consumer.c" $(pkg-config --cflags --libs flashmla) -Wl,-rpath,"$libdir"
"$scratch/consumer"

LD_LIBRARY_PATH="$libdir" "$scratch/prefix/bin/flashmla" info >/dev/null
echo '{"for": "cpu", "groups": [{"name": "seen", "operation": "dense_decode", "s_kv": 64}]}' \
    >"$scratch/prefix/share/flashmla/shapes/installed.json"
LD_LIBRARY_PATH="$libdir" "$scratch/prefix/bin/flashmla" bench --list | grep -qx installed/seen # not the source tree's
echo "find_package, pkg-config and the installed program work"
