#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Each public header compiles alone, as C99 and as C++, without a warning, and so does a caller that uses it all.
# usage: headers.sh <cc> <c++ or empty>
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
include=$(cd "$here/../../include" && pwd)
warnings=(-Wall -Wextra -Wshadow -pedantic -Werror)

alone() { # language options... < source
    "$@" "${warnings[@]}" -I "$include" -fsyntax-only - || { echo "fails: $* ($source)"; exit 1; }
}

for header in "$include"/flashmla/*.h; do
    source="#include <flashmla/$(basename "$header")>"
    # Twice: a header guards itself.
    text=$(printf '%s\n%s\nint unused_name_of_this_file;\n' "$source" "$source")
    alone "$1" -x c -std=c99 <<<"$text"
    alone "$1" -x c -std=c11 <<<"$text"
    if [ -n "${2:-}" ]; then
        alone "$2" -x c++ -std=c++11 <<<"$text"
        alone "$2" -x c++ -std=c++17 <<<"$text"
        alone "$2" -x c++ -std=c++11 <<<"extern \"C\" {
$text
}"
    fi
done

source="downstream_c121.c"
alone "$1" -x c -std=c99 <"$here/downstream_c121.c"
if [ -n "${2:-}" ]; then
    alone "$2" -x c++ -std=c++11 <"$here/downstream_c121.c"
fi
