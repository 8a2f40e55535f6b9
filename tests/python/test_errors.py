# SPDX-License-Identifier: MIT
"""Wrong calls: the right class of error, the argument's Python name in the message, and no result written."""

import re

import numpy as np
import pytest
import support
from support import DenseCase, SparseCase

import flash_mla
from flash_mla import fused_norm_rope_attn_rope_cast as fused


def dense(kit, **changes):
    case = DenseCase(kit)
    keywords = dict(
        q=case.q, k_cache=case.cache, block_table=case.table, cache_seqlens=case.seqlens, head_dim_v=512
    )
    keywords.update(changes)
    return flash_mla.flash_mla_with_kvcache(**keywords)


def sparse(kit, **changes):
    case = SparseCase(kit, changes.pop("main", "v4"), changes.pop("extra", "v4"))
    keywords = dict(
        q=case.q, k_cache=case.cache, block_table=None, cache_seqlens=None, head_dim_v=512, **case.keywords
    )
    keywords.update(changes)
    return flash_mla.flash_mla_with_kvcache(**keywords)


CONTRADICTIONS = [  # call, changes, message
    (dense, lambda kit: {"head_dim_v": 256}, "head_dim_v: 256; allowed: 512"),
    (dense, lambda kit: {"tile_scheduler_metadata": "fast"}, "tile_scheduler_metadata: is a str"),
    (
        dense,
        lambda kit: {"topk_length": kit.i32([1, 2, 3])},
        "topk_length: is given; allowed: None without indices",
    ),
    (dense, lambda kit: {"extra_indices_in_kvcache": kit.i32([[[1]]])}, "extra_indices_in_kvcache: is given"),
    (dense, lambda kit: {"kv_layout": "pages"}, "kv_layout: 'pages'"),
    (dense, lambda kit: {"q": [[1.0]]}, "q: is a list"),
    (sparse, lambda kit: {"causal": True}, "causal: True; allowed: False with indices"),
    (sparse, lambda kit: {"extra_k_cache": None}, "extra_indices_in_kvcache: is given"),
    (
        sparse,
        lambda kit: {"extra_k_cache": None, "extra_indices_in_kvcache": None},
        "extra_topk_length: is given",
    ),
    (sparse, lambda kit: {"extra_indices_in_kvcache": None}, "extra_indices_in_kvcache: is None"),
    (sparse, lambda kit: {"is_fp8_kvcache": False}, "is_fp8_kvcache: False"),
]


@pytest.mark.parametrize("call, changes, message", CONTRADICTIONS, ids=[x[2][:40] for x in CONTRADICTIONS])
def test_contradictions_are_assertion_errors(kit, call, changes, message):
    with pytest.raises(AssertionError) as caught:
        call(kit, **changes(kit))
    assert message in str(caught.value)


