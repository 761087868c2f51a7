#!/usr/bin/env bash
# Install the real SGLang server for a machine without a GPU into its own virtual environment.
# usage: install.sh VENV [PYTHON]      (about 3 GB and two minutes; Python 3.11 or newer)
# Start it with start.sh. The versions are pinned together: the shim fits exactly this SGLang.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 VENV [PYTHON]" >&2; exit 2; fi
venv=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0 sglang==0.5.23
"$venv/bin/python" - <<'PY'
from importlib.metadata import version
print("installed sglang", version("sglang"), "with torch", version("torch"))
PY
