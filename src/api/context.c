/* SPDX-License-Identifier: MIT */
/* context.c: making and ending contexts, and the frame of a call. */
#include "context.h"

#include <stdlib.h>
#include <string.h>

#include "read.h"

#define THREADS_MAX 65536

static void *default_alloc(void *user, size_t size)
{
    (void)user;
    size_t rounded = (size + FMLAI_ALIGNMENT - 1) / FMLAI_ALIGNMENT * FMLAI_ALIGNMENT;
    return rounded < size ? NULL : aligned_alloc(FMLAI_ALIGNMENT, rounded == 0 ? FMLAI_ALIGNMENT : rounded);
}

static void default_release(void *user, void *memory)
{
    (void)user;
    free(memory);
}

/* ---- configuration --------------------------------------------------------------------------------------------- */

static fmla_status check_config(const fmla_context_config *config, fmlai_error *error)
{
    fmlai_checker c = {.error = error};
    fmlai_check_range(&c, "device", config->device, FMLA_DEVICE_AUTO, FMLA_DEVICE_ORACLE);
    fmlai_check_range(&c, "threads", config->threads, 0, THREADS_MAX);
    fmlai_check_range(&c, "isa", config->isa, FMLA_ISA_AUTO, FMLA_ISA_COUNT - 1);
    fmlai_check_range(&c, "spin_us", config->spin_us, -1, INT32_MAX);
    fmlai_check_range(&c, "cuda_kernels", config->cuda_kernels, 0, 5);
    fmlai_check_range(&c, "strict", config->strict, 0, 1);
    const int32_t kib = config->cuda_profile_kib;
    if (kib != 0 && kib != 99 && kib != 163 && kib != 227) {
        fmlai_invalid(&c, "cuda_profile_kib: %d; allowed: 0, 99, 163, 227", (int)kib);
    }
    if (config->parallel_for == NULL && config->parallel_for_pool != NULL) {
        fmlai_invalid(&c, "parallel_for: is NULL, but parallel_for_pool is set; allowed: both or neither");
    }
    if ((config->alloc == NULL) != (config->release == NULL)) {
        fmlai_invalid(&c, "%s: is NULL; allowed: both alloc and release, or neither",
                      config->alloc == NULL ? "alloc" : "release");
    }
    bool other_index =
        config->device_index < 0 ||
        (config->device_index > 0 && (config->device == FMLA_DEVICE_CPU || config->device == FMLA_DEVICE_ORACLE));
    if (other_index) {
        fmlai_reject(&c, FMLA_ERROR_NO_DEVICE, "device_index: %d; allowed: 0%s", (int)config->device_index,
                     config->device == FMLA_DEVICE_CUDA ? " and up" : " on the CPU and the oracle");
    }
    return c.status;
}

static fmla_status read_config(fmla_context_config *config, const fmla_context_config *given, fmlai_error *error)
{
    fmla_status status = FMLA_OK;
    fmla_isa isa;
    *config = (fmla_context_config)FMLA_CONTEXT_CONFIG_INIT;
    if (given != NULL) {
        status = fmlai_args_read(config, sizeof *config, given, "config", error);
    }
    if (status == FMLA_OK) {
        status = check_config(config, error);
    }
    if (status == FMLA_OK) {
        status = fmlai_isa_from_environment(&isa, error);
    }
    if (status == FMLA_OK && config->isa == FMLA_ISA_AUTO) {
        config->isa = (int32_t)isa;
    }
    return status;
}

/* ---- backends -------------------------------------------------------------------------------------------------- */

static fmla_status open_backend(fmla_context *context, const fmla_context_config *config, fmla_device device,
                                fmlai_error *error)
{
    context->device = device;
    context->backend = device == FMLA_DEVICE_CUDA     ? fmlai_plugin_load(error)
                       : device == FMLA_DEVICE_ORACLE ? &fmlai_oracle_backend
                                                      : &fmlai_cpu_backend;
    return context->backend == NULL ? error->status
                                    : context->backend->open(config, &context->allocator, &context->state, error);
}

/* CUDA if there is a device that the plugin can use, else the CPU. */
static fmla_status open_any(fmla_context *context, const fmla_context_config *config, fmlai_error *error)
{
    fmla_status status = open_backend(context, config, FMLA_DEVICE_CUDA, error);
    if (status == FMLA_OK || status == FMLA_ERROR_OUT_OF_MEMORY || status == FMLA_ERROR_INVALID_ARGUMENT) {
        return status;
    }
    if (config->device_index > 0) {
        return fmlai_fail(error, FMLA_ERROR_NO_DEVICE, "device_index: %d; allowed: 0, there is no such CUDA device",
                          (int)config->device_index);
    }
    return open_backend(context, config, FMLA_DEVICE_CPU, error);
}

static fmlai_allocator workspace_source(const fmla_context *context)
{
    const fmlai_backend *b = context->backend;
    return b->workspace_alloc == NULL ? context->allocator
                                      : (fmlai_allocator){b->workspace_alloc, b->workspace_release, context->state};
}

