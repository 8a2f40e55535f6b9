/* SPDX-License-Identifier: MIT */
/* ratios.c: goals that set one shape's time against another's, out of the records of a run. */
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

static double median_of(const cJSON *record)
{
    return cJSON_GetNumberValue(cJSON_GetObjectItem(cJSON_GetObjectItem(record, "time_us"), "median"));
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
            double ratio = median_of(of) / median_of(to);
            cJSON *one = cJSON_CreateObject();
            cJSON_AddStringToObject(one, "of", r->of);
            cJSON_AddStringToObject(one, "to", r->to);
            cJSON_AddNumberToObject(one, "threads", cJSON_GetNumberValue(threads));
            cJSON_AddNumberToObject(one, "ratio", ratio);
            cJSON_AddNumberToObject(one, "at_most", r->at_most);
            cJSON_AddItemToArray(ratios, one);
            if (print) {
                printf("time of %s over %s, %d threads: %.3f, goal at most %.3f\n", r->of, r->to,
                       (int)cJSON_GetNumberValue(threads), ratio, r->at_most);
            }
        }
    }
    return ratios;
}
