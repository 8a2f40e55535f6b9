# SPDX-License-Identifier: MIT
"""The C ABI as ctypes sees it: structs of include/flashmla/*.h, their constants, and the loaded library.

The structs mirror the headers field by field; tests/python/test_abi.py compares every size and offset with the numbers
that the C tests pin, and with the C compiler's own.
"""

import ctypes
import os
import pathlib
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p

# ---- constants of flashmla_types.h and flashmla.h ----------------------------------------------------------

OK = 0
ERROR_INVALID_ARGUMENT, ERROR_UNSUPPORTED, ERROR_WORKSPACE_TOO_SMALL, ERROR_BUSY = 1, 2, 3, 4
ERROR_OUT_OF_MEMORY, ERROR_NO_BACKEND, ERROR_NO_DEVICE, ERROR_UNSUPPORTED_DEVICE, ERROR_DEVICE = (
    10,
    11,
    12,
    13,
    14,
)

DTYPE_NONE, BF16, F16, F32, F64, I32, I64, U8, F8_E4M3, F8_E8M0, F4_E2M1 = range(11)

KV_NONE, KV_BF16, KV_F16, KV_V32, KV_V4, KV_V41, KV_V41_PAGE, KV_V41_FP4, KV_V41_FP4_PAGE = range(9)
KV_COUNT, KV_CUSTOM = 9, 100
LAYOUT_PLAIN, LAYOUT_RECORD, LAYOUT_PAGE = range(3)

DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA, DEVICE_ORACLE = range(4)
ISA_AUTO, ISA_SCALAR, ISA_AVX2, ISA_AVX512BF16, ISA_AMX, ISA_NEON, ISA_COUNT = range(7)

EMPTY_LSE_NEG_INF, EMPTY_LSE_POS_INF = 0, 1
LSE_NATURAL, LSE_BASE2 = 0, 1
Q_PERMUTED, Q_PLAIN = 0, 1
ROPE_INTERLEAVED, ROPE_NEOX = 0, 1
QUANTIZER_DEFAULT, QUANTIZER_V32_2025 = 0, 1
SCHEDULE_2025_02, SCHEDULE_2025_09, SCHEDULE_2026_01 = 1, 4, 5

(
    OP_DENSE_DECODE,
    OP_SPARSE_DECODE,
    OP_SPARSE_PREFILL,
    OP_FUSED_PREFILL,
    OP_FUSED_DECODE,
    OP_MHA_FORWARD,
    OP_MHA_BACKWARD,
    OP_QUANTIZE,
    OP_DEQUANTIZE,
    OP_CONVERT,
    OP_MERGE,
    OP_PERMUTE_Q_B,
    OP_PERMUTE_WV,
    OP_INDICES_CONVERT,
    OP_FP8_CAST,
    OP_SCHEDULE,
    OP_COUNT,
) = range(17)

MAX_RANK = 5
SCALE_DEFAULT = -3.0e38

# ---- structs -----------------------------------------------------------------------------------------------


def _fields(text, types):
    """ "name name: type" lines to ctypes fields."""
    fields = []
    for line in text.strip().splitlines():
        names, kind = line.rsplit(":", 1)
        fields += [(name, types[kind.strip()]) for name in names.split()]
    return fields


_TYPES = {
    "size": c_size_t,
    "f32": c_float,
    "f64": c_double,
    "i32": c_int32,
    "i64": c_int64,
    "pointer": c_void_p,
}


class Tensor(ctypes.Structure):
    """fmla_tensor: a view of the caller's memory; strides count elements; rank 0 means absent."""

    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * MAX_RANK),
        ("stride", c_int64 * MAX_RANK),
    ]


