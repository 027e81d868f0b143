//! One disk under two names: through a loop device, through a partition, or as a region.

use crate::fixture::{Fixture, MIB, refused, stop};
use cbd_daemon::api::{RegisterTransport, StartBackend, StopBackend};
use cbd_daemon::control::Control;
use cbd_testkit::loop_devices::LoopDevice;
use cbd_types::ErrorKind;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

fn may_run() -> bool {
    let may = std::env::var_os("CBD_SYSTEM_TESTS").is_some();
    if !may {
        println!("not run: it makes loop devices; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    may
}

fn plain(fixture: &Fixture, path: &str) -> StartBackend {
    StartBackend { start_dev: false, export: None, ..fixture.backend(path) }
}

#[test]
fn a_disk_that_is_served_is_not_cached_again_through_a_loop_device() {
    if !may_run() {
        return;
    }
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    daemon.start_backend(0, &plain(&fixture, &disk)).unwrap();
    let device = LoopDevice::over(&disk);
    let free = daemon.transports().unwrap()[0].free_segments;
    let error = refused(daemon.start_backend(0, &plain(&fixture, &device.path)), ErrorKind::Busy, &disk);
    assert!(error.line().contains(&format!("process {}", std::process::id())), "{error}");
    assert_eq!(daemon.transports().unwrap()[0].free_segments, free);
    drop(device);
    stop(&daemon, StopBackend::default()).unwrap();
}

#[test]
fn a_disk_that_another_daemon_serves_is_not_cached_through_a_loop_device() {
    if !may_run() {
        return;
    }
    let (fixture, beside) = (Fixture::new(), Fixture::new());
    let disk = fixture.disk("disk", 8 * MIB);
    let device = LoopDevice::over(&disk);
    let (daemon, other) = (fixture.daemon_with_region(), beside.daemon_with_region());
    daemon.start_backend(0, &plain(&fixture, &device.path)).unwrap();
    let second = LoopDevice::over(&disk);
    refused(other.start_backend(0, &plain(&beside, &second.path)), ErrorKind::Busy, &disk);
    refused(other.start_backend(0, &plain(&beside, &disk)), ErrorKind::Busy, &disk);
    stop(&daemon, StopBackend::default()).unwrap();
    other.start_backend(0, &plain(&beside, &second.path)).unwrap();
}

#[test]
fn a_disk_that_is_not_up_gets_no_second_cache_through_a_loop_device() {
    if !may_run() {
        return;
    }
    let fixture = Fixture::new();
    let disk = fixture.disk_left_with_a_block();
    // The file is not at its path: the backend does not come up.
    std::fs::rename(&disk, fixture.path("moved")).unwrap();
    let daemon = fixture.daemon();
    let device = LoopDevice::over(&fixture.text("moved"));
    let error = refused(
        daemon.start_backend(0, &plain(&fixture, &device.path)),
        ErrorKind::AlreadyExists,
        "which is backend 0 already",
    );
    assert!(error.line().contains(&disk), "{error}");
    assert_eq!(daemon.backends(0, true).unwrap().len(), 1);
}

#[test]
fn a_region_is_no_backing_device() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let error = refused(
        daemon.start_backend(0, &plain(&fixture, &fixture.text("region"))),
        ErrorKind::Busy,
        &format!("process {}", std::process::id()),
    );
    assert!(error.line().contains("lock"), "{error}");
    std::fs::copy(fixture.path("region"), fixture.path("copy")).unwrap();
    let words = "holds a CBD transport";
    refused(
        daemon.start_backend(0, &plain(&fixture, &fixture.text("copy"))),
        ErrorKind::InvalidArgument,
        words,
    );
    // The second superblock alone is enough.
    let copy = std::fs::File::options().write(true).open(fixture.path("copy")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&copy, &[0; 4096], 0).unwrap();
    refused(
        daemon.start_backend(0, &plain(&fixture, &fixture.text("copy"))),
        ErrorKind::InvalidArgument,
        words,
    );
    std::os::unix::fs::FileExt::write_all_at(&copy, &[0; 4096], 32 * MIB - 4096).unwrap();
    daemon.start_backend(0, &plain(&fixture, &fixture.text("copy"))).unwrap();
    assert!(Path::new(&fixture.text("copy")).exists());
}

#[test]
fn a_file_beneath_a_loop_device_becomes_no_region_even_by_force() {
    if !may_run() {
        return;
    }
    let fixture = Fixture::new();
    let daemon = fixture.daemon();
    let region = fixture.disk("region", 32 * MIB);
    let format = |force| RegisterTransport { size: None, force, ..fixture.region(32 * MIB) };
    let device = LoopDevice::over(&region);
    let bytes = || std::fs::read(&region).unwrap();
    // Of zeroes, as of data: the loop device uses the file.
    for fill in [0, 7] {
        std::fs::write(&region, vec![fill; 32 * MIB as usize]).unwrap();
        for force in [false, true] {
            let error = refused(daemon.register_transport(&format(force)), ErrorKind::Busy, &region);
            assert!(error.line().contains(&device.path), "{error}");
        }
        assert!(bytes().iter().all(|byte| *byte == fill), "the file is unchanged");
    }
    // The daemon of another test may look at the device while this one detaches it.
    let look = File::open(&device.path).unwrap();
    let other = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop(look);
    });
    device.detach();
    daemon.register_transport(&format(true)).unwrap();
    other.join().unwrap();
    daemon.unregister_transport(0).unwrap();
    let device = LoopDevice::over(&region);
    let plain = RegisterTransport { format: false, ..format(false) };
    refused(daemon.register_transport(&plain), ErrorKind::Busy, &device.path);
    device.detach();
    daemon.register_transport(&plain).unwrap();
}
