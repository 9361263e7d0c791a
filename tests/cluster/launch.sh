#!/usr/bin/env bash
# The cluster launcher against this machine, for test_launcher.py: run it as
#   unshare --mount --pid --net --fork --mount-proc bash launch.sh FOLDER CLONE
# so that `ray stop`, sshd on port 22 and Ray's usual ports and folders concern nobody outside.
# FOLDER holds passwd (with another home for this user), sshd_config, cluster.yaml and the folders home and ray.
set -euo pipefail
folder=$1 clone=$2

python - <<'PY'
import fcntl, socket, struct
with socket.socket() as any_socket:  # loopback up: SIOCSIFFLAGS with IFF_UP | IFF_RUNNING
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))
PY
mkdir -p /tmp/ray /run/sshd
mount --bind "$folder/ray" /tmp/ray
mount --bind "$folder/passwd" /etc/passwd
export HOME="$folder/home" TMPDIR="$folder"
/usr/sbin/sshd -f "$folder/sshd_config"

cd "$clone"
show() {
    local status=0
    echo "+ $*"
    "$@" || status=$?
    echo "= $status"
    return "$status"
}
show ray get-auth-token --generate > /dev/null
for _ in 1 2 3; do # on a machine at its limits a raylet misses Ray's own deadline of 30 s
    show ray up --yes --no-config-cache "$folder/cluster.yaml" && break
done
submit() { show ray submit --no-config-cache "$folder/cluster.yaml" cluster/run.py -- "$@" || true; }
submit configs/quickstart.yaml name=submitted rounds=3
submit configs/quickstart.yaml name=submitted rounds=3
submit tune configs/quickstart.yaml name=swept rounds=2 resources.backend=serial \
    "'tune.param_space={local.lr: {grid_search: [0.1, 0.2]}}'"
submit report runs/swept
show ray exec --no-config-cache "$folder/cluster.yaml" "ray status" || true
show ray down --yes "$folder/cluster.yaml" || true
