/* SPDX-License-Identifier: MIT */
/* ids_shapes.c: faults of shapes: head counts, widths, page sizes and strides, index widths,
 * workspaces, tiers.
 */
#include <stdlib.h>
#include <string.h>

#include "check/ids.h"
#include "problem/numbers.h"

/* ---- heads, widths, index rows ---- */

verdict c021_schedules_of_nothing(checker *k)
{
    static const int parts[] = {1, 8, 132};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 3 * 3; i++) {
        const char *requests = i / 3 == 0 ? "b=0" : i / 3 == 1 ? "b=5,zero_len=1,s_kv=1" : "b=7,s_kv=3000";
        if (ids_bad(&sum, ids_case(k, "op=schedule,%s,count=%d", requests, parts[i % 3]))) {
            return sum;
        }
    }
    ids_bad(&sum, ids_case(k, "op=dense_decode,b=3,s_kv=0,h_q=8"));
    return sum;
}

verdict c046_few_heads(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 6; i++) {
        static const int h_q[] = {8, 16, 32};
        if (ids_bad(
                &sum,
                ids_case(
                    k,
                    "op=sparse_decode,format=%s,b=3,s_q=2,topk=128,s_kv=200,e_topk=64,e_kv=90,h_q=%d,sink=1",
                    i / 3 ? "v41,extra=v41-fp4" : "v4,extra=v4", h_q[i % 3]))) {
            break;
        }
    }
    return sum;
}

verdict c048_grid_of_shapes(checker *k)
{
    static const int h_q[] = {1, 8, 16, 32, 64, 128}, topk[] = {64, 128, 512, 1024}, page[] = {1, 64, 256};
    verdict sum = VERDICT_NOT_OFFERED;
    double budget = k->budget;
    k->budget = 3e5;
    for (int i = 0; i < 6 * 4 * 3; i++) {
        if (ids_bad(&sum, ids_case(k, "op=sparse_decode,format=%s,h_q=%d,topk=%d,page=%d,s_kv=%d",
                                   i % 2 ? "v41" : "v32,d_qk=576", h_q[i % 6], topk[i / 6 % 4], page[i / 24],
                                   topk[i / 6 % 4] + 9))) {
            break;
        }
    }
    for (int i = 0; i < 6 * 4 && sum == VERDICT_PASSED; i++) {
        ids_bad(&sum, ids_case(k, "op=sparse_prefill,s_q=2,h_q=%d,topk=%d,d_qk=%d,s_kv=%d", h_q[i % 6],
                               topk[i / 6], i % 2 ? 512 : 576, topk[i / 6] + 9));
    }
    k->budget = budget;
    return sum;
}

verdict c049_eight_heads(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 6 * 2; i++) {
        if (ids_bad(&sum, ids_case(k, "op=sparse_decode,format=%s,h_q=8,topk=128,s_kv=300,page=64,b=2,s_q=%d",
                                   i / 6 ? "v4" : "v32,d_qk=576", i % 6 + 1))) {
            break;
        }
    }
    return sum;
}

verdict c051_index_rows_of_any_width(checker *k)
{
    static const char *const texts[] = {"topk=2051,s_kv=2600", "topk=2176,s_kv=2048",
                                        "topk=2176,s_kv=2048,lengths=1", "topk=3,s_kv=90"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4 * 3; i++) {
        static const char *const formats[] = {"op=sparse_decode,format=v32,d_qk=576",
                                              "op=sparse_decode,format=v41", "op=sparse_prefill"};
        if (ids_bad(&sum, ids_case(k, "%s,%s,h_q=4,s_q=2", formats[i / 4], texts[i % 4]))) {
            break;
        }
    }
    return sum;
}

verdict c103_dense_decode_of_every_record(checker *k)
{
    static const char *const formats[] = {"v32,d_qk=576", "v4,d_qk=512", "v41,d_qk=512", "v41-page,d_qk=512"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 8; i++) {
        if (ids_bad(&sum,
                    ids_case(
                        k,
                        "op=dense_decode,format=%s,b=3,s_q=2,causal=1,varlen=1,h_q=8,s_kv=%d,page=%d,seed=%d",
                        formats[i % 4], i / 4 ? 900 : 90, i / 4 ? 64 : 31, i))) {
            break;
        }
    }
    return sum;
}

