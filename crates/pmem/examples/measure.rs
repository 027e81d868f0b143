//! Prints what this machine's copies cost: `cargo run --release -p cbd-pmem --example measure [region [bytes]]`.

use cbd_pmem::{Mapping, OpenOptions};
use cbd_types::Pmem;
use std::hint::black_box;
use std::time::Instant;

const BLOCK: usize = 4096;
const COPIES: u64 = 200_000;

fn main() -> cbd_types::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next();
    let size = arguments.next().and_then(|size| size.parse().ok()).unwrap_or(2_u64 << 30);
    let begin = Instant::now();
    drop(Mapping::anonymous(1 << 20)?);
    println!("calibrated in {:?}", begin.elapsed());
    let begin = Instant::now();
    let mapping = match path {
        Some(path) => Mapping::open(
            path,
            &OpenOptions { size: Some(size), create: true, populate: true, ..OpenOptions::default() },
        )?,
        None => Mapping::anonymous(size)?,
    };
    println!("opened in {:?}: {}", begin.elapsed(), mapping.describe());
    for method in mapping.info().methods {
        println!("  {method:?}");
    }
    for warning in mapping.info().warnings {
        println!("  warning: {warning}");
    }
    let places = mapping.len() / BLOCK as u64;
    for at in 0..places {
        mapping.store(at * BLOCK as u64, &[1; BLOCK]);
    }
    // A source that is in the cache, as a client's just filled buffer is.
    let source = vec![3_u8; 1 << 20];
    let from = |index: u64| &source[(index as usize % 256) * BLOCK..][..BLOCK];
    let mut into = vec![0_u8; BLOCK];
    let mut sums = [0];
    for round in 0..3 {
        println!("round {round}");
        measure("bare copy 4096", places, |at, index| mapping.bare_copy(at, from(index)));
        measure("store_summed 4096 + fence", places, |at, index| {
            mapping.store_summed(at, from(index), BLOCK, &mut sums);
            mapping.fence();
        });
        measure("store_summed 4096 + line + fence", places, |at, index| {
            mapping.store_summed(at, from(index), BLOCK, &mut sums);
            mapping.store_line(at / 64, &[1; 64]);
            mapping.fence();
        });
        measure("bare copy 512", places, |at, index| mapping.bare_copy(at, &from(index)[..512]));
        measure("store_summed 512 + fence", places, |at, index| {
            mapping.store_summed(at, &from(index)[..512], 512, &mut sums);
            mapping.fence();
        });
        measure("line + fence", places, |at, _| {
            mapping.store_line(at, &[1; 64]);
            mapping.fence();
        });
        measure("load 4096", places, |at, _| {
            let _ = black_box(mapping.load(at, &mut into));
        });
        measure("load_summed 4096", places, |at, _| {
            let _ = black_box(mapping.load_summed(at, &mut into));
        });
        measure("load_summed 64", places, |at, _| {
            let _ = black_box(mapping.load_summed(at, &mut into[..64]));
        });
        measure("load_summed 4096 hot", 16, |at, _| {
            let _ = black_box(mapping.load_summed(at, &mut into));
        });
        measure("crc alone 4096", places, |_, index| {
            black_box(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, black_box(from(index))));
        });
    }
    Ok(())
}

fn measure(name: &str, places: u64, mut operation: impl FnMut(u64, u64)) {
    let mut state = 0x1234_5678_9abc_def1_u64;
    let begin = Instant::now();
    for index in 0..COPIES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        operation(state % places * BLOCK as u64, index);
    }
    println!("  {name:34} {:7.1} ns", begin.elapsed().as_nanos() as f64 / COPIES as f64);
}