static fmla_status create(const fmla_context_config *given, fmla_context **context, fmlai_error *error)
{
    fmla_context_config config;
    fmla_status status = read_config(&config, given, error);
    if (status != FMLA_OK) {
        return status;
    }
    fmlai_allocator m = {default_alloc, default_release, NULL};
    if (config.alloc != NULL) {
        m = (fmlai_allocator){config.alloc, config.release, config.alloc_user};
    }
    fmla_context *made = m.alloc(m.user, sizeof *made);
    if (made == NULL) {
        return fmlai_fail(error, FMLA_ERROR_OUT_OF_MEMORY, "no memory for a context (%zu bytes)", sizeof *made);
    }
    if ((uintptr_t)made % FMLAI_ALIGNMENT != 0) {
        m.release(m.user, made);
        return fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT, "alloc: returned %p; allowed: a multiple of %d",
                          (void *)made, FMLAI_ALIGNMENT);
    }
    memset(made, 0, sizeof *made);
    made->allocator = m;
    atomic_flag_clear(&made->running);
    status = config.device == FMLA_DEVICE_AUTO ? open_any(made, &config, error)
                                               : open_backend(made, &config, (fmla_device)config.device, error);
    if (status != FMLA_OK) {
        m.release(m.user, made);
        return status;
    }
    made->arena.source = workspace_source(made);
    made->arena.keep = made->device == FMLA_DEVICE_CUDA;
    *context = made;
    return FMLA_OK;
}

fmla_status fmla_context_create(const fmla_context_config *config, fmla_context **context)
{
    fmlai_error error = {.status = FMLA_OK};
    if (context == NULL) {
        fmlai_remember_create_error("context: is NULL; allowed: where the context goes");
        return FMLA_ERROR_INVALID_ARGUMENT;
    }
    *context = NULL;
    fmla_status status = create(config, context, &error);
    if (status != FMLA_OK) {
        fmlai_remember_create_error(error.text);
    }
    return status;
}

void fmla_context_destroy(fmla_context *context)
{
    if (context == NULL) {
        return;
    }
    const fmlai_allocator m = context->allocator;
    fmlai_arena_free(&context->arena);
    context->backend->close(context->state);
    if (context->merge_states != NULL) {
        m.release(m.user, context->merge_states);
    }
    m.release(m.user, context);
}

fmla_device fmla_context_device(const fmla_context *context)
{
    return context == NULL ? FMLA_DEVICE_AUTO : context->device;
}

fmla_isa fmla_context_isa(const fmla_context *context)
{
    return context == NULL || context->backend->isa == NULL ? FMLA_ISA_AUTO : context->backend->isa(context->state);
}

int32_t fmla_context_threads(const fmla_context *context)
{
    return context == NULL || context->backend->threads == NULL ? 0 : context->backend->threads(context->state);
}

/* ---- calls ----------------------------------------------------------------------------------------------------- */

fmla_status fmlai_guarded(fmla_context *context, fmlai_body body, const void *args, void *other)
{
    if (context == NULL) {
        return FMLA_ERROR_INVALID_ARGUMENT;
    }
    if (atomic_flag_test_and_set(&context->running)) {
        return FMLA_ERROR_BUSY;
    }
    fmla_status status = body(context, args, other);
    atomic_flag_clear(&context->running);
    return status;
}

fmlai_checker fmlai_checker_for_size(fmla_context *context)
{
    return (fmlai_checker){
        .error = &context->error,
        .shapes_only = true,
        .oracle = context->device == FMLA_DEVICE_ORACLE,
    };
}

fmlai_checker fmlai_checker_for_run(fmla_context *context, const void *stream)
{
    fmlai_checker c = fmlai_checker_for_size(context);
    c.shapes_only = false;
    c.values = context->device != FMLA_DEVICE_CUDA;
    if (c.values && stream != NULL) {
        fmlai_invalid(&c, "stream: %p; allowed on the %s device: NULL", stream, fmla_device_name(context->device));
    }
    return c;
}

fmlai_call fmlai_plain_call(fmla_context *context, void *stream)
{
    return (fmlai_call){.stream = stream, .error = &context->error};
}

fmla_status fmlai_prepare_call(fmla_context *context, fmlai_workspace own, size_t need, void *stream, fmlai_call *call)
{
    fmlai_error *error = &context->error;
    *call = fmlai_plain_call(context, stream);
    if (own.memory == NULL && own.size != 0) {
        return fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT,
                          "workspace: is NULL; allowed with workspace_size %zu: memory", own.size);
    }
    if ((uintptr_t)own.memory % FMLAI_ALIGNMENT != 0) {
        return fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT, "workspace: %p; allowed: a multiple of %d", own.memory,
                          FMLAI_ALIGNMENT);
    }
    if (own.memory != NULL && own.size < need) {
        return fmlai_fail(error, FMLA_ERROR_WORKSPACE_TOO_SMALL, "workspace_size: %zu; allowed: at least %zu", own.size,
                          need);
    }
    if (own.memory == NULL) {
        fmla_status status = fmlai_arena_grow(&context->arena, need, error);
        own = (fmlai_workspace){context->arena.memory, context->arena.size};
        if (status != FMLA_OK) {
            return status;
        }
    }
    call->workspace = own.memory;
    call->workspace_size = own.size;
    return FMLA_OK;
}

static fmla_status reserve(fmla_context *context, const void *size, void *unused)
{
    (void)unused;
    return fmlai_arena_grow(&context->arena, *(const size_t *)size, &context->error);
}

fmla_status fmla_context_reserve(fmla_context *context, size_t size)
{
    return fmlai_guarded(context, reserve, &size, NULL);
}
