/* SPDX-License-Identifier: MIT */
/* error.c: how failures are worded and kept. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "context.h"

static _Thread_local char create_error[sizeof((fmlai_error *)0)->text];

fmla_status fmlai_fail(fmlai_error *error, fmla_status status, const char *format, ...)
{
    if (error != NULL) {
        va_list list;
        va_start(list, format);
        fmlai_fail_list(error, status, format, list);
        va_end(list);
    }
    return status;
}

void fmlai_fail_list(fmlai_error *error, fmla_status status, const char *format, va_list list)
{
    error->status = status;
    vsnprintf(error->text, sizeof error->text, format, list);
}

void fmlai_remember_create_error(const char *text)
{
    snprintf(create_error, sizeof create_error, "%s", text);
}

const char *fmla_last_create_error(void)
{
    return create_error;
}

const char *fmla_context_error(const fmla_context *context)
{
    return context == NULL ? "" : context->error.text;
}
