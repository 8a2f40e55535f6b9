#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Installs, by package name, what the named parts need on Debian 12: `setup.sh build`, `setup.sh build test`.
# Says nothing when all is there already. Elsewhere it lists the packages and goes on.
set -euo pipefail

build="gcc libc6-dev cmake ninja-build pkg-config libcjson-dev"
test="libcmocka-dev python3 python3-numpy g++ clang libclang-rt-14-dev clang-format cppcheck qemu-user
      libsimde-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross gnuplot-nox doxygen
      python3-pytest python3-hypothesis python3-torch python3-venv"

wanted=()
for part in "$@"; do
    case $part in
    build) wanted+=($build) ;;
    test) wanted+=($test) ;;
    *) echo "setup.sh: unknown part '$part'; allowed: build, test" >&2; exit 2 ;;
    esac
done

missing=()
for package in "${wanted[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
    echo "setup.sh: no apt-get here; please install the counterparts of: ${missing[*]}" >&2
    exit 0
fi
sudo=""
[ "$(id -u)" -eq 0 ] || sudo="sudo"
echo "Installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -q >/dev/null
$sudo apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
