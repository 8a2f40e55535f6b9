/* SPDX-License-Identifier: MIT */
/*
 * hash.c: what a block of device memory holds, as one number that the device computes: to see that nobody has written
 * to gigabytes without bringing them back. The kernel is text that the driver compiles: no compiler is needed to build
 * the program, and one text serves every device.
 */
#include "device.h"

/* The sum over words of 64 bits of a mixture (splitmix64's) of the word and its place, which does not depend on the
 * order of the sum. */
static const char kernel[] =
    ".version 6.0\n"
    ".target sm_70\n"
    ".address_size 64\n"
    ".visible .entry hash(.param .u64 p0, .param .u64 n0, .param .u64 r0)\n"
    "{\n"
    ".reg .pred %p<2>;\n"
    ".reg .b32 %r<5>;\n"
    ".reg .b64 %rd<16>;\n"
    "ld.param.u64 %rd1, [p0];\n"
    "ld.param.u64 %rd2, [n0];\n"
    "ld.param.u64 %rd3, [r0];\n"
    "mov.u32 %r1, %ctaid.x;\n"
    "mov.u32 %r2, %ntid.x;\n"
    "mov.u32 %r3, %tid.x;\n"
    "mov.u32 %r4, %nctaid.x;\n"
    "mad.wide.u32 %rd4, %r1, %r2, 0;\n"
    "cvt.u64.u32 %rd5, %r3;\n"
    "add.u64 %rd4, %rd4, %rd5;\n"
    "mul.wide.u32 %rd6, %r2, %r4;\n"
    "mov.u64 %rd7, 0;\n"
    "$again:\n"
    "setp.ge.u64 %p1, %rd4, %rd2;\n"
    "@%p1 bra $end;\n"
    "shl.b64 %rd8, %rd4, 3;\n"
    "add.u64 %rd8, %rd1, %rd8;\n"
    "ld.global.u64 %rd9, [%rd8];\n"
    "add.u64 %rd10, %rd4, 1;\n"
    "mul.lo.u64 %rd10, %rd10, 0x9E3779B97F4A7C15;\n"
    "xor.b64 %rd9, %rd9, %rd10;\n"
    "shr.u64 %rd11, %rd9, 30;\n"
    "xor.b64 %rd9, %rd9, %rd11;\n"
    "mul.lo.u64 %rd9, %rd9, 0xBF58476D1CE4E5B9;\n"
    "shr.u64 %rd11, %rd9, 27;\n"
    "xor.b64 %rd9, %rd9, %rd11;\n"
    "mul.lo.u64 %rd9, %rd9, 0x94D049BB133111EB;\n"
    "shr.u64 %rd11, %rd9, 31;\n"
    "xor.b64 %rd9, %rd9, %rd11;\n"
    "add.u64 %rd7, %rd7, %rd9;\n"
    "add.u64 %rd4, %rd4, %rd6;\n"
    "bra $again;\n"
    "$end:\n"
    "red.global.add.u64 [%rd3], %rd7;\n"
    "ret;\n"
    "}\n";

#define THREADS 256
#define BLOCKS  528

/* The last context's, for the process: memories come and go with every case. The context is retained for it, so that no
 * other one can have its address. */
static struct {
    void *context, *function;
    bool failed;
} known;

static bool find_kernel(const cuda_driver *cuda)
{
    void *module = NULL, *context = NULL;

    if (known.context != cuda->context && !known.failed && cuda->module_load != NULL) {
        known.failed = cuda->primary_retain(&context, cuda->device) != 0 || cuda->module_load(&module, kernel) != 0 ||
                       cuda->module_function(&known.function, module, "hash") != 0;
        known.context = known.failed ? NULL : context;
    }
    return known.context == cuda->context;
}

int cli_memory_hash(cli_memory *memory, const void *block, size_t size, int slot)
{
    cuda_driver *cuda = cli_memory_cuda(memory);
    uint64_t words = size / 8;

    if (cuda == NULL || slot >= CLI_HASHES || !find_kernel(cuda)) {
        return CLI_DONE;
    }
    int code = 0;
    if (cuda->hashes == 0) {
        cuda->hashes = (uintptr_t)cli_memory_new(memory, CLI_HASHES * sizeof(uint64_t));
        if (cuda->hashes == 0) {
            return CLI_ERROR;
        }
        code = cuda->fill(cuda->hashes, 0, CLI_HASHES * sizeof(uint64_t));
    }
    uintptr_t pointer = (uintptr_t)block, result = cuda->hashes + (uintptr_t)slot * sizeof(uint64_t);
    void *arguments[] = {&pointer, &words, &result};
    code = code == 0 ? cuda->launch(known.function, BLOCKS, 1, 1, THREADS, 1, 1, 0, NULL, arguments, NULL) : code;
    return code == 0 ? CLI_OK : cli_error("the hash of device memory failed (CUDA error %d)", code);
}

int cli_memory_hashes(cli_memory *memory, uint64_t hashes[CLI_HASHES])
{
    cuda_driver *cuda = cli_memory_cuda(memory);
    int code = cuda->to_host(hashes, cuda->hashes, CLI_HASHES * sizeof(uint64_t));
    return code == 0 ? CLI_OK : cli_error("the hash of device memory failed (CUDA error %d)", code);
}
