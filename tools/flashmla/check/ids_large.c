/* SPDX-License-Identifier: MIT */
/*
 * ids_large.c: faults of large numbers: offsets beyond 31 and 32 bits, and batches beyond the limits of
 * grids and work lists. Far addresses need no memory of their size on the host (a mapping comes into being
 * where it is touched); a device must have it, or the check is not offered there.
 */
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include "check/ids.h"
#include "problem/numbers.h"

/* ---- far addresses ---- */

typedef struct far_block {
    uint8_t *data; /* of the engine's device */
    size_t size;
    memory *mem;
    bool host;
} far_block;

static verdict far_open(checker *k, memory *m, size_t size, far_block *f)
{
    fmla_device_info info = FMLA_DEVICE_INFO_INIT;
    *f = (far_block){NULL, size, m, k->engine.host};
    if (f->host) {
        void *data =
            mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        f->data = data == MAP_FAILED ? NULL : data;
        return f->data ? VERDICT_PASSED : VERDICT_NOT_OFFERED;
    }
    int32_t index = k->engine.options.device_index;
    if (fmla_device_get(FMLA_DEVICE_CUDA, index, &info) != FMLA_OK ||
        (double)size > 0.8 * (double)info.memory_bytes) {
        return VERDICT_NOT_OFFERED;
    }
    if (m->device == NULL && cli_memory_open(k->engine.context, index, &m->device) != CLI_OK) {
        return VERDICT_BROKEN;
    }
    f->data = cli_memory_new(m->device, size);
    return f->data ? VERDICT_PASSED : VERDICT_NOT_OFFERED;
}

static void far_close(far_block *f)
{
    if (f->host && f->data != NULL) {
        munmap(f->data, f->size);
    }
}

static void far_write(const far_block *f, size_t offset, const void *source, size_t size)
{
    if (f->host) {
        memcpy(f->data + offset, source, size);
    } else {
        cli_memory_upload(f->mem->device, f->data + offset, source, size);
    }
}

static void far_read(const far_block *f, size_t offset, void *target, size_t size)
{
    if (f->host) {
        memcpy(target, f->data + offset, size);
    } else {
        cli_memory_download(f->mem->device, target, f->data + offset, size);
    }
}

/* A bound call: args have the engine's own addresses. */
static verdict far_call(checker *k, memory *m, fmla_operation op, const any_args *bound)
{
    fmla_status status = engine_call(&k->engine, op, bound);
    status = status == FMLA_OK ? engine_wait(&k->engine, m) : status;
    return status == FMLA_OK ? VERDICT_PASSED : check_status(k, &k->engine, status, "far addresses");
}

static void fetch(const engine *e, const memory *m, const fmla_tensor *host, const fmla_tensor *bound)
{
    if (!e->host) {
        cli_memory_download(m->device, host->data, bound->data, tensor_span(host));
    }
}

/* A case's cache of one token, and the same token in a pool of `pages` pages of the given stride, at offset 0
 * of a page. */
typedef struct far_token {
    trial t;
    far_block pool;
    uint8_t record[2048];
} far_token;

/* Writes the record at offset 0 of a page as the format has it: data row first, the scale row behind all data
 * rows. */
static void far_put(far_token *x, const fmla_kv_cache *cache, int64_t page)
{
    fmla_format_info info = cache_format(cache->format, cache->d_qk);
    size_t at = (size_t)page * (size_t)cache->page_stride_bytes;
    far_write(&x->pool, at, x->record, (size_t)info.data_row_bytes);
    if (info.layout == FMLA_LAYOUT_PAGE) {
        far_write(&x->pool, at + (size_t)(cache->page_size * info.data_row_bytes),
                  x->record + info.data_row_bytes, (size_t)info.scale_row_bytes);
    }
}

