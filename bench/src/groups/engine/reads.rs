//! Random reads that hit and are verified, against a plain copy from the same offsets with one checksum.

use super::pair::Pair;
use crate::Figures;
use crate::turns::{Turn, compare};
use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind, Pmem, Result};
use crc_fast::{CrcAlgorithm, checksum};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use std::hint::black_box;

/// Reads of 4 KiB from the whole cache.
///
/// # Errors
/// The errors of the engine, and an error if the cache does not hold a block that its log lists.
pub fn measure(pair: &mut Pair, figures: &mut Figures) -> Result<()> {
    pair.rig.settle()?;
    let mut hits = pair.rig.held_blocks();
    hits.shuffle(&mut SmallRng::seed_from_u64(3));
    figures.add("read_4k_blocks", hits.len());

    let mut buffer = AlignedBuffer::zeroed(4096);
    let mut plain = AlignedBuffer::zeroed(4096);
    let mut misses = Vec::new();
    let turn = pair.scale.turn(4096);
    let mut verified = hits.chunks(turn).cycle();
    let mut bare_loads = hits.chunks(turn).cycle();
    let found = compare(
        pair.rounds,
        || {
            let hits = verified.next().unwrap_or_default();
            let turn = Turn::measure(hits.len(), || {
                for held in hits {
                    pair.rig.cache().read(ByteRange::at(held.place, 4096), &mut buffer, &mut misses)?;
                }
                Ok(())
            });
            if !misses.is_empty() {
                return Err(Error::new(ErrorKind::NotFound, "what the log holds is not in the cache"));
            }
            turn
        },
        || {
            let hits = bare_loads.next().unwrap_or_default();
            Turn::measure(hits.len(), || {
                for held in hits {
                    pair.bare.load(held.at, &mut plain)?;
                    black_box(checksum(CrcAlgorithm::Crc32Iscsi, &plain));
                }
                Ok(())
            })
        },
    )?;
    figures.add_comparison("read_4k", "copy_crc", "copy_crc_4k", &found);
    Ok(())
}
