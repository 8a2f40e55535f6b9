/* SPDX-License-Identifier: MIT */
/* Contexts on a device whose memory the host may not read, played by fake_plugin.c. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "fake_plugin.h"
#include "support_calls.h"

typedef fake_journal *(*journal_entry)(void);

static calls *c;
static fake_journal *journal;

static int set_up(void **state)
{
    assert_int_equal(setenv("FLASHMLA_CUDA_PLUGIN", FAKE_PLUGIN, 1), 0);
    *state = c = calls_new(make_context(FMLA_DEVICE_CUDA, 0));
    void *library = dlopen(FAKE_PLUGIN, RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    journal_entry entry;
    void *symbol = dlsym(library, "fake_plugin_journal");
    memcpy(&entry, &symbol, sizeof entry);
    journal = entry();
    return 0;
}

/* Addresses that would fault: whatever reads a tensor on the host ends the test. */
static void make_unreadable(fmla_tensor *t)
{
    if (t->rank != 0) {
        t->data = (void *)(uintptr_t)0x1000;
    }
}

static void promise_10_device_memory_is_never_read_on_the_host(void **state)
{
    (void)state;
    int32_t stream_of_mine;
    calls_reset(c);
    fmla_tensor *tensors[] = {
        &c->dense.q,
        &c->dense.block_table,
        &c->dense.cache_seqlens,
        &c->dense.attn_sink,
        &c->dense.out,
        &c->dense.lse,
        &c->dense.max_logits,
        &c->sparse.q,
        &c->sparse.indices,
        &c->sparse.extra_indices,
        &c->sparse.topk_length,
        &c->sparse.extra_topk_length,
        &c->sparse.attn_sink,
        &c->sparse.out,
        &c->sparse.lse,
        &c->sparse.max_logits,
        &c->fused_decode.q,
        &c->fused_decode.indices,
        &c->fused_decode.topk_length,
        &c->fused_decode.fused.token_positions,
        &c->fused_decode.fused.cos_sin_cache,
        &c->quantize.src,
        &c->quantize.slots,
        &c->indices_convert.positions,
        &c->indices_convert.block_table,
    };
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        make_unreadable(tensors[i]);
    }
    c->dense.kv.data = c->sparse.kv.data = c->sparse.extra_kv.data = (void *)(uintptr_t)0x1000;
    c->fused_decode.kv.data = c->quantize.dst.data = (void *)(uintptr_t)0x1000;
    int32_t before = journal->calls;
    assert_int_equal(fmla_decode(c->context, &c->dense, &stream_of_mine), FMLA_OK);
    assert_ptr_equal(journal->stream, &stream_of_mine);
    assert_int_equal(fmla_decode(c->context, &c->sparse, NULL), FMLA_OK);
    assert_null(journal->stream);
    assert_int_equal(fmla_fused_decode(c->context, &c->fused_decode, NULL), FMLA_OK);
    assert_int_equal(fmla_quantize(c->context, &c->quantize, NULL), FMLA_OK);
    assert_int_equal(fmla_indices_convert(c->context, &c->indices_convert, NULL), FMLA_OK);
    assert_int_equal(journal->calls - before, 5);
}

/* A captured graph may name the arena's block: growing must not free it. */
static void growing_workspace_keeps_old_blocks_alive(void **state)
{
    (void)state;
    calls_reset(c);
    assert_int_equal(fmla_decode(c->context, &c->dense, NULL), FMLA_OK);
    void *first = journal->workspace;
    int32_t allocations = journal->allocations, releases = journal->releases;
    assert_int_equal(fmla_decode(c->context, &c->dense, NULL), FMLA_OK);
    assert_ptr_equal(journal->workspace, first);
    assert_int_equal(journal->allocations, allocations);
    assert_int_equal(fmla_context_reserve(c->context, 1 << 20), FMLA_OK);
    assert_int_equal(fmla_decode(c->context, &c->dense, NULL), FMLA_OK);
    assert_ptr_not_equal(journal->workspace, first);
    assert_true(journal->workspace_size >= 1 << 20);
    assert_int_equal(journal->releases, releases);
}

static void batch_invariance_reaches_the_device(void **state)
{
    (void)state;
    calls_reset(c);
    assert_int_equal(fmla_decode(c->context, &c->dense, NULL), FMLA_OK);
    assert_int_equal(journal->batch_invariant, 0);
    c->dense.batch_invariant = 1;
    assert_int_equal(fmla_decode(c->context, &c->dense, NULL), FMLA_OK);
    assert_int_equal(journal->batch_invariant, 1);
}

static void device_words_reach_the_caller(void **state)
{
    (void)state;
    fmla_device_info info = FMLA_DEVICE_INFO_INIT;
    calls_reset(c);
    assert_int_equal(fmla_context_device(c->context), FMLA_DEVICE_CUDA);
    c->sparse.q.dtype = FMLA_F16;
    c->sparse.out.dtype = FMLA_F16;
    assert_int_equal(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_UNSUPPORTED);
    assert_string_equal(fmla_context_error(c->context), "q: dtype is F16; allowed on this device: BF16");
    assert_int_equal(fmla_merge(c->context, &c->merge, NULL), FMLA_ERROR_UNSUPPORTED);
    assert_string_equal(fmla_context_error(c->context), "merge: not offered by the cuda device");
    assert_int_equal(fmla_device_get(FMLA_DEVICE_CUDA, 1, &info), FMLA_OK);
    assert_string_equal(info.name, "fake device 1");
    assert_int_equal(info.capability, 35);
    assert_int_equal(fmla_device_get(FMLA_DEVICE_CUDA, 2, &info), FMLA_ERROR_NO_DEVICE);
    assert_int_equal(fmla_device_get(FMLA_DEVICE_AUTO, 0, &info), FMLA_OK);
    assert_int_equal(info.device, FMLA_DEVICE_CUDA);
}

static void auto_takes_the_device_when_it_is_usable(void **state)
{
    (void)state;
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *context = NULL;
    assert_int_equal(fmla_context_create(&config, &context), FMLA_OK);
    assert_int_equal(fmla_context_device(context), FMLA_DEVICE_CUDA);
    fmla_context_destroy(context);
    config.device_index = 1; /* there, but no kernel was built for it; a CPU has no number 1 */
    assert_int_equal(fmla_context_create(&config, &context), FMLA_ERROR_NO_DEVICE);
    assert_null(context);
}

static void c109_unsupported_device_is_refused_before_any_call(void **state)
{
    (void)state;
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *context = c->context;
    int32_t before = journal->calls;
    config.device = FMLA_DEVICE_CUDA;
    config.device_index = 1;
    assert_int_equal(fmla_context_create(&config, &context), FMLA_ERROR_UNSUPPORTED_DEVICE);
    assert_null(context);
    assert_non_null(strstr(fmla_last_create_error(), "built for 8.0, 9.0"));
    assert_int_equal(journal->calls, before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_10_device_memory_is_never_read_on_the_host),
        cmocka_unit_test(growing_workspace_keeps_old_blocks_alive),
        cmocka_unit_test(batch_invariance_reaches_the_device),
        cmocka_unit_test(device_words_reach_the_caller),
        cmocka_unit_test(auto_takes_the_device_when_it_is_usable),
        cmocka_unit_test(c109_unsupported_device_is_refused_before_any_call),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
