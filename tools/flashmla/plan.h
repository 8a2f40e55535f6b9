/* SPDX-License-Identifier: MIT */
/* plan.h: a schedule as pieces of work, between plan.c (which has it made) and plan_svg.c (which draws it). */
#ifndef FLASHMLA_TOOL_PLAN_H
#define FLASHMLA_TOOL_PLAN_H

#include "program.h"

/* Blocks begin..end-1 of a request, done by one worker. A request without tokens has begin == end. */
typedef struct plan_piece {
    int64_t worker;
    int64_t request;
    int64_t split; /* which part of the request, from 0 */
    int64_t begin;
    int64_t end;
} plan_piece;

typedef struct plan {
    int32_t *lengths; /* NULL: every request has topk slots */
    int64_t batch;
    int64_t parts;
    int64_t overhead;
    plan_piece *pieces; /* by worker */
    int64_t piece_count;
    int32_t *num_splits; /* [batch + 1] */
} plan;

/* Draws the pieces, one row a worker. CLI_OK or CLI_ERROR. */
int plan_draw(const plan *p, const char *path);

#endif