verdict c105_other_widths(checker *k)
{
    static const int widths[][2] = {{576, 512}, {512, 512}, {320, 256}, {288, 256}};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4 * 3; i++) {
        static const char *const texts[] = {"op=dense_decode,b=2,varlen=1,s_q=2,causal=1,s_kv=130",
                                            "op=sparse_prefill,s_q=3,topk=70,s_kv=130",
                                            "op=dense_decode,dtype=f16,format=f16,s_kv=900"};
        if (ids_bad(&sum, ids_case(k, "%s,h_q=8,d_qk=%d,d_v=%d", texts[i / 4], widths[i % 4][0],
                                   widths[i % 4][1]))) {
            break;
        }
    }
    return sum;
}

verdict c106_bf16_query_fp8_cache(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4; i++) {
        if (ids_bad(&sum, ids_case(k, "op=sparse_decode,format=%s,dtype=bf16,b=2,topk=200,s_kv=300,h_q=%d",
                                   i / 2 ? "v41" : "v4", i % 2 ? 64 : 8))) {
            break;
        }
    }
    return sum;
}

verdict c079_splits_of_one_block(checker *k)
{
    static const int s_kv[] = {64 * 132 + 1, 64 * 132, 64 * 131 + 1, 65, 129, 64 * 33 + 1};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 6 * 2; i++) {
        if (ids_bad(&sum, ids_case(k, "op=dense_decode,b=%d,h_q=2,s_kv=%d,varlen=%d", i / 6 ? 3 : 1,
                                   s_kv[i % 6], i / 6))) {
            break;
        }
    }
    return sum;
}

verdict c125_8007_tokens_and_few(checker *k)
{
    static const int s_kv[] = {16, 17, 100, 1024};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < IDS_DENSE_FORMATS; i++) {
        if (ids_bad(&sum, ids_case(k, "op=dense_decode,h_q=4,s_kv=8007,%s", ids_dense_format(i)))) {
            return sum;
        }
    }
    for (int i = 0; i < 4 * 4; i++) {
        if (ids_bad(&sum, ids_case(k, "op=dense_decode,b=%d,h_q=8,s_kv=%d", 1 << i / 4, s_kv[i % 4]))) {
            break;
        }
    }
    return sum;
}

/* ---- pages ---- */

/* The same tokens in pools of other page sizes, page orders and strides: the same bits. */
static verdict every_page_size(checker *k, const int64_t *pages, int count, const char *text)
{
    trial t;
    verdict v = trial_make(k, &t, "%s", text);
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    for (int i = 0; i < count && v == VERDICT_PASSED; i++) {
        char how[40];
        scope s;
        scope_repage(&t.p, &t.p.main, pages[i], 0x7F, (uint64_t)i, &s);
        t.args.decode.kv = s.cache;
        t.args.decode.block_table = s.block_table;
        t.args.decode.indices = s.indices;
        snprintf(how, sizeof how, "pages of %d tokens", (int)pages[i]);
        v = trial_same(k, &t, how);
        scope_free(&s);
    }
    trial_free(&t);
    return v;
}

verdict c056_page_sizes(checker *k)
{
    static const int64_t pages[] = {1, 2, 3, 4, 16, 19, 32, 48, 64, 128, 256, 480};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < IDS_DENSE_FORMATS; i++) {
        char text[256];
        snprintf(text, sizeof text, "op=dense_decode,b=2,varlen=1,s_q=3,causal=1,h_q=4,s_kv=700,page=64,%s",
                 ids_dense_format(i));
        if (ids_bad(&sum, every_page_size(k, pages, 12, text))) {
            break;
        }
    }
    return sum;
}

