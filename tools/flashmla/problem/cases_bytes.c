/* SPDX-License-Identifier: MIT */
/*
 * cases_bytes.c: cases of the operations that are exact, and of merge. Fields in other uses: problem/cases.h,
 * check/small.c.
 */
#include "problem/cases.h"

#include <stdio.h>

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

static const int64_t formats[] = {FMLA_KV_BF16, FMLA_KV_F16,      FMLA_KV_V32,     FMLA_KV_V4,
                                  FMLA_KV_V41,  FMLA_KV_V41_PAGE, FMLA_KV_V41_FP4, FMLA_KV_V41_FP4_PAGE};

static int64_t width_of(int64_t format, int i)
{
    return format == FMLA_KV_V32 || (format <= FMLA_KV_F16 && i % 2) ? 576 : 512;
}

/* Every format, source dtype, kind of data and kind of slots, with page sizes and strides in turn. */
static void transcode(case_list *list, case_set set, fmla_operation op)
{
    static const int64_t dtypes[] = {FMLA_BF16, FMLA_F16, FMLA_F32}, pages[] = {64, 1, 31, 32, 5, 256};
    for (int i = 0; i < COUNT(formats) * 3 * 2 * 3; i++) {
        int x = i;
        test_case c = case_default(op);
        c.format = formats[x % COUNT(formats)], x /= COUNT(formats);
        c.dtype = dtypes[x % 3], x /= 3;
        c.data = x % 2 ? DATA_AMPLIFIED : DATA_PLAIN, x /= 2; /* corners, or every code */
        c.lengths = x;
        c.d_qk = width_of(c.format, i);
        c.page = pages[i % 6];
        c.pad = i / 2 % 2;
        c.misalign = i % 4 == 1 ? 1 : i % 4 == 2 ? 18 : 0;
        c.h_kv = c.format <= FMLA_KV_F16 && i % 3 == 0 ? 3 : 1;
        c.count = set == CASES_QUICK ? 130 : 300;
        cases_add(list, set, c);
        if (c.format == FMLA_KV_V32) {
            c.scales = op == FMLA_OP_QUANTIZE ? 1 : 2;
            cases_add(list, set, c);
        }
    }
    cases_add_text(list, op, "format=v41,count=0");
    cases_add_text(list, op, "format=v4,count=1,page=1");
}

static void convert(case_list *list, case_set set)
{
    for (int i = 0; i < COUNT(formats) * COUNT(formats); i++) {
        test_case c = case_default(FMLA_OP_CONVERT);
        c.format = formats[i % COUNT(formats)];
        c.extra = formats[i / COUNT(formats)];
        c.d_qk = c.format == FMLA_KV_V32 || c.extra == FMLA_KV_V32 ? 576 : 512;
        if (width_of(c.format, c.d_qk == 576) != c.d_qk || width_of(c.extra, c.d_qk == 576) != c.d_qk) {
            continue;
        }
        c.lengths = i % 3;
        c.page = i % 2 ? 64 : 31;
        c.e_page = i % 5 ? 16 : 1;
        c.pad = i / 2 % 2;
        c.misalign = i % 4 == 1 ? 1 : 0;
        c.count = 90;
        c.scales = i % 7 == 3 ? 2 : 0;
        cases_add(list, set, c);
    }
}

static void merge(case_list *list)
{
    static const char *const texts[] = {
        "topk=1,h_q=3,count=11",
        "topk=2,h_q=16,count=20,pad=1",
        "topk=2,h_q=16,count=20,dtype=f16,sink=1,pos_inf=1",
        "topk=2,h_q=16,count=20,dtype=f32,sink=1",
        "topk=7,h_q=5,count=33,data=1,d_v=128,sink=1",
        "topk=64,h_q=2,count=9,dtype=f32",
        "topk=3,h_q=128,count=3,d_v=512,dtype=f32,data=1",
        "topk=2,h_q=4,count=0",
        "topk=4,h_q=9,count=13,d_v=7,dtype=f32",
    };
    for (int i = 0; i < COUNT(texts); i++) {
        cases_add_text(list, FMLA_OP_MERGE, texts[i]);
    }
}

static void small(case_list *list, int operation)
{
    static const struct {
        fmla_operation op;
        const char *text;
    } lines[] = {
        {FMLA_OP_PERMUTE_Q_B, "h_q=4,d_qk=64,count=256,group=32"},
        {FMLA_OP_PERMUTE_Q_B, "h_q=3,d_qk=48,count=512,group=128,pad=1"},
        {FMLA_OP_PERMUTE_Q_B, "h_q=8,d_qk=512,count=128,group=32"},
        {FMLA_OP_PERMUTE_WV, "h_q=8,group=8,d_v=512,count=16"},
        {FMLA_OP_PERMUTE_WV, "h_q=16,group=8,d_v=512,count=7,pad=1"},
        {FMLA_OP_PERMUTE_WV, "h_q=6,group=2,d_v=64,count=33"},
        {FMLA_OP_PERMUTE_WV, "h_q=3,group=1,d_v=128,count=5"},
        {FMLA_OP_INDICES_CONVERT, "b=1,s_q=1,topk=1,s_kv=1"},
        {FMLA_OP_INDICES_CONVERT, "b=3,s_q=2,topk=70,s_kv=300,page=64,pad=1"},
        {FMLA_OP_INDICES_CONVERT, "b=3,s_q=2,topk=70,s_kv=300,page=1"},
        {FMLA_OP_INDICES_CONVERT, "b=40,s_q=1,topk=2048,s_kv=5000,page=61"},
        {FMLA_OP_FP8_CAST, "count=17,d_qk=128,group=32"},
        {FMLA_OP_FP8_CAST, "count=17,d_qk=512,group=128,dtype=f32,pad=1"},
        {FMLA_OP_FP8_CAST, "count=56,d_qk=1024,group=32,dtype=f16"},
        {FMLA_OP_FP8_CAST, "count=56,d_qk=512,group=32,dtype=f32,data=2"},
        {FMLA_OP_FP8_CAST, "count=56,d_qk=512,group=128,data=2"},
        {FMLA_OP_SCHEDULE, "b=4,count=4,s_kv=1000"},
        {FMLA_OP_SCHEDULE, "b=1,count=132,s_kv=100000"},
        {FMLA_OP_SCHEDULE, "b=200,count=78,s_kv=4000,zero_len=1"},
        {FMLA_OP_SCHEDULE, "b=33,count=1,s_kv=300,zero_len=1"},
        {FMLA_OP_SCHEDULE, "b=17,count=150,s_kv=64,zero_len=1,group=3"},
        {FMLA_OP_SCHEDULE, "b=16500,count=160,s_kv=64"},
    };
    for (int i = 0; i < COUNT(lines); i++) {
        if (operation < 0 || operation == (int)lines[i].op) {
            cases_add_text(list, lines[i].op, lines[i].text);
        }
    }
}

void cases_bytes(case_list *list, case_set set, int operation)
{
    bool all = operation < 0;
    for (int op = FMLA_OP_QUANTIZE; op <= FMLA_OP_DEQUANTIZE; op++) {
        if (all || operation == op) {
            transcode(list, set, (fmla_operation)op);
        }
    }
    if (all || operation == FMLA_OP_CONVERT) {
        convert(list, set);
    }
    if (all || operation == FMLA_OP_MERGE) {
        merge(list);
    }
    small(list, operation);
}
