# SPDX-License-Identifier: MIT
"""`python -m flash_mla`: what this library, build and machine offer; the same page as `flashmla info`."""

from ._info import text

if __name__ == "__main__":
    print(text())
