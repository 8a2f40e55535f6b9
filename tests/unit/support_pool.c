/* SPDX-License-Identifier: MIT */
/*
 * Pools and guarded memory for tests.
 */
#include "support_pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

guarded guarded_make(size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t used = (size + page - 1) / page * page;
    guarded g = {.size = size, .mapping_size = used + page};
    g.mapping = mmap(NULL, g.mapping_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(g.mapping != MAP_FAILED);
    memset(g.mapping, 0xA5, used);
    assert_int_equal(mprotect((uint8_t *)g.mapping + used, page, PROT_NONE), 0);
    g.data = (uint8_t *)g.mapping + used - size;
    return g;
}

void guarded_free(guarded *g)
{
    munmap(g->mapping, g->mapping_size);
}

fmlai_pool pool_over(void *data, const fmla_format_info *format, int64_t num_pages, int64_t page_size,
                     int64_t page_stride, int32_t d_qk, int32_t heads)
{
    fmlai_pool pool = {.data = data, .format = *format, .num_pages = num_pages, .page_size = page_size};
    bool plain = format->layout == FMLA_LAYOUT_PLAIN;
    if (plain) {
        pool.format.d_qk = d_qk;
        pool.head_stride = (int64_t)2 * d_qk;
    }
    pool.token_stride = plain ? (int64_t)2 * d_qk * heads : format->data_row_bytes;
    int64_t token_bytes = plain ? pool.token_stride : format->bytes_per_token;
    pool.page_stride = page_stride > 0 ? page_stride : page_size * token_bytes;
    pool.outer_scale = 1.0f;
    return pool;
}

size_t pool_bytes(const fmlai_pool *pool, int32_t heads)
{
    int64_t token_bytes = fmlai_format_token_bytes(&pool->format, pool->format.d_qk);
    token_bytes *= pool->format.layout == FMLA_LAYOUT_PLAIN ? heads : 1;
    return (size_t)((pool->num_pages - 1) * pool->page_stride + pool->page_size * token_bytes);
}
