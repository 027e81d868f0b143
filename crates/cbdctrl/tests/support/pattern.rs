//! Data that identifies the write that it is from, and random numbers with a seed.

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit.max(1)
    }

    /// True with a probability of `percent`.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// The seed, from the environment or the clock; it is printed so that a failure can be reproduced.
pub fn seed() -> u64 {
    let seed = std::env::var("CBD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        now.as_nanos() as u64
    });
    println!("CBD_SEED={seed}");
    seed
}

/// Fills `sector` with the data of write `version` to sector `number`; version 0 is zeroes.
pub fn fill(sector: &mut [u8], number: u64, version: u64) {
    if version == 0 {
        return sector.fill(0);
    }
    let first = mixed(version.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number);
    for (index, word) in sector.chunks_exact_mut(8).enumerate() {
        let value = match index {
            0 => version,
            1 => number,
            _ => first.wrapping_mul(2 * index as u64 + 1),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The version in the sector; 0 for zeroes. An error if the sector is torn.
pub fn version_of(sector: &[u8], number: u64) -> Result<u64, String> {
    let version = u64::from_le_bytes(sector[..8].try_into().map_err(|_| "too short".to_owned())?);
    let mut wanted = [0; SECTOR];
    fill(&mut wanted, number, version);
    if sector == wanted {
        return Ok(version);
    }
    let same = sector.iter().zip(&wanted).take_while(|(found, wanted)| found == wanted).count();
    Err(format!("sector {number} is no whole write: it says {version}, but differs from byte {same}"))
}
