/* SPDX-License-Identifier: MIT */
/*
 * cases_attention.c: the matrices of the attention operations. Each is the published tests' own matrix with every
 * format and our own corners added; FULL takes all of it (meant for a GPU), ALL and QUICK a fixed thinning of it,
 * scaled down to sizes that a CPU and the float64 reference can do. The corner lists are short and always taken whole.
 */
#include "problem/cases.h"

#include <stdio.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* What is run again, in turn over the cases. */
static int64_t again_in_turn(uint64_t n)
{
    static const int64_t turns[] = {AGAIN_THREADS, AGAIN_SLICES | AGAIN_TAIL, AGAIN_PAGES, AGAIN_ORDER | AGAIN_PREFILL};
    return turns[n % COUNT(turns)];
}

/* Strides, alignment, unit of lse, in turn. */
static void dress(test_case *c, uint64_t n)
{
    c->pad = (int64_t)(n / 2 % 2);
    c->misalign = n % 5 == 3 ? 1 : n % 5 == 4 ? 18 : 0;
    c->pos_inf = (int64_t)(n / 3 % 2);
    c->again = again_in_turn(n);
}

/* ---- dense decode -------------------------------------------------------------------------------------------- */

static void dense_main(case_list *list, case_set set)
{
    static const int64_t b[] = {1, 2, 6, 64}, s_q[] = {1, 2, 4}, s_k[] = {20, 140, 4096},
                         dtypes[] = {FMLA_BF16, FMLA_F16};
    static const int64_t h_q[] = {1, 3, 9, 63, 64, 126, 128}, h_kv[] = {1, 2, 3, 8};
    uint64_t n = 0;
    for (int i = 0; i < 4 * 3 * 3 * 7 * 4 * 2 * 2 * 2; i++) {
        int x = i;
        test_case c = case_default(FMLA_OP_DENSE_DECODE);
        c.varlen = x % 2, x /= 2;
        c.causal = x % 2, x /= 2;
        c.dtype = dtypes[x % 2], x /= 2;
        c.h_kv = h_kv[x % 4], x /= 4;
        c.h_q = h_q[x % 7], x /= 7;
        c.s_kv = s_k[x % 3], x /= 3;
        c.s_q = s_q[x % 3], x /= 3;
        c.b = b[x];
        c.format = c.dtype == FMLA_BF16 ? FMLA_KV_BF16 : FMLA_KV_F16;
        if (c.h_q % c.h_kv != 0 || !cases_keep(set, (uint64_t)i, 160, 36)) {
            continue;
        }
        dress(&c, n++);
        cases_add(list, set, c);
    }
    for (int i = 0; i < 7 * 4 * 2; i++) {
        test_case c = case_default(FMLA_OP_DENSE_DECODE);
        c.causal = i % 2;
        c.h_kv = h_kv[i / 2 % 4];
        c.h_q = h_q[i / 8];
        c.b = 128;
        c.s_q = 2;
        c.s_kv = 4096;
        c.varlen = c.zero_len = 1;
        if (c.h_q % c.h_kv == 0 && cases_keep(set, (uint64_t)i, 8, 3)) {
            dress(&c, n++);
            cases_add(list, set, c);
        }
    }
}

