/* SPDX-License-Identifier: MIT */
/*
 * support_oracle.h: runs single operations of the oracle on descriptions, with a workspace of exactly the
 * size that it asks for. Each call must succeed.
 */
#ifndef FLASHMLA_TEST_SUPPORT_ORACLE_H
#define FLASHMLA_TEST_SUPPORT_ORACLE_H

#include "backend.h"

void oracle_mqa(const fmlai_mqa *p);
void oracle_mha_forward(const fmlai_mha *p);
void oracle_mha_backward(const fmlai_mha *p);
void oracle_quantize(const fmlai_transcode *p);
void oracle_dequantize(const fmlai_transcode *p);
void oracle_convert(const fmlai_convert *p);
void oracle_indices_convert(const fmlai_indices_convert *p);
void oracle_fp8_cast(const fmlai_fp8_cast *p);
void oracle_merge(const fmlai_merge *p);
void oracle_permute(const fmlai_permute *p);

/* Fails unless the two differ by at most `bound`, or are the same infinity, or both NaN. */
void assert_close(double a, double b, double bound);

#endif
