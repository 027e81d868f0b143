//! What is on a disk, by the magic numbers of its first 72 KiB: other caches, and file systems, swap space, LVM and md.
//!
//! Invariants: any bytes are either recognised or not; a magic number at a wrong place is none.
//!
//! Elsewhere: reading the disk (`look`), and what a signature means (`disks`, `boot`).

use serde::{Deserialize, Serialize};

/// Bytes of a disk that are looked at: up to the superblock of btrfs.
pub const LENGTH: usize = 72 << 10;

/// Something on a disk.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Signature {
    /// What it is; see [`recognise`].
    pub what: String,
    /// Its UUID, as `/etc/fstab` writes it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uuid: Option<String>,
    /// Its label.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub label: Option<String>,
}

/// The superblock of a bcache device, behind checksum, offset and version (`bcache.h` of Linux).
const BCACHE: [u8; 16] =
    [0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81];
/// `MEMORY_SUPERBLOCK_MAGIC` of `dm-writecache.c`.
const WRITECACHE: u32 = 0x2348_9321;
/// `CACHE_SUPERBLOCK_MAGIC` of `dm-cache-metadata.c`.
const DM_CACHE: u64 = 0o6_142_003;
/// `CACHE_MAGIC_NUMBER` of `metadata_superblock.h` of Open CAS's OCF.
const OPEN_CAS: u32 = 0x187E_1CA6;
/// The magic number of a md superblock.
const MD: u32 = 0xA92B_4EFC;

/// A field of the bytes; zeroes behind their end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut field = [0; N];
        if let Some(found) = self.0.get(at..at + N) {
            field.copy_from_slice(found);
        }
        field
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.field(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.field(at))
    }

    fn has(&self, at: usize, magic: &[u8]) -> bool {
        self.0.get(at..at + magic.len()) == Some(magic)
    }

    fn uuid(&self, at: usize) -> Option<String> {
        let bytes: [u8; 16] = self.field(at);
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]];
        (bytes != [0; 16]).then(|| parts.join("-"))
    }

    fn label(&self, at: usize, length: usize) -> Option<String> {
        let bytes = self.0.get(at..at + length)?;
        let text = bytes.split(|&byte| byte == 0).next()?;
        (!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned())
    }
}

fn named(what: &str) -> Signature {
    Signature { what: what.to_owned(), ..Signature::default() }
}

/// Everything that the first bytes of a disk show: `bcache-cache`, `bcache-backing`, `dm-writecache`, `dm-cache`,
/// `dm-pcache`, `open-cas`; `ext`, `xfs`, `btrfs`, `swap`, `luks`, `lvm`, `md`.
pub fn recognise(first: &[u8]) -> Vec<Signature> {
    let bytes = Bytes(first);
    let mut found = other_caches(&bytes);
    if bytes.has(1024 + 56, &[0x53, 0xef]) {
        found.push(Signature {
            uuid: bytes.uuid(1024 + 104),
            label: bytes.label(1024 + 120, 16),
            ..named("ext")
        });
    }
    if bytes.has(0, b"XFSB") {
        found.push(Signature { uuid: bytes.uuid(32), label: bytes.label(108, 12), ..named("xfs") });
    }
    if bytes.has((64 << 10) + 64, b"_BHRfS_M") {
        let at = 64 << 10;
        found.push(Signature {
            uuid: bytes.uuid(at + 32),
            label: bytes.label(at + 299, 256),
            ..named("btrfs")
        });
    }
    if bytes.has(4096 - 10, b"SWAPSPACE2") {
        found.push(Signature { uuid: bytes.uuid(1036), label: bytes.label(1052, 16), ..named("swap") });
    }
    if bytes.has(0, b"LUKS\xba\xbe") {
        let at = 168;
        found.push(Signature { uuid: bytes.label(at, 40), ..named("luks") });
    }
    let sectors = (0..4).map(|sector| sector * 512);
    if sectors.into_iter().any(|at| bytes.has(at, b"LABELONE") && bytes.has(at + 24, b"LVM2 001")) {
        found.push(named("lvm"));
    }
    if [0, 4096].into_iter().any(|at| bytes.u32(at) == MD) {
        found.push(named("md"));
    }
    found
}

