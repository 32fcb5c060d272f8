#!/usr/bin/env bash
# Runs every benchmark suite and keeps the rows as JSON, with date and hardware: launch/record_benchmarks.sh [FOLDER] [OPTIONS]
# OPTIONS go to `gnnsys bench` (--quick, --only NAME). Run it on idle cores, and as root for dist,
# which needs the lab.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-docs/benchmarks}
shift || true
gnnsys=.venv/bin/gnnsys
[ -x "$gnnsys" ] || gnnsys=gnnsys
mkdir -p "$folder"
for suite in ops loader partition store pipeline dist; do
  "$gnnsys" bench "$suite" --json "$folder/$(date +%F)-$(uname -m)-$suite.json" "$@"
done
