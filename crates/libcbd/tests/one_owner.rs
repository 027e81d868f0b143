//! A region has one owner at a time, and the next one finds the data of the former, daemon or library.

mod support;

use cbd::{DeviceOptions, ErrorKind, Format, Region, RegionOptions};
use cbd_daemon::api::StartBackend;
use cbd_daemon::control::Control;
use support::{BLOCK, HOST, MIB, Place, pattern, version};

fn write(device: &cbd::Device, number: u64) {
    for block in 0..64 {
        device.write_at(&pattern(block, number), block * BLOCK as u64).unwrap();
    }
}

#[track_caller]
fn read_is(device: &cbd::Device, number: u64) {
    for block in 0..64 {
        let mut bytes = vec![0; BLOCK];
        device.read_at(&mut bytes, block * BLOCK as u64).unwrap();
        assert_eq!(version(block, &bytes), number, "block {block}");
    }
}

#[test]
fn the_error_of_a_second_opener_names_the_owner() {
    let place = Place::new();
    let _held = place.format();
    for options in [RegionOptions::default(), RegionOptions::format(32 * MIB)] {
        let error = Region::open(place.region_path(), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        let who = format!("in use by process {} (", std::process::id());
        assert!(error.line().contains(&who), "{error}");
    }
    assert!(place.region_path().exists());
}

#[test]
fn a_region_of_a_daemon_is_refused_to_the_library_and_the_reverse() {
    let place = Place::new();
    let daemon = place.daemon();
    daemon.register_transport(&place.registration(true)).unwrap();
    let error = Region::open(place.region_path(), &RegionOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    daemon.unregister_transport(0).unwrap();
    let region = place.open();
    let error = daemon.register_transport(&place.registration(false)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    drop(region);
    daemon.register_transport(&place.registration(false)).unwrap();
}

#[test]
fn the_daemon_opens_the_cache_of_the_library() {
    let place = Place::new();
    let (region, device) = place.cached(8 * MIB);
    write(&device, 4);
    device.close().unwrap();
    drop(region);
    let daemon = place.daemon();
    daemon.register_transport(&place.registration(false)).unwrap();
    let backends = daemon.backends(0, false).unwrap();
    assert_eq!(backends.len(), 1);
    assert!(backends[0].alive, "{:?}", backends[0].error);
    daemon.take_off(backends[0].backend_id);
    for block in 0..64 {
        assert_eq!(version(block, &place.on_disk(block)), 4, "block {block}");
    }
}

#[test]
fn the_library_opens_the_cache_of_the_daemon() {
    let place = Place::new();
    {
        let daemon = place.daemon();
        daemon.register_transport(&place.registration(true)).unwrap();
        let disk = place.disk().to_str().unwrap().to_owned();
        let request = StartBackend {
            path: disk,
            cache_size: Some(16 * MIB),
            start_dev: true,
            export: Some(format!("nbd:unix:{}", place.path("nbd.sock").display())),
            ..StartBackend::default()
        };
        daemon.start_backend(0, &request).unwrap();
        let mut client =
            cbd_testkit::Client::connect(&cbd_nbd::Listen::Unix(place.path("nbd.sock"))).unwrap();
        for block in 0..64 {
            client.write(block * BLOCK as u64, &pattern(block, 8), false).unwrap();
        }
    }
    let region = place.open();
    assert_eq!(region.info().host.1, HOST);
    let entry = region.backends().pop().unwrap();
    let device = region.open_device(entry.id).unwrap();
    read_is(&device, 8);
    write(&device, 9);
    // The daemon's block device on it is removed with the backend.
    device.detach(cbd::DRAIN_TIMEOUT).unwrap();
    assert_eq!(version(63, &place.on_disk(63)), 9);
    drop(region);
    let daemon = place.daemon();
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert!(daemon.blkdevs(0, true).unwrap().is_empty());
}

#[test]
fn one_disk_gets_one_row_whatever_its_path() {
    let place = Place::new();
    let (region, device) = place.cached(8 * MIB);
    let error = region.attach(place.disk(), &DeviceOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    write(&device, 1);
    device.close().unwrap();
    std::fs::rename(place.disk(), place.path("moved")).unwrap();
    let device = region.attach(place.path("moved"), &DeviceOptions::default()).unwrap();
    read_is(&device, 1);
    let backends = region.backends();
    assert_eq!(backends.len(), 1);
    assert_eq!(backends[0].path, place.path("moved").to_str().unwrap());
}

#[test]
fn another_disk_at_the_recorded_path_is_refused() {
    let place = Place::new();
    let (region, device) = place.cached(8 * MIB);
    write(&device, 1);
    device.close().unwrap();
    std::fs::rename(place.disk(), place.path("away")).unwrap();
    std::fs::File::create(place.disk()).unwrap().set_len(16 * MIB).unwrap();
    let error = region.attach(place.disk(), &DeviceOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exchanged, "{error}");
    assert_eq!(place.on_disk(0), vec![0; BLOCK]);
}

#[test]
fn options_that_differ_from_the_recorded_ones_are_refused() {
    let place = Place::new();
    let (region, device) = place.cached(8 * MIB);
    device.close().unwrap();
    for options in [
        DeviceOptions { cache_size: Some(2 * MIB), ..DeviceOptions::default() },
        DeviceOptions { data_crc: Some(false), ..DeviceOptions::default() },
        DeviceOptions { consistency: Some(cbd::Consistency::None), ..DeviceOptions::default() },
    ] {
        let error = region.attach(place.disk(), &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{options:?}");
    }
    region.attach(place.disk(), &DeviceOptions::default()).unwrap();
}

#[test]
fn a_region_with_several_hosts_requires_a_host_name() {
    let place = Place::new();
    drop(place.format());
    let second = RegionOptions { host: Some("node1".to_owned()), ..RegionOptions::default() };
    let region = Region::open(place.region_path(), &second).unwrap();
    let device = region
        .attach(place.disk(), &DeviceOptions { cache_size: Some(8 * MIB), ..DeviceOptions::default() })
        .unwrap();
    let id = device.id();
    device.close().unwrap();
    drop(region);
    let error = Region::open(place.region_path(), &RegionOptions::default()).unwrap_err();
    assert!(error.line().contains("node0, node1"), "{error}");
    let first = RegionOptions { host: Some(HOST.to_owned()), ..RegionOptions::default() };
    let region = Region::open(place.region_path(), &first).unwrap();
    let error = region.open_device(id).unwrap_err();
    assert!(error.line().contains("belongs to host 1 (node1)"), "{error}");
}

#[test]
fn a_region_that_cannot_be_formatted_is_unchanged() {
    let place = Place::new();
    let options = RegionOptions {
        format: Some(Format { segment_size: Some(3000), force: false }),
        size: Some(32 * MIB),
        ..RegionOptions::default()
    };
    assert!(Region::open(place.region_path(), &options).is_err());
    assert!(!place.region_path().exists());
    std::fs::write(place.region_path(), vec![7; MIB as usize]).unwrap();
    let error = Region::open(place.region_path(), &RegionOptions::format(32 * MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Foreign);
    assert_eq!(std::fs::read(place.region_path()).unwrap(), vec![7; MIB as usize]);
    let error = Region::open(place.path("none"), &RegionOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let persistent = RegionOptions { require_persistent: true, ..RegionOptions::format(32 * MIB) };
    let error = Region::open(place.path("none"), &persistent).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(!place.path("none").exists());
}