static void dense_corners(case_list *list)
{
    static const char *const texts[] = {
        "s_kv=13,page=4,h_q=16,again=16",
        "s_kv=13,page=64,h_q=16,again=16",
        "s_kv=65,page=64,h_q=16,dtype=f16,format=f16",
        "s_kv=1,page=64,h_q=1",
        "s_kv=63,page=1,h_q=33,varlen=1,b=3",
        "s_kv=300,page=480,h_q=16,b=2,pad=1",
        "s_kv=5,s_q=9,causal=1,h_q=5,b=3,varlen=1",
        "s_kv=3,s_q=8,causal=1,h_q=16,pos_inf=1",
        "s_kv=0,h_q=16,b=2",
        "b=0,h_q=16",
        "s_q=0,h_q=16,b=2",
        "s_kv=40,zero_len=1,b=7,h_q=16,sink=1",
        "s_kv=200,b=5,s_q=4,ragged=1,h_q=16,causal=1",
        "s_kv=200,b=5,s_q=4,ragged=1,h_q=16,bound=1,again=2",
        "s_kv=90,b=3,s_q=3,bound=1,h_q=16,again=2",
        "s_kv=90,b=3,no_table=1,h_q=16,again=2,varlen=1",
        "s_kv=150,h_q=16,sink=1,b=3",
        "s_kv=150,h_q=16,sink=3,b=3,base2=1",
        "s_kv=1500,h_q=16,data=1,again=1",
        "s_kv=1500,h_q=16,data=3,again=1",
        "s_kv=700,h_q=16,data=3,scale=-0.04",
        "s_kv=300,h_q=16,scale=1e-30,data=1,base2=1",
        "s_kv=300,h_q=16,d_qk=320,d_v=256",
        "s_kv=300,h_q=16,d_qk=288,d_v=256",
        "s_kv=300,h_q=16,d_qk=512,d_v=512",
        "s_kv=300,h_q=16,out=f32,b=2",
        "s_kv=300,h_q=96,d_qk=64,d_v=64,h_kv=8",
        "s_kv=2500,h_q=16,again=1,out=f32",
        "s_kv=2600,h_q=4,b=2,data=1,again=1",
        "s_kv=2500,h_q=8,s_q=3,causal=1,again=3,b=2,varlen=1",
        "s_kv=100,h_q=8,s_q=4,causal=1,again=17,b=3,varlen=1,nan=1",
        "format=v32,s_kv=1300,h_q=3,s_q=3,causal=1,again=2,b=2,varlen=1,nan=1,sink=1",
        "s_kv=77,h_q=16,s_q=3,b=2,bound=1,nan=1,h_kv=2,out=F32",
        "s_kv=60,b=4,s_q=9,ragged=1,h_q=64,causal=1,again=2",
        "s_kv=60,b=2,s_q=9,h_q=64,causal=1,again=2,nan=1",
        "format=v32,s_kv=200,h_q=16,b=3,varlen=1,again=16",
        "format=v32,s_kv=200,h_q=16,scales=1,again=16,misalign=1",
        "format=v32,s_kv=200,h_q=16,scales=2",
        "format=v4,d_qk=512,s_kv=200,h_q=16,b=2,pad=1,again=16",
        "format=v41,d_qk=512,s_kv=200,h_q=16,b=2,s_q=3,causal=1,again=18",
        "format=v41-page,d_qk=512,s_kv=200,h_q=16,page=31,pad=1",
        "format=v41,d_qk=512,s_kv=1300,h_q=128,again=1",
        "format=v41,d_qk=512,s_kv=130,h_q=64,scales=2",
        "s_kv=300,h_q=16,scale=0",
        "s_kv=300,page=64,h_q=128,scale=0,d_qk=512,d_v=512,b=2",
        "s_kv=300,page=128,h_q=64,s_q=2,causal=1,b=2,varlen=1,nan=1,again=2",
        "s_kv=2500,page=64,h_q=128,again=1,dtype=f16,format=f16",
        "s_kv=200,page=64,b=3,s_q=3,ragged=1,h_q=128,causal=1",
        "s_kv=500,page=64,h_q=100,scale=-0.04,data=3",
        "s_kv=150,page=64,h_q=100,sink=1,b=2",
    };
    for (int i = 0; i < COUNT(texts); i++) {
        cases_add_text(list, FMLA_OP_DENSE_DECODE, texts[i]);
    }
}

/* ---- sparse decode ------------------------------------------------------------------------------------------- */

typedef struct pool_size {
    int64_t s_kv, topk, page;
} pool_size;

static const int64_t pairs[][2] = {
    {FMLA_KV_V32, 0},
    {FMLA_KV_V32, FMLA_KV_V32},
    {FMLA_KV_V4, 0},
    {FMLA_KV_V4, FMLA_KV_V4},
    {FMLA_KV_V41, 0},
    {FMLA_KV_V41, FMLA_KV_V41},
    {FMLA_KV_V41, FMLA_KV_V41_FP4},
    {FMLA_KV_V41_PAGE, 0},
    {FMLA_KV_BF16, 0},
    {FMLA_KV_V41_PAGE, FMLA_KV_V41_PAGE},
    {FMLA_KV_V41_PAGE, FMLA_KV_V41_FP4_PAGE},
    {FMLA_KV_BF16, FMLA_KV_BF16},
};

