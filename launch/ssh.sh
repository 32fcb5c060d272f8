#!/usr/bin/env bash
# torchrun on every host of a file, over ssh, by hand. `gnnsys launch --hosts FILE` does the same, looks before it
# starts, names the rank that failed, and leaves nothing behind even when it is killed. Here the torchrun of a host may
# wait up to five minutes for another one that has failed.
#
#   launch/ssh.sh HOSTS RANKS SCRIPT [ARGS...]      HOSTS: a file with one host name per line; RANKS: on each of them
#   SSH='ssh -F my_config' PORT=29400 launch/ssh.sh ...
set -euo pipefail

mapfile -t hosts < <(sed 's/#.*//' "$1" | awk 'NF { print $1 }')
ranks=$2
shift 2
job=$(date +%s)-$$
torchrun=(torchrun --nnodes="${#hosts[@]}" --nproc-per-node="$ranks" --rdzv-backend=c10d --rdzv-id="$job"
    --rdzv-endpoint="${hosts[0]}:${PORT:-29400}" --max-restarts="${RESTARTS:-0}" "$@")

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # the first failure, or Ctrl-C, ends all of them
for host in "${hosts[@]}"; do
    # With a terminal (-tt) the job there gets SIGHUP when its connection ends. Without the variable a group that was
    # restarted reads the keys of the one before it.
    ${SSH:-ssh} -tt -o BatchMode=yes "$host" "cd $(printf %q "$PWD") &&
        PATH=$(printf %q "$PATH") PYTHONPATH=$(printf %q "${PYTHONPATH:-}") TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
        exec $(printf '%q ' "${torchrun[@]}")" < /dev/null | sed -u "s/^/$host | /" &
done
for _ in "${hosts[@]}"; do wait -n; done
