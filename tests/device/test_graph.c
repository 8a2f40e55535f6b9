/* SPDX-License-Identifier: MIT */
/*
 * test_graph.c: CUDA graphs, long runs, devices and FLASHMLA_CHECK, through the public API and the CUDA runtime: a
 * captured call replays with other lengths, indices and padded requests and gives the bits of an eager call. Faults of
 * tests/cases.md: C060 C063 C064 C066 C067 C070 C078. Exit status 77: no device. No test framework, so that it builds
 * on a bare GPU machine.
 */
#include <cuda_runtime_api.h>
#include <flashmla/flashmla.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define D_QK       576
#define D_V        512
#define PAGE       64
#define MAX_PAGES  1600 /* 102,400 tokens */
#define POOL_PAGES 2048

static int failures;

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            failures++;                                                                                                \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
        }                                                                                                              \
    } while (0)

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t code_ = (call);                                                                                    \
        if (code_ != cudaSuccess) {                                                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(code_));                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void *device(size_t size)
{
    void *memory = NULL;
    CUDA(cudaMalloc(&memory, size));
    CUDA(cudaMemset(memory, 0xFF, size)); /* NaN wherever nothing is written */
    return memory;
}

static uint32_t random_state = 1;

static float uniform(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / 8388608.0f - 1.0f;
}

static uint16_t bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x8000u) >> 16);
}

static void *device_numbers(size_t count)
{
    uint16_t *host = malloc(count * 2);
    for (size_t i = 0; i < count; i++) {
        host[i] = bf16(uniform());
    }
    void *memory = device(count * 2);
    CUDA(cudaMemcpy(memory, host, count * 2, cudaMemcpyHostToDevice));
    free(host);
    return memory;
}

/* One shape's tensors, dense or sparse. */
typedef struct setup {
    fmla_context *context;
    cudaStream_t stream;
    int32_t batch, s_q, h_q, topk;
    void *q, *pool, *out, *lse;
    int32_t *table, *lengths, *indices; /* device */
    void *workspace;
    size_t workspace_size, out_size, lse_size;
} setup;

static fmla_decode_args arguments(const setup *s)
{
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    a.q = fmla_tensor_4d(s->q, FMLA_BF16, s->batch, s->s_q, s->h_q, D_QK);
    a.kv.data = s->pool;
    a.kv.format = FMLA_KV_BF16;
    a.kv.num_pages = POOL_PAGES;
    a.kv.page_size = PAGE;
    if (s->topk > 0) {
        a.indices = fmla_tensor_3d(s->indices, FMLA_I32, s->batch, s->s_q, s->topk);
        a.topk_length = fmla_tensor_1d(s->lengths, FMLA_I32, s->batch);
    } else {
        a.block_table = fmla_tensor_2d(s->table, FMLA_I32, s->batch, MAX_PAGES);
        a.cache_seqlens = fmla_tensor_1d(s->lengths, FMLA_I32, s->batch);
        a.causal = 1;
    }
    a.out = fmla_tensor_4d(s->out, FMLA_BF16, s->batch, s->s_q, s->h_q, D_V);
    a.lse = fmla_tensor_3d(s->lse, FMLA_F32, s->batch, s->h_q, s->s_q);
    a.workspace = s->workspace;
    a.workspace_size = s->workspace_size;
    return a;
}

static setup make(fmla_context *context, int32_t batch, int32_t s_q, int32_t h_q, int32_t topk)
{
    setup s = {.context = context, .batch = batch, .s_q = s_q, .h_q = h_q, .topk = topk};
    size_t rows = (size_t)batch * (size_t)s_q * (size_t)h_q;
    int32_t *table = malloc((size_t)batch * MAX_PAGES * sizeof *table);
    CUDA(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    s.q = device_numbers(rows * D_QK);
    s.pool = device_numbers((size_t)POOL_PAGES * PAGE * D_QK);
    s.out_size = rows * D_V * 2;
    s.lse_size = rows * sizeof(float);
    s.out = device(s.out_size);
    s.lse = device(s.lse_size);
    s.lengths = device((size_t)batch * sizeof(int32_t));
    s.table = device((size_t)batch * MAX_PAGES * sizeof(int32_t));
    s.indices = topk > 0 ? device((size_t)batch * (size_t)s_q * (size_t)topk * sizeof(int32_t)) : NULL;
    for (int32_t i = 0; i < batch * MAX_PAGES; i++) {
        table[i] = (int32_t)((uint32_t)i * 2654435761u % POOL_PAGES);
    }
    CUDA(cudaMemcpy(s.table, table, (size_t)batch * MAX_PAGES * sizeof *table, cudaMemcpyHostToDevice));
    free(table);
    fmla_decode_args a = arguments(&s);
    fmla_status status = fmla_decode_workspace_size(context, &a, &s.workspace_size);
    CHECK(status == FMLA_OK, "%s", fmla_context_error(context));
    s.workspace = s.workspace_size > 0 ? device(s.workspace_size) : NULL;
    return s;
}

static void discard(setup *s)
{
    void *all[] = {s->q, s->pool, s->out, s->lse, s->lengths, s->table, s->indices, s->workspace};
    CUDA(cudaDeviceSynchronize());
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        CUDA(cudaFree(all[i]));
    }
    CUDA(cudaStreamDestroy(s->stream));
}

