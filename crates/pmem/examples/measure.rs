//! Prints the cost of this machine's copies: `cargo run --release -p cbd-pmem --example measure [region
//! [bytes]]`.

use cbd_pmem::{Mapping, OpenOptions};
use cbd_types::Pmem;
use std::hint::black_box;
use std::time::Instant;

const BLOCK: usize = 4096;
const COPIES: u64 = 4000;
const ROUNDS: usize = 60;

type Operation<'a> = Box<dyn FnMut(u64, u64) + 'a>;

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
    // A source that is in the cache, as a buffer that a client has just filled.
    let source = vec![3_u8; 1 << 20];
    let from = |index: u64| &source[(index as usize % 256) * BLOCK..][..BLOCK];
    let (mut into, mut checksums, mut line_checksums) = (vec![0_u8; BLOCK], [0], [0]);
    let mut into_summed = into.clone();
    let mut into_line = [0_u8; 64];
    let mut into_hot = into.clone();
    // The operations take turns, so that a disturbance affects all of them equally.
    let mut operations: [(&str, u64, Operation<'_>); 11] = [
        ("bare copy 4096", places, Box::new(|at, index| mapping.bare_copy(at, from(index)))),
        (
            "store_summed 4096 + fence",
            places,
            Box::new(|at, index| {
                mapping.store_summed(at, from(index), BLOCK, &mut checksums);
                mapping.fence();
            }),
        ),
        (
            "store_summed 4096 + line + fence",
            places,
            Box::new(|at, index| {
                mapping.store_summed(at, from(index), BLOCK, &mut line_checksums);
                mapping.store_line(at / 128 * 64, &[1; 64]);
                mapping.fence();
            }),
        ),
        ("bare copy 512", places, Box::new(|at, index| mapping.bare_copy(at, &from(index)[..512]))),
        (
            "store_summed 512 + fence",
            places,
            Box::new(|at, index| {
                mapping.store_summed(at, &from(index)[..512], 512, &mut [0]);
                mapping.fence();
            }),
        ),
        (
            "line + fence",
            places,
            Box::new(|at, _| {
                mapping.store_line(at, &[1; 64]);
                mapping.fence();
            }),
        ),
        (
            "load 4096",
            places,
            Box::new(|at, _| {
                let _ = black_box(mapping.load(at, &mut into));
            }),
        ),
        (
            "load_summed 4096",
            places,
            Box::new(|at, _| {
                let _ = black_box(mapping.load_summed(at, &mut into_summed));
            }),
        ),
        (
            "load_summed 64",
            places,
            Box::new(|at, _| {
                let _ = black_box(mapping.load_summed(at, &mut into_line));
            }),
        ),
        (
            "load_summed 4096, cached",
            16,
            Box::new(|at, _| {
                let _ = black_box(mapping.load_summed(at, &mut into_hot));
            }),
        ),
        (
            "crc alone 4096, cached",
            places,
            Box::new(|_, index| {
                black_box(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, black_box(from(index))));
            }),
        ),
    ];
    let mut times = vec![Vec::new(); operations.len()];
    let mut state = 0x1234_5678_9abc_def1_u64;
    for _ in 0..ROUNDS {
        for ((_, places, operation), times) in operations.iter_mut().zip(&mut times) {
            let begin = Instant::now();
            for index in 0..COPIES {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                operation(state % *places * BLOCK as u64, index);
            }
            times.push(begin.elapsed().as_nanos() as f64 / COPIES as f64);
        }
    }
    println!("{:34} {:>8} {:>8}", "nanoseconds", "least", "median");
    for ((name, _, _), times) in operations.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        println!("{name:34} {:8.1} {:8.1}", times[0], times[times.len() / 2]);
    }
    Ok(())
}
