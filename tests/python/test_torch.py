# SPDX-License-Identifier: MIT
"""torch in particular: lazily known, autograd, custom operators, torch.compile and export, streams and workspace."""

import os
import subprocess
import sys

import numpy as np
import pytest
import support
from support import DenseCase, SparseCase
from test_mha import Case as MhaCase
from test_prefill import Case as PrefillCase

import flash_mla
from flash_mla import fused_norm_rope_attn_rope_cast as fused

torch = pytest.importorskip("torch")
kit = support.KITS["torch"]
operators = pytest.mark.skipif(
    not hasattr(getattr(torch, "library", None), "custom_op"), reason="torch before 2.4"
)


def run_python(code):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("fine"), done.stderr


@pytest.mark.parametrize("first", ["import torch, flash_mla", "import flash_mla, torch"])
def test_order_of_imports_does_not_matter(first):
    run_python(
        first + "\nq = torch.ones(1, 1, 2, 576, dtype=torch.bfloat16)\n"
        "c = torch.ones(1, 64, 1, 576, dtype=torch.bfloat16)\n"
        "o, l = flash_mla.flash_mla_with_kvcache(q, c, torch.zeros(1, 1, dtype=torch.int32),\n"
        "                                        torch.tensor([3], dtype=torch.int32), 512)\n"
        "assert (o == 1).all() and o.dtype == torch.bfloat16\n"
        "x = torch.ones(2, 1, 128, dtype=torch.bfloat16, requires_grad=True)\n"
        "cu = torch.tensor([0, 2], dtype=torch.int32)\n"
        "flash_mla.flash_attn_varlen_func(x, x, x, cu, cu, 2, 2)[0].sum().backward()\n"
        "assert torch.isfinite(x.grad).all()\nprint('fine')"
    )


def test_results_are_torch_tensors_where_the_query_is():
    case = DenseCase(kit)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
    assert isinstance(out, torch.Tensor) and out.is_contiguous() and lse.dtype == torch.float32
    table, splits = flash_mla.get_mla_metadata(case.seqlens, 4, 1)
    assert table.dtype == splits.dtype == torch.int32


def test_host_arrays_of_both_kinds_mix():
    """One device is one device: NumPy's tables beside torch's tensors."""
    case, host = DenseCase(kit), DenseCase(support.KITS["numpy"])
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, host.table, host.seqlens, 512)
    assert isinstance(out, torch.Tensor)
    case.check(kit, out, lse)


def test_parameters_and_inference_mode():
    case = DenseCase(kit)
    with torch.inference_mode():
        q = torch.nn.Parameter(case.q)
        out, lse = flash_mla.flash_mla_with_kvcache(q, case.cache, case.table, case.seqlens, 512)
    case.check(kit, out, lse)


def test_a_saved_graph_can_be_run_backward_twice():
    case = MhaCase(kit)
    q = case.q.clone().requires_grad_()
    out, _ = flash_mla.flash_attn_varlen_func(q, case.k, case.v, *case.arguments[3:])
    loss = out.float().sum()
    loss.backward(retain_graph=True)
    first = q.grad.clone()
    loss.backward()
    assert torch.equal(q.grad, first + first)


# ---- traces ----------------------------------------------------------------------------------------------


def decode_case(main="v4", extra="v4"):
    case = SparseCase(kit, main, extra)
    return case, (
        lambda q, cache, keywords: flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, **keywords)
    )


@operators
def test_compiled_decode_is_one_graph():
    case, call = decode_case()
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(
        compiled(case.q, case.cache, case.keywords), call(case.q, case.cache, case.keywords)
    ):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()


@operators
def test_compiled_dense_decode_with_metadata():
    case = DenseCase(kit)
    torch._dynamo.reset()

    def call(q, cache, table, seqlens, meta):
        out, lse = flash_mla.flash_mla_with_kvcache(
            q * 1, cache, table, seqlens, 512, meta, None, causal=True
        )
        return out * 2, lse

    meta, _ = flash_mla.get_mla_metadata()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, lse = compiled(case.q, case.cache, case.table, case.seqlens, meta)
    case.check(kit, out / 2, lse, causal=True)


@operators
def test_compiled_prefill_with_changing_sizes():
    torch._dynamo.reset()
    compiled = torch.compile(
        flash_mla.flash_mla_sparse_fwd, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for s_q in (5, 3, 4):
        case = PrefillCase(kit, s_q=s_q)
        case.check(kit, *compiled(case.q, case.kv, case.index_array, 0.06, **case.keywords), 0.06)


@operators
def test_compiled_attention_trains():
    case = MhaCase(kit)
    torch._dynamo.reset()
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))

    def call(q, k, v):
        return flash_mla.flash_attn_varlen_func(q, k, v, *case.arguments[3:], causal=True)[0]

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    out.backward(case.do)
    plain = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    wanted = call(*plain)
    wanted.backward(case.do)
    assert torch.equal(out, wanted)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip((q, k, v), plain))