static void sparse_main(case_list *list, case_set set)
{
    static const pool_size mains[] = {{512, 64, 2},     {512, 64, 64},     {512, 64, 5},    {512, 64, 69},
                                      {1024, 576, 2},   {1024, 576, 61},   {2046, 2048, 1}, {2046, 2048, 2},
                                      {2046, 2048, 64}, {2046, 2048, 576}, {512, 64, 61},   {650, 576, 53}};
    static const pool_size extras[] = {{512, 64, 5},    {512, 64, 69},     {1024, 576, 2}, {1024, 576, 123},
                                       {2046, 2048, 1}, {2046, 2048, 576}, {512, 64, 61},  {650, 576, 53}};
    static const int64_t b[] = {4, 74, 321, 1}, s_q[] = {1, 3}, h_q[] = {64, 128};
    uint64_t n = 0;
    for (int i = 0; i < COUNT(pairs) * 12 * 4 * 2 * 2 * 8; i++) {
        int x = i;
        test_case c = case_default(FMLA_OP_SPARSE_DECODE);
        c.format = pairs[x % COUNT(pairs)][0];
        c.extra = pairs[x % COUNT(pairs)][1], x /= COUNT(pairs);
        const pool_size *main_pool = &mains[x % 12];
        x /= 12;
        c.b = b[x % 4], x /= 4;
        c.s_q = s_q[x % 2], x /= 2;
        c.h_q = h_q[x % 2], x /= 2;
        const pool_size *extra_pool = &extras[x];
        if (!cases_keep(set, (uint64_t)i + 100000, 420, 75) || (c.extra == 0 && x != 0)) {
            continue;
        }
        c.d_qk = c.format == FMLA_KV_V32 || (c.format == FMLA_KV_BF16 && n % 2) ? 576 : 512;
        c.s_kv = main_pool->s_kv, c.topk = main_pool->topk, c.page = main_pool->page;
        if (c.extra != 0) {
            c.e_kv = extra_pool->s_kv, c.e_topk = extra_pool->topk, c.e_page = extra_pool->page;
        }
        c.varlen = (int64_t)(n % 4 != 0);
        c.lengths = (int64_t)(n % 3);
        c.e_lengths = c.extra ? (int64_t)(n / 3 % 3) : 0;
        c.sink = n % 2 ? SINK_MIXED : SINK_NONE;
        c.invalid = n % 7 == 5 ? 1 : n % 7 == 6 ? 3 : 0;
        c.zero_len = (int64_t)(n % 5 == 4);
        c.repeated = (int64_t)(n % 6 == 2);
        dress(&c, n++);
        cases_add(list, set, c);
    }
}

