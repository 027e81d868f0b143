#!/bin/bash
# The rules that keep cached disks out of reach, in an initramfs of dracut. Install the folder to /usr/lib/dracut/modules.d/90cbd.
# initramfs-tools copies all rules of /etc/udev/rules.d by itself.

check() {
    # Only where a disk is sealed.
    compgen -G "${dracutsysrootdir-}/etc/udev/rules.d/*-cbd-sealed*.rules" > /dev/null || return 255
    return 0
}

depends() {
    echo udev-rules
    return 0
}

install() {
    local rule
    inst_multiple sh
    for rule in "${dracutsysrootdir-}"/etc/udev/rules.d/*-cbd-sealed*.rules; do
        inst_simple "$rule"
    done
}