/* To the device, there when this returns: copies and fills are not in the order of the streams of the tests. */
static void put(void *to, const void *from, size_t size)
{
    CUDA(cudaMemcpy(to, from, size, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
}

static void set_lengths(const setup *s, const int32_t *lengths)
{
    put(s->lengths, lengths, (size_t)s->batch * sizeof *lengths);
}

/* Random slots, some of them invalid. */
static void set_indices(const setup *s)
{
    size_t count = (size_t)s->batch * (size_t)s->s_q * (size_t)s->topk;
    int32_t *host = malloc(count * sizeof *host);
    for (size_t i = 0; i < count; i++) {
        random_state = random_state * 1664525u + 1013904223u;
        host[i] = random_state >> 28 == 0 ? -1 : (int32_t)((random_state >> 4) % (POOL_PAGES * PAGE));
    }
    put(s->indices, host, count * sizeof *host);
    free(host);
}

static void call(const setup *s)
{
    fmla_decode_args a = arguments(s);
    fmla_status status = fmla_decode(s->context, &a, s->stream);
    CHECK(status == FMLA_OK, "%s", fmla_context_error(s->context));
}

static cudaGraphExec_t capture(const setup *s)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    call(s);
    CUDA(cudaStreamEndCapture(s->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* Results of the stream so far: out, then lse. */
static uint8_t *results(const setup *s)
{
    uint8_t *host = malloc(s->out_size + s->lse_size);
    CUDA(cudaStreamSynchronize(s->stream));
    CUDA(cudaMemcpy(host, s->out, s->out_size, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(host + s->out_size, s->lse, s->lse_size, cudaMemcpyDeviceToHost));
    CUDA(cudaMemset(s->out, 0xFF, s->out_size));
    CUDA(cudaMemset(s->lse, 0xFF, s->lse_size));
    CUDA(cudaDeviceSynchronize());
    return host;
}

/* The graph's bits are an eager call's. */
static void compare(const setup *s, cudaGraphExec_t exec, const char *what)
{
    call(s);
    uint8_t *eager = results(s);
    CUDA(cudaGraphLaunch(exec, s->stream));
    uint8_t *replayed = results(s);
    CHECK(memcmp(eager, replayed, s->out_size + s->lse_size) == 0, "%s: replay differs from an eager call", what);
    bool nan = false;
    for (size_t i = 0; i < s->out_size / 2; i++) {
        uint16_t bits;
        memcpy(&bits, eager + 2 * i, sizeof bits);
        nan = nan || (bits & 0x7FFF) > 0x7F80;
    }
    CHECK(!nan, "%s: NaN in the output", what);
    free(eager);
    free(replayed);
}

static void c064_replay_with_other_lengths(fmla_context *context)
{
    const int32_t lengths[] = {64, 1, 65, 8192, 100000, 0};
    setup s = make(context, 2, 2, 16, 0);
    set_lengths(&s, (int32_t[]){64, 64});
    cudaGraphExec_t exec = capture(&s);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char what[64];
        snprintf(what, sizeof what, "length %d after capture at 64", (int)lengths[i]);
        set_lengths(&s, (int32_t[]){lengths[i], 300});
        compare(&s, exec, what);
    }
    CUDA(cudaGraphExecDestroy(exec));
    discard(&s);
}

static void c063_padded_requests(fmla_context *context)
{
    int32_t lengths[112];
    setup s = make(context, 8, 1, 128, 0);
    set_lengths(&s, (int32_t[]){900, 800, 700, 600, 500, 400, 300, 200});
    cudaGraphExec_t exec = capture(&s);
    set_lengths(&s, (int32_t[]){4000, 1, 77, 640, 63, 0, 0, 0});
    compare(&s, exec, "C063: 5 requests in a graph of 8");
    CUDA(cudaGraphExecDestroy(exec));
    discard(&s);
    s = make(context, 112, 1, 16, 0);
    for (int32_t i = 0; i < 112; i++) {
        lengths[i] = 64 * (i % 7) + i;
    }
    set_lengths(&s, lengths);
    exec = capture(&s);
    for (int32_t i = 100; i < 112; i++) {
        lengths[i] = 0;
    }
    set_lengths(&s, lengths);
    compare(&s, exec, "C066: 100 requests in a graph of 112");
    CUDA(cudaGraphExecDestroy(exec));
    discard(&s);
}

/* Few lists, and so many that blocks join their pieces by themselves. */
static void c067_workspace_holds_garbage(fmla_context *context)
{
    const int32_t batches[] = {16, 112};
    for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++) {
        int32_t lengths[112] = {9000, 8000, 7000};
        for (int32_t j = 3; j < batches[i]; j++) {
            lengths[j] = batches[i] > 16 ? 1500 + 37 * j : 0;
        }
        setup s = make(context, batches[i], 1, 16, 0);
        set_lengths(&s, lengths);
        cudaGraphExec_t exec = capture(&s);
        if (s.workspace) {
            CUDA(cudaMemset(s.workspace, 0xFF, s.workspace_size));
            CUDA(cudaDeviceSynchronize());
        }
        compare(&s, exec, "C067: workspace filled with 0xFF");
        CUDA(cudaGraphExecDestroy(exec));
        discard(&s);
    }
}

static void c060_graph_eager_graph(fmla_context *context)
{
    setup s = make(context, 4, 2, 64, 2048);
    set_lengths(&s, (int32_t[]){2048, 100, 1, 0});
    set_indices(&s);
    cudaGraphExec_t exec = capture(&s);
    CUDA(cudaGraphLaunch(exec, s.stream));
    uint8_t *first = results(&s);
    setup other = make(context, 3, 1, 128, 0);
    set_lengths(&other, (int32_t[]){50000, 20, 0});
    call(&other);
    CUDA(cudaStreamSynchronize(other.stream));
    CUDA(cudaGraphLaunch(exec, s.stream));
    uint8_t *second = results(&s);
    CHECK(memcmp(first, second, s.out_size + s.lse_size) == 0, "C060: an eager call changed the graph's result");
    set_indices(&s);
    compare(&s, exec, "C060: other indices");
    free(first);
    free(second);
    CUDA(cudaGraphExecDestroy(exec));
    discard(&other);
    discard(&s);
}

/* Rings of barriers go round thousands of times, with blocks that meet each other at changing distances. */
static void c078_long_runs(fmla_context *context)
{
    const int32_t topks[] = {0, 2048, 0}, batches[] = {5, 64, 70}, first_length[] = {100000, 2048, 1500};
    const int32_t shorter[] = {17001, 31, 17};
    for (size_t i = 0; i < sizeof topks / sizeof topks[0]; i++) {
        setup s = make(context, batches[i], 2, 128, topks[i]);
        int32_t lengths[70];
        for (int32_t j = 0; j < s.batch; j++) {
            lengths[j] = first_length[i] - shorter[i] * j;
        }
        set_lengths(&s, lengths);
        if (topks[i]) {
            set_indices(&s);
        }
        cudaGraphExec_t exec = capture(&s);
        compare(&s, exec, "C078: the first run");
        call(&s);
        uint8_t *first = results(&s);
        for (int run = 0; run < 1000; run++) {
            CUDA(cudaGraphLaunch(exec, s.stream));
        }
        uint8_t *last = results(&s);
        CHECK(memcmp(first, last, s.out_size + s.lse_size) == 0, "C078: run 1000 differs from the first");
        free(first);
        free(last);
        CUDA(cudaGraphExecDestroy(exec));
        discard(&s);
    }
}

static void expect_fault(const setup *s, const char *text)
{
    fmla_decode_args a = arguments(s);
    fmla_status status = fmla_decode(s->context, &a, s->stream);
    const char *error = fmla_context_error(s->context);
    CHECK(status == FMLA_ERROR_INVALID_ARGUMENT, "status %d, expected: %s", (int)status, text);
    CHECK(strcmp(error, text) == 0, "'%s', expected '%s'", error, text);
}

/* The first offender is named; what is right passes, and a capture is left alone. */
static void flashmla_check_reports(void)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *context = NULL;
    const int32_t bad_page = POOL_PAGES, bad_slot = POOL_PAGES * PAGE;
    config.device = FMLA_DEVICE_CUDA;
    setenv("FLASHMLA_CHECK", "1", 1);
    fmla_status status = fmla_context_create(&config, &context);
    unsetenv("FLASHMLA_CHECK");
    CHECK(status == FMLA_OK, "%s", fmla_last_create_error());
    setup s = make(context, 3, 2, 16, 0);
    set_lengths(&s, (int32_t[]){100, 5000, 0});
    call(&s);
    set_lengths(&s, (int32_t[]){100, MAX_PAGES * PAGE + 1, -7});
    expect_fault(&s, "cache_seqlens: element 1 is 102401, out of range");
    set_lengths(&s, (int32_t[]){100, 5000, -7});
    expect_fault(&s, "cache_seqlens: element 2 is -7, out of range");
    set_lengths(&s, (int32_t[]){100, 5000, 64});
    put(s.table + MAX_PAGES + 3, &bad_page, sizeof bad_page);
    put(s.table + 2 * MAX_PAGES + 1, &bad_page, sizeof bad_page);
    expect_fault(&s, "block_table: element 1603 is 2048, out of range");
    cudaGraphExec_t exec = capture(&s);
    CUDA(cudaGraphExecDestroy(exec));
    set_lengths(&s, (int32_t[]){100, 192, 64}); /* the bad entries are behind the last page now */
    call(&s);
    CUDA(cudaStreamSynchronize(s.stream));
    discard(&s);
    s = make(context, 2, 1, 16, 64);
    set_lengths(&s, (int32_t[]){64, 20});
    set_indices(&s);
    call(&s);
    put(s.indices + 64 + 20, &bad_slot, sizeof bad_slot);
    call(&s); /* beyond the length */
    put(s.indices + 64 + 19, &bad_slot, sizeof bad_slot);
    expect_fault(&s, "indices: element 83 is 131072, out of range");
    set_lengths(&s, (int32_t[]){65, 20});
    expect_fault(&s, "indices: element 83 is 131072, out of range"); /* before topk_length in the order of kinds */
    discard(&s);
    fmla_context_destroy(context);
}

static void c070_current_device_is_left_alone(void)
{
    int count = 0, before, after;
    CUDA(cudaGetDeviceCount(&count));
    if (count < 2) {
        return;
    }
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *context = NULL;
    config.device = FMLA_DEVICE_CUDA;
    config.device_index = 1;
    CUDA(cudaSetDevice(1));
    fmla_status status = fmla_context_create(&config, &context);
    CHECK(status == FMLA_OK, "%s", fmla_last_create_error());
    setup s = make(context, 2, 1, 16, 0);
    set_lengths(&s, (int32_t[]){100, 5000});
    CUDA(cudaSetDevice(0));
    CUDA(cudaGetDevice(&before));
    call(&s);
    CUDA(cudaGetDevice(&after));
    CHECK(before == after, "device %d became %d", before, after);
    CUDA(cudaSetDevice(1));
    free(results(&s));
    discard(&s);
    fmla_context_destroy(context);
    CUDA(cudaSetDevice(0));
}

int main(void)
{
    /* The best kernels, then the portable ones with each amount of shared memory. */
    const int32_t profiles[] = {0, 0, 99, 163}, kernels[] = {0, 1, 1, 1};
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++) {
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
        fmla_context *context = NULL;
        config.device = FMLA_DEVICE_CUDA;
        config.cuda_profile_kib = profiles[i];
        config.cuda_kernels = kernels[i];
        fmla_status status = fmla_context_create(&config, &context);
        if (status == FMLA_ERROR_NO_BACKEND || status == FMLA_ERROR_NO_DEVICE) {
            fprintf(stderr, "skipped: %s\n", fmla_last_create_error());
            return 77;
        }
        if (status == FMLA_ERROR_UNSUPPORTED) {
            continue; /* the device has less shared memory than the profile */
        }
        CHECK(status == FMLA_OK, "%s", fmla_last_create_error());
        c064_replay_with_other_lengths(context);
        c063_padded_requests(context);
        c067_workspace_holds_garbage(context);
        c060_graph_eager_graph(context);
        c078_long_runs(context);
        fmla_context_destroy(context);
    }
    flashmla_check_reports();
    c070_current_device_is_left_alone();
    printf("graphs: %d failures\n", failures);
    return failures > 0;
}
