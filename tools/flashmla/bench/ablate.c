/* SPDX-License-Identifier: MIT */
/*
 * ablate.c: `flashmla bench --ablate`: the same calls with a technique and without it, in one run. What is varied is
 * either a field of the case or the choice of kernels; a call's first variant is what the others are set against.
 */
#include "bench/bench.h"

#include <stdlib.h>
#include <string.h>

#define VARIANTS_MAX 4
#define CASES_MAX    5

typedef struct variant {
    const char *name, *fields, *kernels;
} variant;

typedef struct ablation {
    const char *name;
    variant variants[VARIANTS_MAX]; /* the first without the technique */
    const char *base;               /* fields of every case, or "" */
    const char *cases[CASES_MAX];   /* a field of its own each, and what follows from it */
} ablation;

static const ablation ablations[] = {
    /* More than 64 heads attend the same quantised tokens: every 64 heads expand them for themselves, or two blocks
     * expand half of them each and exchange scores and weights. */
    {"crossover",
     {{"alone", "", "unpaired"}, {"pairs", "", "best"}},
     "op=sparse_decode,h_q=128,s_q=2,page=64,varlen=1,sink=1",
     {"b=2,format=v32,d_qk=576,s_kv=8192,topk=2048", "b=128,format=v32,d_qk=576,s_kv=8192,topk=2048",
      "b=148,format=v32,d_qk=576,s_kv=16384,topk=16384",
      "b=128,format=v4,s_kv=256,topk=128,page=256,extra=v4,e_kv=8192,e_topk=1024,e_page=64",
      "b=128,format=v41,s_kv=256,topk=128,page=256,extra=v41-fp4,e_kv=8192,e_topk=1024,e_page=64"}},
    /* A leader has all scores and weights, so products wait for weights; or two warpgroups have those of every other
     * tile each, so that one's weights are made beside the other's products. */
    {"seesaw",
     {{"leader", "", "leader"}, {"turns", "", "turns"}},
     "",
     {"op=dense_decode,b=128,s_q=1,s_kv=16384,h_q=128,varlen=1",
      "op=dense_decode,b=128,s_q=2,s_kv=16384,h_q=128,varlen=1",
      "op=sparse_prefill,s_q=4096,s_kv=8192,h_q=128,d_qk=576,topk=2048,sink=1",
      "op=sparse_prefill,s_q=4096,s_kv=131072,h_q=128,d_qk=576,topk=2048,sink=1",
      "op=sparse_prefill,s_q=4096,s_kv=8192,h_q=128,topk=1024,sink=1"}},
    /* A list is one block's, or is cut into pieces that are joined. */
    {"splits",
     {{"whole", "again=1", "best"}, {"cut", "", "best"}},
     "op=dense_decode,h_q=128,s_q=1,varlen=1",
     {"b=1,s_kv=1024,varlen=0", "b=1,s_kv=8192,varlen=0", "b=1,s_kv=65536,varlen=0", "b=16,s_kv=8192",
      "b=128,s_kv=4096"}},
    /* The same tokens as bf16, which needs no expanding and nearly twice the bytes; and quantised with scales that are
     * no powers of two, so that each code is multiplied in float. */
    {"dequant",
     {{"bf16", "format=bf16", "best"}, {"v32-any-scale", "format=v32,scales=1", "best"}, {"v32", "format=v32", "best"}},
     "op=sparse_decode,d_qk=576,s_q=2,s_kv=16384,topk=2048,page=64,varlen=1,sink=1",
     {"b=128,h_q=16", "b=128,h_q=64", "b=128,h_q=128", "b=148,h_q=64,topk=16384", "b=148,h_q=128,topk=16384"}},
};

static const ablation *find(const char *name)
{
    for (size_t i = 0; i < sizeof ablations / sizeof ablations[0]; i++) {
        if (strcmp(ablations[i].name, name) == 0) {
            return &ablations[i];
        }
    }
    return NULL;
}

static int make_shape(bench_shape *shape, const ablation *a, const variant *v, const char *fields)
{
    char text[512], error[256];
    snprintf(text, sizeof text, "%s%s%s%s%s", a->base, a->base[0] ? "," : "", fields, v->fields[0] ? "," : "",
             v->fields);
    snprintf(shape->name, sizeof shape->name, "ablate/%s/%s/%s", a->name, v->name, fields);
    shape->kernels = v->kernels;
    return case_parse(&shape->c, text, error, sizeof error) == 0 ? CLI_OK : cli_error("%s", error);
}

/* Adds a case in the variants that the filter leaves. */
static int add_case(bench_shapes *list, const ablation *a, const char *fields, const char *filter)
{
    const bench_shape *first = NULL;
    int status = CLI_OK;
    for (int j = 0; j < VARIANTS_MAX && a->variants[j].name != NULL && status == CLI_OK; j++) {
        bench_shape *shape = &list->shapes[list->count];
        status = make_shape(shape, a, &a->variants[j], fields);
        if (status != CLI_OK || (filter != NULL && strstr(shape->name, filter) == NULL)) {
            continue;
        }
        list->count++;
        if (first != NULL) {
            bench_ratio *r = &list->ratios[list->ratio_count++];
            memcpy(r->of, shape->name, sizeof r->of);
            memcpy(r->to, first->name, sizeof r->to);
        }
        first = first != NULL ? first : shape;
    }
    return status;
}

int bench_ablation(bench_shapes *list, const char *name, const char *filter)
{
    const ablation *a = find(name);
    int status = CLI_OK;
    if (a == NULL) {
        return cli_error("--ablate: '%s' is none of crossover, seesaw, splits, dequant", name);
    }
    list->shapes = xcalloc((size_t)VARIANTS_MAX * CASES_MAX, sizeof *list->shapes);
    for (int i = 0; i < CASES_MAX && a->cases[i] != NULL && status == CLI_OK; i++) {
        status = add_case(list, a, a->cases[i], filter);
    }
    return status;
}