static void sparse_corners(case_list *list)
{
    static const char *const texts[] = {
        "format=v41,extra=v41,b=4,h_q=128,s_q=3,s_kv=512,topk=128,e_kv=512,e_topk=100",
        "format=v4,b=3,h_q=128,s_kv=300,topk=64,invalid=1,again=1",
        "format=v41,extra=v41-fp4,b=4,h_q=128,s_q=3,s_kv=512,topk=128,e_kv=512,e_topk=100,again=2",
        "format=v32,d_qk=576,topk=0,h_q=16",
        "format=v41,topk=0,extra=v41-fp4,e_topk=64,h_q=16,lengths=1",
        "format=v4,topk=64,h_q=16,invalid=1,sink=3,b=3",
        "format=v4,topk=64,extra=v4,e_topk=32,h_q=16,invalid=3,e_lengths=1,b=3",
        "format=v32,d_qk=576,topk=51,s_kv=300,h_q=65,sink=1,lengths=2,b=3,s_q=2,again=2",
        "format=v41,topk=2500,s_kv=2600,h_q=4,b=2,data=1,again=1",
        "format=v32,d_qk=576,topk=2051,s_kv=4000,h_q=8,again=1",
        "format=v32,d_qk=576,topk=2176,s_kv=2048,h_q=8,again=8",
        "format=v32,d_qk=576,topk=200,s_kv=400,h_q=16,scales=1,again=16",
        "format=v32,d_qk=576,topk=200,s_kv=400,h_q=16,scales=2",
        "format=v32,d_qk=576,topk=200,s_kv=400,h_q=128,scales=1,again=2",
        "format=v32,d_qk=576,topk=200,s_kv=400,h_q=64,scales=2",
        "format=v4,topk=200,s_kv=400,h_q=16,scales=2,misalign=1",
        "format=v41-page,topk=200,s_kv=400,h_q=16,scales=2,page=31",
        "format=v41,extra=v41-fp4,topk=70,e_topk=200,e_kv=400,h_q=16,scales=2,e_page=31",
        "format=v41-page,extra=v41-fp4-page,topk=70,e_topk=200,e_kv=400,h_q=16,scales=2,e_page=32,page=1",
        "format=bf16,d_qk=576,topk=300,s_kv=400,h_q=16,again=24,pad=1",
        "format=f16,dtype=f16,d_qk=576,topk=300,s_kv=400,h_q=16",
        "format=f16,dtype=f16,topk=300,s_kv=400,h_q=16,sink=1,b=2",
        "format=v41,topk=300,s_kv=400,h_q=16,out=f32",
        "format=v32,d_qk=576,b=5,s_q=4,ragged=1,topk=100,s_kv=200,h_q=16,again=2,lengths=1",
        "format=v41,b=5,s_q=4,ragged=1,topk=100,s_kv=200,h_q=16,again=3,lengths=2,sink=1",
        "format=v32,d_qk=576,topk=600,s_kv=900,h_q=16,data=1,again=8",
        "format=v41,topk=600,s_kv=900,h_q=16,data=1,again=1",
        "format=v41,topk=600,s_kv=900,h_q=16,data=2",
        "format=v4,topk=600,s_kv=900,h_q=16,data=3,base2=1",
        "format=v4,topk=600,s_kv=900,h_q=16,data=3,scale=-0.04",
        "format=v41,extra=v41-fp4,topk=40,e_topk=30,h_q=5,s_q=9,s_kv=900,e_kv=900,nan=1,again=1",
        "format=v4,topk=40,h_q=5,s_q=9,s_kv=900,nan=1,again=24",
        "format=v32,d_qk=576,topk=600,s_kv=900,h_q=128,data=1,again=8",
        "format=v41,extra=v41-fp4,topk=400,e_topk=300,s_kv=900,e_kv=900,h_q=128,data=2",
        "format=v4,topk=2048,s_kv=3000,h_q=384,b=3",
        "format=v4,topk=600,s_kv=900,h_q=128,data=3,scale=-0.04",
        "format=v4,topk=200,s_kv=400,h_q=128,scales=2,misalign=1",
        "format=v32,d_qk=576,topk=200,s_kv=400,h_q=100,scales=1,nan=1,again=16",
        "format=v41,b=9,topk=129,s_kv=500,h_q=128,lengths=2,zero_len=1,sink=1,pos_inf=1",
        "format=v41,topk=64,h_q=1,s_q=5,page=1",
        "format=v41,b=70,topk=8,s_kv=64,h_q=3,again=4",
        "format=v32,d_qk=576,topk=300,s_kv=100,h_q=16,repeated=1,again=1",
        "format=v41,topk=64,h_q=16,b=0",
        "format=v41,topk=64,h_q=16,s_q=0,b=2",
        "format=v4,topk=100,s_kv=100,h_q=16,page=256,pad=1",
    };
    for (int i = 0; i < COUNT(texts); i++) {
        cases_add_text(list, FMLA_OP_SPARSE_DECODE, texts[i]);
    }
}

/* ---- sparse prefill ------------------------------------------------------------------------------------------ */

static void prefill_main(case_list *list, case_set set)
{
    static const int64_t sizes[][2] = {{128, 128},  {256, 256}, {512, 512}, {592, 128}, {1840, 256}, {1592, 384},
                                       {1521, 512}, {95, 128},  {153, 256}, {114, 384}, {32, 2048},  {64, 8192}};
    static const int64_t s_q[] = {1, 62, 213}, h_q[] = {64, 128}, d_qk[] = {512, 576};
    uint64_t n = 0;
    for (int i = 0; i < 12 * 3 * 2 * 2 * 2 * 2 * 2; i++) {
        int x = i;
        test_case c = case_default(FMLA_OP_SPARSE_PREFILL);
        c.s_kv = sizes[x % 12][0];
        c.topk = sizes[x % 12][1], x /= 12;
        c.s_q = s_q[x % 3], x /= 3;
        c.h_q = h_q[x % 2], x /= 2;
        c.d_qk = d_qk[x % 2], x /= 2;
        c.sink = x % 2 ? SINK_MIXED : SINK_NONE, x /= 2;
        c.lengths = x % 2, x /= 2;
        c.data = x % 2 ? DATA_AMPLIFIED : DATA_PLAIN;
        if (cases_keep(set, (uint64_t)i + 200000, 32, 8)) {
            dress(&c, n++);
            cases_add(list, set, c);
        }
    }
    for (int i = 0; i < 4 * 2 * 2 * 2; i++) {
        static const int64_t poisoned[][3] = {{1, 128, 128}, {1, 256, 256}, {1234, 4321, 4096}, {4096, 2048, 2048}};
        test_case c = case_default(FMLA_OP_SPARSE_PREFILL);
        c.s_q = poisoned[i % 4][0];
        c.s_kv = poisoned[i % 4][1];
        c.topk = poisoned[i % 4][2];
        c.h_q = h_q[i / 4 % 2];
        c.d_qk = d_qk[i / 8 % 2];
        c.data = i / 16 ? DATA_AMPLIFIED : DATA_PLAIN;
        c.sink = SINK_MIXED;
        c.lengths = 1;
        c.invalid = 2;
        if (cases_keep(set, (uint64_t)i + 210000, 8, 2)) {
            dress(&c, n++);
            cases_add(list, set, c);
        }
    }
}

