//! Random reads that hit, verified, against a plain copy and one checksum.

use super::rig::Rig;
use super::scale::{Scale, Sources, random_places};
use crate::Figures;
use crate::options::Options;
use crate::turns::{Turn, compare};
use crate::window::{Store, Window};
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind, Pmem, Result};
use crc_fast::{CrcAlgorithm, checksum};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use std::collections::HashMap;
use std::hint::black_box;

/// Reads of 4 KiB.
pub fn measure(
    options: &Options,
    scale: Scale,
    rig: &mut Rig,
    bare: &Window<Mapping>,
    figures: &mut Figures,
) -> Result<()> {
    let mut random = SmallRng::seed_from_u64(3);
    rig.settle()?;
    let sources = Sources::new(4096);
    let written = random_places(&mut random, scale.device, 4096, scale.between_rests());
    let log = rig.log();
    let (outcome, stores) = log.record(|| rig.write_all(&written, &sources));
    outcome?;
    // The newest place of each block that was written, in a new random order.
    let mut hits: Vec<(u64, Store)> =
        written.into_iter().zip(stores).collect::<HashMap<_, _>>().into_iter().collect();
    hits.shuffle(&mut random);

    let mut buffer = AlignedBuffer::zeroed(4096);
    let mut plain = AlignedBuffer::zeroed(4096);
    let mut misses = Vec::new();
    let mut verified = hits.chunks(scale.turn).cycle();
    let mut bare_loads = hits.chunks(scale.turn).cycle();
    let found = compare(
        options.rounds(),
        || {
            let hits = verified.next().unwrap_or_default();
            let turn = Turn::measure(hits.len(), || {
                for (place, _) in hits {
                    rig.cache().read(ByteRange::at(*place, 4096), &mut buffer, &mut misses)?;
                }
                Ok(())
            });
            if !misses.is_empty() {
                return Err(Error::new(ErrorKind::NotFound, "what was just written is not in the cache"));
            }
            turn
        },
        || {
            let hits = bare_loads.next().unwrap_or_default();
            Turn::measure(hits.len(), || {
                for (_, store) in hits {
                    bare.load(store.at, &mut plain)?;
                    black_box(checksum(CrcAlgorithm::Crc32Iscsi, &plain));
                }
                Ok(())
            })
        },
    )?;
    figures.add_comparison("read_4k", "load", "load_4k", &found);
    Ok(())
}
