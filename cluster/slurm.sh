#!/usr/bin/env bash
# Slurm: one run on the nodes of one allocation. From the folder of the clone, on a file system that all nodes share:
#   RAYSIM_HOME=/shared/raysim sbatch cluster/slurm.sh CONFIG [a.b=c ...]      (see cluster/README.md)
# Five minutes before the time limit, or on preemption, the run writes a checkpoint and is requeued. A run needs a name
# to resume from the checkpoint.
#SBATCH --job-name=raysim
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=raysim-%j.log
# `ray symmetric-run` ends every Ray of the user on its nodes at its end, and refuses to start beside another Ray.
#SBATCH --exclusive
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch cluster/slurm.sh CONFIG [a.b=c ...]" >&2
    exit 2
fi
cd "${SLURM_SUBMIT_DIR:-.}"
export RAYSIM_HOME="${RAYSIM_HOME:-$PWD}"  # runs in $RAYSIM_HOME/runs, data in $RAYSIM_HOME/data
export PATH="${RAYSIM_VENV:-$PWD/.venv}/bin:$PATH"
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Seconds that the nodes wait for each other: Python from a shared file system can be slow to start.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

# Resources of this job: a token, the driver's process id, ports, and a folder for Ray on each node.
mkdir -p "$RAYSIM_HOME"
private=$(mktemp -d "$RAYSIM_HOME/.slurm-$SLURM_JOB_ID-XXXXXX")
trap 'rm -rf "$private"' EXIT
python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$private/token"
export RAY_AUTH_TOKEN_PATH="$private/token"
base=$((10000 + SLURM_JOB_ID % 220 * 100)) # below the ports that outgoing connections get
nodes=${SLURM_JOB_NUM_NODES:-1}

# The first node runs this script and the head. With several nodes, the head needs an address that is not loopback.
head_ip=${RAYSIM_HEAD_IP:-$(hostname --ip-address | tr ' ' '\n' | grep -v -e '^127\.' -e : | head -n 1 || true)}
if [ -z "$head_ip" ]; then
    if [ "$nodes" -gt 1 ]; then
        echo "slurm.sh: this node's name resolves to a loopback address only; set RAYSIM_HEAD_IP to one the others reach" >&2
        exit 2
    fi
    head_ip=127.0.0.1
fi
export RAY_ADDRESS="$head_ip:$base"

is_stopped='' is_signalled=''
# shellcheck disable=SC2329  # called by the trap
stop() {
    is_stopped=yes is_signalled=yes
    if [ -s "$private/pid" ]; then
        kill -TERM "$(cat "$private/pid")" || true
    fi
}
trap stop TERM

# Only the driver is signalled: a TERM to `ray symmetric-run` or to Ray would end both while the run still needs them.
# shellcheck disable=SC2016
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$nodes" \
    --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" \
    --temp-dir="/tmp/raysim-$SLURM_JOB_ID" --dashboard-host=127.0.0.1 --dashboard-port=$((base + 1)) \
    --ray-client-server-port=$((base + 2)) --object-manager-port=$((base + 3)) --node-manager-port=$((base + 4)) \
    --dashboard-agent-listen-port=$((base + 5)) --dashboard-agent-grpc-port=$((base + 6)) \
    --runtime-env-agent-port=$((base + 7)) --metrics-export-port=$((base + 8)) \
    --min-worker-port=$((base + 10)) --max-worker-port=$((base + 99)) \
    -- bash -c 'echo $$ > "$0/pid"; exec python -m raysim run "$@"' "$private" "$@" &
step=$!
status=0
wait "$step" || status=$?
while [ -n "$is_signalled" ]; do # the signal ended `wait`, not the run
    is_signalled='' again=0
    wait "$step" || again=$?
    if [ "$again" -ne 127 ]; then # 127: no process is left to wait for
        status=$again
    fi
done
if [ -n "$is_stopped" ] && [ "$status" -eq 143 ]; then
    echo "slurm.sh: stopped after a checkpoint; queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
