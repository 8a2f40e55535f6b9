/* SPDX-License-Identifier: MIT */
/* ids_tokens.c: faults about who is attended and who is not, and about calls with nothing in them. */
#include <limits.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "check/ids.h"
#include "problem/numbers.h"

verdict c001_page_tail(checker *k)
{
    static const uint16_t patterns[] = {PATTERN_BF16_INF, 0, PATTERN_NAN, PATTERN_HUGE, PATTERN_BF16_NAN};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 2 * IDS_DENSE_FORMATS; i++) {
        trial t;
        verdict v = trial_make(k, &t, "op=dense_decode,b=1,h_q=16,s_q=1,s_kv=13,page=%d,%s", i % 2 ? 64 : 4,
                               ids_dense_format(i / 2));
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        for (int j = 0; j < 5 && v == VERDICT_PASSED; j++) {
            ids_fill_unread(&t.p.main, patterns[j]);
            v = trial_same(k, &t, "other bytes in slots that nobody attends");
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

/* Lanes past each row's length get one number. */
static void fill_lanes(const problem *p, const scope *s, int32_t number)
{
    for (int64_t t = 0; t < p->tokens; t++) {
        for (int64_t i = scope_count(p, s, t); i < s->topk; i++) {
            ids_index_row(p, s, t)[i] = number;
        }
    }
}

static int32_t unread_slot(const scope *s)
{
    int64_t slot = cache_slots(&s->cache) - 1;
    while (slot > 0 && s->used[slot]) {
        slot--;
    }
    return (int32_t)slot;
}

verdict c003_lanes_past_the_length(checker *k)
{
    static const char *const texts[] = {
        "op=sparse_decode,format=v4,extra=v4,lengths=2,e_lengths=2,page=16,e_page=7,e_topk=24,e_kv=70",
        "op=sparse_decode,format=v41,extra=v41-fp4,lengths=1,e_lengths=2,e_topk=24,e_kv=70",
        "op=sparse_prefill,lengths=1"};
    static const uint16_t rubbish[] = {PATTERN_NAN, PATTERN_HUGE, PATTERN_BF16_INF};
    static const int s_q[] = {1, 64, 65, 256};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 12; i++) {
        trial t;
        verdict v = trial_make(k, &t, "%s,h_q=3,s_q=%d,topk=40,s_kv=90", texts[i / 4], s_q[i % 4]);
        scope *scopes[2] = {&t.p.main, &t.p.extra};
        for (int s = 0; s < 2 && v == VERDICT_PASSED; s++) {
            fill_lanes(&t.p, scopes[s], -1);
        }
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        for (int n = 0; n < 6 && v == VERDICT_PASSED; n++) {
            for (int s = 0; s < 2; s++) {
                /* Slots that nobody attends hold rubbish; where there is none, any slot serves. */
                int32_t slot = scopes[s]->used ? unread_slot(scopes[s]) : 0;
                const int32_t numbers[] = {slot, slot, slot, INT_MAX, -123456789, TABLE_RUBBISH};
                if (n < 3 && scopes[s]->used && !scopes[s]->used[slot]) {
                    ids_fill_slot(&scopes[s]->cache, slot, rubbish[n]);
                }
                fill_lanes(&t.p, scopes[s], numbers[n]);
            }
            v = trial_same(k, &t, "other lanes past the length");
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

/* out and lse of one query token: NaN in all elements, or finite. */
static verdict row_is(checker *k, const problem *p, int64_t token, bool poisoned, const char *how)
{
    for (int64_t h = 0; h < p->c.h_q; h++) {
        double lse = number_get(p->lse.data, FMLA_F32, problem_lse_offset(p, &p->lse, token, h));
        for (int64_t d = 0; d < p->c.d_v; d++) {
            double x = number_get(p->out.data, p->out.dtype, problem_out_offset(p, token, h) + d);
            if (poisoned ? !isnan(x) || !isnan(lse) : !isfinite(x) || !isfinite(lse)) {
                return check_fail(k, "%s: query token %lld, head %lld, dim %lld is %g, lse %g", how,
                                  (long long)token, (long long)h, (long long)d, x, lse);
            }
        }
    }
    return VERDICT_PASSED;
}

/* Request 0: its last token is NaN, which only the last of its causal queries sees. Request 1: all tokens are
 * NaN. */
static verdict poison_requests(checker *k, trial *t)
{
    problem *p = &t->p;
    verdict v = trial_run_and_judge(k, t);
    if (v != VERDICT_PASSED) {
        return v;
    }
    fmla_tensor out = ids_copy(&p->mem, &p->out), lse = ids_copy(&p->mem, &p->lse);
    int64_t s_q = p->c.s_q, last = scope_count(p, &p->main, s_q - 1) - 1;
    for (int64_t j = 0; j < scope_count(p, &p->main, 2 * s_q - 1); j++) {
        ids_fill_slot(&p->main.cache, scope_slot(p, &p->main, s_q, 0, j), PATTERN_NAN);
    }
    ids_fill_slot(&p->main.cache, scope_slot(p, &p->main, 0, 0, last), PATTERN_NAN);
    v = trial_run(k, t);
    for (int64_t i = 0; i < p->tokens && v == VERDICT_PASSED; i++) {
        bool poisoned = p->request[i] == 1 || i == s_q - 1;
        v = row_is(k, p, i, poisoned, "NaN in other requests' tokens and behind the causal bound");
        fmla_tensor a = ids_rows(&p->out, 0, p->request[i], 1), b = ids_rows(&out, 0, p->request[i], 1);
        fmla_tensor c = ids_rows(&p->lse, 0, p->request[i], 1), d = ids_rows(&lse, 0, p->request[i], 1);
        a = ids_rows(&a, 1, p->inner[i], 1), b = ids_rows(&b, 1, p->inner[i], 1);
        c = ids_rows(&c, 2, p->inner[i], 1), d = ids_rows(&d, 2, p->inner[i], 1);
        if (v == VERDICT_PASSED && !poisoned && (!ids_same_bits(&a, &b) || !ids_same_bits(&c, &d))) {
            v = check_fail(k, "query token %lld changed although no token that it attends did", (long long)i);
        }
    }
    return v;
}

verdict c004_nan_codes(checker *k)
{
    static const char *const formats[] = {"v32,d_qk=576", "v4,d_qk=512", "v41,d_qk=512", "v41-page,d_qk=512"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 8; i++) {
        trial t;
        verdict v =
            trial_make(k, &t, "op=dense_decode,b=3,s_q=4,causal=1,varlen=1,h_q=3,page=16,s_kv=%d,format=%s",
                       i / 4 ? 700 : 50, formats[i % 4]);
        v = v == VERDICT_PASSED ? poison_requests(k, &t) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

/* Lane 0, the last lane, one in the middle, and all lanes of the last row. */
static void put_invalid(const problem *p, const scope *s, int32_t number)
{
    for (int64_t t = 0; t < p->tokens; t++) {
        int32_t *row = ids_index_row(p, s, t);
        row[0] = row[s->topk / 2] = row[s->topk - 1] = number;
        for (int64_t i = 0; i < s->topk && t == p->tokens - 1; i++) {
            row[i] = number;
        }
    }
}

verdict c006_invalid_indices(checker *k)
{
    static const char *const texts[] = {"op=sparse_prefill,h_q=16,d_qk=576",
                                        "op=sparse_prefill,h_q=64,d_qk=512",
                                        "op=sparse_decode,format=v41,h_q=16,page=16",
                                        "op=sparse_decode,format=v32,d_qk=576,h_q=16,page=16,b=2",
                                        "op=fused_prefill,h_q=16",
                                        "op=fused_decode,format=v41,h_q=16"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 6; i++) {
        trial t;
        verdict v = trial_make(k, &t, "%s,s_q=5,s_kv=90,topk=64", texts[i]);
        if (v == VERDICT_PASSED) {
            put_invalid(&t.p, &t.p.main, -1);
            v = trial_run_and_judge(k, &t);
        }
        for (int n = 0; n < 6 && v == VERDICT_PASSED; n++) {
            int64_t slots = cache_slots(&t.p.main.cache);
            const int64_t numbers[] = {-2, INT_MIN, slots, slots + 1, TABLE_RUBBISH, INT_MAX};
            put_invalid(&t.p, &t.p.main, (int32_t)numbers[n]);
            v = trial_same(k, &t, "another number for \"no token\"");
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

/* Positions to slots with rubbish in all table entries that no position needs. */
static verdict convert_past_the_table(checker *k)
{
    static const int32_t rubbish[] = {-1, INT_MAX, TABLE_RUBBISH};
    memory m = {0};
    any_args a;
    memset(&a, 0, sizeof a);
    a.indices_convert = (fmla_indices_convert_args)FMLA_INDICES_CONVERT_ARGS_INIT;
    fmla_indices_convert_args *c = &a.indices_convert;
    c->page_size = 8;
    c->positions = memory_tensor_4(&m, FMLA_I32, 3, 2, 3, 16, 0, 0, 0);
    c->block_table = memory_tensor_4(&m, FMLA_I32, 2, 2, 6, 0, 0, 0, 0);
    c->indices = memory_tensor_4(&m, FMLA_I32, 3, 2, 3, 16, 0, 0, POISON_BYTE);
    verdict v = VERDICT_PASSED;
    for (int n = 0; n < 3 && v == VERDICT_PASSED; n++) {
        for (int64_t i = 0; i < 2 * 6; i++) {
            ((int32_t *)c->block_table.data)[i] = i % 6 < 3 ? (int32_t)(11 * i + 5) : rubbish[n];
        }
        for (int64_t i = 0; i < 2 * 3 * 16; i++) {
            ((int32_t *)c->positions.data)[i] = (int32_t)(i % 7 == 0 ? -1 : i * 5 % 24);
        }
        v = ids_call(k, &m, FMLA_OP_INDICES_CONVERT, &a, "positions to slots");
        for (int64_t i = 0; i < 2 * 3 * 16 && v == VERDICT_PASSED; i++) {
            int32_t position = ((int32_t *)c->positions.data)[i], slot = ((int32_t *)c->indices.data)[i];
            int32_t want =
                position < 0 ? -1 : (int32_t)((11 * (i / 48 * 6 + position / 8) + 5) * 8 + position % 8);
            v = slot == want ? v : check_fail(k, "position %d became slot %d, not %d", position, slot, want);
        }
    }
    memory_free(&m);
    return v;
}

verdict c007_table_past_the_length(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < IDS_DENSE_FORMATS; i++) {
        trial t;
        verdict v = trial_make(
            k, &t, "op=dense_decode,b=5,varlen=1,zero_len=1,s_q=2,causal=1,h_q=4,s_kv=70,page=16,%s",
            ids_dense_format(i));
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        for (int n = 0; n < 4 && v == VERDICT_PASSED; n++) {
            scope *s = &t.p.main;
            for (int64_t r = 0; r < t.p.batch; r++) {
                for (int64_t j = (s->seqlen[r] + 15) / 16; j < s->block_table.shape[1]; j++) {
                    const int64_t numbers[] = {-1, INT_MAX, INT_MIN, (r * 7919 + j * 104729) % 100000007};
                    tensor_set(&s->block_table, r, j, 0, 0, (double)numbers[n]);
                }
            }
            v = trial_same(k, &t, "other entries behind the needed pages");
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            return sum;
        }
    }
    ids_bad(&sum, convert_past_the_table(k));
    return sum;
}

/* Sparse prefill in pieces; an empty one among them. */
static verdict prefill_in_pieces(checker *k, trial *t, const int64_t *pieces, int count)
{
    verdict v = VERDICT_PASSED;
    problem_poison(&t->p);
    for (int64_t i = 0, first = 0; i < count && v == VERDICT_PASSED; first += pieces[i], i++) {
        any_args a = t->args;
        fmla_tensor *rows[] = {&a.prefill.q, &a.prefill.indices, &a.prefill.out, &a.prefill.lse,
                               &a.prefill.max_logits};
        for (int j = 0; j < 5; j++) {
            *rows[j] = ids_rows(rows[j], 0, first, pieces[i]);
        }
        v = ids_call(k, &t->p.mem, FMLA_OP_SPARSE_PREFILL, &a, pieces[i] ? "a piece" : "an empty piece");
    }
    return v == VERDICT_PASSED ? trial_compare(k, t, "in pieces, the last one empty") : v;
}

verdict c009_empty_chunk(checker *k)
{
    static const int64_t pieces[] = {8, 8, 0, 8, 8, 3, 0};
    trial t;
    verdict v = trial_make(k, &t, "op=sparse_prefill,s_q=35,s_kv=80,topk=33,h_q=64,d_qk=512");
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    v = v == VERDICT_PASSED ? prefill_in_pieces(k, &t, pieces, 7) : v;
    trial_free(&t);
    return v;
}

verdict c010_mixed_step_without_prefill(checker *k)
{
    const int64_t s_kv = 161000;
    memory m = {0};
    any_args a;
    memset(&a, 0, sizeof a);
    a.prefill = (fmla_prefill_args)FMLA_PREFILL_ARGS_INIT;
    a.prefill.q = fmla_tensor_3d(NULL, FMLA_BF16, 0, 8, 576);
    a.prefill.kv = fmla_tensor_3d(memory_take(&m, (size_t)s_kv * 576 * 2, 0), FMLA_BF16, s_kv, 1, 576);
    a.prefill.indices = fmla_tensor_2d(NULL, FMLA_I32, 0, 2048);
    a.prefill.out = fmla_tensor_3d(NULL, FMLA_BF16, 0, 8, 512);
    a.prefill.lse = fmla_tensor_2d(NULL, FMLA_F32, 0, 8);
    verdict v = ids_case(k, "op=dense_decode,b=32,h_q=8,s_kv=150,varlen=1,s_q=2,causal=1");
    v = v == VERDICT_PASSED ? ids_call(k, &m, FMLA_OP_SPARSE_PREFILL, &a, "a prefill of no rows") : v;
    v = v == VERDICT_PASSED
            ? ids_case(k, "op=dense_decode,b=32,h_q=8,s_kv=150,varlen=1,s_q=2,causal=1,seed=3")
            : v;
    memory_free(&m);
    return v;
}

/* Runs, with standard output and error going to a file; *written: how many bytes did. */
static verdict run_captured(checker *k, trial *t, long *written)
{
    FILE *file = tmpfile();
    if (file == NULL) {
        return check_fail(k, "no temporary file to catch messages in");
    }
    fflush(stdout);
    fflush(stderr);
    int out = dup(1), err = dup(2);
    dup2(fileno(file), 1);
    dup2(fileno(file), 2);
    verdict v = trial_run(k, t);
    fflush(stdout);
    fflush(stderr);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    fseek(file, 0, SEEK_END);
    *written = ftell(file);
    fclose(file);
    return v;
}

/* cu_seqlens of a packed problem of one sequence, cut anew. */
static void cut_sequences(problem *p, fmla_tensor *cu, const int32_t *starts, int64_t n)
{
    *cu = memory_tensor_4(&p->mem, FMLA_I32, 1, n + 1, 0, 0, 0, 0, 0);
    memcpy(cu->data, starts, (size_t)(n + 1) * sizeof *starts);
    p->batch = n;
}

verdict c012_segments_of_no_tokens(checker *k)
{
    static const int32_t q[] = {0, 0, 5, 5, 9}, kv[] = {0, 3, 3, 10, 17};
    trial t;
    long written = 0;
    verdict v = trial_make(k, &t, "op=mha_forward,b=1,s_q=9,s_kv=17,h_q=4,h_kv=2,causal=1");
    if (v == VERDICT_PASSED) {
        cut_sequences(&t.p, &t.p.cu_seqlens_q, q, 4);
        cut_sequences(&t.p, &t.p.cu_seqlens_kv, kv, 4);
        problem_args(&t.p, &t.args);
        v = run_captured(k, &t, &written);
    }
    v = v == VERDICT_PASSED ? trial_judge(k, &t) : v;
    v = v == VERDICT_PASSED && written != 0 ? check_fail(k, "%ld bytes were printed", written) : v;
    v = v == VERDICT_PASSED ? trial_same(k, &t, "a second run") : v;
    trial_free(&t);
    return v;
}

/* An extra cache that exists, without a page. */
static verdict no_pages(checker *k, int64_t h_q)
{
    trial t;
    verdict v =
        trial_make(k, &t,
                   "op=sparse_decode,format=v4,extra=v4,b=3,s_q=6,topk=16,page=16,e_topk=16,invalid=3,"
                   "h_q=%d",
                   (int)h_q);
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    if (v == VERDICT_PASSED) {
        t.args.decode.extra_kv.num_pages = 0;
        t.args.decode.extra_kv.data = NULL;
        v = trial_same(k, &t, "an extra cache of no pages");
    }
    trial_free(&t);
    return v;
}

verdict c013_shapes_of_two_caches(checker *k)
{
    static const char *const extras[] = {"", ",extra=v4,e_kv=0,e_topk=16", ",extra=v4,e_topk=16,e_lengths=1",
                                         ",extra=v4,e_topk=0"};
    static const int b[] = {0, 1, 3}, s_q[] = {1, 6, 8}, h_q[] = {16, 128};
    verdict sum = VERDICT_NOT_OFFERED;
    double budget = k->budget;
    k->budget = 4e5;
    for (int i = 0; i < 3 * 3 * 2 * 4; i++) {
        verdict v = ids_case(k, "op=sparse_decode,format=v4,topk=16,page=16,b=%d,s_q=%d,h_q=%d%s,seed=%d",
                             b[i % 3], s_q[i / 3 % 3], h_q[i / 9 % 2], extras[i / 18], i);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    k->budget = budget;
    for (int i = 0; i < 2 && sum == VERDICT_PASSED; i++) {
        ids_bad(&sum, no_pages(k, h_q[i]));
    }
    return sum;
}

static void empty_scope(const problem *p, const scope *s, bool by_length)
{
    for (int64_t i = 0; i < p->batch; i++) {
        ((int32_t *)s->length.data)[i] = by_length ? 0 : (int32_t)s->topk;
    }
    for (int64_t t = 0; t < p->tokens; t++) {
        for (int64_t i = 0; i < s->topk && !by_length; i++) {
            ids_index_row(p, s, t)[i] = -1;
        }
    }
}

verdict c015_rows_of_padding(checker *k)
{
    static const double sinks[] = {0, 5, 1e4};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 3 * 2 * 3; i++) {
        int empty = 1 + i % 3; /* bit 0: main, bit 1: extra */
        trial t;
        verdict v = trial_make(k, &t,
                               "op=sparse_decode,format=v41,extra=v41-fp4,b=3,s_q=2,h_q=4,topk=16,e_topk=16,"
                               "lengths=1,e_lengths=1,sink=2");
        if (v == VERDICT_PASSED) {
            for (int64_t h = 0; h < 4; h++) {
                ((float *)t.p.sink.data)[h] = (float)sinks[i / 6];
            }
            if (empty & 1) {
                empty_scope(&t.p, &t.p.main, i / 3 % 2);
            }
            if (empty & 2) {
                empty_scope(&t.p, &t.p.extra, i / 3 % 2);
            }
            v = trial_run_and_judge(k, &t);
        }
        if (v == VERDICT_PASSED && empty == 3) {
            v = ids_all(k, &t.p.out, 0, "out of rows without a token");
            v = v == VERDICT_PASSED ? ids_all(k, &t.p.lse, -(double)INFINITY, "lse of rows without a token")
                                    : v;
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

verdict c085_infinite_sinks(checker *k)
{
    static const char *const texts[] = {
        "op=dense_decode,b=4,zero_len=1,s_kv=70,s_q=2,causal=1",
        "op=dense_decode,format=v32,b=4,zero_len=1,s_kv=1500",
        "op=sparse_decode,format=v41,extra=v41-fp4,b=4,s_q=2,topk=40,e_topk=20,lengths=1,zero_len=1",
        "op=sparse_decode,format=v4,b=2,topk=700,s_kv=900", "op=sparse_prefill,s_q=9,topk=40,invalid=2"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5; i++) {
        trial t;
        verdict v = trial_make(k, &t, "%s,h_q=6", texts[i]);
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        if (v == VERDICT_PASSED) {
            problem *p = &t.p;
            fmla_tensor out = ids_copy(&p->mem, &p->out), lse = ids_copy(&p->mem, &p->lse);
            int32_t head = p->out.rank - 2;
            p->sink = memory_tensor_4(&p->mem, FMLA_F32, 1, 6, 0, 0, 0, 0, 0);
            for (int64_t h = 0; h < 6; h++) {
                ((float *)p->sink.data)[h] = h % 2 ? INFINITY : -INFINITY;
            }
            problem_args(p, &t.args);
            v = trial_run(k, &t);
            for (int64_t h = 0; h < 6 && v == VERDICT_PASSED; h++) {
                fmla_tensor with = ids_rows(&p->out, head, h, 1), without = ids_rows(&out, head, h, 1);
                v = h % 2 ? ids_all(k, &with, 0, "out with a sink of +inf")
                          : ids_near(k, &with, &without, 0, 0, "out with a sink of -inf");
            }
            v = v == VERDICT_PASSED ? ids_near(k, &p->lse, &lse, 0, 0, "lse with infinite sinks") : v;
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}