/* The problem's one token at several pages of a far pool: at each, the bits of the near pool's results. */
static verdict token_at_pages(checker *k, const char *text, int64_t page_size, int64_t stride,
                              const int64_t *pages, int count)
{
    far_token x;
    verdict v = trial_make(k, &x.t, "%s,s_kv=1,topk=1,h_q=16,page=%d,data=1", text, (int)page_size);
    problem *p = &x.t.p;
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &x.t) : v;
    if (v == VERDICT_PASSED) {
        bool dense = case_is_dense(&p->c);
        fmla_kv_cache pool = p->main.cache;
        pool.num_pages = pages[count - 1] + 1;
        pool.page_stride_bytes = stride;
        cache_get(&p->main.cache, scope_slot(p, &p->main, 0, 0, 0), x.record);
        v = far_open(k, &p->mem, (size_t)pool.num_pages * (size_t)stride, &x.pool);
        for (int i = 0; i < count && v == VERDICT_PASSED; i++) {
            any_args bound;
            far_put(&x, &pool, pages[i]);
            if (dense) {
                ((int32_t *)p->main.block_table.data)[0] = (int32_t)pages[i];
            } else {
                ids_index_row(p, &p->main, 0)[0] = (int32_t)(pages[i] * page_size);
            }
            problem_poison(p);
            x.t.args.decode.kv.data = NULL;
            if (engine_bind(&k->engine, &p->mem, (fmla_operation)p->c.op, &x.t.args, &bound) != FMLA_OK) {
                v = VERDICT_BROKEN;
                break;
            }
            bound.decode.kv = pool;
            bound.decode.kv.data = x.pool.data;
            v = far_call(k, &p->mem, (fmla_operation)p->c.op, &bound);
            fetch(&k->engine, &p->mem, &p->out, &bound.decode.out);
            fetch(&k->engine, &p->mem, &p->lse, &bound.decode.lse);
            fetch(&k->engine, &p->mem, &p->max_logits, &bound.decode.max_logits);
            v = v == VERDICT_PASSED ? trial_compare(k, &x.t, "a page far away") : v;
        }
        far_close(&x.pool);
    }
    trial_free(&x.t);
    return v;
}

verdict c024_page_numbers(checker *k)
{
    static const int64_t pages[] = {0, 58253, 58254, 1050000};
    return token_at_pages(k, "op=dense_decode", 32, 32 * 1152, pages, 4);
}

verdict c025_pages_of_480_tokens(checker *k)
{
    static const int64_t pages[] = {7766, 7767, 7768, 163000};
    return token_at_pages(k, "op=dense_decode", 480, 480 * 1152, pages, 4);
}

verdict c027_two_gibibytes(checker *k)
{
    static const char *const texts[] = {"op=sparse_decode,format=v4",
                                        "op=sparse_decode,format=v32,d_qk=576",
                                        "op=sparse_decode,format=bf16,d_qk=576",
                                        "op=sparse_decode,format=v41",
                                        "op=dense_decode,format=v32",
                                        "op=dense_decode"};
    static const int64_t pages[] = {2142, 2143, 4285, 4286};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 6 && !ids_bad(&sum, token_at_pages(k, texts[i], 64, 1002240, pages, 4)); i++) {
    }
    return sum;
}

static verdict far_round_trip(checker *k, int64_t format)
{
    static const int64_t slots[] = {4000000, ((int64_t)1 << 31) / 576, ((int64_t)1 << 31) / 576 + 1, 0};
    fmla_format_info info = cache_format(format, 576);
    memory m = {0};
    far_block pool;
    any_args a, bound;
    memset(&a, 0, sizeof a);
    a.quantize = (fmla_quantize_args)FMLA_QUANTIZE_ARGS_INIT;
    a.quantize.src = memory_tensor_4(&m, FMLA_BF16, 2, 4, info.d_qk, 0, 0, 0, 0);
    a.quantize.slots = memory_tensor_4(&m, FMLA_I64, 1, 4, 0, 0, 0, 0, 0);
    memcpy(a.quantize.slots.data, slots, sizeof slots);
    for (int64_t i = 0; i < tensor_elements(&a.quantize.src); i++) {
        number_set(a.quantize.src.data, FMLA_BF16, i, (double)(i / info.d_qk + 1) * (i % 2 ? 1 : -0.5));
    }
    fmla_kv_cache cache = {.format = (int32_t)format, .d_qk = info.d_qk, .num_pages = 62501, .page_size = 64};
    verdict v = far_open(k, &m, (size_t)62501 * 64 * (size_t)info.bytes_per_token, &pool);
    cache.data = pool.data;
    if (v == VERDICT_PASSED && engine_bind(&k->engine, &m, FMLA_OP_QUANTIZE, &a, &bound) == FMLA_OK) {
        bound.quantize.dst = cache;
        v = far_call(k, &m, FMLA_OP_QUANTIZE, &bound);
    }
    if (v == VERDICT_PASSED) {
        any_args back;
        memset(&back, 0, sizeof back);
        back.dequantize = (fmla_dequantize_args)FMLA_DEQUANTIZE_ARGS_INIT;
        back.dequantize.slots = a.quantize.slots;
        back.dequantize.dst = memory_tensor_4(&m, FMLA_BF16, 2, 4, info.d_qk, 0, 0, 0, POISON_BYTE);
        if (engine_bind(&k->engine, &m, FMLA_OP_DEQUANTIZE, &back, &bound) == FMLA_OK) {
            bound.dequantize.src = cache;
            v = far_call(k, &m, FMLA_OP_DEQUANTIZE, &bound);
            fetch(&k->engine, &m, &back.dequantize.dst, &bound.dequantize.dst);
        }
        v = v == VERDICT_PASSED
                ? ids_near(k, &back.dequantize.dst, &a.quantize.src, 0, 0, "slots beyond 3.7 million")
                : v;
    }
    far_close(&pool);
    memory_free(&m);
    return v;
}

