#!/bin/sh
# Make a base image for compose/Dockerfile where no image registry can be reached: Python 3.11 or newer with pip and venv
# from the distribution's own packages, imported into the Docker engine.
#
#   make_base.sh [--tag polar-base:py3] [--from host|mmdebstrap|debootstrap] [--suite bookworm]
#
# host         packages that are installed on this machine: seconds, no network (needs python3-venv installed)
# mmdebstrap,
# debootstrap  a fresh small system from the distribution's mirror: needs root and that program
# Without --from the first way that this machine has. DOCKER names the client (default: docker).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
tag=polar-base:py3 from='' suite='' docker=${DOCKER:-docker}
fail() { echo "make_base: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --tag) tag=${2:?--tag needs a value}; shift 2 ;;
    --from) from=${2:?--from needs a value}; shift 2 ;;
    --suite) suite=${2:?--suite needs a value}; shift 2 ;;
    *) fail "found '$1', allowed are --tag, --from and --suite" ;;
  esac
done

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
if [ -z "$from" ]; then
  if installed python3-venv && installed libstdc++6 && new_enough /usr/bin/python3; then from=host
  elif command -v mmdebstrap >/dev/null; then from=mmdebstrap
  elif command -v debootstrap >/dev/null; then from=debootstrap
  else fail "needs the package python3-venv (with Python 3.11 or newer), mmdebstrap or debootstrap"
  fi
fi
if [ -z "$suite" ] && [ "$from" != host ]; then
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  [ -n "$suite" ] || fail "give --suite: this machine's own release has no code name"
fi

packages=ca-certificates,dash,python3,python3-venv,libstdc++6
put() {
  "$docker" import --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin' --change 'ENV LANG=C.UTF-8' \
    --change 'CMD ["python3"]' "$1" "$tag" >/dev/null
}
case $from in
  host)
    # Like a sandbox's image, only with other packages in it.
    /usr/bin/python3 "$here/../base_image.py" --tag "$tag" --docker "$docker" \
      bash coreutils findutils grep sed tar $(echo "$packages" | tr , ' ') >/dev/null ;;
  mmdebstrap | debootstrap)
    [ "$(id -u)" = 0 ] || fail "$from needs root"
    command -v "$from" >/dev/null || fail "$from is not installed"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT INT TERM
    if [ "$from" = mmdebstrap ]; then
      mmdebstrap --mode=root --variant=essential --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' "$suite" "$work/root.tar"
    else
      debootstrap --variant=minbase --include="$packages" "$suite" "$work/root"
      rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/usr/share/doc "$work"/root/usr/share/man
      tar -C "$work/root" --exclude='./dev/*' -cf "$work/root.tar" .
    fi
    put "$work/root.tar" ;;
  *) fail "--from: found '$from', allowed are host, mmdebstrap and debootstrap" ;;
esac

"$docker" run --rm --network none "$tag" python3 -c '
import sys, venv, ensurepip, ssl, sqlite3
if sys.version_info < (3, 11): sys.exit("make_base: Python %d.%d is older than 3.11" % sys.version_info[:2])'
echo "$tag: made from $from"
