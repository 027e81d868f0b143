#!/bin/sh
# The first process of a guest: sets up what programs expect, runs /job, reports how it ended, and powers off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/busybox
export HOME=/root
/bin/busybox mkdir -p /usr/lib/busybox /dev /proc /sys /run /tmp /root /out /mnt /var/lib /var/log /etc
/bin/busybox --install -s /usr/lib/busybox
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
# Nothing is mounted here: shipped files may be in it.
chmod 1777 /tmp
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/mounts /etc/mtab
ip link set lo up
cd /root

while read -r module; do
    insmod "/lib/modules/$module.ko" || echo "init: the module $module cannot be loaded"
done </lib/modules/order

# The host's port with this name.
port() {
    for folder in /sys/class/virtio-ports/*; do
        if [ "$(cat "$folder/name")" = "$1" ]; then
            echo "/dev/${folder##*/}"
        fi
    done
}

uptime() {
    read -r seconds rest </proc/uptime
    echo "$seconds"
}

if grep -q cbd.interactive /proc/cmdline; then
    setsid cttyhack /job
    poweroff -f
fi

result=$(port result)
exec 3>"$result"
echo "begun $(uptime)" >&3
/job >"$(port output)" 2>"$(port error)" </dev/null 3>&-
code=$?
echo "ended $(uptime) $code" >&3
tar -c -f "$(port files)" -C /out .
sync
poweroff -f
