#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The README's C example compiles without a warning. Arguments: compiler, source folder.
set -euo pipefail
cc=$1 source=$2
example=$(mktemp --suffix=.c)
trap 'rm -f "$example"' EXIT
awk '/^```c$/ {on = 1; next} /^```/ {on = 0} on' "$source/README.md" >"$example"
grep -q fmla_decode "$example"
"$cc" -std=c11 -Wall -Wextra -Werror -I "$source/include" -fsyntax-only "$example"
echo "the README's example compiles"
