#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Builds the API reference from the public headers into build/docs/html, warnings being errors.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/docs
version=$(sed -n 's/.*FMLA_VERSION_STRING "\(.*\)".*/\1/p' include/flashmla/flashmla_version.h)
doxygen - <<CONFIG
PROJECT_NAME = libflashmla
PROJECT_NUMBER = $version
INPUT = include/flashmla docs README.md
USE_MDFILE_AS_MAINPAGE = README.md
FILE_PATTERNS = *.h *.md
OUTPUT_DIRECTORY = build/docs
GENERATE_LATEX = NO
OPTIMIZE_OUTPUT_FOR_C = YES
EXTRACT_ALL = YES
JAVADOC_AUTOBRIEF = YES
MARKDOWN_SUPPORT = YES
MACRO_EXPANSION = YES
PREDEFINED = FMLA_API=
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
CONFIG
echo "docs: build/docs/html/index.html"
