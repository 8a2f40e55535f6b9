/* SPDX-License-Identifier: MIT */
/* driver.c: finds the driver and cuBLASLt at run time. */
#include "bench/driver.h"

#include <dlfcn.h>
#include <string.h>

#include "program.h"

const char *bench_symbols_find(void *library, const bench_symbol *symbols, size_t count, void *table)
{
    for (size_t i = 0; i < count; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (symbol == NULL) {
            return symbols[i].name;
        }
        memcpy((char *)table + symbols[i].offset, &symbol, sizeof symbol);
    }
    return NULL;
}

#define D(name, member) {name, offsetof(bench_driver, member)}
#define B(name, member) {name, offsetof(bench_blas, member)}

int bench_driver_open(bench_driver *driver)
{
    static const bench_symbol symbols[] = {
        D("cuInit", init),
        D("cuDeviceGet", device_get),
        D("cuDevicePrimaryCtxRetain", primary_retain),
        D("cuDevicePrimaryCtxRelease_v2", primary_release),
        D("cuCtxSetCurrent", set_current),
        D("cuMemGetInfo_v2", memory_info),
        D("cuMemAlloc_v2", alloc),
        D("cuMemFree_v2", release),
        D("cuMemcpyHtoD_v2", to_device),
        D("cuMemcpyDtoDAsync_v2", copy),
        D("cuMemsetD8Async", fill),
        D("cuStreamCreate", stream_create),
        D("cuStreamDestroy_v2", stream_destroy),
        D("cuStreamSynchronize", stream_wait),
        D("cuStreamBeginCapture_v2", capture_begin),
        D("cuStreamEndCapture", capture_end),
        D("cuGraphInstantiateWithFlags", graph_instantiate),
        D("cuGraphLaunch", graph_launch),
        D("cuGraphDestroy", graph_destroy),
        D("cuGraphExecDestroy", executable_destroy),
        D("cuEventCreate", event_create),
        D("cuEventRecord", event_record),
        D("cuEventElapsedTime", event_elapsed),
        D("cuEventDestroy_v2", event_destroy),
    };
    driver->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver->library == NULL) {
        return cli_error("the CUDA driver (libcuda.so.1) cannot be loaded: %s", dlerror());
    }
    const char *missing = bench_symbols_find(driver->library, symbols, sizeof symbols / sizeof symbols[0], driver);
    if (missing != NULL) {
        dlclose(driver->library);
        return cli_error("the CUDA driver lacks %s", missing);
    }
    return CLI_OK;
}

bool bench_blas_open(bench_blas *blas)
{
    static const bench_symbol symbols[] = {
        B("cublasLtCreate", create),
        B("cublasLtDestroy", destroy),
        B("cublasLtMatmulDescCreate", operation_create),
        B("cublasLtMatmulDescSetAttribute", operation_set),
        B("cublasLtMatmulDescDestroy", operation_destroy),
        B("cublasLtMatrixLayoutCreate", layout_create),
        B("cublasLtMatrixLayoutDestroy", layout_destroy),
        B("cublasLtMatmulPreferenceCreate", preference_create),
        B("cublasLtMatmulPreferenceSetAttribute", preference_set),
        B("cublasLtMatmulPreferenceDestroy", preference_destroy),
        B("cublasLtMatmulAlgoGetHeuristic", heuristic),
        B("cublasLtMatmul", product),
    };
    static const char *const names[] = {
        "libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so", "/usr/local/cuda/lib64/libcublasLt.so.13",
        "/usr/local/cuda/lib64/libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so"};
    blas->library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && blas->library == NULL; i++) {
        blas->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    }
    if (blas->library != NULL &&
        bench_symbols_find(blas->library, symbols, sizeof symbols / sizeof symbols[0], blas) != NULL) {
        dlclose(blas->library);
        blas->library = NULL;
    }
    return blas->library != NULL;
}
