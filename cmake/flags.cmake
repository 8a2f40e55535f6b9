# SPDX-License-Identifier: MIT
# Compiler flags: one place. Every target of ours links flashmla_flags.
add_library(flashmla_flags INTERFACE)
target_compile_definitions(flashmla_flags INTERFACE _GNU_SOURCE)
target_compile_options(flashmla_flags INTERFACE
  -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wno-missing-field-initializers
  -fvisibility=hidden
  -ffp-contract=off        # a product and a sum are two roundings unless the code says fma
  -fno-math-errno)
if(FLASHMLA_WERROR)
  target_compile_options(flashmla_flags INTERFACE -Werror)
endif()

# Instruction sets of the CPU tiers: a folder src/cpu/<tier>/ is compiled with FLASHMLA_ISA_FLAGS_<tier>, nothing else is.
set(FLASHMLA_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(FLASHMLA_ISA_FLAGS_avx512bf16 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mavx512bf16)
set(FLASHMLA_ISA_FLAGS_amx ${FLASHMLA_ISA_FLAGS_avx512bf16}) # its tile instructions are assembly
set(FLASHMLA_ISA_FLAGS_neon "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(FLASHMLA_TIERS avx2 avx512bf16 amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(FLASHMLA_TIERS neon)
else()
  set(FLASHMLA_TIERS "")
endif()
