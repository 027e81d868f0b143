//! CRC32C (Castagnoli), the checksum of everything here.

use crc_fast::{CrcAlgorithm, checksum};

/// CRC32C of `bytes`, as iSCSI and ext4 define it.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    // The crate answers 64 bits for all its algorithms; CRC32C uses the lower half.
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_checksum_is_the_castagnoli_one() {
        // RFC 3720, appendix B.4.
        assert_eq!(super::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(super::crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(super::crc32c(b"123456789"), 0xe306_9283);
    }
}
