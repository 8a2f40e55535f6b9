/* SPDX-License-Identifier: MIT */
/*
 * compare.c: results against expected ones by the published rule: infinities and NaN at the same places; every
 * element within the absolute or the relative tolerance; the whole within a cosine distance. The default tolerances are
 * the published ones of each operation and tensor. Integers and bytes must be equal.
 */
#include "check/compare.h"
#include "problem/numbers.h"
#include "run/run.h"

#include <math.h>
#include <string.h>

static bool is_real(int32_t dtype)
{
    return dtype == FMLA_BF16 || dtype == FMLA_F16 || dtype == FMLA_F32 || dtype == FMLA_F64;
}

static run_tolerance bounds_of(const run_case *c, const char *tensor, const run_tolerance *wanted)
{
    const published other = {1e-3, 2.01 / 128, 5e-6}; /* sparse decode's, for what has no published bound */
    bool fused = strncmp(c->operation->name, "fused", 5) == 0;
    quantity what = QUANTITY_COUNT;
    if (strcmp(tensor, "out") == 0) {
        what = fused ? QUANTITY_FUSED_OUT : QUANTITY_OUT;
    } else if (fused || strcmp(tensor, "lse") == 0 || strcmp(tensor, "max_logits") == 0) {
        what = QUANTITY_LSE;
    } else if (strcmp(c->operation->name, "mha_backward") == 0) {
        what = QUANTITY_GRADIENT;
    }
    published p = {-1, 0, 0};
    for (int op = 0; op < FMLA_OP_COUNT; op++) {
        if (strcmp(fmla_operation_name((fmla_operation)op), c->operation->name) == 0) {
            p = published_of(what, (fmla_operation)op);
        }
    }
    p = p.absolute < 0 ? other : p;
    return (run_tolerance){
        wanted->abs >= 0 ? wanted->abs : p.absolute,
        wanted->rel >= 0 ? wanted->rel : p.relative,
        wanted->cos_diff >= 0 ? wanted->cos_diff : p.cosine,
    };
}

run_difference run_measure(const fmla_tensor *answer, const fmla_tensor *reference, double abs_tolerance,
                           double rel_tolerance)
{
    run_difference d = {0};
    int64_t n = run_elements(reference);
    double ab = 0;
    double aa = 0;
    double bb = 0;
    double squares = 0;

    for (int64_t i = 0; i < n; i++) {
        double a = number_get(answer->data, answer->dtype, i);
        double b = number_get(reference->data, reference->dtype, i);
        if (!isfinite(a) || !isfinite(b)) {
            d.outside += !(a == b || (isnan(a) && isnan(b)));
            continue;
        }
        double difference = fabs(a - b);
        double relative = difference / (fabs(b) + 1e-6);
        d.max_abs = fmax(d.max_abs, difference);
        d.max_rel = fmax(d.max_rel, relative);
        d.outside += !(difference < abs_tolerance || relative < rel_tolerance || difference == 0);
        squares += difference * difference;
        ab += a * b;
        aa += a * a;
        bb += b * b;
    }
    d.rms = n == 0 ? 0 : sqrt(squares / (double)n);
    d.rms_reference = n == 0 ? 0 : sqrt(bb / (double)n);
    d.cos_diff = bb < 1e-12 ? 0 : fabs(1 - 2 * ab / (aa + bb));
    d.cosine = aa * bb == 0 ? 1 : ab / sqrt(aa * bb);
    return d;
}

static bool same_shape(const fmla_tensor *a, const fmla_tensor *b)
{
    return a->rank == b->rank && memcmp(a->shape, b->shape, (size_t)a->rank * sizeof a->shape[0]) == 0;
}

/* Words of a result that must be equal: how many are not. */
static int64_t count_unequal(const fmla_tensor *a, const fmla_tensor *b)
{
    size_t width = fmla_dtype_size((fmla_dtype)a->dtype);
    int64_t unequal = 0;

    for (int64_t i = 0; i < run_elements(a); i++) {
        size_t at = (size_t)i * width;
        unequal += memcmp((const char *)a->data + at, (const char *)b->data + at, width) != 0;
    }
    return unequal;
}

static void report(const char *name, const run_difference *d, const run_tolerance *t, bool passed, cJSON *list)
{
    if (list == NULL) {
        printf("  %-12s %-11.3g %-11.3g %-11.3g %-9lld %s (abs %.3g, rel %.3g, cos %.3g)\n", name, d->max_abs,
               d->max_rel, d->cos_diff, (long long)d->outside, passed ? "ok" : "FAILED", t->abs, t->rel,
               t->cos_diff);
        return;
    }
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "name", name);
    cli_json_number(item, "max_abs", d->max_abs);
    cli_json_number(item, "max_rel", d->max_rel);
    cli_json_number(item, "cos_diff", d->cos_diff);
    cli_json_number(item, "outside", (double)d->outside);
    cli_json_number(item, "abs", t->abs);
    cli_json_number(item, "rel", t->rel);
    cli_json_number(item, "cos", t->cos_diff);
    cJSON_AddBoolToObject(item, "ok", passed);
    cJSON_AddItemToArray(list, item);
}

/* CLI_OK, CLI_FAILED, CLI_ERROR. */
static int compare_one(const run_case *c, const run_output *output, const fmla_tensor *expected,
                       const run_tolerance *wanted, cJSON *list)
{
    const fmla_tensor *answer = &output->host;
    bool real = is_real(answer->dtype);
    run_tolerance bounds = {0, 0, 0};
    run_difference d = {0};

    if (!same_shape(answer, expected) || real != is_real(expected->dtype) ||
        (!real && fmla_dtype_size((fmla_dtype)answer->dtype) != fmla_dtype_size((fmla_dtype)expected->dtype))) {
        return cli_error("--compare: '%s' has another shape or dtype there (rank %d, %s; here rank %d, %s)",
                         output->name, (int)expected->rank, fmla_dtype_name((fmla_dtype)expected->dtype),
                         (int)answer->rank, fmla_dtype_name((fmla_dtype)answer->dtype));
    }
    if (real) {
        bounds = bounds_of(c, output->name, wanted);
        d = run_measure(answer, expected, bounds.abs, bounds.rel);
    } else {
        d.outside = count_unequal(answer, expected);
    }
    bool passed = d.outside == 0 && d.cos_diff <= bounds.cos_diff;
    report(output->name, &d, &bounds, passed, list);
    return passed ? CLI_OK : CLI_FAILED;
}

int run_compare(const run_case *c, const char *path, const char *prefix, const run_tolerance *wanted, cJSON *tree)
{
    st_file file;
    char error[1024];
    char name[RUN_NAME];
    int result = CLI_OK;
    int compared = 0;

    if (st_read(&file, path, error, sizeof error) != 0) {
        return cli_error("%s", error);
    }
    cJSON *list = tree == NULL ? NULL : cJSON_AddArrayToObject(tree, "comparison");
    if (list == NULL) {
        printf("  %-12s %-11s %-11s %-11s %-9s\n", "compared", "max abs", "max rel", "cos diff", "outside");
    }
    for (int i = 0; i < c->output_count && result != CLI_ERROR; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, c->outputs[i].name);
        const fmla_tensor *expected = st_find(&file, name);
        if (expected != NULL) {
            int one = compare_one(c, &c->outputs[i], expected, wanted, list);
            result = one > result ? one : result;
            compared++;
        }
    }
    st_free(&file);
    if (compared == 0) {
        return cli_error("--compare: %s has none of the results, '%s%s' and so on", path, prefix,
                         c->outputs[0].name);
    }
    return result;
}
