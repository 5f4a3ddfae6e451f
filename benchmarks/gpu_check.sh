#!/bin/sh
# Is the GPU path right, and what do CUDA graphs bring? One command, some minutes on one GPU:
#     benchmarks/gpu_check.sh [--model FOLDER_OR_ID]
# Exit code 0: everything agrees with Hugging Face; 1: something does not; 2: there is no GPU. See gpu_check.py.
cd "$(dirname "$0")/.." || exit 1
if [ -z "$PYTHON" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" benchmarks/gpu_check.py "$@"
