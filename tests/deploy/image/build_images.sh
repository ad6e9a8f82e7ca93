#!/bin/sh
# Build deploy/Dockerfile with buildah where no registry of images is reached: the base is made from Debian's packages,
# the wheels are compiled in the stage that does so, with this machine's Rust. Needs buildah, rustc, and some 12 GB of disk
# at most; a CPU build of torch keeps the server's image small. Root needs debootstrap, another user mmdebstrap and ids of
# its own in /etc/subuid and /etc/subgid.
#
#   build_images.sh                      localhost/plait-router and localhost/plait, that with torch's CPU build
#   TORCH="torch>=2.11,<3" CUDA_PACKAGES="..." build_images.sh     as the Dockerfile's own
#
# TORCH_WHEELS names a folder with wheels of torch, for machines that reach PyPI alone; WHEELS one with the wheels that
# `make wheel` built, so that none are compiled here.
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export BUILDAH_ISOLATION=chroot

exists() { buildah inspect --type image "$1" >/dev/null 2>&1; }

# Debian's packages, and the authorities that this machine trusts.
if ! exists localhost/plait-base; then
    base=$(buildah from scratch)
    if [ "$(id -u)" = 0 ]; then
        tree=$(buildah mount "$base")
        debootstrap --variant=minbase bookworm "$tree" http://deb.debian.org/debian >"$work/debootstrap.log" ||
            { tail -5 "$work/debootstrap.log"; exit 1; }
        rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/* "$tree"/var/log/*
        buildah umount "$base"
    else
        mmdebstrap --quiet --mode=unshare --variant=minbase bookworm "$work/base.tar" http://deb.debian.org/debian
        buildah add --quiet "$base" "$work/base.tar" /
    fi
    [ -z "$(find /usr/local/share/ca-certificates -name '*.crt')" ] ||
        buildah copy --quiet "$base" /usr/local/share/ca-certificates /usr/local/share/ca-certificates
    buildah commit --quiet --rm "$base" localhost/plait-base
fi

# In place of rust:1-slim-bookworm: the same folders.
if [ -z "${WHEELS:-}" ] && ! exists localhost/plait-rust; then
    rust=$(buildah from --pull-never localhost/plait-base)
    buildah copy --quiet "$rust" "$(rustc --print sysroot)" /usr/local/rust
    buildah run "$rust" -- sh -c 'apt-get update && apt-get install --yes --no-install-recommends ca-certificates && rm -rf /usr/local/rust/share/doc' >"$work/rust.log"
    buildah config --env 'PATH=/usr/local/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin' "$rust"
    buildah commit --quiet --rm "$rust" localhost/plait-rust
fi

build() {
    target=$1
    shift
    buildah build --quiet --layers --pull-never --format docker --file "$root/deploy/Dockerfile" --target "$target" \
        --ignorefile "$root/deploy/Dockerfile.dockerignore" \
        --build-arg BASE=localhost/plait-base --build-arg RUST=localhost/plait-rust --build-arg WHEELS=localhost/plait-wheels "$@" "$root"
}

if [ -n "${WHEELS:-}" ]; then
    wheels=$(buildah from scratch)
    buildah copy --quiet "$wheels" "$WHEELS" /wheels
    buildah commit --quiet --rm "$wheels" localhost/plait-wheels
else
    build wheels --build-arg WHEELS=wheels --tag localhost/plait-wheels
fi
build router --tag localhost/plait-router
if [ -n "${TORCH_WHEELS:-}" ]; then
    build server --tag "${SERVER_IMAGE:-localhost/plait}" --volume "$TORCH_WHEELS:/torch:ro" \
        --build-arg "TORCH=--find-links=/torch ${TORCH:-torch==2.13.0+cpu}" --build-arg "CUDA_PACKAGES=${CUDA_PACKAGES:-}"
else
    build server --tag "${SERVER_IMAGE:-localhost/plait}" ${TORCH:+--build-arg "TORCH=$TORCH"} \
        ${CUDA_PACKAGES:+--build-arg "CUDA_PACKAGES=$CUDA_PACKAGES"}
fi
buildah images
