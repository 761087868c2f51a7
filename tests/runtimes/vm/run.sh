#!/bin/bash
# Boot a Linux kernel with systemd and control groups version 2 over this machine's own files (read-only), and run a
# command in it as root. See README.md.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 COMMAND   (MEMORY=MiB, APPEND=kernel arguments, LOG=file for the console)" >&2; exit 2; }
here=$(cd "$(dirname "$0")/../../.." && pwd) cache=/var/tmp/polar-vm
export TMPDIR=/dev/shm # the kernel's memory is a file there
run=$(mktemp -d "$TMPDIR/polar-vm-XXXXXX")
trap 'rm -rf "$run"' EXIT

# 1. The kernel, and what a machine that never booted lacks: downloaded and unpacked, not installed.
if [ ! -d "$cache" ]; then
  mkdir "$run/debs" "$run/new"
  (cd "$run/debs" && apt-get -o APT::Sandbox::User=root download user-mode-linux busybox-static libpam-systemd >&2)
  for deb in "$run"/debs/*.deb; do dpkg-deb -x "$deb" "$run/new"; done
  cp -a "$run/new" "$cache.$$" && mv -T "$cache.$$" "$cache" && rm -rf "$run/debs" "$run/new"
fi

# 2. A disk: a layer over the files of this machine, and folders that overlays may lie in.
upper=$run/disk/upper
mkdir -p "$upper"/usr/{bin,lib/x86_64-linux-gnu/security} "$upper"/etc/{pam.d,systemd/system} "$run"/disk/{work,tmp,vartmp,home}
chmod 1777 "$run"/disk/{tmp,vartmp}
cp -a "$cache"/lib/x86_64-linux-gnu/security/pam_systemd.so "$upper/usr/lib/x86_64-linux-gnu/security/"
{ cat /etc/pam.d/common-session; echo 'session optional pam_systemd.so'; } >"$upper/etc/pam.d/common-session"
: >"$upper/etc/fstab"
mknod "$upper/.dockerenv" c 0 0 # hides it: systemd would take the machine for a container
printf '#!/bin/bash\ncd %q\n%s\n' "$here" "$1" >"$upper/usr/bin/polar-vm"
chmod 755 "$upper/usr/bin/polar-vm"
cat >"$upper/etc/systemd/system/polar-vm.target" <<'UNIT'
[Unit]
Wants=sysinit.target dbus.service systemd-logind.service systemd-user-sessions.service polar-vm.service
UNIT
cat >"$upper/etc/systemd/system/polar-vm.service" <<'UNIT'
[Unit]
After=dbus.service systemd-logind.service systemd-user-sessions.service
[Service]
Type=oneshot
Environment=HOME=/root PYTHONDONTWRITEBYTECODE=1
ExecStart=/bin/sh -c '/usr/bin/polar-vm; echo "exit code $?"'
ExecStopPost=/bin/systemctl poweroff --force --force
StandardOutput=file:/dev/ttyS0
StandardError=file:/dev/ttyS0
UNIT
truncate -s 8G "$run/disk.img" # sparse
/sbin/mkfs.ext4 -q -d "$run/disk" "$run/disk.img"

# 3. The first program: mounts them over each other.
init=$run/initramfs
mkdir -p "$init"/{bin,proc,sys,dev,host,disk,root,lib/modules}
cp "$cache/bin/busybox" "$init/bin/"
modules=$(basename "$cache"/usr/lib/uml/modules/*)
cp -r "$cache/usr/lib/uml/modules/$modules" "$init/lib/modules/"
"$init/bin/busybox" depmod -b "$init" "$modules"
cat >"$init/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
for m in overlay fuse autofs4 tun veth bridge; do modprobe \$m; done
mount -t hostfs -o ro none /host && mount /dev/ubda /disk &&
mount -t overlay -o lowerdir=/host,upperdir=/disk/upper,workdir=/disk/work none /root || exec sh
for m in tmp:tmp vartmp:var/tmp home:home; do mount --bind /disk/\${m%%:*} /root/\${m#*:}; done
mount --bind /host$here /root$here
umount /proc /sys; mount --move /host /root/mnt; exec switch_root /root /lib/systemd/systemd
INIT
chmod 755 "$init/init"
(cd "$init" && find . | "$init/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$run/initrd"

# 4. The kernel is an ordinary program, and sees this machine's files read-only.
mkdir "$run/root"
exec 3>&1
unshare -m sh -c 'mount --bind / "$0" && mount -o remount,bind,ro "$0" && exec "$@"' \
  "$run/root" "$cache/usr/bin/linux.uml" mem="${MEMORY:-2048}M" ubd0="$run/disk.img" initrd="$run/initrd" \
  hostfs="$run/root" con=null con0=null,fd:1 ssl=null ssl0=null,fd:3 console=tty0 panic=-1 \
  systemd.unit=polar-vm.target systemd.mask=systemd-timesyncd.service ${APPEND:-} </dev/null >"${LOG:-/dev/null}" 2>&1
