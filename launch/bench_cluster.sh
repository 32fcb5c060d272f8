#!/usr/bin/env bash
# A suite on the GPUs of a Slurm allocation: salloc --nodes 4 --gpus-per-node 8 launch/bench_cluster.sh DATASET [RESULTS]
# DATASET is a name that `gnnsys partition` takes. It is trained on 1, 2, 4, ... nodes, on every GPU of each. RESULTS
# (default: bench-cluster-results) must be a folder that all nodes see. Started again, it goes on where it was.
set -euo pipefail

dataset=${1:?which dataset: launch/bench_cluster.sh DATASET [RESULTS]}
results=${2:-bench-cluster-results}
nodes=${SLURM_JOB_NUM_NODES:?there is no Slurm allocation: run it by salloc or sbatch}
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?set GPUS_PER_NODE: Slurm does not say how many a node has}}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

hosts=1
for ((count = 2; count <= nodes; count *= 2)); do hosts+=", $count"; done

mkdir -p "$(dirname "$results")"
cat > "$results.json" << EOF
{
  "name": "bench-cluster",
  "datasets": ["$dataset"],
  "models": ["GraphSAGE", "GAT"],
  "samplers": ["15,10,5"],
  "hosts": [$hosts],
  "trainers": [$gpus],
  "options": {"synchronous": {"loading": "synchronous"}, "keeping": {}},
  "defaults": {"batch_size": 1024, "hidden": 256, "device": "cuda", "steps": 100},
  "warmup": 1, "repeats": 10, "deadline": 1800,
  "launcher": ["srun", "--nodes={hosts}", "--ntasks={hosts}", "--ntasks-per-node=1", "torchrun", "--nnodes={hosts}",
    "--nproc-per-node={trainers}", "--rdzv-backend=c10d", "--rdzv-endpoint=$head:${PORT:-29400}", "--rdzv-id=$SLURM_JOB_ID"]
}
EOF
gnnsys bench suite "$results.json" --out "$results"
gnnsys bench plot "$results"
