//! The constants that fold a message into its CRC32C by carry-less multiplication.
//!
//! Invariants: everything is computed at compile time from the polynomial; no table is copied from another source. The
//! arithmetic is that of Intel's "Fast CRC Computation Using PCLMULQDQ" for bit-reflected checksums: 128 bits that are
//! `distance` bits before others can be added to them after a multiplication by x to the distance modulo the polynomial (in
//! two halves).
//!
//! Elsewhere: the folding itself (`x86/guarded.s`, which relies on the offsets in [`Keys`]).

/// The polynomial of CRC32C (Castagnoli) without its highest term, most significant bit first.
const POLYNOMIAL: u32 = 0x1EDC_6F41;

/// x to `power`, modulo the polynomial, reflected and shifted as a 64-bit carry-less multiplication of
/// reflected operands requires.
const fn power_of_x(power: u32) -> u64 {
    let mut remainder: u32 = 1;
    let mut step = 0;
    while step < power {
        let carry = remainder >> 31 == 1;
        remainder <<= 1;
        if carry {
            remainder ^= POLYNOMIAL;
        }
        step += 1;
    }
    (remainder.reverse_bits() as u64) << 1
}

/// The two factors for a distance in bits: for the low half, which is 64 bits further away, and for the high half.
const fn pair(distance: u32) -> [u64; 2] {
    [power_of_x(distance + 32), power_of_x(distance - 32)]
}

const fn four(pair: [u64; 2]) -> [[u64; 2]; 4] {
    [pair; 4]
}

/// The factors in the order in which the routines load them.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Keys {
    /// For a step of 256 bytes.
    step: [[u64; 2]; 4],
    /// From the first of four accumulators of 64 bytes to the last.
    first: [[u64; 2]; 4],
    /// From the second.
    second: [[u64; 2]; 4],
    /// From the third; also a step of 64 bytes for accumulators of 16.
    third: [[u64; 2]; 4],
    /// From each lane of 16 bytes to the last one, which needs no factor.
    lanes: [[u64; 2]; 4],
}

/// The one instance.
pub static KEYS: Keys = Keys {
    step: four(pair(2048)),
    first: four(pair(1536)),
    second: four(pair(1024)),
    third: four(pair(512)),
    lanes: [pair(384), pair(256), pair(128), [0, 0]],
};

const _: () = assert!(size_of::<Keys>() == 320);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_below_the_degree_is_a_single_bit() {
        // Reflected, x^0 is the highest of 32 bits; the shift makes it bit 32.
        assert_eq!(power_of_x(0), 1 << 32);
        assert_eq!(power_of_x(31), 1 << 1);
    }

    fn carry_less_product(one: u64, other: u64) -> u128 {
        (0..64).filter(|bit| other >> bit & 1 == 1).fold(0, |sum, bit| sum ^ u128::from(one) << bit)
    }

    /// The remainder of a message of 16-byte words, bit by bit.
    fn remainder(message: &[u128]) -> u32 {
        message.iter().flat_map(|word| word.to_le_bytes()).fold(0, |state, byte| {
            (0..8).fold(state ^ u32::from(byte), |state, _| {
                let carry = state & 1 == 1;
                state >> 1 ^ if carry { POLYNOMIAL.reverse_bits() } else { 0 }
            })
        })
    }

    #[test]
    fn a_word_folded_over_its_distance_leaves_the_remainder() {
        let (far, near) = (0x0123_4567_89AB_CDEF_0F1E_2D3C_4B5A_6978_u128, 0xFEDC_u128 << 90);
        for (distance, [low, high]) in [(128, KEYS.lanes[2]), (512, KEYS.third[0]), (2048, KEYS.step[3])] {
            let mut message = vec![0; distance / 128 + 1];
            message[0] = far;
            message[distance / 128] = near;
            let folded =
                carry_less_product(far as u64, low) ^ carry_less_product((far >> 64) as u64, high) ^ near;
            assert_eq!(remainder(&[folded]), remainder(&message), "{distance}");
        }
    }
}
