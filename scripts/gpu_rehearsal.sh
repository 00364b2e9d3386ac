#!/bin/sh
# Rehearses benchmarks on a GPU machine without a network, on this machine: an environment as there (scripts/gpu_image.txt, about 6 GB with
# CUDA's libraries), the wheels to carry, the tiny benchmark from a bare checkout, and every row compiled ahead of time for H200 and H100.
# Usage: PYTHON=python3.12 VENV=.venv-gpu sh scripts/gpu_rehearsal.sh [wheels | bench | compile]...   (default: all)
set -eu
python=${PYTHON:-python3.12}
venv=${VENV:-.venv-gpu}
wheels=${WHEELS:-build/gpu-wheels}
limit=67108864   # bytes that one call carries, the checkout included
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
case $venv in /*) ;; *) venv=$root/$venv ;; esac
case $wheels in /*) ;; *) wheels=$root/$wheels ;; esac
[ $# -gt 0 ] || set -- wheels bench compile

say() { printf '\n== %s\n' "$*"; }

if ! cmp -s scripts/gpu_image.txt "$venv/.installed"; then
  say "environment: $venv"
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { echo "gpu_rehearsal: needs Python 3.12 (PYTHON=...)" >&2; exit 2; }
  "$python" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --no-compile -r scripts/gpu_image.txt
  # They come with other packages here, and are missing there.
  "$venv/bin/pip" uninstall --quiet --yes pydantic pydantic_core annotated-types typing-inspection
  cp scripts/gpu_image.txt "$venv/.installed"
fi
checkout=$(git ls-files -z | xargs -0 du -cb | tail -1 | cut -f1)

carry() {   # SET: download its wheels, and install them into a folder of their own
  mkdir -p "$wheels/$1"
  # shellcheck disable=SC2046 # one word per package
  "$venv/bin/pip" download --quiet --no-deps --only-binary=:all: -d "$wheels/$1" $("$venv/bin/python" benchmarks/gpu_needs.py "$1")
  rm -rf "$wheels/site-$1"
  "$venv/bin/pip" install --quiet --no-index --no-deps --no-compile --target "$wheels/site-$1" "$wheels/$1"/*.whl
  bytes=$(du -cb "$wheels/$1"/*.whl | tail -1 | cut -f1)
  count=$(find "$wheels/$1" -name '*.whl' | wc -l)
  awk -v set="$1" -v n="$count" -v b="$bytes" -v c="$checkout" -v l=$limit \
    'BEGIN { printf "%-8s %3d wheels, %4.1f MB; with the checkout %4.1f of %.1f MB\n", set, n, b / 1e6, (b + c) / 1e6, l / 1e6 }'
  [ $((bytes + checkout)) -le $limit ] || { echo "gpu_rehearsal: $1 does not fit one call" >&2; exit 1; }
}

# From an empty directory, with nothing on the module path but the carried wheels.
away() { site=$1; shift; (cd "$(mktemp -d)" && PYTHONPATH="$wheels/site-$site" JAX_PLATFORMS=cpu "$venv/bin/python" "$@"); }

for part in "$@"; do
  case $part in
    wheels)
      say "wheels to carry, in $wheels"
      for set in bench train maxtext; do carry $set; done
      away train -c "import sys; sys.path.insert(0, '$root'); import ridgeline.trainer.run, ridgeline.loaders.loader, ridgeline.cli.main" ;;
    bench)
      say "the tiny benchmark from a bare checkout"
      # Exit code 1: a toy misses the targets.
      away bench "$root/benchmarks/gpu.py" 1b-1k --tiny --steps 3 --output "$root/runs/gpu-rehearsal" || [ $? -eq 1 ]
      say "numbers of kernels and steps, and a run that is killed and resumed"
      away bench "$root/benchmarks/gpu_numerics.py" --tiny
      away train "$root/benchmarks/gpu_resume.py" --tiny --steps 60 --output "$root/runs/gpu-rehearsal-resume" ;;
    compile)
      say "every row, compiled ahead of time"
      away train "$root/benchmarks/gpu_compile.py" --output "$root/runs/gpu-compile.json" ;;
    *) echo "gpu_rehearsal: no part '$part'; there are wheels, bench and compile" >&2; exit 2 ;;
  esac
done
