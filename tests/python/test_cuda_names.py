# SPDX-License-Identifier: MIT
"""flash_mla.cuda: the names of the original's compiled extension answer as the public functions do."""

import numpy as np
import support
from support import DenseCase, SparseCase
from test_fused import Case as FusedCase
from test_fused import SCALE, column_words
from test_mha import Case as MhaCase
from test_prefill import Case as PrefillCase

import flash_mla
from flash_mla import cuda
from flash_mla import flash_mla_interface as interface


def bits(kit, results):
    return [kit.raw(x).tobytes() for x in results]


def test_decode_of_2025(kit):
    dense, sparse = DenseCase(kit), SparseCase(kit, "v32", lengths=False, sink=False)
    meta, splits = cuda.get_mla_metadata(dense.seqlens, 8, 2)
    tail = (512, dense.seqlens, dense.table, 0.05, True, meta, splits)
    wanted = bits(
        kit,
        flash_mla.flash_mla_with_kvcache(
            dense.q, dense.cache, dense.table, dense.seqlens, 512, meta, splits, 0.05, True
        ),
    )
    assert bits(kit, cuda.fwd_kvcache_mla(dense.q, dense.cache, None, *tail)) == wanted
    assert bits(kit, cuda.fwd_kvcache_mla(dense.q, dense.cache, *tail)) == wanted
    assert bits(kit, cuda.fwd_kvcache_mla(dense.q, dense.cache, *tail, False, None)) == wanted
    meta, splits = cuda.get_mla_decoding_metadata(kit.i32([1, 1]), 6, 1, 3, True, 24)
    out, lse = cuda.fwd_kvcache_mla(
        sparse.q,
        sparse.cache,
        512,
        None,
        None,
        sparse.d**-0.5,
        False,
        meta,
        splits,
        True,
        sparse.keywords["indices"],
    )
    sparse.check(kit, out, lse)


def test_decode_of_2026(kit):
    dense, sparse = DenseCase(kit), SparseCase(kit, "v41", "v41-fp4")
    out, lse, meta, splits = cuda.dense_decode_fwd(
        dense.q, dense.cache, 512, dense.seqlens, dense.table, 0.05, False, None, None
    )
    assert meta is None and splits is None
    dense.check(kit, out, lse, scale=0.05)
    k = sparse.keywords
    out, lse, _, _ = cuda.sparse_decode_fwd(
        sparse.q,
        sparse.cache,
        k["indices"],
        k["topk_length"],
        k["attn_sink"],
        None,
        None,
        k["extra_k_cache"],
        k["extra_indices_in_kvcache"],
        k["extra_topk_length"],
        512,
        sparse.d**-0.5,
    )
    sparse.check(kit, out, lse)


def test_prefills(kit):
    case = PrefillCase(kit)
    results = cuda.sparse_prefill_fwd(
        case.q, case.kv, case.index_array, 0.06, 512, case.keywords["attn_sink"], case.keywords["topk_length"]
    )
    case.check(kit, *results, 0.06)
    mha = MhaCase(kit, h_q=2, h_kv=2)
    out, lse = kit.bf16(np.ones((31, 2, 128))), kit.strided(kit.f32(np.ones(62)), (31, 2), (1, 31))
    cuda.dense_prefill_fwd(
        None, mha.q, mha.k, mha.v, mha.cu_q, mha.cu_k, out, lse, 1, 0.08, mha.max_q, mha.max_k
    )
    mha.check(kit, out, lse, 0.08, True)
    gradients = [kit.bf16(np.ones(x.shape)) for x in (mha.values["q"], mha.values["k"], mha.values["v"])]
    cuda.dense_prefill_bwd(
        None,
        mha.do,
        mha.q,
        mha.k,
        mha.v,
        out,
        lse,
        mha.cu_q,
        mha.cu_k,
        *gradients,
        1,
        0.08,
        mha.max_q,
        mha.max_k,
    )
    wanted = interface._flash_attn_varlen_backward(
        mha.do,
        mha.q,
        mha.k,
        mha.v,
        out,
        lse,
        mha.cu_q,
        mha.cu_k,
        mha.max_q,
        mha.max_k,
        causal=True,
        softmax_scale=0.08,
    )
    assert bits(kit, gradients) == bits(kit, wanted)


def test_fused_and_permutations(kit):
    case, rng = FusedCase(kit), np.random.default_rng(0)
    kv, rows = kit.bf16(rng.normal(size=(9, 1, 512))), kit.i32(rng.integers(0, 9, (5, 1, 6)))
    assert bits(kit, cuda.fused_norm_rope_attn_rope_cast_fwd(*case.head, kv, rows, SCALE)) == bits(
        kit, flash_mla.fused_norm_rope_attn_rope_cast.prefill(*case.head, kv, rows, SCALE)
    )
    pages, _ = support.random_pages(rng, "v41", 2, 5)
    cache = support.cache_view(kit, pages, 5, 528)
    assert bits(
        kit, cuda.fused_norm_rope_attn_rope_cast_decode(*case.head, cache, rows[:, 0], SCALE)
    ) == bits(kit, flash_mla.fused_norm_rope_attn_rope_cast.decode(*case.head, cache, rows[:, 0], SCALE))
    w, sf = kit.bytes(rng.integers(0, 256, (64, 128))), column_words(kit, rng.integers(0, 9, (64, 1)))
    assert bits(kit, cuda.permute_q_b_proj(w, sf, 4, 16)) == bits(
        kit, flash_mla.fused_norm_rope_attn_rope_cast.permute_q_b_proj((w, sf), 4, 16)
    )
    w, sf = kit.bytes(rng.integers(0, 256, (2, 3, 128))), column_words(kit, rng.integers(0, 9, (2, 3, 1)))
    assert bits(kit, cuda.permute_wv_proj(w, sf, 4, 32)) == bits(
        kit, flash_mla.fused_norm_rope_attn_rope_cast.permute_wv_proj((w, sf), 4, 32)
    )