/* From pages of one token, in dense and in sparse decode. */
verdict c057_pages_of_more_than_one_token(checker *k)
{
    static const int64_t pages[] = {2, 7, 64, 576};
    static const char *const texts[] = {"op=dense_decode,s_kv=300", "op=dense_decode,format=v32,s_kv=300",
                                        "op=sparse_decode,format=v32,d_qk=576,topk=200,s_kv=300",
                                        "op=sparse_decode,format=v4,topk=200,s_kv=300",
                                        "op=sparse_decode,format=v41-page,topk=200,s_kv=300"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5; i++) {
        char text[256];
        snprintf(text, sizeof text, "%s,b=2,h_q=8,page=1", texts[i]);
        if (ids_bad(&sum, every_page_size(k, pages, 4, text))) {
            break;
        }
    }
    return sum;
}

verdict c146_chunks_over_any_page(checker *k)
{
    static const int pages[] = {1, 7, 16, 100, 256};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5 * 2; i++) {
        if (ids_bad(&sum, ids_case(k, "op=dense_decode,b=2,varlen=1,s_q=%d,causal=1,h_q=4,s_kv=200,page=%d",
                                   i / 5 ? 33 : 1, pages[i % 5]))) {
            break;
        }
    }
    return sum;
}

static verdict v4_page_strides(checker *k, int64_t page)
{
    trial t;
    verdict v =
        trial_make(k, &t, "op=sparse_decode,format=v4,b=2,s_q=2,topk=100,s_kv=500,h_q=8,page=%d", (int)page);
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    const int64_t exact = page * 584, padded = (exact + 575) / 576 * 576;
    if (v == VERDICT_PASSED && t.p.main.cache.page_stride_bytes != exact) {
        v = VERDICT_BROKEN;
    }
    const int64_t strides[] = {padded, exact + 1, exact + 4096};
    for (int i = 0; i < 3 && v == VERDICT_PASSED; i++) {
        fmla_kv_cache *from = &t.p.main.cache, *to = &t.args.decode.kv;
        to->page_stride_bytes = strides[i];
        to->data = memory_take(&t.p.mem, (size_t)(strides[i] * from->num_pages), 0);
        memset(to->data, 0xFF, (size_t)(strides[i] * from->num_pages));
        for (int64_t j = 0; j < from->num_pages; j++) {
            memcpy((uint8_t *)to->data + j * strides[i], (uint8_t *)from->data + j * exact, (size_t)exact);
        }
        v = trial_same(k, &t, "another page stride");
    }
    trial_free(&t);
    return v;
}

verdict c054_page_strides(checker *k)
{
    verdict v = v4_page_strides(k, 64);
    return v == VERDICT_PASSED ? v4_page_strides(k, 256) : v;
}

verdict c058_cache_without_a_table(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4; i++) {
        if (ids_bad(&sum, ids_case(k,
                                   "op=dense_decode,b=3,varlen=1,no_table=1,s_q=2,causal=1,h_q=4,s_kv=90,"
                                   "page=%d,pad=%d,again=%d",
                                   i % 2 ? 200 : 16, i / 2, i % 2 ? AGAIN_SLICES : 0))) {
            break;
        }
    }
    return sum;
}

/* The index buffer is longer than the batch: results of exactly the batch's rows, what follows stays as it
 * was. */
static verdict fewer_rows(checker *k, trial *t)
{
    problem *p = &t->p;
    any_args a = t->args;
    fmla_decode_args *d = &a.decode;
    verdict v = trial_run_and_judge(k, t);
    if (v != VERDICT_PASSED) {
        return v;
    }
    fmla_tensor out = ids_copy(&p->mem, &p->out);
    fmla_tensor *rows[] = {&d->q, &d->indices, &d->out, &d->lse, &d->max_logits};
    for (int i = 0; i < 5; i++) {
        *rows[i] = ids_rows(rows[i], 0, 0, 5);
    }
    problem_poison(p);
    v = ids_call(k, &p->mem, FMLA_OP_SPARSE_DECODE, &a, "five rows of nine");
    fmla_tensor mine = ids_rows(&out, 0, 0, 5), rest = ids_rows(&p->out, 0, 5, 4);
    v = v == VERDICT_PASSED ? ids_near_out(k, &d->out, &mine, "five rows of nine") : v;
    uint8_t *bytes = xmalloc((size_t)tensor_elements(&rest) * 2);
    size_t n = tensor_pack(&rest, bytes);
    for (size_t i = 0; i < n && v == VERDICT_PASSED; i++) {
        v = bytes[i] == POISON_BYTE ? v : check_fail(k, "rows behind the batch were written");
    }
    free(bytes);
    return v;
}