TENSORS = [
    (dense, lambda kit: {"q": kit.f32(np.ones((3, 2, 4, 576)))}, "q: dtype is F32"),
    (dense, lambda kit: {"q": kit.f16(np.ones((3, 2, 4, 576)))}, "k_cache: kv: format is bf16"),
    (dense, lambda kit: {"q": kit.bf16(np.ones((3, 4, 576)))}, "q: shape is [3, 4, 576]"),
    (dense, lambda kit: {"q": kit.bf16(np.ones((3, 2, 5, 576)))}, "h_q: 5; allowed: a multiple of h_kv, 2"),
    (dense, lambda kit: {"q": kit.bf16(np.ones((3, 2, 4, 1152)))[..., ::2]}, "q: stride[3] is 2"),
    (dense, lambda kit: {"q": kit.bf16(np.ones((3, 2, 4, 512)))}, "k_cache: kv: d_qk is 576"),
    (dense, lambda kit: {"k_cache": kit.bf16(np.ones((3, 16, 576)))}, "k_cache: shape is [3, 16, 576]"),
    (dense, lambda kit: {"k_cache": kit.f32(np.ones((3, 16, 2, 576)))}, "k_cache: dtype is F32"),
    (
        dense,
        lambda kit: {"k_cache": kit.bf16(np.ones((3, 16, 2, 1152)))[..., ::2]},
        "k_cache: stride[3] is 2",
    ),
    (dense, lambda kit: {"block_table": kit.f32(np.ones((3, 11)))}, "block_table: dtype is F32"),
    (dense, lambda kit: {"block_table": kit.i32(np.ones((2, 11)))}, "block_table: shape is [2, 11]"),
    (dense, lambda kit: {"block_table": kit.i32(np.full((3, 11), 999))}, "block_table[0, 0]: 999"),
    (dense, lambda kit: {"cache_seqlens": kit.i32([1, 2])}, "cache_seqlens: shape is [2]"),
    (dense, lambda kit: {"cache_seqlens": kit.i32([1, -2, 3])}, "cache_seqlens[1]: -2"),
    (dense, lambda kit: {"cache_seqlens": kit.i32([1, 0, 99999])}, "cache_seqlens[2]: 99999"),
    (dense, lambda kit: {"cache_seqlens": kit.i32([1, 9, 2, 9, 3, 9])[::2]}, "cache_seqlens: stride[0] is 2"),
    (dense, lambda kit: {"attn_sink": kit.f32([0.0])}, "attn_sink: shape is [1]"),
    (dense, lambda kit: {"softmax_scale": float("nan")}, "softmax_scale: nan"),
    (dense, lambda kit: {"out": kit.bf16(np.ones((3, 2, 4, 256)))}, "out: shape is [3, 2, 4, 256]"),
    (dense, lambda kit: {"out": kit.f16(np.ones((3, 2, 4, 512)))}, "out: dtype is F16"),
    (dense, lambda kit: {"lse": kit.f32(np.ones((3, 2, 4)))}, "lse: shape is [3, 2, 4]"),
    (
        sparse,
        lambda kit: {"k_cache": kit.bytes(np.ones((2, 4, 1, 600)))},
        "k_cache: 600 bytes per token with d_qk 512",
    ),
    (sparse, lambda kit: {"k_cache": kit.bytes(np.ones((2, 4, 1, 656)))}, "allowed: bf16 or fp16"),
    (sparse, lambda kit: {"k_cache": kit.bytes(np.ones((2, 4, 2, 584)))}, "k_cache: kv.num_heads: 2"),
    (
        sparse,
        lambda kit: {"k_cache": kit.bytes(np.ones((2, 8, 1, 584)))[:, ::2]},
        "k_cache: kv.token_stride_bytes: 1168",
    ),
    (sparse, lambda kit: {"indices": kit.i32(np.ones((2, 24)))}, "indices: shape is [2, 24]"),
    (sparse, lambda kit: {"indices": kit.f32(np.ones((2, 2, 24)))}, "indices: dtype is F32"),
    (sparse, lambda kit: {"indices": kit.i32(np.ones((2, 2, 48)))[..., ::2]}, "indices: stride[2] is 2"),
    (sparse, lambda kit: {"topk_length": kit.i32([1, 2, 3])}, "topk_length: shape is [3]"),
    (
        sparse,
        lambda kit: {"extra_indices_in_kvcache": kit.i32(np.ones((2, 3, 4)))},
        "extra_indices_in_kvcache: extra_indices: shape is [2, 3, 4]",
    ),
    (
        sparse,
        lambda kit: {"main": "v41", "extra": "v4"},
        "extra_k_cache: extra_kv: format is v4; allowed beside",
    ),
    (sparse, lambda kit: {"main": "v41-fp4", "extra": "v41-fp4"}, "k_cache: kv: format is v41-fp4"),
    (sparse, lambda kit: {"attn_sink": kit.bf16([0.0, 0.0, 0.0])}, "attn_sink: dtype is BF16"),
]


@pytest.mark.parametrize("call, changes, message", TENSORS, ids=[x[2][:40] for x in TENSORS])
def test_wrong_tensors_are_runtime_errors(kit, call, changes, message):
    if re.match(r"\w+\[", message) and not kit.checks_values:
        pytest.skip("values on a device are not checked")
    with pytest.raises(RuntimeError) as caught:
        call(kit, **changes(kit))
    assert message in str(caught.value)


