#!/usr/bin/env bash
# All that a machine with a GPU should measure, in order of value, in 8 minutes at most:
#
#     bash bench/gpu.sh [FOLDER] && python -m bench.report
#
# Each part has a time limit of its own, and what fails or runs out of time does not keep the others from
# running. FOLDER (bench/results/gpu) gets their JSON and pictures, and gpu.txt with all that they print.
# PYTHON is what runs them: .venv/bin/python where there is one, else python3; it needs torch with CUDA, numba,
# psutil, tqdm and pytest. Exits with 1 if a part failed, with 2 where there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-bench/results/gpu}
mkdir -p "$folder"
python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
export PYTHONUNBUFFERED=1
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "$python finds no CUDA GPU here: nothing was measured"
  exit 2
fi

deadline=$((SECONDS + 480))
outcomes=()

part() { # NAME SECONDS COMMAND...: run it for as long, and for as long as there is time at all
  local name=$1 limit=$2 left=$((deadline - SECONDS)) begun=$SECONDS
  shift 2
  if [ "$left" -lt 15 ]; then
    outcomes+=("$name: not begun, no time left")
    return
  fi
  [ "$limit" -gt "$left" ] && limit=$left
  echo "=== $name, at most $limit s: $*"
  # an interrupt, after which pytest still says what has failed
  timeout --signal=INT --kill-after=15 "$limit" "$@"
  local code=$?
  case $code in
    0) outcomes+=("$name: done in $((SECONDS - begun)) s") ;;
    124 | 137) outcomes+=("$name: FAILED, stopped after $limit s") ;;
    *) outcomes+=("$name: FAILED with $code after $((SECONDS - begun)) s") ;;
  esac
}

measure() {
  nvidia-smi || true
  part "10 billion parameters in 16 GiB" 230 "$python" -m bench.fits configs/gpt2-10b.toml \
    --steps 12 --set optimizer.warmup_steps=4 --host-memory 120GiB --batch-sizes 32 64 \
    --json "$folder/fits.json"
  part "tests" 120 "$python" -m pytest -m cuda -p no:cacheprovider --tb=short --durations=5 \
    tests/backends/test_cuda.py tests/backends/test_cuda_memory.py tests/backends/test_cuda_update.py tests/bench
  part "beside others, 1.5 billion parameters" 150 "$python" -m bench.versus --device cuda \
    --n-layer 48 --n-head 25 --n-embd 1600 --vocab-size 50257 --context 1024 --batch-size 32 \
    --lr 1e-4 --rounds 5 --steps 2 --seconds 60 --only streamer-2 streamer-48 fsdp2 torchao-bf16 \
    --json "$folder/versus.json"
  part "by depth" 40 "$python" -m bench.depth --device cuda --dtype bfloat16 --n-embd 1024 --n-head 16 \
    --context 512 --batch-size 8 --rounds 5 --json "$folder/depth.json" --png "$folder/depth.png"
  part "by layer" 60 "$python" -m bench.overlap configs/gpt2-1.5b.toml --steps 5 \
    --json "$folder/overlap.json" --png "$folder/overlap.png"
  # three layers of the ten billion parameters, so that five wrapped models fit side by side into host memory
  part "tokens per transfer" 75 "$python" -m bench.tokens_per_transfer bus --device cuda --n-layer 3 \
    --n-head 32 --n-embd 4096 --vocab-size 50257 --context 1024 --batch-sizes 4 16 --lr 1e-4 --rounds 3 \
    --steps 1 --seconds 40 --only "whole batch" accumulation micro-batches offload "all that saves" \
    --json "$folder/tokens_bus.json"
  part "hidden update" 40 "$python" -m bench.hidden_update --device cuda --n-layer 24 --n-head 16 \
    --n-embd 2048 --batch-size 8 --context 1024 --dtype bfloat16 --compute-threads 4 --host-threads 12 \
    --rounds 5 --json "$folder/hidden_update.json"
  echo "=== $folder"
  printf '%s\n' "${outcomes[@]}"
  [[ "${outcomes[*]}" != *FAILED* && "${outcomes[*]}" != *"not begun"* ]]
}

measure 2>&1 | tee "$folder/gpu.txt"