@operators
def test_compiled_fused():
    rng = np.random.default_rng(0)
    head = (
        True,
        1e-6,
        kit.i32([0, 1]),
        False,
        64,
        kit.f32(rng.normal(size=(2, 64))),
        1,
        32,
        True,
        True,
        True,
        kit.bf16(rng.normal(size=(2, 2, 512))),
    )
    kv, rows = kit.bf16(rng.normal(size=(5, 1, 512))), kit.i32([[[0, 4, 2]], [[1, -1, 3]]])
    pages, _ = support.random_pages(rng, "v41", 2, 4)
    cache = support.cache_view(kit, pages, 4, 528)
    for call, tail in ((fused.prefill, (kv, rows, 0.1)), (fused.decode, (cache, rows[:, 0], 0.1))):
        torch._dynamo.reset()
        got, wanted = torch.compile(call, backend="aot_eager", fullgraph=True)(*head, *tail), call(
            *head, *tail
        )
        assert all((kit.raw(a) == kit.raw(b)).all() and a.stride() == b.stride() for a, b in zip(got, wanted))


@operators
def test_exported():
    case, call = decode_case("v41", "v41-fp4")

    class Module(torch.nn.Module):
        def forward(self, q, cache, indices, extra, extra_indices):
            return call(
                q, cache, dict(indices=indices, extra_k_cache=extra, extra_indices_in_kvcache=extra_indices)
            )

    k = case.keywords
    inputs = (case.q, case.cache, k["indices"], k["extra_k_cache"], k["extra_indices_in_kvcache"])
    program = torch.export.export(Module(), inputs)
    assert any("flash_mla.decode" in str(node.target) for node in program.graph.nodes)
    assert all(torch.equal(a, b) for a, b in zip(program.module()(*inputs), Module()(*inputs)))


@operators
def test_fake_tensors_have_the_shapes_of_results():
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = DenseCase(kit)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (case.q, case.cache, case.table, case.seqlens)]
        fake_out, fake_lse = flash_mla.flash_mla_with_kvcache(*fakes, 512)
    assert fake_out.shape == out.shape and fake_lse.shape == lse.shape and fake_out.dtype == out.dtype
    assert fake_out.stride() == out.stride() and fake_lse.stride() == lse.stride()


@operators
def test_operators_pass_torchs_own_checks():
    case = MhaCase(kit, lengths_q=(3, 2), lengths_k=(4, 2))
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.flash_mla.mha_forward.default,
        (q, k, v, case.cu_q, case.cu_k, 3, 4, None, True),
        test_utils=tests,
    )
    prefill = PrefillCase(kit)
    torch.library.opcheck(
        torch.ops.flash_mla.sparse_prefill.default,
        (prefill.q, prefill.kv, prefill.index_array, 0.1, 512, None, None, False),
        test_utils=tests,
    )


@operators
def test_nothing_differentiable_through_decode():
    case = DenseCase(kit)
    q = case.q.clone().requires_grad_()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="requires grad|no gradient|autograd"):
        out, _ = torch.compile(flash_mla.flash_mla_with_kvcache, backend="aot_eager", fullgraph=True)(
            q, case.cache, case.table, case.seqlens, 512
        )
        out.sum().backward()


# ---- the device's side, as far as it shows without one ----------------------------------------------------


def test_workspace_and_stream_of_cuda_calls(monkeypatch):
    """On CUDA a call asks for its workspace, hands in torch's memory and torch's current stream, and waits for nothing.
    Here with stand-ins for both, over host memory."""
    import ctypes

    from flash_mla import _context
    from flash_mla import _library as c

    case = DenseCase(kit)
    seen = {}

    def measure(handle, pointer, size):
        seen["measured"] = True
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = 4096
        return c.OK

    def function(handle, pointer, stream):
        args = ctypes.cast(pointer, ctypes.POINTER(c.DecodeArgs))[0]
        seen.update(stream=stream, size=args.workspace_size, memory=args.workspace)
        return c.OK

    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *s, device=None, **k: real_empty(*s, **k))
    monkeypatch.setattr(_context, "current_stream", lambda index: 0x1234 + index)
    monkeypatch.setattr(_context, "context", lambda device: _context.Context((c.DEVICE_CPU, 0)))
    call = _context.Call(c.DecodeArgs)
    view = flash_mla._tensors.array(case.q, "q")
    view.device = (c.DEVICE_CUDA, 2)
    call.place(view, "q")
    memory = call.run(function, measure)
    assert seen == {"measured": True, "stream": 0x1236, "size": 4096, "memory": memory.data_ptr()}
