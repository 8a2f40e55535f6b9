# SPDX-License-Identifier: MIT
"""What only shows on a GPU: nothing waits, graphs capture every call and own their scratch memory, the current stream
and device are used and left alone, compiled and exported programs. Run with FLASHMLA_TEST_CUDA=1."""

import os

import numpy as np
import pytest
import support
from support import DenseCase, SparseCase
from test_fused import SCALE
from test_fused import Case as FusedCase
from test_mha import Case as MhaCase
from test_prefill import Case as PrefillCase

import flash_mla
from flash_mla import fused_norm_rope_attn_rope_cast as fused
from flash_mla import quant

torch = pytest.importorskip("torch")
if not os.environ.get("FLASHMLA_TEST_CUDA"):
    pytest.skip("FLASHMLA_TEST_CUDA is not set", allow_module_level=True)
kit = support.KITS["cuda"]


def dense_decode():
    case = DenseCase(kit, lengths=(300, 0, 77))
    return lambda: flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, causal=True
    )


def sparse_decode(main="v41", extra="v41-fp4"):
    case = SparseCase(kit, main, extra, topk=700)
    return lambda: flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)


def with_metadata():
    case, (meta, _) = DenseCase(kit), flash_mla.get_mla_metadata()
    return lambda: flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512, meta)


def metadata_tables():
    case = DenseCase(kit)
    return lambda: flash_mla.get_mla_metadata(case.seqlens, 8, 1)


def sparse_prefill():
    case = PrefillCase(kit)
    return lambda: flash_mla.flash_mla_sparse_fwd(case.q, case.kv, case.index_array, 0.1, **case.keywords)


def attention(backward=False, is_varlen=True):
    case = MhaCase(kit) if is_varlen else MhaCase(kit, lengths_q=(5, 5), lengths_k=(7, 7))
    q, k, v = (x.clone().requires_grad_(backward) for x in (case.q, case.k, case.v))

    def call():
        out, lse = flash_mla.flash_attn_varlen_func(q, k, v, *case.arguments[3:], is_varlen=is_varlen)
        return torch.autograd.grad(out, (q, k, v), case.do) if backward else (out, lse)

    return call


def fused_prefill():
    case, kv = FusedCase(kit), kit.bf16(np.random.default_rng(0).normal(size=(30, 1, 512)))
    rows = kit.i32(np.random.default_rng(1).integers(-1, 30, (5, 12)))
    return lambda: fused.prefill(*case.head, kv, rows, SCALE, attn_sink=case.sink_array)


def fused_decode():
    case, (pages, _) = FusedCase(kit), support.random_pages(np.random.default_rng(0), "v4", 3, 9)
    cache = support.cache_view(kit, pages, 9, 584)
    rows = kit.i32(np.random.default_rng(1).integers(-1, 27, (5, 12)))
    return lambda: fused.decode(*case.head, cache, rows, SCALE)


def caches():
    x = kit.bf16(np.random.default_rng(0).normal(size=(3, 8, 1, 512)))

    def call():
        cache = quant.quantize_k_cache(x, quant.KVCacheLayout.V4_FP8Sparse)
        return (quant.dequantize_k_cache(cache, quant.KVCacheLayout.V4_FP8Sparse),)

    return call


def small_things():
    table = kit.i32(np.arange(6).reshape(2, 3))
    positions = kit.i32(np.random.default_rng(0).integers(-1, 190, (2, 1, 20)))
    x = kit.bf16(np.random.default_rng(1).normal(size=(32, 256)))
    outs = [kit.f32(np.random.default_rng(i).normal(size=(5, 2, 512))).bfloat16() for i in range(2)]
    lses = [kit.f32(np.random.default_rng(i).normal(size=(5, 2))) for i in range(2)]

    def call():
        codes, scale = quant.per_token_cast(x)
        weights = fused.permute_q_b_proj((codes, scale), 2, 16)
        merged = flash_mla.merge_states(outs, lses)
        return (quant.abs_indices2indices_in_kvcache(positions, table, 64), *weights, *merged)

    return call


MAKERS = {
    "dense decode": dense_decode,
    "sparse decode": sparse_decode,
    "sparse decode, V3.2": lambda: sparse_decode("v32", None),
    "metadata object": with_metadata,
    "metadata tables": metadata_tables,
    "sparse prefill": sparse_prefill,
    "attention": attention,
    "attention, equal lengths": lambda: attention(is_varlen=False),
    "attention backward": lambda: attention(True),
    "fused prefill": fused_prefill,
    "fused decode": fused_decode,
    "caches": caches,
    "small things": small_things,
}


