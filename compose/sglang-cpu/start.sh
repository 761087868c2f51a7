#!/usr/bin/env bash
# Start SGLang on a CPU (after install.sh). usage: start.sh VENV MODEL_FOLDER PORT [SGLang options...]
# Dense models only: mixture-of-experts models start on a CPU but answer with noise.
set -euo pipefail
if [ $# -lt 3 ]; then echo "usage: $0 VENV MODEL_FOLDER PORT [SGLang options...]" >&2; exit 2; fi
venv=$1 model=$2 port=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/shim" SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1
exec "$venv/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
  --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch \
  --disable-overlap-schedule --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled \
  --max-total-tokens 100000 "$@"
