//! The boot of the machine.
//!
//! Invariants: the identifier is the same for the life of the process, and differs between boots.

use cbd_types::BootId;
use std::sync::OnceLock;

const FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The kernel's identifier of the boot in which this process runs. If it cannot be read, a random identifier: then no use
/// record of another process matches this boot.
#[must_use]
pub fn this_boot() -> BootId {
    static BOOT: OnceLock<BootId> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let known = std::fs::read_to_string(FILE).ok().and_then(|text| BootId::parse(&text));
        known.filter(|boot| *boot != BootId::UNKNOWN).unwrap_or_else(random)
    })
}

fn random() -> BootId {
    let mut id = [0u8; 16];
    let got = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
    if got == Ok(16) { BootId(id) } else { BootId::UNKNOWN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_is_known_and_stays() {
        assert_ne!(this_boot(), BootId::UNKNOWN);
        assert_eq!(this_boot(), this_boot());
    }
}