def test_nothing_is_written_on_failure(host_kit):
    kit = host_kit
    case = DenseCase(kit)
    out, lse = kit.bf16(np.full((3, 2, 4, 512), 3.0)), kit.f32(np.full((3, 4, 2), 5.0))
    with pytest.raises(RuntimeError, match="cache_seqlens"):
        dense(kit, cache_seqlens=kit.i32([1, 2, 99999]), out=out, lse=lse)
    assert (kit.value(out) == 3).all() and (kit.value(lse) == 5).all()
    assert case.q is not None


def test_contradicted_metadata_writes_nothing(host_kit):
    kit = host_kit
    meta, _ = flash_mla.get_mla_metadata()
    dense(kit, tile_scheduler_metadata=meta)
    out, lse = kit.bf16(np.full((3, 2, 4, 512), 3.0)), kit.f32(np.full((3, 4, 2), 5.0))
    with pytest.raises(AssertionError, match="tile_scheduler_metadata: causal is True"):
        dense(kit, tile_scheduler_metadata=meta, causal=True, out=out, lse=lse)
    assert (kit.value(out) == 3).all() and (kit.value(lse) == 5).all()


def test_expanded_caches_are_refused(kit):
    """A stride of 0 would mean "contiguous" to the library; the caller means "the same memory"."""
    one = kit.bf16(np.ones((1, 16, 2, 576)))
    expanded = one.expand(9, 16, 2, 576) if hasattr(kit, "torch") else np.broadcast_to(one, (9, 16, 2, 576))
    with pytest.raises(RuntimeError, match=r"k_cache: stride\[0\] is 0"):
        dense(kit, k_cache=expanded)


def test_prefill_and_mha(host_kit):
    kit = host_kit
    q, kv, rows = kit.bf16(np.ones((2, 3, 512))), kit.bf16(np.ones((5, 1, 512))), kit.i32(np.ones((2, 1, 4)))
    for kind, match, call in (
        (AssertionError, "d_v: 128", lambda: flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, 128)),
        (AssertionError, "sm_scale: is None", lambda: flash_mla.flash_mla_sparse_fwd(q, kv, rows, None)),
        (
            RuntimeError,
            "kv: dtype",
            lambda: flash_mla.flash_mla_sparse_fwd(q, kit.f16(np.ones((5, 1, 512))), rows, 0.1),
        ),
        (RuntimeError, "indices: shape", lambda: flash_mla.flash_mla_sparse_fwd(q, kv, rows[:1], 0.1)),
        (
            RuntimeError,
            "topk_length: shape",
            lambda: flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, topk_length=kit.i32([1])),
        ),
        (
            RuntimeError,
            "cu_seqlens_qo",
            lambda: flash_mla.flash_attn_varlen_func(q, kv, kv, kit.i32([0, 3]), kit.i32([0, 5]), 3, 5),
        ),
        (
            RuntimeError,
            "max_seqlen_qo",
            lambda: flash_mla.flash_attn_varlen_func(q, kv, kv, kit.i32([0, 2]), kit.i32([0, 5]), 1, 5),
        ),
        (
            AssertionError,
            "is_varlen: False",
            lambda: flash_mla.flash_attn_varlen_func(
                q, kv, kv, kit.i32([0, 0, 0]), kit.i32([0, 0, 0]), 1, 5, is_varlen=False
            ),
        ),
    ):
        with pytest.raises(kind, match=match):
            call()


def test_numpy_strides_and_byte_order():
    kit = support.KITS["numpy"]
    with pytest.raises(RuntimeError, match="cache_seqlens: dtype"):
        dense(kit, cache_seqlens=np.array([1, 2, 3], ">i4"))
    records = np.zeros(4, [("a", "u1"), ("b", "<i4")])["b"]
    with pytest.raises(RuntimeError, match="cache_seqlens: strides"):
        dense(kit, cache_seqlens=records[:3])
    with pytest.raises(RuntimeError, match="has 6 dimensions"):
        dense(kit, q=np.zeros((1,) * 6, np.uint16))