verdict c061_rows_and_gathers(checker *k)
{
    trial t;
    verdict v = trial_make(k, &t, "op=sparse_decode,format=v32,d_qk=576,b=9,topk=70,s_kv=90,h_q=8");
    v = v == VERDICT_PASSED ? fewer_rows(k, &t) : v;
    trial_free(&t);
    for (int i = 0; i < 3 && v == VERDICT_PASSED; i++) {
        static const char *const dtypes[] = {"bf16", "f32", "f16"};
        v = ids_case(k, "op=dequantize,format=v32,d_qk=576,count=70,page=%d,dtype=%s,pad=%d",
                     i == 1 ? 31 : 64, dtypes[i], i % 2);
    }
    return v;
}

/* ---- workspaces ---- */

static fmla_status workspace_of(checker *k, fmla_operation op, const any_args *a, size_t *size)
{
    switch (op) {
    case FMLA_OP_SPARSE_PREFILL:
        return fmla_prefill_workspace_size(k->engine.context, &a->prefill, size);
    case FMLA_OP_FUSED_PREFILL:
        return fmla_fused_prefill_workspace_size(k->engine.context, &a->fused_prefill, size);
    case FMLA_OP_FUSED_DECODE:
        return fmla_fused_decode_workspace_size(k->engine.context, &a->fused_decode, size);
    case FMLA_OP_MHA_FORWARD:
        return fmla_mha_forward_workspace_size(k->engine.context, &a->mha_forward, size);
    case FMLA_OP_MHA_BACKWARD:
        return fmla_mha_backward_workspace_size(k->engine.context, &a->mha_backward, size);
    default:
        return fmla_decode_workspace_size(k->engine.context, &a->decode, size);
    }
}

static void set_workspace(fmla_operation op, any_args *a, void *space, size_t size)
{
    void **where[] = {&a->decode.workspace,        &a->decode.workspace,       &a->prefill.workspace,
                      &a->fused_prefill.workspace, &a->fused_decode.workspace, &a->mha_forward.workspace,
                      &a->mha_backward.workspace};
    size_t *bytes[] = {&a->decode.workspace_size,       &a->decode.workspace_size,
                       &a->prefill.workspace_size,      &a->fused_prefill.workspace_size,
                       &a->fused_decode.workspace_size, &a->mha_forward.workspace_size,
                       &a->mha_backward.workspace_size};
    *where[op] = space;
    *bytes[op] = size;
}