fn other_caches(bytes: &Bytes<'_>) -> Vec<Signature> {
    let mut found = Vec::new();
    if bytes.has(4096 + 24, &BCACHE) {
        // The other versions are of cache devices.
        let is_backing = matches!(bytes.u64(4096 + 16), 1 | 4 | 6);
        let what = if is_backing { "bcache-backing" } else { "bcache-cache" };
        found.push(Signature { uuid: bytes.uuid(4096 + 40), ..named(what) });
    }
    if bytes.u32(0) == WRITECACHE && matches!(bytes.u32(4), 1 | 2) {
        found.push(named("dm-writecache"));
    }
    if bytes.u64(32) == DM_CACHE {
        found.push(named("dm-cache"));
    }
    if bytes.u64(cbd_pcache::SUPERBLOCK_AT as usize + 8) == cbd_pcache::SUPERBLOCK_MAGIC {
        found.push(named("dm-pcache"));
    }
    if bytes.u32(4) == OPEN_CAS {
        found.push(named("open-cas"));
    }
    found
}

#[cfg(test)]
pub mod made {
    use super::*;

    /// The first bytes of a disk with these fields.
    pub fn disk(fields: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        for (at, field) in fields {
            bytes[*at..at + field.len()].copy_from_slice(field);
        }
        bytes
    }

    /// A disk with a cache of each kind.
    pub fn caches() -> Vec<(&'static str, Vec<u8>)> {
        vec![
            ("bcache-cache", disk(&[(4096 + 16, &[3]), (4096 + 24, &BCACHE)])),
            ("bcache-backing", disk(&[(4096 + 16, &[1]), (4096 + 24, &BCACHE)])),
            ("dm-writecache", disk(&[(0, &WRITECACHE.to_le_bytes()), (4, &[1])])),
            ("dm-cache", disk(&[(32, &DM_CACHE.to_le_bytes())])),
            ("dm-pcache", disk(&[(4104, &cbd_pcache::SUPERBLOCK_MAGIC.to_le_bytes())])),
            ("open-cas", disk(&[(4, &OPEN_CAS.to_le_bytes())])),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::made::{caches, disk};
    use super::*;

    fn names(bytes: &[u8]) -> Vec<String> {
        recognise(bytes).into_iter().map(|signature| signature.what).collect()
    }

    #[test]
    fn each_cache_is_recognised_by_its_magic_and_nothing_is_seen_elsewhere() {
        for (what, mut bytes) in caches() {
            assert_eq!(names(&bytes), [what]);
            bytes.rotate_right(1);
            assert_eq!(names(&bytes), [""; 0], "{what}");
        }
        assert!(names(&[]).is_empty() && names(&[0xff; LENGTH]).is_empty() && names(&[0; 512]).is_empty());
    }

    #[test]
    fn file_systems_have_their_uuid_and_label() {
        let uuid: Vec<u8> = (1..=16).collect();
        let written = Some("01020304-0506-0708-090a-0b0c0d0e0f10".to_owned());
        for (what, bytes, label) in [
            ("ext", disk(&[(1080, &[0x53, 0xef]), (1128, &uuid), (1144, b"data")]), Some("data")),
            ("xfs", disk(&[(0, b"XFSB"), (32, &uuid)]), None),
            ("btrfs", disk(&[(65600, b"_BHRfS_M"), (65568, &uuid), (65835, b"x")]), Some("x")),
            ("swap", disk(&[(4086, b"SWAPSPACE2"), (1036, &uuid)]), None),
        ] {
            let found = recognise(&bytes);
            assert_eq!(found.len(), 1, "{what}");
            assert_eq!((found[0].what.as_str(), &found[0].uuid), (what, &written));
            assert_eq!(found[0].label.as_deref(), label);
        }
        assert_eq!(names(&disk(&[(512, b"LABELONE"), (536, b"LVM2 001")])), ["lvm"]);
        assert_eq!(names(&disk(&[(4096, &MD.to_le_bytes())])), ["md"]);
    }
}
