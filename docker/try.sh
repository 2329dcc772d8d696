#!/usr/bin/env bash
# Builds the images without Docker and runs a program in them: two ranks of
# examples/own_project.
#
#   docker/try.sh                            docker/Dockerfile
#   docker/try.sh docker/Dockerfile.cuda
#   docker/try.sh FILE OPTION...             with options of `buildah build`, such
#                                            as --build-arg TORCH_VERSION=2.13.0
#
# Debian's base image is made by debootstrap; buildah executes the Dockerfiles, in
# roots that it enters by chroot. Needs root, both (Debian: debootstrap, buildah),
# Debian's and PyPI's packages, and 10 GB in TMPDIR (/var/tmp; 25 GB for CUDA).
# Nothing is left there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

file=${1:-docker/Dockerfile}
shift || true
for tool in debootstrap buildah; do
  command -v "$tool" >/dev/null || {
    echo "try.sh: $tool is missing; run apt-get install debootstrap buildah" >&2
    exit 2
  }
done
((EUID == 0)) || {
  echo "try.sh: debootstrap and chroot need root; run it by sudo" >&2
  exit 2
}

place=$(mktemp -d "${TMPDIR:-/var/tmp}/lockstep-images-XXXXXX")
export TMPDIR=$place  # buildah leaves nothing outside
engine() {
  buildah --root "$place/images" --runroot "$place/state" \
    --storage-driver vfs "$@"
}
build() { engine build --isolation chroot --layers=false --pull-never "$@"; }
finish() {
  engine rm --all >/dev/null || true
  rm -rf "$place"
}
trap finish EXIT

echo "==> Debian's base image"
debootstrap --variant=minbase bookworm "$place/debian" >"$place/log" || {
  tail "$place/log" >&2
  exit 1
}
base=$(engine from scratch)
engine copy --quiet "$base" "$place/debian" /
engine commit --quiet --rm "$base" docker.io/library/debian:bookworm-slim
rm -rf "$place/debian"

echo "==> $file"
build -f "$file" -t lockstep "$@" .
echo "==> examples/own_project/Dockerfile"
build -f examples/own_project/Dockerfile -t train examples/own_project

echo "==> two ranks in the image"
program=$(engine from --pull-never train)
engine run --isolation chroot "$program" -- \
  lockstep run --standalone --nproc-per-node=2 ./train | tee "$place/output"
for rank in 0 1; do
  grep -q "rank $rank of 2 has trained" "$place/output"
done
