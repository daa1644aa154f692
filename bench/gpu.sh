#!/usr/bin/env bash
# All that a machine with a GPU should measure, in order of value, in 8 minutes at most:
#
#     bash bench/gpu.sh [FOLDER [PART...]] && python -m bench.report
#
# Each part has a time limit of its own, and what fails or runs out of time does not keep the others from
# running. FOLDER (bench/results/gpu) gets their JSON and pictures, and gpu.txt with all that they print. PARTS
# are some of fits, versus, overlap, tests, tokens, depth and hidden, in this order: what trains ten billion
# parameters, and how fast beside others, is worth most; then what copies cost, and whether results are right.
#
# PYTHON is what runs them: .venv/bin/python where there is one, else python3; it needs torch with CUDA, numba,
# psutil, safetensors, tqdm and pytest, and for pictures matplotlib. Exits with 1 if a part failed, with 2 where
# there is no GPU or Python cannot import what is needed.
#
# A dry run: SMALL=1 takes sizes that go through on two cores and 12 GiB of host memory, NO_VALUES=1 goes on
# before a stand-in for a GPU whose kernels compute nothing. `bench.report` takes no such result for a GPU's.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-bench/results/gpu}
shift
chosen=" $* "
known=" fits versus overlap tests tokens depth hidden "
for name in $chosen; do
  if [[ $known != *" $name "* ]]; then
    echo "there is no part '$name' here: choose among$known"
    exit 2
  fi
done
if [ -n "${SMALL:-}${NO_VALUES:-}" ] && [ "$folder" = bench/results/gpu ]; then
  echo "a dry run needs a FOLDER of its own: bench/results/gpu has the figures of GPUs"
  exit 2
fi
mkdir -p "$folder"
python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
export PYTHONUNBUFFERED=1
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "$python finds no CUDA GPU here: nothing was measured"
  exit 2
fi
if ! "$python" -c 'import bench.common, psutil, safetensors, tqdm'; then
  echo "$python cannot import what streamer needs, see above: nothing was measured"
  exit 2
fi

deadline=$((SECONDS + 480))
outcomes=()

part() { # NAME SECONDS COMMAND...: run it for as long, and for as long as there is time at all
  local name=$1 limit=$2 left=$((deadline - SECONDS)) begun=$SECONDS
  shift 2
  [[ $chosen =~ [^\ ] && $chosen != *" $name "* ]] && return
  if [ "$left" -lt 15 ]; then
    outcomes+=("$name: not begun, no time left")
    return
  fi
  [ "$limit" -gt "$left" ] && limit=$left
  echo "=== $name, at most $limit s: $*"
  # an interrupt, after which pytest still says what has failed, and bench.fits what it has measured
  timeout --signal=INT --kill-after=15 "$limit" "$@"
  local code=$?
  if [ $code = 0 ]; then
    outcomes+=("$name: done in $((SECONDS - begun)) s")
  elif [ $((SECONDS - begun)) -ge "$limit" ]; then
    outcomes+=("$name: FAILED, stopped after $limit s")
  elif [ $code = 137 ]; then
    outcomes+=("$name: FAILED, killed after $((SECONDS - begun)) s, as the system does where host memory ends")
  else
    outcomes+=("$name: FAILED with $code after $((SECONDS - begun)) s")
  fi
}

# arguments of each part at full size; those of a dry run replace some of them
values=()
fits=() versus=() overlap=() tests=() tokens=() depth=() hidden=()
versus_groups=(streamer-2,streamer-48 fsdp2,torchao-bf16)
if [ -n "${NO_VALUES:-}" ]; then
  values=(--no-values)
  tests=(--assert=plain --show-capture=no)  # to print a tensor that no kernel has written can take for ever
