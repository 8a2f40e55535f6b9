#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# `pip install .` as a stranger meets it: a wheel from the sources, then in fresh environments, away from the source
# tree, a decode with NumPy alone and, where the interpreter has torch, with torch tensors.
# Arguments: interpreter, source tree. Skips itself (77) where packages cannot be fetched.
set -euo pipefail
python=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(-m pip -q --disable-pip-version-check)

"$python" -m venv "$work/build" || { echo "no venv module here"; exit 77; }
"$work/build/bin/python" "${pip[@]}" install "scikit-build-core>=0.10" ninja cmake || {
    echo "packages cannot be fetched here"; exit 77; }
"$work/build/bin/python" "${pip[@]}" wheel "$source" --no-deps --no-build-isolation -w "$work" \
    --config-settings "build-dir=$work/tree" --config-settings cmake.define.FLASHMLA_CUDA=OFF

cat >"$work/decode.py" <<'END'
import sys
import numpy as np
import flash_mla

assert "torch" not in sys.modules
assert "site-packages" in flash_mla._library.path and flash_mla._library.path.startswith(sys.prefix)
q = np.full((2, 1, 16, 576), 0x3F80, np.uint16)
cache = np.full((3, 64, 1, 576), 0x3F80, np.uint16)
out, lse = flash_mla.flash_mla_with_kvcache(q, cache, np.array([[2, 0], [1, 0]], np.int32),
                                            np.array([100, 7], np.int32), 512)
assert (out == 0x3F80).all() and np.allclose(lse[:, :, 0], 24 + np.log([[100.0], [7.0]]), atol=1e-4)
print("numpy", np.__version__)
if "torch" in sys.argv:
    import torch
    out, lse = flash_mla.flash_mla_with_kvcache(
        torch.ones(2, 1, 16, 576, dtype=torch.bfloat16), torch.ones(3, 64, 1, 576, dtype=torch.bfloat16),
        torch.tensor([[2, 0], [1, 0]], dtype=torch.int32), torch.tensor([100, 7], dtype=torch.int32), 512)
    assert (out == 1).all() and out.dtype == torch.bfloat16
    print("torch", torch.__version__)
END

cd "$work"
"$python" -m venv "$work/plain"
"$work/plain/bin/python" "${pip[@]}" install "$work"/flash_mla-*.whl
"$work/plain/bin/python" -c "import torch" 2>/dev/null && { echo "torch is in a fresh environment"; exit 1; }
"$work/plain/bin/python" "$work/decode.py"
"$work/plain/bin/python" -m flash_mla >"$work/page"
head -1 "$work/page"

if "$python" -c "import torch" 2>/dev/null; then
    "$python" -m venv --system-site-packages "$work/torch"
    "$work/torch/bin/python" "${pip[@]}" install --no-deps "$work"/flash_mla-*.whl
    "$work/torch/bin/python" "$work/decode.py" torch
fi