/* Sizes of dense and sparse decode from shapes alone, one dimension growing at a time. */
static verdict growing(checker *k, int dimension, bool sparse)
{
    static const int64_t steps[] = {1, 2, 7, 8, 9, 33, 64, 65, 127, 129, 300, 513, 2048, 4097, 20000};
    int64_t n[5] = {3, 2, 16, 40, 256}; /* b, s_q, h_q, pages, topk */
    size_t last = 0;
    for (int i = 0; i < 15; i++) {
        any_args a;
        size_t size = 0;
        n[dimension] = dimension == 2 && steps[i] > 300 ? 300 : steps[i];
        memset(&a, 0, sizeof a);
        a.decode = (fmla_decode_args)FMLA_DECODE_ARGS_INIT;
        int64_t d = sparse ? 512 : 576;
        a.decode.q = fmla_tensor_4d(NULL, FMLA_BF16, n[0], n[1], n[2], d);
        a.decode.kv = (fmla_kv_cache){
            .format = sparse ? FMLA_KV_V41 : FMLA_KV_BF16, .num_pages = n[3], .page_size = 64};
        a.decode.out = fmla_tensor_4d(NULL, FMLA_BF16, n[0], n[1], n[2], 512);
        if (sparse) {
            a.decode.indices = fmla_tensor_3d(NULL, FMLA_I32, n[0], n[1], n[4]);
        } else {
            a.decode.block_table = fmla_tensor_2d(NULL, FMLA_I32, n[0], n[3]);
            a.decode.cache_seqlens = fmla_tensor_1d(NULL, FMLA_I32, n[0]);
        }
        fmla_status status = workspace_of(k, FMLA_OP_DENSE_DECODE, &a, &size);
        if (status != FMLA_OK) {
            return check_status(k, &k->engine, status, "workspace size");
        }
        if (size < last) {
            return check_fail(k, "dimension %d at %lld: %zu bytes after %zu", dimension, (long long)steps[i],
                              size, last);
        }
        last = size;
    }
    return VERDICT_PASSED;
}

verdict c132_workspace_grows_with_shapes(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5 * 2 && !ids_bad(&sum, growing(k, i / 2, i % 2)); i++) {
    }
    return sum;
}

/* Exactly the size that was asked for does, guarded behind; one byte less is refused. */
static verdict exact_workspace(checker *k, const char *text)
{
    trial t;
    any_args bound;
    size_t size = 0;
    verdict v = trial_make(k, &t, "%s", text);
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    fmla_operation op = (fmla_operation)t.p.c.op;
    if (v == VERDICT_PASSED && workspace_of(k, op, &t.args, &size) == FMLA_OK && size > 0) {
        /* A host buffer of the problem's; on a device, the same size there between guards of the device's own
         * buffer.
         */
        fmla_tensor buffer_there = memory_tensor_4(&t.p.mem, FMLA_U8, 1, (int64_t)size, 0, 0, 0, 0, 0xFF);
        uint8_t guard[256], back[256];
        memset(guard, 0xA5, sizeof guard);
        problem_poison(&t.p);
        v = engine_bind(&k->engine, &t.p.mem, op, &t.args, &bound) == FMLA_OK ? v : VERDICT_BROKEN;
        uint8_t *space = buffer_there.data;
        if (!k->engine.host && v == VERDICT_PASSED) {
            space = cli_memory_new(t.p.mem.device, size + sizeof guard);
            v = space == NULL ||
                        cli_memory_upload(t.p.mem.device, space + size, guard, sizeof guard) != CLI_OK
                    ? VERDICT_BROKEN
                    : v;
        }
        set_workspace(op, &bound, space, size - 1);
        if (v == VERDICT_PASSED && engine_call(&k->engine, op, &bound) != FMLA_ERROR_WORKSPACE_TOO_SMALL) {
            v = check_fail(k, "a workspace of one byte less than %zu is not refused", size);
        }
        set_workspace(op, &bound, space, size);
        fmla_status status = v == VERDICT_PASSED ? engine_call(&k->engine, op, &bound) : FMLA_OK;
        status = status == FMLA_OK ? engine_wait(&k->engine, &t.p.mem) : status;
        v = status == FMLA_OK ? v : check_status(k, &k->engine, status, "a workspace of exactly the size");
        if (!k->engine.host && v == VERDICT_PASSED) {
            cli_memory_download(t.p.mem.device, back, space + size, sizeof back);
            v = memcmp(back, guard, sizeof back) == 0
                    ? v
                    : check_fail(k, "bytes behind the workspace were written");
        }
        v = v == VERDICT_PASSED && !memory_intact(&t.p.mem)
                ? check_fail(k, "bytes around the workspace were written")
                : v;
        if (k->engine.host && v == VERDICT_PASSED) {
            v = trial_compare(k, &t, "in a workspace of exactly the size");
        }
    }
    trial_free(&t);
    return v;
}