@pytest.fixture(params=list(MAKERS))
def call(request):
    return MAKERS[request.param]()


def bits(results):
    return [kit.raw(x).copy() for x in results]


def same(a, b):
    return all((x == y).all() for x, y in zip(a, b))


def test_nothing_waits_for_the_device(call):
    """torch refuses whatever would wait, in the first call and in later ones."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [call() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(bits(results[0]), bits(results[2]))


def test_every_call_can_be_captured(call):
    """A capture forbids waits, allocations by the driver and other streams. Replays give the eager bits, before and
    after eager calls of other sizes, and after torch's cache was emptied: a graph owns its scratch memory (C060, c)."""
    wanted = bits(call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    others = [make() for make in (dense_decode, sparse_decode)]
    for _ in range(3):
        for x in results:
            x.view(torch.uint8).fill_(0x5A) if x.is_contiguous() else None
        graph.replay()
        torch.cuda.synchronize()
        assert same(bits(results), wanted)
        for other in others:
            other()
        torch.cuda.empty_cache()


def test_a_graph_reads_what_its_inputs_hold_at_replay():
    """Lengths, tables, indices and caches are read by the device at each replay, not when the graph was made."""
    first, second = (DenseCase(kit, seed, lengths) for seed, lengths in ((0, (300, 5, 77)), (1, (9, 290, 0))))
    shape = [max(n) for n in zip(first.cache.shape, second.cache.shape)]
    width = max(first.table.shape[1], second.table.shape[1])
    cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    table = torch.full((3, width), 2147480000, dtype=torch.int32, device="cuda")
    q, seqlens = first.q.clone(), first.seqlens.clone()

    def load(case):
        q.copy_(case.q), seqlens.copy_(case.seqlens)
        cache[: case.cache.shape[0]].copy_(case.cache)
        table[:, : case.table.shape[1]].copy_(case.table)

    load(first)
    graph = torch.cuda.CUDAGraph()
    flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512)
    for case in (first, second, first):
        load(case)
        graph.replay()
        torch.cuda.synchronize()
        case.check(kit, out, lse)


@pytest.mark.parametrize("repeated", [False, True])
def test_current_stream(repeated):
    """The call waits for what its stream does before it, and for nothing else: q comes late on a side stream."""
    case, stream = DenseCase(kit), torch.cuda.Stream()

    def call(q):
        return flash_mla.flash_mla_with_kvcache(q, case.cache, case.table, case.seqlens, 512)

    late = torch.full_like(case.q, float("nan"))
    if repeated:
        call(late)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(case.q)
        out, lse = call(late)
        assert not stream.query()  # launched, not waited for
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    stream.synchronize()
    case.check(kit, out, lse)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_the_device_is_the_tensors():
    case = DenseCase(support.TorchKit(torch, "cuda:1"))
    with torch.cuda.device(0):
        out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
        assert torch.cuda.current_device() == 0 and out.device.index == lse.device.index == 1
    case.check(kit, out, lse)
    with pytest.raises(RuntimeError, match="cache_seqlens: is on cuda:0; allowed: cuda:1"):
        flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens.to("cuda:0"), 512)


def test_a_tensor_on_the_host_is_named():
    case = DenseCase(kit)
    for _ in range(2):
        flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
        with pytest.raises(RuntimeError, match="block_table: is on cpu; allowed: cuda:0"):
            flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table.cpu(), case.seqlens, 512)


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_compiled(backend):
    case = SparseCase(kit, "v41", "v41-fp4")
    torch._dynamo.reset()

    def call(q, cache, keywords):
        out, lse = flash_mla.flash_mla_with_kvcache(q * 1, cache, None, None, 512, **keywords)
        return out * 2, lse

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for _ in range(4):  # warm-up, recording, replays
        out, lse = compiled(case.q, case.cache, case.keywords)
        case.check(kit, out.clone() / 2, lse.clone())


def test_exported():
    case = DenseCase(kit)

    class Module(torch.nn.Module):
        def forward(self, q, cache, table, seqlens):
            return flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, causal=True)

    inputs = (case.q, case.cache, case.table, case.seqlens)
    program = torch.export.export(Module(), inputs)
    assert any("flash_mla.decode" in str(node.target) for node in program.graph.nodes)
    case.check(kit, *program.module()(*inputs), causal=True)
