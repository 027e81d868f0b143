//! Forged images with correct checksums: a result, in bounded time and memory.

mod support;

use cbd_pcache::{LogEnd, Options, Reason};
use cbd_testkit::pcache::{Sample, SampleKey};
use cbd_types::ErrorKind;
use support::{BLOCK, Writer, read, read_with};

const B: u64 = BLOCK as u64;

/// One valid write before the forged key.
fn with_key(data_crc: bool, forge: impl FnOnce(&mut SampleKey)) -> Writer {
    let mut writer = Writer::new(data_crc);
    writer.write(8 * B, BLOCK, 1);
    let mut key = writer.key(0, BLOCK, 2);
    forge(&mut key);
    writer.sample.append(&[key]);
    writer
}

#[test]
fn a_key_with_an_impossible_location_is_damage_of_its_range() {
    let forges: [fn(&mut SampleKey); 5] = [
        |key| key.segment = 4,
        |key| key.segment = u32::MAX,
        |key| key.data_offset = u32::MAX - 511,
        |key| key.data_offset = (16 << 20) - 12288 - 512,
        |key| key.length = u32::MAX - 511,
    ];
    for forge in forges {
        let mut writer = with_key(false, forge);
        // It hides the older data of its range, whatever it contains.
        writer.write(16 << 30, BLOCK, 3);
        let read = read(&writer.sample);
        if matches!(read.survey.end, Some(LogEnd::Overfull { .. })) {
            continue;
        }
        assert_eq!(read.scanned.damaged.ranges[0].reason, Some(Reason::Outside));
        assert!(read.has(16 << 30, B, 3) && !read.received.contains_key(&0));
    }
}

#[test]
fn an_implausible_key_is_damage_of_whole_sectors() {
    let forges: [fn(&mut SampleKey); 4] =
        [|key| key.flags = 1, |key| key.offset = 100, |key| key.length = 1000, |key| key.data_offset = 3];
    for forge in forges {
        let read = read(&with_key(false, forge).sample);
        assert_eq!(read.scanned.damaged.ranges[0].reason, Some(Reason::Implausible));
        assert!(read.has(8 * B, B, 1) && read.scanned.dirty.bytes == B);
    }
}

#[test]
fn a_key_beyond_any_device_is_counted_and_has_no_range() {
    let forges: [fn(&mut SampleKey); 4] = [
        |key| key.offset = u64::MAX - 100,
        |key| key.offset = i64::MAX as u64,
        |key| key.offset = u64::MAX - 4095,
        |key| key.length = 0,
    ];
    for forge in forges {
        let read = read(&with_key(true, forge).sample);
        assert_eq!((read.survey.impossible_keys, read.scanned.damaged.count), (1, 0));
        assert!(read.has(8 * B, B, 1));
    }
}

#[test]
fn a_circular_log_is_read_once() {
    for back_to in [0, 2] {
        let mut writer = Writer::new(true);
        writer.write(0, BLOCK, 1);
        writer.sample.append_last(2);
        writer.write(B, BLOCK, 2);
        let head = writer.sample.head();
        let first = Sample::data_at(0);
        let mut begin = [0; 24];
        cbd_pcache::Image::read(
            &writer.sample,
            if back_to == 0 { first } else { Sample::data_at(2) },
            &mut begin,
        )
        .expect("it is there");
        let at = writer.sample.append_last(back_to);
        writer.sample.store(Sample::data_at(back_to), &begin);
        assert_ne!(writer.sample.head(), head);
        let read = read(&writer.sample);
        assert_eq!(read.survey.end, Some(LogEnd::Astray { at, segment: back_to }));
        assert!(read.has(0, B, 1) && read.has(B, B, 2));
    }
}

#[test]
fn a_log_that_leads_to_a_missing_segment_ends_there() {
    for segment in [4, 5, u32::MAX] {
        let mut writer = Writer::new(true);
        writer.write(0, BLOCK, 1);
        let at = writer.sample.append_last(segment);
        let read = read(&writer.sample);
        assert_eq!(read.survey.end, Some(LogEnd::Astray { at, segment }));
        assert!(read.has(0, B, 1));
    }
}