verdict c133_workspace_of_exact_size(checker *k)
{
    static const char *const texts[] = {
        "op=dense_decode,s_kv=4000,h_q=16",
        "op=dense_decode,b=7,varlen=1,s_kv=900,h_q=16,format=v32",
        "op=sparse_decode,format=v41,extra=v41-fp4,topk=600,e_topk=500,s_kv=900,e_kv=900,h_q=16",
        "op=sparse_prefill,s_q=5,topk=300,s_kv=900,h_q=16",
        "op=fused_prefill,s_q=5,topk=90,h_q=16,norm=1",
        "op=fused_decode,format=v41,s_q=5,topk=90,h_q=16,norm=1",
        "op=mha_forward,s_q=70,s_kv=70,h_q=2,h_kv=2",
        "op=mha_backward,s_q=70,s_kv=70,h_q=2,h_kv=1"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 8 && !ids_bad(&sum, exact_workspace(k, texts[i])); i++) {
    }
    return sum;
}

/* ---- tiers ---- */

/* All operations on every tier that this processor offers; whatever the checker itself runs on. */
static verdict on_tier(checker *k, fmla_isa isa)
{
    static const char *const texts[] = {
        "op=dense_decode,b=2,varlen=1,s_q=2,causal=1,s_kv=200",
        "op=dense_decode,dtype=f16,format=f16,s_kv=200",
        "op=sparse_decode,format=v32,d_qk=576,topk=90,s_kv=200,scales=2",
        "op=sparse_decode,format=v4,extra=v4,topk=90,e_topk=40,s_kv=200",
        "op=sparse_decode,format=v41,extra=v41-fp4,topk=90,e_topk=40,s_kv=200",
        "op=sparse_prefill,s_q=4,topk=90,s_kv=200",
        "op=fused_prefill,s_q=4,topk=90,s_kv=200,norm=1",
        "op=fused_decode,format=v41,s_q=4,topk=90,s_kv=200,norm=1",
        "op=mha_forward,s_q=40,s_kv=50,causal=1",
        "op=mha_backward,s_q=40,s_kv=50,causal=1",
        "op=quantize,format=v41,d_qk=512",
        "op=dequantize,format=v32,d_qk=576",
        "op=convert,format=v41,extra=v41-page,d_qk=512",
        "op=merge,topk=3"};
    cli_options tier = {.device = FMLA_DEVICE_CPU, .isa = isa, .threads = 2};
    checker *other = NULL;
    verdict v = checker_open(&other, &tier, 1, k->budget) == CLI_OK ? VERDICT_PASSED : VERDICT_BROKEN;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0] && v == VERDICT_PASSED; i++) {
        v = ids_case(other, "%s,h_q=8", texts[i]);
    }
    if (v == VERDICT_FAILED) {
        check_fail(k, "tier %s: %.900s", fmla_isa_name(isa), other->why);
    }
    checker_close(other);
    return v;
}

verdict c147_every_tier(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int isa = FMLA_ISA_SCALAR; isa < FMLA_ISA_COUNT; isa++) {
        if (fmla_isa_available((fmla_isa)isa) && ids_bad(&sum, on_tier(k, (fmla_isa)isa))) {
            break;
        }
    }
    return sum;
}

verdict c148_tiers_of_other_processors(checker *k)
{
    for (int isa = FMLA_ISA_SCALAR; isa < FMLA_ISA_COUNT; isa++) {
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
        fmla_context *context = NULL;
        config.device = FMLA_DEVICE_CPU;
        config.isa = isa;
        fmla_status status = fmla_context_create(&config, &context);
        bool there = fmla_isa_available((fmla_isa)isa);
        bool right = there ? status == FMLA_OK && (int)fmla_context_isa(context) == isa
                           : status == FMLA_ERROR_UNSUPPORTED && context == NULL;
        fmla_context_destroy(context);
        if (!right) {
            return check_fail(k, "tier %s, %s here: %s", fmla_isa_name((fmla_isa)isa),
                              there ? "available" : "not available", fmla_status_string(status));
        }
    }
    return VERDICT_PASSED;
}
