/* SPDX-License-Identifier: MIT */
/* fake_plugin.h: what fake_plugin.c tells the tests; found by dlsym as fake_plugin_journal. */
#ifndef FAKE_PLUGIN_H
#define FAKE_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_BAD_STREAM ((void *)(uintptr_t)0xBAD)

typedef struct fake_journal {
    int32_t calls, allocations, releases;
    void *stream;
    void *workspace;
    size_t workspace_size;
    int32_t batch_invariant; /* of the last attention call */
} fake_journal;

#endif
