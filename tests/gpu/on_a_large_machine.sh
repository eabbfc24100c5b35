#!/usr/bin/env bash
# What a machine of 16 cores, perhaps with a GPU, shows that smaller ones cannot, in at most 8 minutes: the package is
# built from this checkout without a network, then each part runs with a time limit of its own, most valuable first.
#
# Use: tests/gpu/on_a_large_machine.sh [FOLDER]     results, a file for each part; ./large-machine where none is named
#
# Needs Python 3.10 or newer (PYTHON names it) with torch 2.11 or newer, numpy, cloudpickle, nanobind, scikit-build-core,
# CMake and ninja; parts use CuPy, mpi4py and pytest where they are there. Installs nothing outside of FOLDER.
# Ends with status 1 where the package was not built, or a part failed or was cut off.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
checkout=$PWD
results=$(mkdir -p "${1:-large-machine}" && cd "${1:-large-machine}" && pwd)
site=$results/site
cores=$(nproc)
end=$((SECONDS + ${LIMIT_S:-480}))
status=0
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONPATH=$site

part() { # name, limit in seconds, command
  local name=$1 limit=$2 left=$((end - SECONDS)) begin=$SECONDS
  shift 2
  ((limit < left)) || limit=$left
  if ((limit < 5)); then
    echo "$name: left out, no time is left" | tee -a "$results/summary.txt"
    status=1
    return 1
  fi
  (cd "$results" && timeout --kill-after 5 "$limit" "$@") >"$results/$name.txt" 2>&1
  local code=$?
  local outcome="ended with status $code"
  ((code == 124 || code == 137)) && outcome="cut off at its limit of $limit s"
  ((code == 0)) && outcome=passed || status=1
  echo "$name: $outcome after $((SECONDS - begin)) s" | tee -a "$results/summary.txt"
  return "$code"
}

ranks_up_to() { # number: 2, 4, 8, ... as far as there are cores
  local counts=2 count
  for ((count = 4; count <= $1 && count <= cores; count *= 2)); do counts+=,$count; done
  echo "$counts"
}

: >"$results/summary.txt"
{ uname -srm; lscpu; "$PYTHON" -m pip list; nvidia-smi; } >"$results/machine.txt" 2>&1

part build 240 "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --upgrade --target "$site" \
  "$checkout" || { tail -n 20 "$results/build.txt"; exit 1; }

collectives=("$PYTHON" -m collectives)
export OMP_NUM_THREADS=1

if "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>"$results/cuda.txt"; then
  part gpu-tests 120 "$PYTHON" -m pytest -q -m gpu --full -p no:cacheprovider --rootdir "$checkout" \
    -c "$checkout/pyproject.toml" "$checkout/tests/gpu"
  part accept 90 "${collectives[@]}" accept --ranks 1 --short --sections preflight,streams,training,host-cost \
    --json accept.json
fi
part allreduce 110 "${collectives[@]}" bench allreduce --backends host,torch:gloo --nproc "$(ranks_up_to 16)" \
  --sizes 8,8K,64K,1M,16M,64M --bind --budget 20 --json allreduce.json
# Threads of a rank; ranks keep to equal shares of the cores, and what these are too few for is left out.
part threads 100 "${collectives[@]}" bench allreduce --backends torch:gloo --threads 1,4,8 --nproc "$(ranks_up_to 4)" \
  --ops all_reduce,all_gather,broadcast --sizes 64K,512K,1M,4M,16M,64M --bind --budget 30 --json threads.json
part bfloat16 50 "${collectives[@]}" bench allreduce --backends host,torch:gloo --nproc "$(ranks_up_to 8)" \
  --sizes 8K,256K,4M --dtype bfloat16 --bind --budget 12 --json bfloat16.json
part training 100 "${collectives[@]}" bench ddp --models language --peers torch:gloo,ours:host --nproc "$((cores < 8 ? cores : 8))" \
  --budget 15 --json training.json
rm -rf "$site"
cat "$results/summary.txt"
exit "$status"