class FormatInfo(ctypes.Structure):
    """fmla_format_info: one row of the library's table of KV formats."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("format", c_int32),
        ("layout", c_int32),
        ("name", c_char * 24),
    ] + _fields(
        "d_qk quant_dims rope_dims element group scale bytes_per_token data_row_bytes scale_row_bytes scale_offset "
        "rope_offset extra_only: i32",
        _TYPES,
    )


class KvCache(ctypes.Structure):
    """fmla_kv_cache: a paged cache; strides count bytes, 0 means contiguous."""

    _fields_ = (
        _fields(
            """
        data: pointer
        format num_heads d_qk reserved0: i32
        num_pages page_size page_stride_bytes token_stride_bytes head_stride_bytes: i64
        outer_scale: f64
        """,
            _TYPES,
        )
        + [("custom", POINTER(FormatInfo)), ("reserved1", c_int64 * 2)]
    )


_TYPES.update(tensor=Tensor, cache=KvCache, tensors=POINTER(Tensor))


class ContextConfig(ctypes.Structure):
    """fmla_context_config: device, threads, instruction tier."""

    _fields_ = _fields(
        """
        struct_size: size
        device device_index threads isa spin_us cuda_profile_kib cuda_kernels strict: i32
        parallel_for parallel_for_pool alloc release alloc_user: pointer
        """,
        _TYPES,
    )


class DecodeArgs(ctypes.Structure):
    """fmla_decode_args."""

    _fields_ = _fields(
        """
        struct_size: size
        softmax_scale: f32
        causal: i32
        q: tensor
        kv extra_kv: cache
        block_table cache_seqlens kv_bound indices extra_indices topk_length extra_topk_length: tensor
        attn_sink cu_seqlens_q out lse max_logits: tensor
        empty_lse lse_base batch_invariant reserved0: i32
        abs_out abs_logit: tensor
        workspace: pointer
        workspace_size: size
        """,
        _TYPES,
    )


class PrefillArgs(ctypes.Structure):
    """fmla_prefill_args."""

    _fields_ = _fields(
        """
        struct_size: size
        softmax_scale: f32
        empty_lse: i32
        q kv indices topk_length attn_sink out lse max_logits: tensor
        lse_base reserved0: i32
        abs_out abs_logit: tensor
        workspace: pointer
        workspace_size: size
        """,
        _TYPES,
    )


class FusedParams(ctypes.Structure):
    """fmla_fused_params: what fused prefill and fused decode share."""

    _fields_ = (
        _fields(
            """
        q_norm: i32
        rms_norm_eps: f32
        q_layout rope_style rope_dim n_wv_group: i32
        token_positions cos_sin_cache attn_sink out_fp8 out_scale lse max_logits: tensor
        empty_lse reserved0: i32
        out_exact abs_out abs_logit: tensor
        """,
            _TYPES,
        )
        + [("reserved1", c_int64 * 4)]
    )


_TYPES["fused"] = FusedParams


class FusedPrefillArgs(ctypes.Structure):
    """fmla_fused_prefill_args."""

    _fields_ = _fields(
        """
        struct_size: size
        softmax_scale: f32
        reserved0: i32
        q kv indices topk_length: tensor
        fused: fused
        workspace: pointer
        workspace_size: size
        """,
        _TYPES,
    )


class FusedDecodeArgs(ctypes.Structure):
    """fmla_fused_decode_args."""

    _fields_ = _fields(
        """
        struct_size: size
        softmax_scale: f32
        reserved0: i32
        q: tensor
        kv extra_kv: cache
        indices extra_indices topk_length extra_topk_length: tensor
        fused: fused
        workspace: pointer
        workspace_size: size
        """,
        _TYPES,
    )


class MhaForwardArgs(ctypes.Structure):
    """fmla_mha_forward_args."""

    _fields_ = _fields(
        """
        struct_size: size
        softmax_scale: f32
        causal: i32
        q k v cu_seqlens_q cu_seqlens_kv: tensor
        max_seqlen_q max_seqlen_kv: i64
        out lse: tensor
        empty_lse reserved0: i32
        abs_out abs_logit: tensor
        workspace: pointer
        workspace_size: size
        """,
        _TYPES,
    )


class MhaBackwardArgs(ctypes.Structure):
    """fmla_mha_backward_args."""

    _fields_ = _fields(
        """
        struct_size: size
        softmax_scale: f32
        causal: i32
        q k v out lse dout cu_seqlens_q cu_seqlens_kv: tensor
        max_seqlen_q max_seqlen_kv: i64
        dq dk dv: tensor
        workspace: pointer
        workspace_size: size
        """,
        _TYPES,
    )


class QuantizeArgs(ctypes.Structure):
    """fmla_quantize_args."""

    _fields_ = _fields(
        """
        struct_size: size
        src slots: tensor
        dst: cache
        quantizer reserved0: i32
        """,
        _TYPES,
    )


class DequantizeArgs(ctypes.Structure):
    """fmla_dequantize_args."""

    _fields_ = _fields(
        """
        struct_size: size
        src: cache
        slots dst: tensor
        """,
        _TYPES,
    )


class ConvertArgs(ctypes.Structure):
    """fmla_convert_args."""

    _fields_ = _fields(
        """
        struct_size: size
        src dst: cache
        src_slots dst_slots: tensor
        """,
        _TYPES,
    )


class IndicesConvertArgs(ctypes.Structure):
    """fmla_indices_convert_args."""

    _fields_ = _fields(
        """
        struct_size: size
        page_size: i64
        positions block_table indices: tensor
        """,
        _TYPES,
    )


class Fp8CastArgs(ctypes.Structure):
    """fmla_fp8_cast_args."""

    _fields_ = _fields(
        """
        struct_size: size
        src codes scale: tensor
        group reserved0: i32
        """,
        _TYPES,
    )


class MergeArgs(ctypes.Structure):
    """fmla_merge_args."""

    _fields_ = _fields(
        """
        struct_size: size
        outs lses: tensors
        count empty_lse: i32
        attn_sink out lse: tensor
        """,
        _TYPES,
    )


class PermuteQBArgs(ctypes.Structure):
    """fmla_permute_q_b_args."""

    _fields_ = _fields(
        """
        struct_size: size
        h_q d_q: i32
        weight scale out_weight out_scale: tensor
        """,
        _TYPES,
    )


class PermuteWvArgs(ctypes.Structure):
    """fmla_permute_wv_args."""

    _fields_ = _fields(
        """
        struct_size: size
        wv_group_size d_o: i32
        weight scale out_weight out_scale: tensor
        """,
        _TYPES,
    )


class ScheduleArgs(ctypes.Structure):
    """fmla_schedule_args."""

    _fields_ = _fields(
        """
        struct_size: size
        cache_seqlens topk_length extra_topk_length: tensor
        batch topk extra_topk: i64
        form overhead_blocks: i32
        metadata num_splits: tensor
        """,
        _TYPES,
    )


class SupportQuery(ctypes.Structure):
    """fmla_support_query."""

    _fields_ = _fields(
        """
        struct_size: size
        operation kv_format extra_format q_dtype h_q h_kv d_qk d_v: i32
        """,
        _TYPES,
    )


class DeviceInfo(ctypes.Structure):
    """fmla_device_info."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("device", c_int32),
        ("index", c_int32),
        ("name", c_char * 128),
        ("kernels", c_char * 128),
        ("compute_units", c_int32),
        ("capability", c_int32),
        ("memory_bytes", c_int64),
        ("shared_memory_bytes", c_int64),
    ]


