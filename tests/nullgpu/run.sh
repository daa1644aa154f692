#!/bin/sh
# run.sh PYTHON ARGUMENTS...: runs PYTHON, of an environment with a CUDA build of PyTorch, with a GPU that
# computes nothing. First compiles libnullgpu.so for that PyTorch where that is still to be done.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${1:?usage: run.sh PYTHON ARGUMENTS..., PYTHON of an environment with a CUDA build of PyTorch}
out=${NULLGPU_BUILD:-$(cd "$(dirname "$(command -v "$python")")/.." && pwd)/nullgpu}

build() {
for tool in g++ gcc nm; do
  command -v $tool > /dev/null ||
    { echo "$tool is missing: install g++ and binutils (apt-get install g++ binutils)" >&2; exit 1; }
done
mkdir -p "$out/shim/crt"
# wheels for CUDA 13 have one folder of headers, those for CUDA 12 one for each library
headers=$(ls "$site"/nvidia/cu*/include/cuda.h "${CUDA_HOME:-/usr/local/cuda}/include/cuda.h" 2>/dev/null | head -1)
include=${headers%/cuda.h}
[ -n "$include" ] ||
  { echo "no headers of CUDA beside the PyTorch of $python: install its CUDA build (pip install torch)" >&2; exit 1; }
# the runtime's packages leave out what belongs to the compiler
cat > "$out/shim/crt/host_defines.h" <<'END'
#pragma once
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __specialization_static static
#define __forceinline__ inline
#define __no_return__ __attribute__((noreturn))
END
: > "$out/shim/crt/host_config.h"
flags="-O2 -g -fPIC -pthread -std=c++17 -Wall -isystem $include"
[ -e "$include/crt/host_defines.h" ] || flags="$flags -I$out/shim"
g++ $flags -c "$here/nullgpu.cpp" -o "$out/nullgpu.o"
# what PyTorch imports and nullgpu.cpp does not define gets a stub, so that nothing reaches the real libraries
nm -g --defined-only "$out/nullgpu.o" | awk '{print $3}' | sort -u > "$out/defined"
{
  for library in "$site"/torch/lib/*.so; do nm -D --undefined-only "$library" 2>/dev/null; done |
    awk '{sub(/@.*/, "", $2); print $2}'
  # Triton compiles this file when it is first used
  cat "$site"/triton/backends/nvidia/driver.c 2>/dev/null | grep -oE '\bcu[A-Z][A-Za-z0-9_]+' || true
} | grep -E '^(cuda[A-Z]|cublas[A-Z]|cublasLt|cu[A-Z][a-z])' |
  grep -vE '^cuFile' | sort -u | comm -23 - "$out/defined" > "$out/stubbed"
{
  echo 'int nullgpu_stub(const char*); int nullgpu_unsupported(const char*);'
  while read -r name; do
    case $name in
      cudaGraph* | cudaStreamBeginCapture* | cudaStreamEndCapture | cudaIpc* | cudaLibrary* | cuLink*)
        call=nullgpu_unsupported ;;
      *) call=nullgpu_stub ;;
    esac
    echo "int $name(void) { return $call(\"$name\"); }"
  done < "$out/stubbed"
} > "$out/stubs.c"
gcc -O1 -fPIC -w -c "$out/stubs.c" -o "$out/stubs.o"
g++ -shared -pthread -o "$out/libnullgpu.so" "$out/nullgpu.o" "$out/stubs.o" -ldl
for name in libcuda.so.1 libnvidia-ml.so.1; do ln -sf libnullgpu.so "$out/$name"; done
echo "$torch" > "$out/torch"
}

# found, not imported, which would take seconds
site=$("$python" -c 'import importlib.util as u, os; print(os.path.dirname(os.path.dirname(u.find_spec("torch").origin)))')
torch="$python $(ls -d "$site"/torch-*.dist-info)"
if ! [ "$out/libnullgpu.so" -nt "$here/nullgpu.cpp" ] || ! [ "$out/libnullgpu.so" -nt "$here/run.sh" ] ||
  [ "$(cat "$out/torch" 2>/dev/null)" != "$torch" ]; then build; fi
LD_PRELOAD=$out/libnullgpu.so${LD_PRELOAD:+:$LD_PRELOAD} LD_LIBRARY_PATH=$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$@"
