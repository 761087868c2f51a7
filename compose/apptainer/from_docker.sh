#!/bin/sh
# from_docker.sh IMAGE TARGET: an image of the local Docker engine as a folder (or, if TARGET ends in .sif, a file) that the
# `apptainer` runtime takes. Run as root, it builds as the user whose containers will use it (POLAR_APPTAINER_USER).
set -eu
image=$1 target=$2
user=${POLAR_APPTAINER_USER:-polar-apptainer}
work=$(mktemp -d "${TMPDIR:-/var/tmp}/polar-from-docker.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
docker save "$image" -o "$work/image.tar"
chmod 644 "$work/image.tar"
mkdir "$work/out" "$work/home"
kind=--sandbox
case $target in *.sif) kind= ;; esac
run() {
  if [ "$(id -u)" = 0 ]; then
    chown "$user" "$work/out" "$work/home"
    setpriv --reuid "$user" --regid "$(id -g "$user")" --init-groups env HOME="$work/home" "$@"
  else
    env HOME="$work/home" "$@"
  fi
}
# shellcheck disable=SC2086
run apptainer -s build $kind "$work/out/image" "docker-archive:$work/image.tar"
mv "$work/out/image" "$target"
