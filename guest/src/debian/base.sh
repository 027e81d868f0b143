#!/bin/sh
# Makes a fresh Debian boot as a guest: mmdebstrap runs this on the machine with the folder of its root.
set -e
root=$1

mkdir -p "$root/usr/lib/modules"
cp -r "$GUEST_MODULES" "$root/usr/lib/modules/$GUEST_KERNEL"
rm -f "$root/usr/lib/modules/$GUEST_KERNEL/vmlinuz"
chroot "$root" depmod "$GUEST_KERNEL"
# Not in the initramfs: there nfit and nd_pmem can be loaded before the module whose symbols they need.
printf '%s\n' nfit nd_pmem ublk_drv >"$root/etc/modules-load.d/guest.conf"
printf '%s\n' virtio_pci virtio_blk ext4 >"$root/etc/initramfs-tools/modules"
# update-initramfs looks there for what the kernel can unpack.
{ cat "$GUEST_MODULES/config" 2>/dev/null || echo CONFIG_RD_ZSTD=y; } >"$root/boot/config-$GUEST_KERNEL"
sed -i 's/^MODULES=.*/MODULES=list/' "$root/etc/initramfs-tools/initramfs.conf"
echo 'COMPRESSLEVEL=1' >>"$root/etc/initramfs-tools/initramfs.conf"

cp "$GUEST_JOB" "$root/usr/local/sbin/guest-job"
chmod 755 "$root/usr/local/sbin/guest-job"
cat >"$root/etc/systemd/system/guest-job.service" <<'UNIT'
[Unit]
Description=The job of this boot
After=multi-user.target

[Service]
ExecStart=/usr/local/sbin/guest-job
Environment=HOME=/root DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8

[Install]
WantedBy=multi-user.target
UNIT
chroot "$root" systemctl enable guest-job.service

echo guest >"$root/etc/hostname"
echo '127.0.0.1 localhost guest' >"$root/etc/hosts"
echo 'LABEL=root / ext4 defaults 0 0' >"$root/etc/fstab"
# An empty one would make each guest's first start another one.
echo 6362640000004000800000000000cbd0 >"$root/etc/machine-id"
# Settings of this machine, perhaps with a password of a proxy.
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap"

chroot "$root" update-initramfs -c -k "$GUEST_KERNEL"
cp "$root/boot/initrd.img-$GUEST_KERNEL" "$GUEST_INITRAMFS"
