# shellcheck shell=bash
# The environment of every node, sourced before `ray start` (and by ~/.bashrc, so that `ray submit` has it, too).
# To change a value, set the variable before this file is sourced.

# Folder that all nodes share: relative `storage` and `data.root` begin in it (runs in $RAYSIM_HOME/runs).
export RAYSIM_HOME="${RAYSIM_HOME:-/mnt/raysim}"

# Every request to Ray needs the token of ~/.ray/auth_token; `ray get-auth-token --generate` makes one.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"

# `ray job stop` sends SIGTERM, and kills after this number of seconds (3 by default). In between, the run ends a round that
# takes at most 20 more seconds, and writes a checkpoint; otherwise it resumes from its last periodic checkpoint.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-120}"

export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"

# Fixed ports, for exact firewall rules between the nodes: 6379, 8076 to 8081, 10001, 10100 to 10999.
# The dashboard (8265) listens on the head's loopback only; `ray dashboard CLUSTER.yaml` forwards it through ssh.
RAYSIM_NODE_PORTS="--object-manager-port=8076 --node-manager-port=8077 --dashboard-agent-listen-port=8078"
RAYSIM_NODE_PORTS+=" --dashboard-agent-grpc-port=8079 --runtime-env-agent-port=8080 --metrics-export-port=8081"
RAYSIM_NODE_PORTS+=" --min-worker-port=10100 --max-worker-port=10999"
RAYSIM_HEAD_PORTS="--port=6379 --dashboard-host=127.0.0.1 --dashboard-port=8265 --ray-client-server-port=10001"
export RAYSIM_NODE_PORTS RAYSIM_HEAD_PORTS

if [ -d "$HOME/raysim-venv/bin" ]; then
    export PATH="$HOME/raysim-venv/bin:$PATH"
fi