static void prefill_corners(case_list *list, case_set set)
{
    static const char *const texts[] = {
        "s_q=0,topk=64,h_q=16",
        "s_q=5,topk=0,h_q=16,pos_inf=1",
        "s_q=3,s_kv=0,topk=7,h_q=16",
        "s_q=3,s_kv=1,topk=7,h_q=16",
        "s_q=40,s_kv=90,topk=33,h_q=1,again=16",
        "s_q=9,s_kv=90,topk=33,h_q=96,h_kv=3,again=2",
        "s_q=9,s_kv=90,topk=33,h_q=7,h_kv=7",
        "s_q=20,s_kv=300,topk=200,h_q=16,dtype=f16,format=f16,again=8",
        "s_q=20,s_kv=300,topk=200,h_q=16,out=f32,sink=3",
        "s_q=20,s_kv=300,topk=200,h_q=16,base2=1,pos_inf=0,invalid=2",
        "s_q=20,s_kv=300,topk=200,h_q=16,data=1,again=1",
        "s_q=20,s_kv=300,topk=200,h_q=16,data=3",
        "s_q=3,s_kv=2600,topk=2500,h_q=4,data=1,again=1",
        "s_q=8,s_kv=300,topk=400,h_q=16,repeated=1,again=4",
        "s_q=30,s_kv=900,topk=40,h_q=20,again=17,nan=1",
        "s_q=300,s_kv=16,topk=4,h_q=2,again=4",
        "s_q=20,s_kv=300,topk=200,h_q=16,d_qk=320,d_v=256,pad=1",
    };
    for (int i = 0; i < COUNT(texts); i++) {
        cases_add_text(list, FMLA_OP_SPARSE_PREFILL, texts[i]);
    }
    if (set == CASES_FULL) {
        test_case c = case_default(FMLA_OP_SPARSE_PREFILL);
        c.s_q = 70000;
        c.s_kv = c.topk = 256;
        c.h_q = 64;
        cases_add(list, set, c);
    }
}

/* ---- fused --------------------------------------------------------------------------------------------------- */

static const int64_t fused_sizes[][2] = {{64, 64},    {128, 128},   {256, 256}, {512, 512}, {592, 120},   {1840, 240},
                                         {1521, 600}, {3412, 2896}, {95, 152},  {153, 264}, {2345, 5136}, {32, 2048}};

/* sink, all invalid, lengths */
static const int64_t fused_flags[][3] = {{0, 0, 0}, {1, 0, 0}, {1, 1, 0}, {1, 0, 1}, {0, 1, 1}};

static void fused_dress(test_case *c, uint64_t n)
{
    c->pos_inf = (int64_t)(n / 3 % 2);
    c->norm = (int64_t)(n % 2);
    c->plain_q = (int64_t)(n % 7 == 3);
    c->neox = (int64_t)(n % 7 == 5);
    c->group = n % 3 ? 8 : 0;
    c->again = again_in_turn(n);
}

static void fused_prefill(case_list *list, case_set set)
{
    static const int64_t s_q[] = {1, 184, 2123}, h_q[] = {64, 128};
    uint64_t n = 0;
    for (int i = 0; i < 12 * 5 * 3 * 2 * 2; i++) {
        int x = i;
        test_case c = case_default(FMLA_OP_FUSED_PREFILL);
        c.s_kv = fused_sizes[x % 12][0];
        c.topk = fused_sizes[x % 12][1], x /= 12;
        c.sink = fused_flags[x % 5][0] ? SINK_MIXED : SINK_NONE;
        c.invalid = fused_flags[x % 5][1];
        c.lengths = fused_flags[x % 5][2], x /= 5;
        c.s_q = s_q[x % 3], x /= 3;
        c.h_q = h_q[x % 2], x /= 2;
        c.data = x ? DATA_AMPLIFIED : DATA_PLAIN;
        if (cases_keep(set, (uint64_t)i + 300000, 60, 12)) {
            fused_dress(&c, n++);
            cases_add(list, set, c);
        }
    }
}