def test_read_only_inputs_are_fine():
    kit = support.KITS["numpy"]
    case = DenseCase(kit)
    for x in (case.q, case.cache, case.table, case.seqlens):
        x.flags.writeable = False
    case.check(kit, *flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512))


# ---- torch -------------------------------------------------------------------------------------------------


def test_gradients_where_there_are_none(torch):
    kit = support.KITS["torch"]
    case = DenseCase(kit)
    q = case.q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="q: requires grad"):
        dense(kit, q=q)
    with torch.no_grad():
        dense(kit, q=q)
    dense(kit, q=q.detach())
    with pytest.raises(RuntimeError, match="kv: requires grad"):
        flash_mla.flash_mla_sparse_fwd(
            kit.bf16(np.ones((2, 3, 512))),
            kit.bf16(np.ones((5, 1, 512))).requires_grad_(),
            kit.i32(np.ones((2, 1, 4))),
            0.1,
        )


def test_meta_and_sparse_tensors(torch):
    kit = support.KITS["torch"]
    with pytest.raises(RuntimeError, match="q: is on meta"):
        dense(kit, q=torch.empty((3, 2, 4, 576), dtype=torch.bfloat16, device="meta"))
    with pytest.raises(RuntimeError, match="attn_sink: is on cpu with layout torch.sparse_coo"):
        dense(kit, attn_sink=torch.zeros(4).to_sparse())
    with pytest.raises(RuntimeError, match="block_table: dtype is torch.int16"):
        dense(kit, block_table=torch.zeros((3, 11), dtype=torch.int16))
    with pytest.raises(RuntimeError, match="cache_seqlens: dtype is I64"):
        dense(kit, cache_seqlens=torch.tensor([1, 2, 3]))


def test_devices_must_agree(torch):
    """Two devices in one call; a stand-in for the second where there is no GPU."""
    kit = support.KITS["torch"]
    from flash_mla import _library as c
    from flash_mla._context import Call

    call = Call(c.DecodeArgs)
    call.tensor("q", kit.bf16(np.ones((1, 1, 1, 576))))
    view = flash_mla._tensors.array(kit.i32([1]), "cache_seqlens")
    view.device = (c.DEVICE_CUDA, 1)
    with pytest.raises(RuntimeError, match="cache_seqlens: is on cuda:1; allowed: cpu, where q is"):
        call.place(view, "cache_seqlens")


def test_no_gpu_is_a_clear_error(torch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    from flash_mla import _library as c
    from flash_mla._context import context

    with pytest.raises(RuntimeError, match="(?i)cuda:0: .+"):
        context((c.DEVICE_CUDA, 0))
    with pytest.raises(RuntimeError, match="(?i)cuda"):
        flash_mla.supports("sparse_decode", device="cuda")


def test_fused(kit):
    with pytest.raises(AssertionError, match="extra_indices_in_kvcache: is given"):
        fused.decode(
            False,
            0,
            None,
            False,
            64,
            None,
            1,
            32,
            True,
            True,
            True,
            None,
            None,
            None,
            0.1,
            extra_indices_in_kvcache=kit.i32([[1]]),
        )
    with pytest.raises(AssertionError, match="extra_indices_in_kvcache: is None"):
        fused.decode(
            False,
            0,
            None,
            False,
            64,
            None,
            1,
            32,
            True,
            True,
            True,
            None,
            None,
            None,
            0.1,
            extra_k_cache=kit.bytes(np.ones((1, 1, 1, 584))),
        )
    with pytest.raises(RuntimeError, match=r"q: shape is \[2, 512\]"):
        fused.prefill(
            False,
            0.0,
            kit.i32([0]),
            False,
            64,
            kit.f32(np.ones((1, 64))),
            1,
            32,
            True,
            True,
            True,
            kit.bf16(np.ones((2, 512))),
            kit.bf16(np.ones((1, 1, 512))),
            kit.i32([[0]]),
            0.1,
        )
