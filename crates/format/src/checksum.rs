//! CRC32C (Castagnoli), the checksum of all structures and data.

/// The polynomial, with reversed bits.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// CRC32C of `bytes`, as iSCSI and ext4 define it.
#[cfg(not(target_os = "none"))]
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    // The crate returns 64 bits for all its algorithms; CRC32C is the lower half.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC32C of `bytes`, as iSCSI and ext4 define it.
#[cfg(target_os = "none")]
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    by_table(bytes)
}

/// CRC32C of two adjacent ranges, from the checksum of each; the second range has `length` bytes.
#[must_use]
pub const fn crc32c_joined(first: u32, second: u32, length: u64) -> u32 {
    // Multiplies `first` by x to the power of the number of bits of the second range, one bit of `length` at a time.
    let (mut shifted, mut rest, mut bit) = (first, length, 0);
    while rest > 0 {
        if rest & 1 > 0 {
            shifted = times(shifted, BYTES[bit]);
        }
        rest >>= 1;
        bit += 1;
    }
    shifted ^ second
}

/// The product of two polynomials modulo the CRC polynomial; the most significant bit is the lowest power.
const fn times(a: u32, mut b: u32) -> u32 {
    let (mut product, mut bit) = (0, 32);
    while bit > 0 {
        bit -= 1;
        product ^= b & 0_u32.wrapping_sub((a >> bit) & 1);
        b = (b >> 1) ^ (POLYNOMIAL & 0_u32.wrapping_sub(b & 1));
    }
    product
}

/// x to the power of the number of bits in 1, 2, 4... bytes.
const BYTES: [u32; 64] = {
    let mut powers = [1 << 23; 64];
    let mut number = 1;
    while number < powers.len() {
        powers[number] = times(powers[number - 1], powers[number - 1]);
        number += 1;
    }
    powers
};

/// CRC32C, a byte at a time: for targets without a faster method.
#[cfg(any(test, target_os = "none"))]
fn by_table(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < table.len() {
            // x to the power of 8, multiplied by the byte.
            table[byte] = times(byte as u32, 1 << 23);
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(u32::MAX, |crc, byte| (crc >> 8) ^ TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize])
}

#[cfg(test)]
mod tests {
    use super::{by_table, crc32c, crc32c_joined};

    #[test]
    fn the_checksum_is_the_castagnoli_one() {
        // RFC 3720, appendix B.4.
        for crc32c in [crc32c, by_table] {
            assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
            assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
            assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        }
    }

    #[test]
    fn checksums_of_parts_join_to_that_of_the_whole() {
        let bytes: [u8; 4096] = core::array::from_fn(|at| ((at * at) >> 3) as u8);
        for cut in [0, 1, 7, 64, 511, 512, 513, 1536, 4095, 4096] {
            let (first, second) = bytes.split_at(cut);
            let joined = crc32c_joined(crc32c(first), crc32c(second), second.len() as u64);
            assert_eq!(joined, crc32c(&bytes), "cut at {cut}");
        }
    }
}