static void fused_decode(case_list *list, case_set set)
{
    static const int64_t batches[][2] = {{1, 1}, {69, 3}, {19, 80}}, h_q[] = {64, 128};
    static const int64_t extras[][2] = {{0, 0}, {32, 2048}, {512, 512}, {3412, 2896}};
    uint64_t n = 0;
    for (int i = 0; i < 12 * 5 * 3 * 2 * 4 * 6; i++) {
        int x = i;
        test_case c = case_default(FMLA_OP_FUSED_DECODE);
        c.s_kv = fused_sizes[x % 12][0];
        c.topk = fused_sizes[x % 12][1], x /= 12;
        c.sink = fused_flags[x % 5][0] ? SINK_MIXED : SINK_NONE;
        c.invalid = fused_flags[x % 5][1];
        c.lengths = fused_flags[x % 5][2], x /= 5;
        c.b = batches[x % 3][0];
        c.s_q = batches[x % 3][1], x /= 3;
        c.h_q = h_q[x % 2], x /= 2;
        c.e_kv = extras[x % 4][0] ? extras[x % 4][0] : 64;
        c.e_topk = extras[x % 4][1], x /= 4;
        static const int64_t formats[][2] = {{FMLA_KV_V41, FMLA_KV_V41},
                                             {FMLA_KV_V41, FMLA_KV_V41_FP4},
                                             {FMLA_KV_V4, FMLA_KV_V4},
                                             {FMLA_KV_V41_PAGE, FMLA_KV_V41_PAGE},
                                             {FMLA_KV_V41_PAGE, FMLA_KV_V41_FP4_PAGE},
                                             {FMLA_KV_BF16, FMLA_KV_BF16}};
        c.format = formats[x][0];
        c.extra = c.e_topk ? formats[x][1] : 0;
        c.page = 64 + c.topk % 8;
        c.e_page = 128 + c.e_topk % 8;
        c.e_lengths = c.e_topk ? (i / 7) % 2 : 0;
        if (cases_keep(set, (uint64_t)i + 400000, 480, 110)) {
            fused_dress(&c, n++);
            cases_add(list, set, c);
        }
    }
}

static void fused_corners(case_list *list, fmla_operation op)
{
    static const char *const texts[] = {
        "s_q=0,topk=8,h_q=8",
        "s_q=3,topk=0,h_q=8,group=4",
        "s_q=5,topk=64,h_q=8,sink=3,invalid=2",
        "s_q=5,topk=64,h_q=16,norm=1,group=1",
        "s_q=6,topk=64,h_q=3,norm=1,group=1,again=2",
        "s_q=2,topk=600,s_kv=900,h_q=16,norm=1,data=1,again=1,group=8",
        "s_q=9,topk=40,s_kv=900,h_q=8,nan=1,again=2",
        "s_q=2,topk=600,s_kv=900,h_q=16,data=2,again=1",
        "s_q=2,topk=2300,s_kv=2400,h_q=4,data=1,again=1",
        "s_q=7,topk=90,s_kv=100,h_q=32,plain_q=1,neox=1,sink=1,lengths=1,again=10",
        "s_q=7,topk=90,s_kv=100,h_q=32,plain_q=1,group=8,again=16,repeated=1",
        "s_q=2,topk=166,s_kv=170,h_q=64,norm=1,again=32", /* decode as prefill does it, from codes */
    };
    for (int i = 0; i < COUNT(texts); i++) {
        char text[256];
        snprintf(text, sizeof text, "%s%s", op == FMLA_OP_FUSED_DECODE ? "format=v41," : "", texts[i]);
        cases_add_text(list, op, text);
    }
    if (op == FMLA_OP_FUSED_DECODE) {
        cases_add_text(list, op, "format=v4,extra=v4,topk=66,s_kv=70,e_topk=50,e_kv=90,h_q=128,again=32");
    }
}

/* ---- multi-head attention ------------------------------------------------------------------------------------ */

