/* SPDX-License-Identifier: MIT */
/*
 * supports.h: the one table of what the library offers: operations, formats, pairs of formats, dtypes, widths, heads.
 * Validation, its messages and fmla_supports() ask here, so they cannot disagree.
 */
#ifndef FLASHMLA_API_SUPPORTS_H
#define FLASHMLA_API_SUPPORTS_H

#include "../backend.h"

/* Widest key of attention over caches, and widest head of multi-head attention. */
#define FMLAI_D_QK_MAX  1024
#define FMLAI_MHA_D_MAX 256

/* FMLA_OK, or INVALID_ARGUMENT / UNSUPPORTED with a sentence. Zero fields are not asked about. */
fmla_status fmlai_supports(const fmla_support_query *query, fmlai_error *error);

#endif
