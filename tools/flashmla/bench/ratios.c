/* SPDX-License-Identifier: MIT */
/* ratios.c: one shape's time in terms of another's, with its goal if it has one, out of the records of a run. */
#include "bench/bench.h"

#include <string.h>

static const cJSON *record_of(const cJSON *records, const char *name, const cJSON *threads)
{
    const cJSON *record;
    cJSON_ArrayForEach(record, records)
    {
        const char *own = cJSON_GetStringValue(cJSON_GetObjectItem(record, "name"));
        if (own != NULL && strcmp(own, name) == 0 &&
            cJSON_Compare(cJSON_GetObjectItem(record, "threads"), threads, true)) {
            return record;
        }
    }
    return NULL;
}

/* Spans of kernels where both have them. */
static double ratio_of(const cJSON *a, const cJSON *b)
{
    bool spans = cJSON_HasObjectItem(a, "span_us") && cJSON_HasObjectItem(b, "span_us");
    const char *what = spans ? "span_us" : "time_us";
    return cJSON_GetNumberValue(cJSON_GetObjectItem(cJSON_GetObjectItem(a, what), "median")) /
           cJSON_GetNumberValue(cJSON_GetObjectItem(cJSON_GetObjectItem(b, what), "median"));
}

static void print_ratio(const bench_ratio *r, int threads, double ratio)
{
    printf("time of %s over %s", r->of, r->to);
    if (threads > 0) {
        printf(", %d threads", threads);
    }
    printf(": %.3f", ratio);
    if (r->at_most > 0) {
        printf(", goal at most %.3f", r->at_most);
    }
    printf("\n");
}

cJSON *bench_ratios(const bench_shapes *list, const cJSON *records, bool print)
{
    cJSON *ratios = cJSON_CreateArray();
    for (size_t i = 0; i < list->ratio_count; i++) {
        const bench_ratio *r = &list->ratios[i];
        const cJSON *of;
        cJSON_ArrayForEach(of, records)
        {
            const cJSON *threads = cJSON_GetObjectItem(of, "threads"), *to = record_of(records, r->to, threads);
            if (to == NULL || of != record_of(records, r->of, threads)) {
                continue;
            }
            double ratio = ratio_of(of, to);
            cJSON *one = cJSON_CreateObject();
            cJSON_AddStringToObject(one, "of", r->of);
            cJSON_AddStringToObject(one, "to", r->to);
            cJSON_AddNumberToObject(one, "threads", cJSON_GetNumberValue(threads));
            cJSON_AddNumberToObject(one, "ratio", ratio);
            if (r->at_most > 0) {
                cJSON_AddNumberToObject(one, "at_most", r->at_most);
            }
            cJSON_AddItemToArray(ratios, one);
            if (print) {
                print_ratio(r, (int)cJSON_GetNumberValue(threads), ratio);
            }
        }
    }
    return ratios;
}
