/* SPDX-License-Identifier: MIT */
/*
 * Runs single operations of the oracle.
 */
#include "support_oracle.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static void *test_alloc(void *user, size_t size)
{
    void *memory = NULL;
    (void)user;
    return posix_memalign(&memory, 64, size) == 0 ? memory : NULL;
}

static void test_release(void *user, void *memory)
{
    (void)user;
    free(memory);
}

static void *opened(void)
{
    static const fmlai_allocator allocator = {.alloc = test_alloc, .release = test_release};
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmlai_error error = {0};
    void *state = NULL;
    assert_int_equal(fmlai_oracle_backend.open(&config, &allocator, &state, &error), FMLA_OK);
    return state;
}

static fmlai_call make_call(void *state, size_t workspace_size, fmlai_error *error)
{
    fmlai_call call = {.workspace_size = workspace_size, .error = error};
    if (workspace_size > 0) {
        call.workspace = fmlai_oracle_backend.workspace_alloc(state, workspace_size);
        assert_non_null(call.workspace);
    }
    return call;
}

static void finish(void *state, fmlai_call *call, fmla_status status)
{
    assert_int_equal(status, FMLA_OK);
    if (call->workspace) {
        fmlai_oracle_backend.workspace_release(state, call->workspace);
    }
    fmlai_oracle_backend.close(state);
}

void oracle_mqa(const fmlai_mqa *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, fmlai_oracle_backend.mqa_workspace(state, p), &error);
    finish(state, &call, fmlai_oracle_backend.mqa(state, p, &call));
}

void oracle_mha_forward(const fmlai_mha *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, fmlai_oracle_backend.mha_forward_workspace(state, p), &error);
    finish(state, &call, fmlai_oracle_backend.mha_forward(state, p, &call));
}

void oracle_mha_backward(const fmlai_mha *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, fmlai_oracle_backend.mha_backward_workspace(state, p), &error);
    finish(state, &call, fmlai_oracle_backend.mha_backward(state, p, &call));
}

void oracle_quantize(const fmlai_transcode *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, 0, &error);
    finish(state, &call, fmlai_oracle_backend.quantize(state, p, &call));
}

void oracle_dequantize(const fmlai_transcode *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, 0, &error);
    finish(state, &call, fmlai_oracle_backend.dequantize(state, p, &call));
}

void oracle_convert(const fmlai_convert *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, 0, &error);
    finish(state, &call, fmlai_oracle_backend.convert(state, p, &call));
}

void oracle_indices_convert(const fmlai_indices_convert *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, 0, &error);
    finish(state, &call, fmlai_oracle_backend.indices_convert(state, p, &call));
}

void oracle_fp8_cast(const fmlai_fp8_cast *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, 0, &error);
    finish(state, &call, fmlai_oracle_backend.fp8_cast(state, p, &call));
}

void oracle_merge(const fmlai_merge *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, 0, &error);
    finish(state, &call, fmlai_oracle_backend.merge(state, p, &call));
}

void oracle_permute(const fmlai_permute *p)
{
    fmlai_error error = {0};
    void *state = opened();
    fmlai_call call = make_call(state, 0, &error);
    finish(state, &call, fmlai_oracle_backend.permute(state, p, &call));
}

void assert_close(double a, double b, double bound)
{
    bool same = a == b || (isnan(a) && isnan(b));
    if (!same && !(fabs(a - b) <= bound)) {
        fail_msg("%.17g is not %.17g within %g", a, b, bound);
    }
}
