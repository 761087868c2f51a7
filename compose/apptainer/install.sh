#!/bin/sh
# Puts a rootless Apptainer onto a Debian 12 node, whose own release has none. Run as root; does nothing if there is one.
#
# The packages come from Debian's unstable suite through an apt list of their own, so that the suite never mixes into the
# system. They want a newer C library than Debian 12 has: it lies in a folder of its own beside them. On a newer Debian,
# or with the project's own packages, install `apptainer` in the ordinary way and skip this.
set -eu
suite=${APPTAINER_SUITE:-sid}
private=/usr/local/lib/apptainer-libc

if command -v apptainer >/dev/null && apptainer --version; then exit 0; fi

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends \
  squashfs-tools squashfuse fuse2fs fuse-overlayfs fuse3 uidmap patchelf util-linux ca-certificates
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1)
arch=$(dpkg --print-architecture)
triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/unpacked"
chmod -R a+rX "$work"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$work/sources.list"
apt() {
  apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- -o Dir::Etc::preferencesparts=- \
    -o Dir::State::lists="$work/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root "$@"
}
apt update
cd "$work/archives"
apt download "apptainer:$arch" "libc6:$arch" "libseccomp2:$arch" "libsqlite3-0:$arch"
for deb in apptainer libc6 libseccomp2 libsqlite3-0; do
  mkdir -p "$work/unpacked/$deb"
  dpkg-deb -x "$deb"_*.deb "$work/unpacked/$deb"
done

cd "$work/unpacked"
mkdir -p "$private"
for lib in libc6 libseccomp2 libsqlite3-0; do
  find "$lib" -name '*.so*' -path "*$triplet*" \( -type f -o -type l \) -exec cp -a -t "$private" {} +
done
cp -a "apptainer/usr/lib/$triplet/apptainer" "/usr/lib/$triplet/"
cp -a apptainer/etc/apptainer /etc/
cp -a apptainer/usr/bin/apptainer "$work/apptainer"
loader=$(find "$private" -name 'ld-linux*' | head -n 1)
for program in "$work/apptainer" "/usr/lib/$triplet/apptainer/bin/starter"; do
  patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$private" "$program"
done
for lib in "$private"/libsqlite3.so.0 "$private"/libseccomp.so.2; do
  patchelf --force-rpath --set-rpath "$private" "$(readlink -f "$lib")"
done
mkdir -p /var/lib/apptainer/mnt/session
install -m 755 "$work/apptainer" /usr/bin/apptainer
# Images and overlay files are mounted by the user.
[ ! -e /dev/fuse ] || chmod 666 /dev/fuse
apptainer --version
