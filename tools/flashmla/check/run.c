/* SPDX-License-Identifier: MIT */
/* run.c: one run of a problem, and all that a run may not touch. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check/check.h"
#include "problem/numbers.h"

const char *verdict_name(verdict v)
{
    static const char *const names[] = {"passed", "failed", "not offered", "broken"};
    return names[v];
}

bool verdict_is_bad(verdict v)
{
    return v == VERDICT_FAILED || v == VERDICT_BROKEN;
}

double check_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int checker_open(checker **checked, const cli_options *sets, int count, double budget)
{
    checker *k = xcalloc(1, sizeof *k);
    k->choices = xcalloc((size_t)count, sizeof *k->choices);
    k->budget = budget;
    int status = engine_open_host(&k->oracle, FMLA_DEVICE_ORACLE, FMLA_ISA_AUTO, 1);
    for (; k->choice_count < count && status == CLI_OK; k->choice_count += status == CLI_OK) {
        status = engine_open(&k->choices[k->choice_count].engine, &sets[k->choice_count]);
    }
    if (status == CLI_OK) {
        check_use(k, 0);
        k->class = class_of(k->engine.context);
        *checked = k;
    } else {
        checker_close(k);
    }
    return status;
}

void checker_close(checker *k)
{
    if (k == NULL) {
        return;
    }
    for (int i = 0; i < CHECK_OTHERS; i++) {
        engine_close(&k->others[i]);
    }
    for (int i = 0; i < k->choice_count; i++) {
        engine_close(&k->choices[i].engine);
    }
    engine_close(&k->oracle);
    free(k->choices);
    free(k);
}

verdict check_fail(checker *k, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(k->why, sizeof k->why, format, arguments);
    va_end(arguments);
    return VERDICT_FAILED;
}

verdict check_status(checker *k, const engine *e, fmla_status status, const char *how)
{
    if (status == FMLA_ERROR_UNSUPPORTED && !e->host) {
        return VERDICT_NOT_OFFERED;
    }
    return check_fail(k, "%s%s%s: %s", how, how[0] ? ": " : "", fmla_status_string(status), engine_error(e));
}

int check_open_others(checker *k)
{
    static const int32_t threads[CHECK_OTHERS] = {1, 2, 3, 8};
    for (int i = 0; i < CHECK_OTHERS && k->others[i].context == NULL; i++) {
        if (engine_open_host(&k->others[i], FMLA_DEVICE_CPU, fmla_context_isa(k->engine.context), threads[i]) !=
            CLI_OK) {
            return CLI_ERROR;
        }
    }
    return CLI_OK;
}

static bool has_run(verdict v)
{
    return v == VERDICT_PASSED || v == VERDICT_FAILED;
}

/* v, or what the look at the inputs makes of it. */
static verdict after_look(checker *k, const engine *e, fmla_status status, bool untouched, verdict v)
{
    if (status != FMLA_OK && v == VERDICT_PASSED) {
        return check_status(k, e, status, "looking at the inputs");
    }
    if (untouched || !has_run(v)) {
        return v;
    }
    if (v == VERDICT_FAILED) {
        char why[512];
        snprintf(why, sizeof why, "%.500s", k->why);
        return check_fail(k, "an input was written to, and: %s", why);
    }
    return check_fail(k, "an input was written to%s", k->choice_count > 1 ? ", by this or another set" : "");
}

verdict check_end(checker *k, engine *e, problem *p, verdict v)
{
    bool untouched = true;
    fmla_status status = has_run(v) ? engine_untouched(e, &p->mem, &untouched) : FMLA_OK;
    engine_release(&p->mem);
    return after_look(k, e, status, untouched, v);
}

void check_end_all(checker *k, problem *p)
{
    bool untouched = true, any = false;
    for (int i = 0; i < k->choice_count; i++) {
        any = any || has_run(k->choices[i].verdict);
    }
    fmla_status status = any ? engine_untouched(&k->engine, &p->mem, &untouched) : FMLA_OK;
    engine_release(&p->mem);
    for (int i = 0; i < k->choice_count; i++) {
        check_use(k, i);
        check_note(k, after_look(k, &k->engine, status, untouched, k->choices[i].verdict));
    }
}

void check_use(checker *k, int i)
{
    k->choice = &k->choices[i];
    k->engine = k->choice->engine;
    k->worst = k->choice->worst;
    memcpy(k->why, k->choice->why, sizeof k->why);
}

void check_note(checker *k, verdict v)
{
    k->choice->verdict = v;
    memcpy(k->choice->why, k->why, sizeof k->why);
}

