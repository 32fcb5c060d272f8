#!/usr/bin/env bash
# A suite on the GPUs of a Slurm allocation: salloc --nodes 4 --gpus-per-node 8 launch/bench_cluster.sh DATASET [RESULTS]
# DATASET is a name that `gnnsys partition` takes. It is trained on 1, 2, 4, ... nodes, on every GPU of each, through
# `gnnsys launch`. RESULTS (default: bench-cluster-results) is a folder of the node that runs this; PARTS_ON_NODES is
# one that parts are sent to (default: the same path). Started again, it goes on where it was.
set -euo pipefail

dataset=${1:?which dataset: launch/bench_cluster.sh DATASET [RESULTS]}
results=${2:-bench-cluster-results}
nodes=${SLURM_JOB_NUM_NODES:?there is no Slurm allocation: run it by salloc or sbatch}
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?set GPUS_PER_NODE: Slurm does not say how many a node has}}

hosts=1
for ((count = 2; count <= nodes; count *= 2)); do hosts+=", $count"; done

mkdir -p "$(dirname "$results")"
cat > "$results.yaml" << EOF
name: bench-cluster
where: cluster
slurm: true
${PARTS_ON_NODES:+parts_on_hosts: $PARTS_ON_NODES}
datasets: ["$dataset"]
models: [GraphSAGE, GAT]
samplers: ["15,10,5"]
hosts: [$hosts]
trainers: [$gpus]
options:
  synchronous: {loading: synchronous}
  keeping: {}
defaults: {batch_size: 1024, hidden: 256, device: cuda, steps: 100}
warmup: 1
repeats: 10
deadline: 1800
EOF
gnnsys bench suite "$results.yaml" --out "$results"
gnnsys bench plot "$results"