# C names, for the test that compares these structs with the header.
STRUCTS = {
    "fmla_tensor": Tensor,
    "fmla_format_info": FormatInfo,
    "fmla_kv_cache": KvCache,
    "fmla_context_config": ContextConfig,
    "fmla_decode_args": DecodeArgs,
    "fmla_prefill_args": PrefillArgs,
    "fmla_fused_params": FusedParams,
    "fmla_fused_prefill_args": FusedPrefillArgs,
    "fmla_fused_decode_args": FusedDecodeArgs,
    "fmla_mha_forward_args": MhaForwardArgs,
    "fmla_mha_backward_args": MhaBackwardArgs,
    "fmla_quantize_args": QuantizeArgs,
    "fmla_dequantize_args": DequantizeArgs,
    "fmla_convert_args": ConvertArgs,
    "fmla_indices_convert_args": IndicesConvertArgs,
    "fmla_fp8_cast_args": Fp8CastArgs,
    "fmla_merge_args": MergeArgs,
    "fmla_permute_q_b_args": PermuteQBArgs,
    "fmla_permute_wv_args": PermuteWvArgs,
    "fmla_schedule_args": ScheduleArgs,
    "fmla_support_query": SupportQuery,
    "fmla_device_info": DeviceInfo,
}

# ---- the library -------------------------------------------------------------------------------------------


