#!/bin/sh
# Runs the job that a disk holds, reports how it ended, and powers off.
port=/dev/virtio-ports

uptime() {
    read -r seconds rest </proc/uptime
    echo "$seconds"
}

mkdir -p /out
rm -rf /out/*
tar -x -f /dev/disk/by-id/virtio-job -C /
exec 3>"$port/result"
echo "begun $(uptime)" >&3
/job >"$port/output" 2>"$port/error" </dev/null 3>&-
code=$?
echo "ended $(uptime) $code" >&3
tar -c -f "$port/files" -C /out .
if [ -e /run/guest-shuts-down ]; then
    systemctl --no-block poweroff
else
    sync -f /
    poweroff -f
fi
