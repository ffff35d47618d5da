#!/usr/bin/env bash
# All of the 4-bit products that needs a GPU, in order: equality, memory, which variant where, speed beside peers, figure.
# humming-kernels is measured where it is installed, Marlin where vllm is or LOWBITRL_VLLM_LIBRARY names its library.
#     bash benchmarks/products_h200.sh
set -euo pipefail
cd "$(dirname "$0")/.."
tests=(tests/kernels/test_products_cuda.py tests/kernels/test_between_experts.py)
python -m pytest -q "${tests[@]}" tests/kernels/test_products.py tests/quant/test_codes_cuda.py tests/quant/test_experts_cuda.py
compute-sanitizer --tool memcheck --error-exitcode 9 python -m pytest -q -x "${tests[@]}" -k "not largest"
python benchmarks/choose_products.py
python -m lowbitrl bench kernels --only experts --only products --out results/h200-kernels
python benchmarks/draw_products.py results/h200-kernels
