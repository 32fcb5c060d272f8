#!/usr/bin/env bash
# Test accuracy of 1, 2 and 4 trainers with the same global batch, on one machine: launch/compare_trainers.sh [DATASET] [SEEDS]
# DATASET is a name or file that `gnnsys partition` takes (default: pubmed, where GNNSYS_DATA has it).
set -euo pipefail
cd "$(dirname "$0")/.."

dataset=${1:-pubmed}
seeds=${2:-3}
bin=.venv/bin
[ -x "$bin/gnnsys" ] || bin=$(dirname "$(command -v python)")
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
"$bin/python" -m gnnsys.cli partition "$dataset" --parts 4 --out "$parts/parts" > /dev/null 2>&1
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
for trainers in 1 2 4; do
  for seed in $(seq 0 $((seeds - 1))); do
    printf '%s trainers, seed %s: ' "$trainers" "$seed"
    "$bin/torchrun" --standalone --nproc-per-node "$trainers" examples/node_classification.py "$parts/parts" \
      --epochs 15 --batch-size 64 --dropout 0.5 --seed "$seed" 2> "$parts/errors" | grep 'test accuracy' || { cat "$parts/errors" >&2; exit 1; }
  done
done
