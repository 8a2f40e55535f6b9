/* SPDX-License-Identifier: MIT */
/* record.c: a shape and its times as JSON. */
#include "bench/bench.h"

static cJSON *shape_json(const test_case *c)
{
    cJSON *shape = cJSON_CreateObject();
    const struct {
        const char *name;
        int64_t value;
    } fields[] = {{"b", c->b},           {"s_q", c->s_q},       {"s_kv", c->s_kv},    {"h_q", c->h_q},
                  {"h_kv", c->h_kv},     {"d_qk", c->d_qk},     {"d_v", c->d_v},      {"topk", c->topk},
                  {"e_topk", c->e_topk}, {"page", c->page},     {"e_kv", c->e_kv},    {"e_page", c->e_page},
                  {"count", c->count},   {"causal", c->causal}, {"varlen", c->varlen}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        cJSON_AddNumberToObject(shape, fields[i].name, (double)fields[i].value);
    }
    return shape;
}

static const char *format_text(const test_case *c, char *text, size_t size)
{
    fmla_format_info a = cache_format(c->format, c->d_qk);
    bool two = c->extra != FMLA_KV_NONE;
    fmla_format_info b = two ? cache_format(c->extra, c->d_qk) : a;
    snprintf(text, size, "%s%s%s", a.name, two ? "+" : "", two ? b.name : "");
    return text;
}

static cJSON *runs_json(double median, double least, double most, int32_t runs)
{
    cJSON *t = cJSON_CreateObject();
    cJSON_AddNumberToObject(t, "median", median * 1e6);
    cJSON_AddNumberToObject(t, "min", least * 1e6);
    cJSON_AddNumberToObject(t, "max", most * 1e6);
    cJSON_AddNumberToObject(t, "runs", runs);
    return t;
}

static cJSON *time_json(const bench_rounds *measured)
{
    const bench_time *time = &measured->time[measured->middle];
    cJSON *t = runs_json(time->median, time->least, time->most, time->runs);
    if (measured->count > 1) {
        cJSON *medians = cJSON_AddArrayToObject(t, "rounds");
        for (int i = 0; i < measured->count; i++) {
            cJSON_AddItemToArray(medians, cJSON_CreateNumber(measured->time[i].median * 1e6));
        }
    }
    if (time->graph > 0) {
        cJSON_AddNumberToObject(t, "graph", time->graph * 1e6);
        cJSON_AddNumberToObject(t, "steady", time->steady * 1e6);
    }
    return t;
}

static cJSON *span_json(const bench_span *span)
{
    cJSON *s = runs_json(span->median, span->least, span->most, span->runs);
    cJSON *parts = cJSON_AddArrayToObject(s, "kernels");
    for (int i = 0; i < span->parts; i++) {
        const bench_part *part = &span->part[i];
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "name", part->name);
        cJSON_AddNumberToObject(one, "begin", part->begin * 1e6);
        cJSON_AddNumberToObject(one, "us", part->length * 1e6);
        cJSON_AddItemToArray(parts, one);
    }
    return s;
}

cJSON *bench_record(const bench_shape *shape, const bench_rounds *measured)
{
    char format[64];
    cJSON *r = cJSON_CreateObject();
    cJSON_AddStringToObject(r, "name", shape->name);
    cJSON_AddStringToObject(r, "operation", fmla_operation_name((fmla_operation)shape->c.op));
    cJSON_AddStringToObject(r, "format", format_text(&shape->c, format, sizeof format));
    cJSON_AddItemToObject(r, "shape", shape_json(&shape->c));
    cJSON_AddItemToObject(r, "time_us", time_json(measured));
    if (measured->span.runs > 0) {
        cJSON_AddItemToObject(r, "span_us", span_json(&measured->span));
    }
    return r;
}
