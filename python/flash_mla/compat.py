# SPDX-License-Identifier: MIT
"""The one switch between published generations that cannot be satisfied at the same time.

Everything else this package accepts is a superset of all generations; the setting changes these points only:

    setting                        newest      2026-09-10   2026-04    2025-09
    layout of 528/288-byte caches  per token   page-level   per token  per token
    sparse prefill lse and max     natural,    natural,     natural,   base 2,
      of rows without tokens       +inf        +inf         +inf       lse -inf
    get_mla_metadata(args)         tensors     object       object     tensors of 2025-09 always

It is read from the environment variable FLASH_MLA_COMPAT when the package is imported, and set by set_compat().
"""

import os

GENERATIONS = ("newest", "2026-09-10", "2026-04", "2025-09")

_current = "newest"


def set_compat(generation):
    """Selects the generation whose conventions hold from now on, in the whole process.

    generation: one of "newest" (default), "2026-09-10", "2026-04", "2025-09". Raises AssertionError for another word.
    Returns the setting before.
    """
    global _current
    if generation not in GENERATIONS:
        raise AssertionError(f"compat: {generation!r}; allowed: {', '.join(GENERATIONS)}")
    before, _current = _current, generation
    return before


def get_compat():
    """The generation in force."""
    return _current


def page_layout():
    """True if 528- and 288-byte caches are page-level unless the call says otherwise."""
    return _current == "2026-09-10"


def prefill_base2():
    """True if sparse prefill reports lse and max_logits in base 2 and lonely lse as -inf."""
    return _current == "2025-09"


def metadata_as_tensors():
    """True if get_mla_metadata with a cache_seqlens tensor gives tensors."""
    return _current in ("newest", "2025-09")


set_compat(os.environ.get("FLASH_MLA_COMPAT") or "newest")
