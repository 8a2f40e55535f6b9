#!/bin/sh
# SPDX-License-Identifier: MIT
# compile.sh <nvcc> <arguments>: compiles, keeps what ptxas says about each kernel beside the object (<object>.resources: kernel,
# architecture, registers, static shared memory) and fails if a function of ours spills registers or has a stack frame (C112), or if
# ptxas makes wgmma wait for each other, which it only mentions. FLASH_MLA_SKIP_REG_SPILL_CHECK=1 leaves these checks out.
object=
previous=
for argument in "$@"; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" >"$log" 2>&1
status=$?
grep -v -E '^ptxas info|bytes stack frame|^$' "$log" >&2
[ $status -eq 0 ] && [ -n "$object" ] || exit $status

awk -v q="'" '
    /Compiling entry function/ { split($0, part, q); kernel = part[2]; arch = part[4] }
    /Used [0-9]+ registers/ {
        match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
        shared = 0
        if (match($0, /[0-9]+ bytes smem/)) { split(substr($0, RSTART, RLENGTH), word, " "); shared = word[1] }
        print kernel, arch, registers, shared
    }' "$log" >"$object.resources"

[ "$FLASH_MLA_SKIP_REG_SPILL_CHECK" = 1 ] && exit 0
awk -v q="'" '
    /Compiling entry function/ { split($0, part, q); arch = part[4] }
    /Function properties for/ { name = $NF }
    /bytes stack frame/ {
        if ($1 != 0 || $5 != 0 || $9 != 0) {
            print "error: " name " (" arch "): " $0
            bad = 1
        }
    }
    /wgmma.* are serialized/ {
        print "error: " $0
        bad = 1
    }
    END { exit bad }' "$log" >&2 || {
    rm -f "$object" "$object.resources"
    echo "error: kernels must not spill registers, use a stack frame or have their wgmma serialized;" \
        "FLASH_MLA_SKIP_REG_SPILL_CHECK=1 skips this check" >&2
    exit 1
}
