#!/bin/sh
# SPDX-License-Identifier: MIT
# resources.sh <table> <folder of objects> <architectures>: compares the committed table of registers and static shared memory
# per kernel with what was just built, for the architectures that were built. FLASHMLA_WRITE_RESOURCES=1 rewrites those lines.
table=$1
objects=$2
archs=$3
new=$(mktemp) && old=$(mktemp) || exit 1
trap 'rm -f "$new" "$old"' EXIT
pattern=$(echo "$archs" | tr ';' '\n' | sed 's/a$/a?/; s/.*/ sm_& /' | paste -sd'|')
find "$objects" -name '*.resources' -exec cat {} + | LC_ALL=C sort -u >"$new"
if [ "$FLASHMLA_WRITE_RESOURCES" = 1 ]; then
    { grep '^#' "$table"; { grep -v '^#' "$table" | grep -v -E "$pattern"; cat "$new"; } | LC_ALL=C sort -u; } >"$old"
    cat "$old" >"$table"
    exit 0
fi
grep -v '^#' "$table" | grep -E "$pattern" | LC_ALL=C sort -u >"$old"
diff -u "$old" "$new" && exit 0
echo "error: kernels use other resources than $table says; FLASHMLA_WRITE_RESOURCES=1 rewrites it" >&2
exit 1