bool check_next(checker *k, int *i)
{
    for ((*i)++; *i < k->choice_count; (*i)++) {
        if (k->choices[*i].verdict == VERDICT_PASSED) {
            check_use(k, *i);
            return true;
        }
    }
    return false;
}

/* What lies between the elements of outputs. Scale words of tokens that pad the last group of four must be 0. */
static verdict check_gaps(checker *k, const problem *p)
{
    const fmla_tensor *outputs[4];
    int n = problem_outputs(p, outputs);
    for (int i = 0; i < n; i++) {
        const buffer *b = memory_find(&p->mem, outputs[i]->data);
        if (!tensor_gaps_are(outputs[i], b->host, b->size, outputs[i] == &p->out_scale ? 0 : POISON_BYTE)) {
            return check_fail(k,
                              "bytes between the rows of an output were written, or padding words of scales are not 0");
        }
    }
    return VERDICT_PASSED;
}

/* Runs on poisoned outputs; then all but the results must be as it was. */
static verdict run(checker *k, engine *e, problem *p, const any_args *args)
{
    const fmla_tensor *outputs[4];
    int n = problem_outputs(p, outputs);
    problem_poison(p);
    engine_keep(e, &p->mem, outputs, n);
    fmla_status status = engine_run(e, &p->mem, (fmla_operation)p->c.op, args);
    verdict v = status != FMLA_OK ? check_status(k, e, status, "") : VERDICT_PASSED;
    if (v == VERDICT_PASSED && !memory_intact(&p->mem)) {
        v = check_fail(k, "guard bytes around a tensor were overwritten");
    }
    if (!p->lasting) {
        v = check_end(k, e, p, v);
    }
    return v == VERDICT_PASSED ? check_gaps(k, p) : v;
}

/* All elements of the outputs in a canonical order, to be freed. */
static uint8_t *pack(const problem *p, size_t *size)
{
    const fmla_tensor *outputs[4];
    int n = problem_outputs(p, outputs);
    *size = 0;
    for (int i = 0; i < n; i++) {
        *size += (size_t)tensor_elements(outputs[i]) * fmla_dtype_size((fmla_dtype)outputs[i]->dtype);
    }
    uint8_t *results = xmalloc(*size);
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        at += tensor_pack(outputs[i], results + at);
    }
    return results;
}

verdict check_run(checker *k, engine *e, problem *p, const any_args *args, uint8_t **results, size_t *size)
{
    verdict v = run(k, e, p, args);
    if (v == VERDICT_PASSED) {
        *results = pack(p, size);
    }
    return v;
}

verdict check_outputs(checker *k, const problem *p, const uint8_t *results, const char *how)
{
    const fmla_tensor *outputs[4];
    int n = problem_outputs(p, outputs);
    size_t at = 0, size;
    bool same = true;
    for (int i = 0; i < n && same; i++) {
        same = tensor_equals(outputs[i], results + at);
        at += (size_t)tensor_elements(outputs[i]) * fmla_dtype_size((fmla_dtype)outputs[i]->dtype);
    }
    if (same) {
        return VERDICT_PASSED;
    }
    uint8_t *now = pack(p, &size);
    verdict v = check_same(k, p, now, results, size, how);
    free(now);
    return v;
}

verdict check_run_same(checker *k, engine *e, problem *p, const any_args *args, const uint8_t *results, const char *how)
{
    verdict v = run(k, e, p, args);
    if (v == VERDICT_PASSED) {
        return check_outputs(k, p, results, how);
    }
    if (v == VERDICT_FAILED) {
        char why[512];
        snprintf(why, sizeof why, "%.500s", k->why);
        check_fail(k, "%s: %s", how, why);
    }
    return v;
}

verdict check_same(checker *k, const problem *p, const uint8_t *a, const uint8_t *b, size_t size, const char *how)
{
    const fmla_tensor *outputs[4];
    if (memcmp(a, b, size) == 0) {
        return VERDICT_PASSED;
    }
    int n = problem_outputs(p, outputs);
    size_t at = 0, differ = 0;
    while (a[at] == b[at]) {
        at++;
    }
    for (size_t i = 0; i < size; i++) {
        differ += a[i] != b[i];
    }
    int which = 0;
    for (size_t end = 0; which < n; which++) {
        size_t bytes = (size_t)tensor_elements(outputs[which]) * fmla_dtype_size((fmla_dtype)outputs[which]->dtype);
        if (at < end + bytes) {
            at -= end;
            break;
        }
        end += bytes;
    }
    return check_fail(k, "%s: other bits: %zu of %zu bytes, the first in output %d at element %zu", how, differ, size,
                      which, at / fmla_dtype_size((fmla_dtype)outputs[which < n ? which : 0]->dtype));
}
