#!/usr/bin/env bash
# The second half of node.sh: enter.sh NODE REPO CMD... runs CMD with the node's root in its own mount, pid and cgroup namespaces.
# The network is the host's. The root is an overlay over the cached one, so that nothing a run writes there reaches the next.
set -euo pipefail
node=$1 repo=$2
group=coldsnap-node-$(cksum <<<"$node" | cut -d' ' -f1)

# "FILESYSTEM OPTIONS MOUNTPOINT DIRECTORY" of every cgroup hierarchy; DIRECTORY is the node's own group. In v1 it lies in the caller's group, whose
# limits go on to hold; in v2 at the top, because a group with processes in it gives its children no controllers.
hierarchies() {
  local controllers path at
  while IFS=: read -r _ controllers path; do
    at=/sys/fs/cgroup/${controllers#name=} path=${path%/}
    [ -n "$controllers" ] || { path='' at=/sys/fs/cgroup$([ ! -d /sys/fs/cgroup/unified ] || echo /unified); }
    case $controllers in '') echo -n "cgroup2 rw" ;; name=*) echo -n "cgroup none,$controllers" ;; *) echo -n "cgroup $controllers" ;; esac
    echo " $at $at$path/$group"
  done </proc/self/cgroup
}
groups() { find /sys/fs/cgroup -depth -type d -path "*/$group*" "$@" 2>/dev/null || true; }
# What was killed may need a moment to leave its group.
remove_groups() { for _ in {1..20}; do groups -exec rmdir {} +; [ -n "$(groups)" ] || return 0; sleep 0.1; done; }

if [ -z "${COLDSNAP_NODE_STAGE:-}" ]; then
  [ -e "$node/root/packages" ] || { echo "node: not prepared, run 'make node' first" >&2; exit 1; }
  exec 9>"$node/run.lock"
  flock -n 9 || { echo "node: in use by another run (it holds $node/run.lock): wait for it or stop it" >&2; exit 75; }
  remove_groups
  rm -rf "$node/state" && mkdir -p "$node"/state/{upper,work,containerd,coldsnap}
  COLDSNAP_NODE_STAGE=group unshare --mount --pid --fork --kill-child --propagation private "$0" "$@" <&0 &
  trap 'kill -KILL $!' INT TERM && status=0 && wait $! || status=$?
  wait || true # a signal ends the wait above before the node has ended
  remove_groups && exit "$status"
elif [ "$COLDSNAP_NODE_STAGE" = group ]; then
  exec 9>&- # unshare holds the lock on, until everything in the node is gone
  hierarchies | while read -r _ _ _ dir; do
    mkdir -p "$dir"
    # A v1 cpuset without processors and memory nodes takes no process.
    for f in cpuset.cpus cpuset.mems; do [ ! -e "$dir/../notify_on_release" ] || [ ! -e "$dir/$f" ] || cat "$dir/../$f" >"$dir/$f"; done
    echo 1 >"$dir/cgroup.procs"
  done
  COLDSNAP_NODE_STAGE=root exec unshare --cgroup "$0" "$@"
fi
root=$node/state/root work=$PWD && shift 2 && mkdir "$root"
mount -t overlay -o "lowerdir=$node/root,upperdir=$node/state/upper,workdir=$node/state/work" node "$root"
cd "$root" && mkdir -p .old var/lib/containerd var/lib/coldsnap
mount -t proc proc proc && mount -t sysfs sysfs sys && mount --rbind /dev dev
for m in run tmp sys/fs/cgroup; do mount -t tmpfs -o mode=0755 tmpfs "$m"; done
hierarchies | while read -r type options at _; do mkdir -p ".$at" && mount -t "$type" -o "$options" cgroup ".$at"; done
mkdir -p ".$repo" && mount --bind "$repo" ".$repo" && mount --bind "$node/state/containerd" var/lib/containerd && mount --bind "$node/state/coldsnap" var/lib/coldsnap
pivot_root . .old && umount -l /.old
[ ! -e /sys/fs/cgroup/cgroup.procs ] || { mkdir /sys/fs/cgroup/init && echo 1 >/sys/fs/cgroup/init/cgroup.procs; }
cd "$work" && unset COLDSNAP_NODE_STAGE && export COLDSNAP_NODE=1 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Not exec: process 1 has to reap what loses its parent, above all shims.
"$@" && exit || exit $?