static void mha_main(case_list *list, case_set set, fmla_operation op)
{
    static const int64_t sizes[][2] = {{4096, 4096}, {8192, 8192}, {65, 130}, {100, 37}, {17, 17}};
    static const int64_t heads[][2] = {{128, 128}, {32, 4}, {32, 32}, {16, 4}, {12, 3}};
    uint64_t n = 0;
    for (int i = 0; i < 5 * 5 * 2 * 2 * 2; i++) {
        int x = i;
        test_case c = case_default(op);
        c.s_q = sizes[x % 5][0];
        c.s_kv = sizes[x % 5][1], x /= 5;
        c.h_q = heads[x % 5][0];
        c.h_kv = heads[x % 5][1], x /= 5;
        c.varlen = x % 2, x /= 2;
        c.causal = x % 2, x /= 2;
        c.d_qk = x ? 192 : 128;
        c.b = 2;
        if (cases_keep(set, (uint64_t)i + 500000, 12, 3)) {
            dress(&c, n++);
            c.again = n % 2 ? AGAIN_THREADS : 0;
            if (set != CASES_FULL) {
                c.h_q = c.h_q > 32 ? 8 : c.h_q / 4;
                c.h_kv = c.h_kv > 32 ? 8 : c.h_kv > 3 ? c.h_kv / 4 : 1;
                c.s_q = c.s_q > 200 ? 150 + c.s_q / 1024 : c.s_q;
                c.s_kv = c.s_kv > 200 ? 150 + c.s_kv / 1024 : c.s_kv;
            }
            cases_add(list, set, c);
        }
    }
}

static void mha_corners(case_list *list, fmla_operation op)
{
    static const char *const texts[] = {
        "b=3,s_q=8,s_kv=3,causal=1,h_q=2,h_kv=2",
        "b=3,s_q=8,s_kv=3,causal=1,h_q=2,h_kv=1,d_qk=128,pos_inf=1",
        "b=6,s_q=20,s_kv=30,zero_len=1,varlen=1,h_q=4,h_kv=2,again=1",
        "b=2,s_q=0,s_kv=5,h_q=2,h_kv=2",
        "b=2,s_q=5,s_kv=0,h_q=2,h_kv=2",
        "b=1,s_q=1,s_kv=1,h_q=1,h_kv=1",
        "b=3,s_q=76,s_kv=1,varlen=1,causal=1,h_q=2,h_kv=2,data=1",
        "b=2,s_q=130,s_kv=131,h_q=3,h_kv=3,data=1,causal=1,pad=1,again=1",
        "b=1,s_q=70,s_kv=200,h_q=4,h_kv=1,dtype=f16,causal=1",
        "b=1,s_q=33,s_kv=64,h_q=2,h_kv=2,scale=-0.1",
        "b=1,s_q=64,s_kv=64,h_q=2,h_kv=2,d_qk=64,d_v=64,causal=1",
        "b=2,s_q=70,s_kv=90,h_q=2,h_kv=2,causal=1,nan=1",
        "b=1,s_q=300,s_kv=300,h_q=2,h_kv=1,causal=1,again=1",
    };
    for (int i = 0; i < COUNT(texts); i++) {
        cases_add_text(list, op, texts[i]);
    }
}

void cases_attention(case_list *list, case_set set, int operation)
{
    bool all = operation < 0;
    if (all || operation == FMLA_OP_DENSE_DECODE) {
        dense_main(list, set);
        dense_corners(list);
    }
    if (all || operation == FMLA_OP_SPARSE_DECODE) {
        sparse_main(list, set);
        sparse_corners(list);
    }
    if (all || operation == FMLA_OP_SPARSE_PREFILL) {
        prefill_main(list, set);
        prefill_corners(list, set);
    }
    if (all || operation == FMLA_OP_FUSED_PREFILL) {
        fused_prefill(list, set);
        fused_corners(list, FMLA_OP_FUSED_PREFILL);
    }
    if (all || operation == FMLA_OP_FUSED_DECODE) {
        fused_decode(list, set);
        fused_corners(list, FMLA_OP_FUSED_DECODE);
    }
    for (int op = FMLA_OP_MHA_FORWARD; op <= FMLA_OP_MHA_BACKWARD; op++) {
        if (all || operation == op) {
            mha_main(list, set, (fmla_operation)op);
            mha_corners(list, (fmla_operation)op);
        }
    }
}
