#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The exported symbols of libflashmla.so, the names in the export map, and those the header declares are the committed
# list, no more and no less.
# usage: symbols.sh <libflashmla.so> <nm>
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
failed=0

compare() {
    if ! diff -u --label "symbols.txt" --label "$1" "$here/symbols.txt" - ; then
        echo "$1 differs from tests/abi/symbols.txt"
        failed=1
    fi
}

"$2" --dynamic --defined-only "$1" | awk '$2 != "A" {sub(/@.*/, "", $3); print $3}' | LC_ALL=C sort | compare "library"
sed -e 's:/\*.*\*/::g' "$root/src/flashmla.map" | grep -oE '[a-z_0-9*]+;' | tr -d ';' | grep -v '^\*$' | LC_ALL=C sort |
    compare "export map"
tr '\n' ' ' <"$root/include/flashmla/flashmla.h" | grep -oE 'FMLA_API [^(;]*\(' | grep -oE '[a-z_0-9]+\($' | tr -d '(' |
    LC_ALL=C sort | compare "header"
exit "$failed"
