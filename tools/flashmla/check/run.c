/* SPDX-License-Identifier: MIT */
/* run.c: one run of a problem, and all that a run may not touch. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "check/check.h"
#include "problem/numbers.h"

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

/* Scale words of tokens that pad the last group of four must be 0; they are no elements of the tensor. */
static bool scale_padding_is_zero(const fmla_tensor *t)
{
    int64_t rows = t->stride[2];
    int32_t *words = t->data;
    for (int64_t w = 0; w < t->shape[1] * t->shape[2]; w++) {
        for (int64_t i = t->shape[0]; i < rows; i++) {
            if (words[w * rows + i] != 0) {
                return false;
            }
            memset(&words[w * rows + i], POISON_BYTE, sizeof *words);
        }
    }
    return true;
}

verdict check_run(checker *k, engine *e, problem *p, const any_args *args, uint8_t **results, size_t *size)
{
    const fmla_tensor *outputs[4];
    int n = problem_outputs(p, outputs);
    problem_poison(p);
    uint64_t before = memory_hash(&p->mem, outputs, n);
    fmla_status status = engine_run(e, &p->mem, (fmla_operation)p->c.op, args);
    if (status != FMLA_OK) {
        return check_status(k, e, status, "");
    }
    if (!memory_intact(&p->mem)) {
        return check_fail(k, "guard bytes around a tensor were overwritten");
    }
    if (memory_hash(&p->mem, outputs, n) != before) {
        return check_fail(k, "an input was written to");
    }
    *size = 0;
    for (int i = 0; i < n; i++) {
        *size += (size_t)tensor_elements(outputs[i]) * fmla_dtype_size((fmla_dtype)outputs[i]->dtype);
    }
    *results = xmalloc(*size);
    size_t at = 0;
    bool clean = true;
    for (int i = 0; i < n && clean; i++) {
        at += tensor_pack(outputs[i], *results + at);
        /* Look at what is left when the results are taken away, then put them back. */
        buffer *b = memory_find(&p->mem, outputs[i]->data);
        uint8_t *copy = xmalloc(b->size);
        memcpy(copy, b->host, b->size);
        tensor_fill(outputs[i], POISON_BYTE);
        clean = outputs[i] != &p->out_scale || p->tokens == 0 || scale_padding_is_zero(outputs[i]);
        const uint8_t *left = b->host; /* all poison: the first byte is, and each is like the one before it */
        clean = clean && (b->size == 0 || (left[0] == POISON_BYTE && memcmp(left, left + 1, b->size - 1) == 0));
        memcpy(b->host, copy, b->size);
        free(copy);
    }
    if (!clean) {
        free(*results);
        *results = NULL;
        return check_fail(k, "bytes between the rows of an output were written, or padding words of scales are not 0");
    }
    return VERDICT_PASSED;
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