def _candidates():
    """Where libflashmla may be, in order: in the package, where FLASHMLA_LIBRARY says, where the loader looks."""
    yield from sorted(str(path) for path in pathlib.Path(__file__).parent.glob("libflashmla.so*"))
    if os.environ.get("FLASHMLA_LIBRARY"):
        yield os.environ["FLASHMLA_LIBRARY"]
    yield "libflashmla.so.0"


def _load():
    reasons = []
    for name in _candidates():
        try:
            return ctypes.CDLL(name), name
        except OSError as error:
            reasons.append(f"{name}: {error}")
    raise ImportError(
        "flash_mla: libflashmla cannot be loaded; set FLASHMLA_LIBRARY to its path. Tried: "
        + "; ".join(reasons)
    )


def _declare(library):
    """Argument and result types. Args structs are passed as plain pointers (byref)."""
    contextual = (
        "decode prefill fused_prefill fused_decode mha_forward mha_backward quantize dequantize convert "
        "indices_convert fp8_cast merge permute_q_b permute_wv schedule"
    ).split()
    sized = "decode prefill fused_prefill fused_decode mha_forward mha_backward".split()
    signatures = {f"fmla_{name}": (c_int32, [c_void_p, c_void_p, c_void_p]) for name in contextual}
    signatures.update(
        {f"fmla_{name}_workspace_size": (c_int32, [c_void_p, c_void_p, c_void_p]) for name in sized}
    )
    signatures.update(
        fmla_context_create=(c_int32, [c_void_p, c_void_p]),
        fmla_context_destroy=(None, [c_void_p]),
        fmla_context_error=(c_char_p, [c_void_p]),
        fmla_last_create_error=(c_char_p, []),
        fmla_context_device=(c_int32, [c_void_p]),
        fmla_context_isa=(c_int32, [c_void_p]),
        fmla_context_threads=(c_int32, [c_void_p]),
        fmla_supports=(c_int32, [c_void_p, c_void_p]),
        fmla_format_get=(c_int32, [c_int32, c_void_p]),
        fmla_format_by_name=(c_int32, [c_char_p]),
        fmla_isa_available=(c_int32, [c_int32]),
        fmla_device_get=(c_int32, [c_int32, c_int32, c_void_p]),
        fmla_version=(c_int32, []),
    )
    signatures.update(
        {
            f"fmla_{name}": (c_char_p, [c_int32])
            for name in ("status_string", "dtype_name", "isa_name", "device_name", "operation_name")
        }
    )
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_loaded, path = _load()
lib = _declare(_loaded)


def version():
    """The running library's version, "major.minor.patch"."""
    number = lib.fmla_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def name_of(kind, value):
    """The library's word for a value: kind is status_string, dtype_name, isa_name, device_name, operation_name."""
    return getattr(lib, "fmla_" + kind)(value).decode()


def sized(struct):
    """A zeroed struct that says its own size."""
    made = struct()
    made.struct_size = ctypes.sizeof(struct)
    return made


def format_info(kv_format):
    """A format's row of the library's table."""
    info = sized(FormatInfo)
    if lib.fmla_format_get(kv_format, ctypes.byref(info)) != OK:
        raise RuntimeError(f"kv_format: {kv_format}; allowed: 1..{KV_COUNT - 1}")
    return info


def device_info(kind, index):
    """(status, fmla_device_info) of a device."""
    info = sized(DeviceInfo)
    return lib.fmla_device_get(kind, index, ctypes.byref(info)), info
