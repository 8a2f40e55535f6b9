/* SPDX-License-Identifier: MIT */
/* device.c: which devices and instruction tiers there are, before any context. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "read.h"

int32_t fmla_isa_available(fmla_isa isa)
{
    return isa > FMLA_ISA_AUTO && isa < FMLA_ISA_COUNT && fmlai_isa_usable(isa);
}

fmla_status fmlai_isa_from_environment(fmla_isa *isa, fmlai_error *error)
{
    const char *name = getenv("FLASHMLA_ISA");
    char allowed[96] = "auto";
    *isa = FMLA_ISA_AUTO;
    if (name == NULL || name[0] == '\0' || strcmp(name, "auto") == 0) {
        return FMLA_OK;
    }
    for (int32_t i = FMLA_ISA_SCALAR; i < FMLA_ISA_COUNT; i++) {
        const char *known = fmla_isa_name((fmla_isa)i);
        if (strcmp(name, known) == 0) {
            *isa = (fmla_isa)i;
            return FMLA_OK;
        }
        snprintf(allowed + strlen(allowed), sizeof allowed - strlen(allowed), ", %s", known);
    }
    return fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT, "FLASHMLA_ISA: \"%.64s\"; allowed: %s", name, allowed);
}

static fmla_status backend_info(const fmlai_backend *backend, int32_t index, fmla_device_info *info, fmlai_error *error)
{
    return backend->device_info == NULL ? FMLA_ERROR_UNSUPPORTED : backend->device_info(index, info, error);
}

fmla_status fmla_device_get(fmla_device device, int32_t index, fmla_device_info *info)
{
    fmla_device_info answer = {.struct_size = sizeof answer};
    fmlai_error error;
    fmla_status status = FMLA_ERROR_INVALID_ARGUMENT;
    if (info == NULL || index < 0) {
        return FMLA_ERROR_INVALID_ARGUMENT;
    }
    if (device == FMLA_DEVICE_CUDA || device == FMLA_DEVICE_AUTO) {
        const fmlai_backend *cuda = fmlai_plugin_load(&error);
        status = cuda == NULL ? FMLA_ERROR_NO_BACKEND : backend_info(cuda, index, &answer, &error);
    }
    if (device == FMLA_DEVICE_CPU || (device == FMLA_DEVICE_AUTO && status != FMLA_OK)) {
        status = backend_info(&fmlai_cpu_backend, index, &answer, &error);
    } else if (device == FMLA_DEVICE_ORACLE) {
        status = backend_info(&fmlai_oracle_backend, index, &answer, &error);
    }
    return status == FMLA_OK ? fmlai_args_write(info, &answer, sizeof answer, "info", &error) : status;
}