verdict c022_far_slots(checker *k)
{
    static const int64_t formats[] = {FMLA_KV_BF16, FMLA_KV_V32, FMLA_KV_V4, FMLA_KV_V41, FMLA_KV_V41_PAGE};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5 && !ids_bad(&sum, far_round_trip(k, formats[i])); i++) {
    }
    return sum;
}

/* Three rows of q, kv and out that lie 2^31 elements apart: the results of the near ones, to the bit. */
static verdict far_rows(checker *k, int64_t d_qk)
{
    const int64_t apart = ((int64_t)1 << 31) + 64;
    far_block blocks[3];
    trial t;
    any_args bound;
    verdict v = trial_make(k, &t, "op=sparse_prefill,s_q=3,s_kv=3,topk=3,h_q=16,d_qk=%d,data=1", (int)d_qk);
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    problem *p = &t.p;
    const fmla_tensor *near_by[] = {&p->q, &p->kv, &p->out};
    int open = 0;
    for (; open < 3 && v == VERDICT_PASSED; open++) {
        v = far_open(k, &p->mem, (size_t)(2 * apart + near_by[open]->stride[0]) * 2, &blocks[open]);
    }
    problem_poison(p);
    if (v == VERDICT_PASSED &&
        engine_bind(&k->engine, &p->mem, FMLA_OP_SPARSE_PREFILL, &t.args, &bound) == FMLA_OK) {
        fmla_tensor *far[] = {&bound.prefill.q, &bound.prefill.kv, &bound.prefill.out};
        for (int i = 0; i < 3; i++) {
            size_t row = (size_t)near_by[i]->stride[0] * 2;
            for (int64_t r = 0; r < 3 && i < 2; r++) {
                far_write(&blocks[i], (size_t)(r * apart) * 2, (uint8_t *)near_by[i]->data + (size_t)r * row,
                          row);
            }
            far[i]->data = blocks[i].data;
            far[i]->stride[0] = apart;
        }
        v = far_call(k, &p->mem, FMLA_OP_SPARSE_PREFILL, &bound);
        for (int64_t r = 0; r < 3 && v == VERDICT_PASSED; r++) {
            size_t row = (size_t)p->out.stride[0] * 2;
            far_read(&blocks[2], (size_t)(r * apart) * 2, (uint8_t *)p->out.data + (size_t)r * row, row);
        }
        fetch(&k->engine, &p->mem, &p->lse, &bound.prefill.lse);
        fetch(&k->engine, &p->mem, &p->max_logits, &bound.prefill.max_logits);
        v = v == VERDICT_PASSED ? trial_compare(k, &t, "rows 2^31 elements apart") : v;
    }
    for (int i = 0; i < open; i++) {
        far_close(&blocks[i]);
    }
    trial_free(&t);
    return v;
}

verdict c028_far_rows(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    if (!ids_bad(&sum, far_rows(k, 576))) {
        ids_bad(&sum, far_rows(k, 512));
    }
    return sum;
}

/* ---- large batches ---- */

/* A tensor with its rows of dimension `dim` over and over, n of them. Dimensions before it have one element
 * each. */
static fmla_tensor repeated(memory *m, const fmla_tensor *t, int32_t dim, int64_t n)
{
    fmla_tensor many = *t;
    if (t->rank == 0) {
        return many;
    }
    int64_t period = t->shape[dim];
    size_t element = fmla_dtype_size((fmla_dtype)t->dtype);
    many.shape[dim] = n;
    many = memory_tensor(m, (fmla_dtype)t->dtype, t->rank, many.shape, 0, 0);
    fmla_tensor first = ids_rows(&many, dim, 0, period);
    tensor_copy(&first, t);
    size_t row = (size_t)many.stride[dim] * element;
    for (int64_t i = period; i < n; i++) {
        memcpy((uint8_t *)many.data + (size_t)i * row, (uint8_t *)many.data + (size_t)(i % period) * row,
               row);
    }
    return many;
}