#[test]
fn a_circular_chain_of_segments_is_followed_once() {
    let mut writer = Writer::new(true);
    writer.write(0, BLOCK, 1);
    let at = Sample::segment_at(1);
    writer.sample.store(at + 12, &0_u32.to_le_bytes());
    writer.sample.reseal(at, 16);
    let read = read(&writer.sample);
    assert!(read.has(0, B, 1) && read.harmful == 1);
    assert!(read.findings[0].contains("has segment 0 as number"), "{:?}", read.findings);
}

#[test]
fn keys_with_more_data_than_the_cache_holds_end_the_log() {
    let mut writer = Writer::new(false);
    let key = SampleKey { length: 16 << 20, segment: 1, ..SampleKey::default() };
    for number in 0..100 {
        writer.sample.append(&[SampleKey { offset: number << 30, ..key }]);
    }
    let read = read(&writer.sample);
    assert!(matches!(read.survey.end, Some(LogEnd::Overfull { .. })), "{:?}", read.survey.end);
    assert!(read.survey.keys <= 4);
}

#[test]
fn an_impossible_number_of_segments_is_refused_and_missing_ones_take_no_memory() {
    for count in [0_u32, (1 << 20) + 1, u32::MAX] {
        for at in [4096 + 16, 12288 + 12] {
            let mut sample = Sample::new(4, true);
            sample.store(at, &count.to_le_bytes());
            sample.reseal(at & !4095, 24);
            let opened = read_with(&sample, Options::default()).map(|_| ()).map_err(|error| error.kind());
            assert_eq!(opened, Err(ErrorKind::Damaged), "{count} at {at}");
        }
    }
    let mut sample = Sample::new(4, true);
    for at in [4096 + 16, 12288 + 12] {
        sample.store(at, &(1_u32 << 20).to_le_bytes());
        sample.reseal(at & !4095, 24);
    }
    let read = read(&sample);
    assert!(read.harmful > 0 && read.survey.keys == 0);
}

#[test]
fn tails_outside_the_log_are_damage() {
    for (segment, offset) in [(4, 0), (u32::MAX, 0), (0, 16 << 20), (0, u32::MAX), (0, 4)] {
        let mut sample = Sample::new(4, true);
        sample.set_dirty_tail(2, segment, offset);
        sample.set_key_tail(2, segment, offset);
        let opened = read_with(&sample, Options::default()).map(|_| ()).map_err(|error| error.kind());
        assert_eq!(opened, Err(ErrorKind::Damaged), "{segment}:{offset}");
    }
    let mut sample = Sample::new(4, true);
    sample.set_dirty_tail(2, 0, (16 << 20) - 12288 - 16);
    assert!(matches!(read(&sample).survey.end, Some(LogEnd::Unreadable { .. })), "no set fits there");
}

#[test]
fn random_damage_never_passes_on_a_byte_that_was_not_written() {
    use rand::{Rng, SeedableRng};
    let seed = std::env::var("CBD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = rand::rngs::StdRng::seed_from_u64(seed);
    for _ in 0..300 {
        let mut writer = Writer::new(true);
        for number in 0..40_u64 {
            writer.write(number % 16 * B, BLOCK, number as u8);
            if number == 25 {
                writer.sample.append_last(3);
            }
        }
        let places = [
            4096,
            8192,
            12288,
            16384,
            Sample::segment_at(0),
            Sample::data_at(0),
            Sample::data_at(1),
            Sample::data_at(3),
        ];
        for _ in 0..random.random_range(1..6) {
            let place = places[random.random_range(0..places.len())] + random.random_range(0..2048);
            if random.random_bool(0.1) {
                writer.sample.poison(place);
            } else {
                writer.sample.flip(place, 1 << random.random_range(0..8));
            }
        }
        let options = Options { past_damage: random.random_bool(0.5), pieces_max: 4 };
        let Ok(read) = read_with(&writer.sample, options) else { continue };
        for (offset, sector) in read.received {
            let fill = sector[0];
            assert!(sector.iter().all(|&byte| byte == fill), "seed {seed}: a torn sector at {offset}");
            assert_eq!(u64::from(fill) % 16, offset / B, "seed {seed}: data of another offset at {offset}");
        }
    }
}
