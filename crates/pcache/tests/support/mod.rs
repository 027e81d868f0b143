//! Helpers of the tests of images.
#![allow(dead_code, reason = "each test takes what it needs")]

use cbd_pcache::{Cache, Options, Scanned, Sink, Survey};
use cbd_testkit::pcache::{Sample, SampleKey};
use cbd_types::{Error, Result};
use std::collections::BTreeMap;

/// A page of a cache's data.
pub const BLOCK: usize = 4096;

/// The device with the data that was passed on, in sectors of 512 bytes.
#[derive(Default, Debug)]
pub struct Received(pub BTreeMap<u64, Vec<u8>>, u64);

impl Sink for Received {
    fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        assert!(offset >= self.1 && !bytes.is_empty(), "calls ascend and never overlap");
        assert!(offset.is_multiple_of(512) && bytes.len().is_multiple_of(512), "whole sectors");
        self.1 = offset + bytes.len() as u64;
        for (number, sector) in bytes.chunks(512).enumerate() {
            self.0.insert(offset + 512 * number as u64, sector.to_vec());
        }
        Ok(())
    }
}

/// The result of reading an image.
#[derive(Debug)]
pub struct Outcome {
    pub survey: Survey,
    pub scanned: Scanned,
    pub received: BTreeMap<u64, Vec<u8>>,
    pub harmful: u64,
    pub findings: Vec<String>,
}

impl Outcome {
    /// Whether the whole range was passed on with this content.
    pub fn has(&self, offset: u64, length: u64, fill: u8) -> bool {
        let mut sectors = (offset..offset + length).step_by(512);
        sectors.all(|at| self.received.get(&at).is_some_and(|sector| sector.iter().all(|&byte| byte == fill)))
    }

    /// Damaged ranges: offset, bytes.
    pub fn damaged(&self) -> Vec<(u64, u64)> {
        self.scanned.damaged.ranges.iter().map(|range| (range.offset, range.bytes)).collect()
    }
}

pub fn read_with(sample: &Sample, options: Options) -> std::result::Result<Outcome, Error> {
    let cache = Cache::open(sample, options)?;
    let survey = cache.survey(&mut |_, _, _| {});
    let mut received = Received::default();
    let scanned =
        cache.scan(&mut received, &mut |_, done, of| assert!(done <= of)).expect("the sink takes all");
    assert_eq!(scanned.dirty.bytes, received.0.len() as u64 * 512);
    let findings = cache.findings().iter().map(ToString::to_string).collect();
    Ok(Outcome { survey, scanned, received: received.0, harmful: cache.harmful(), findings })
}

pub fn read(sample: &Sample) -> Outcome {
    read_with(sample, Options::default()).expect("the image can be opened")
}

/// An image with its log in segment 0 and consecutive data from segment 1 on.
pub struct Writer {
    pub sample: Sample,
    next: u32,
}

impl Writer {
    pub fn new(data_crc: bool) -> Self {
        Self { sample: Sample::new(4, data_crc), next: 0 }
    }

    /// Data of one byte value, and a key for it.
    pub fn key(&mut self, offset: u64, length: usize, fill: u8) -> SampleKey {
        let at = self.next;
        self.next += length as u32;
        self.sample.data(offset, 1, at, &vec![fill; length])
    }

    /// Appends a key set with one key; returns its offset.
    pub fn write(&mut self, offset: u64, length: usize, fill: u8) -> u64 {
        let key = self.key(offset, length, fill);
        self.sample.append(&[key])
    }
}