fi
if [ -n "${SMALL:-}" ]; then
  fits=(--set model.args.n_layer=12 --set model.args.n_head=8 --set model.args.n_embd=512 --set train.max_length=256
    --set 'stream.device_memory="2GiB"')
  versus=(--n-layer 3 --n-head 8 --n-embd 512 --batch-size 4 --context 256)
  versus_groups=(streamer-2,streamer-3 fsdp2,torchao-bf16)
  overlap=(--set model.args.n_layer=4 --set model.args.n_head=8 --set model.args.n_embd=512
    --set train.per_device_train_batch_size=4)
  tokens=(--n-head 8 --n-embd 512 --vocab-size 1000 --context 128)
  depth=(--layers 2 4 8 --n-head 8 --n-embd 256 --context 64)
  hidden=(--n-layer 4 --n-head 8 --n-embd 512 --context 128 --compute-threads 1 --host-threads 1)
else
  # a layer takes 2.25 GiB of host memory with 48 sequences: 10 bytes per parameter and its saved inputs
  layers=$("$python" -c 'from streamer.backends.host_memory import available_bytes
print(max(2, min(50, int((available_bytes() / 2**30 - 5) / 2.25))))')
  if [ "${layers:-50}" -lt 50 ]; then
    echo "free host memory is enough for $layers of the 50 layers of ten billion parameters"
    fits=(--set "model.args.n_layer=$layers")
  fi
fi

measure() {
  nvidia-smi || true
  free -g || true
  part fits 230 "$python" -m bench.fits configs/gpt2-10b.toml --steps 8 --set train.warmup_steps=4 \
    --host-memory 120GiB --batch-sizes 32 48 --json "$folder/fits.json" "${fits[@]}" "${values[@]}"
  part versus 150 "$python" -m bench.versus --device cuda --n-layer 48 --n-head 25 --n-embd 1600 \
    --vocab-size 50257 --context 1024 --batch-size 32 --lr 1e-4 --rounds 5 --steps 2 --seconds 45 \
    --json "$folder/versus.json" "${versus[@]}" "${values[@]}" --groups "${versus_groups[@]}"
  part overlap 60 "$python" -m bench.overlap configs/gpt2-1.5b.toml --steps 5 --json "$folder/overlap.json" \
    --png "$folder/overlap.png" "${overlap[@]}" "${values[@]}"
  part tests 120 "$python" -m pytest -m cuda -p no:cacheprovider --tb=short --durations=5 "${tests[@]}" \
    tests/backends/test_cuda.py tests/backends/test_cuda_memory.py tests/backends/test_cuda_update.py tests/bench
  # three layers of the ten billion parameters, so that five wrapped models fit side by side into host memory
  part tokens 75 "$python" -m bench.tokens_per_transfer bus --device cuda --n-layer 3 --n-head 32 \
    --n-embd 4096 --vocab-size 50257 --context 1024 --batch-sizes 4 16 --lr 1e-4 --rounds 3 --steps 1 \
    --seconds 40 --only "whole batch" accumulation micro-batches offload "all that saves" \
    --json "$folder/tokens_bus.json" "${tokens[@]}" "${values[@]}"
  part depth 50 "$python" -m bench.depth --device cuda --dtype bfloat16 --n-embd 1024 --n-head 16 \
    --context 512 --batch-size 8 --rounds 5 --layers 4 8 16 32 --json "$folder/depth.json" --png "$folder/depth.png" \
    "${depth[@]}" "${values[@]}"
  part hidden 50 "$python" -m bench.hidden_update --device cuda --n-layer 12 --n-head 16 --n-embd 2048 \
    --batch-size 8 --context 1024 --dtype bfloat16 --compute-threads 4 --host-threads 12 --rounds 5 \
    --json "$folder/hidden_update.json" "${hidden[@]}" "${values[@]}"
  echo "=== $folder"
  printf '%s\n' "${outcomes[@]}"
  [[ "${outcomes[*]}" != *FAILED* && "${outcomes[*]}" != *"not begun"* ]]
}

measure 2>&1 | tee "$folder/gpu.txt"