/* Rows of many against the small problem's: out near, lse near. The first that differs is named. */
static verdict compare_rows(checker *k, const problem *p, const fmla_decode_args *many, int32_t dim,
                            int64_t n)
{
    int32_t lse_dim = dim == 0 ? 0 : 2;
    int64_t period = p->out.shape[dim];
    for (int64_t i = 0; i < n; i++) {
        fmla_tensor a = ids_rows(&many->out, dim, i, 1), b = ids_rows(&p->out, dim, i % period, 1);
        fmla_tensor c = ids_rows(&many->lse, lse_dim, i, 1), d = ids_rows(&p->lse, lse_dim, i % period, 1);
        char how[64];
        snprintf(how, sizeof how, "row %lld of %lld", (long long)i, (long long)n);
        size_t row = (size_t)many->out.stride[dim] * sizeof(uint16_t); /* contiguous in both */
        if (memcmp(a.data, b.data, row) != 0 && ids_near_out(k, &a, &b, how) != VERDICT_PASSED) {
            return VERDICT_FAILED;
        }
        if (ids_near_lse(k, &c, &d, how) != VERDICT_PASSED) {
            return VERDICT_FAILED;
        }
    }
    return VERDICT_PASSED;
}

/* The small problem's requests (dim 0) or query tokens (dim 1) over and over in one call of n of them. */
static verdict many_rows(checker *k, trial *t, int32_t dim, int64_t n)
{
    problem *p = &t->p;
    any_args a = t->args;
    fmla_decode_args *d = &a.decode;
    verdict v = trial_run_and_judge(k, t);
    if (v != VERDICT_PASSED) {
        return v;
    }
    memory *m = &p->mem;
    d->q = repeated(m, &d->q, dim, n);
    if (dim == 0) {
        d->block_table = repeated(m, &d->block_table, 0, n);
        d->cache_seqlens = repeated(m, &d->cache_seqlens, 0, n);
    }
    if (d->indices.rank != 0 && d->indices.stride[dim] == 0) {
        d->indices.shape[dim] = n;
    } else {
        d->indices = repeated(m, &d->indices, dim, n);
    }
    int64_t shape[3] = {dim == 0 ? n : 1, p->c.h_q, dim == 0 ? 1 : n};
    d->out = memory_tensor_4(m, FMLA_BF16, 4, shape[0], shape[2], p->c.h_q, p->c.d_v, 0, POISON_BYTE);
    d->lse = memory_tensor(m, FMLA_F32, 3, shape, 0, POISON_BYTE);
    d->max_logits = (fmla_tensor){0};
    v = ids_call(k, m, (fmla_operation)p->c.op, &a, "many rows");
    return v == VERDICT_PASSED ? compare_rows(k, p, d, dim, n) : v;
}

/* With one index row for all (an expanded table, stride 0), and with a row for each request. */
static verdict wide_batch(checker *k, bool expanded)
{
    trial t;
    verdict v = trial_make(k, &t, "op=sparse_decode,format=v41,b=7,topk=8,s_kv=30,data=1,h_q=%d",
                           k->engine.host ? 1 : 16);
    if (v == VERDICT_PASSED && expanded) {
        for (int64_t i = 0; i < 8 * 7; i++) {
            ids_index_row(&t.p, &t.p.main, i / 8)[i % 8] = ids_index_row(&t.p, &t.p.main, 0)[i % 8];
        }
        t.args.decode.indices.stride[0] = 0;
    }
    v = v == VERDICT_PASSED ? many_rows(k, &t, 0, 65600) : v;
    trial_free(&t);
    return v;
}

verdict c030_batch_beyond_16_bits(checker *k)
{
    verdict v = wide_batch(k, true);
    return v == VERDICT_PASSED ? wide_batch(k, false) : v;
}

verdict c031_large_grids(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 3; i++) {
        static const int64_t rows[] = {65600, 70000, 4100};
        int heads = i < 2 ? 1 : k->engine.host ? 16 : 128;
        trial t;
        verdict v = trial_make(k, &t, "op=dense_decode,b=%d,s_q=%d,s_kv=6,h_q=%d,data=1", i == 1 ? 7 : 1,
                               i == 1 ? 1 : 7, heads);
        v = v == VERDICT_PASSED ? many_rows(k, &t, i != 1, rows[i]) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

verdict c033_work_lists(checker *k)
{
    static const int64_t batches[] = {16384, 16385, 16600, 17000, 40000};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5; i++) {
        trial t;
        verdict v = trial_make(k, &t, "op=dense_decode,b=7,varlen=2,s_q=1,data=1,s_kv=%d,h_q=%d",
                               k->engine.host ? 7 : 32, k->engine.host ? 1 : 16);
        v = v == VERDICT_PASSED ? many_rows(k, &t, 0, batches[i]) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}
