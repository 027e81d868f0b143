//! A device of a virtual machine, through the daemon: its socket, its status, and a daemon that is killed and
//! restarted.

mod support;

/// The guest of the vhost-user server's own tests.
#[path = "../../vhost/tests/common/guest.rs"]
#[allow(dead_code)]
mod guest;

use guest::{DATA, DO_FLUSH, EVENT_INDEX, IN, Link, OUT, Ram, Ring, TYPICAL, WRITE};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::time::{Duration, Instant};
use support::{Fixture, MIB};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;

/// Timeout, far above the expected duration of each wait.
const TIMEOUT: Duration = Duration::from_secs(40);

fn fixture() -> (Fixture, String) {
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 16 * MIB);
    let socket = fixture.text("vm.sock");
    let export = format!("vhost-user:{socket}");
    let printed = fixture.ok(&["backend-start", "-p", &disk, "-c", "16M", "-D", "-e", &export]);
    assert_eq!(printed, format!("{socket}\n"), "the path of the socket, and only that");
    (fixture, socket)
}

struct Machine {
    ram: Ram,
    ring: Ring,
    notes: Option<(VhostUserInflight, File)>,
}

impl Machine {
    fn new() -> Self {
        Self { ram: Ram::new(), ring: Ring::new(0, 64), notes: None }
    }

    fn connect(&mut self, fixture: &Fixture) -> Link {
        let mut link = Link::open(&fixture.path("vm.sock"), TYPICAL | EVENT_INDEX);
        match &self.notes {
            Some((given, file)) => link.front_end.set_inflight_fd(given, file.as_raw_fd()).expect("taken"),
            None => self.notes = Some(link.make_inflight(1, 64)),
        }
        link.share_memory(&self.ram);
        link.start(&self.ram, &self.ring, self.ring.used(&self.ram));
        link
    }

    fn write(&mut self, slot: u16, sector: u64, fill: u8) {
        let data = DATA + u64::from(slot) * 4096;
        self.ram.put(data, &[fill; 4096]);
        self.ring.write_request(&self.ram, slot * 3, OUT, sector, &[(data, 4096, 0)]);
        self.ring.offer(&self.ram, slot * 3);
    }
}

#[test]
fn a_machine_has_a_device_until_it_disconnects() {
    let (mut fixture, socket) = fixture();
    let mode = std::fs::metadata(&socket).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut machine = Machine::new();
    let link = machine.connect(&fixture);
    machine.ram.put(DATA, &[7; 4096]);
    assert_eq!(machine.ring.execute(&machine.ram, OUT, 8, &[(DATA, 4096, 0)]), 0);
    assert_eq!(machine.ring.execute(&machine.ram, DO_FLUSH, 0, &[]), 0);
    let status = fixture.json(&["status", "--json"]);
    let device = &status["transports"][0]["backends"][0]["blkdevs"][0];
    assert!(device.to_string().contains(&socket), "{status}");
    let refused = fixture.run(&["dev-stop", "-d", "0"]);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("is connected to"), "{}", refused.stderr);
    drop(link);
    fixture.ok(&["dev-stop", "-d", "0"]);
    assert!(!fixture.path("vm.sock").exists());
    fixture.ok(&["backend-stop", "-b", "0"]);
    let mut written = [0; 4096];
    File::open(fixture.path("disk")).and_then(|disk| disk.read_exact_at(&mut written, 4096)).expect("read");
    assert_eq!(written, [7; 4096]);
    fixture.terminate();
}

#[test]
fn a_machine_loses_no_write_when_the_daemon_is_killed() {
    const SLOTS: u16 = 16;
    let (mut fixture, _) = fixture();
    let mut machine = Machine::new();
    let mut link = machine.connect(&fixture);
    // For each page the acknowledged version, and for each slot the version in flight.
    let mut pages = vec![0_u8; 1024];
    let mut flying = [None::<(usize, u8)>; SLOTS as usize];
    let mut fill = 0_u8;
    for round in 0..5_usize {
        let end = Instant::now() + Duration::from_millis(30 + 10 * round as u64);
        let mut done = 0;
        let mut page = round * 97;
        while Instant::now() < end || done == 0 {
            for slot in 0..SLOTS {
                if flying[usize::from(slot)].is_none() {
                    page = (page + 1) % pages.len();
                    if flying.iter().flatten().any(|&(other, _)| other == page) {
                        continue;
                    }
                    fill = fill.wrapping_add(1).max(1);
                    machine.write(slot, page as u64 * 8, fill);
                    flying[usize::from(slot)] = Some((page, fill));
                }
            }
            machine.ring.kick();
            while let Some((head, _)) = machine.ring.answer(&machine.ram) {
                let (page, fill) = flying[usize::from(head / 3)].take().expect("it was in flight");
                assert_eq!(machine.ring.status(&machine.ram, head), 0);
                pages[page] = fill;
                done += 1;
            }
        }
        fixture.kill();
        drop(link);
        fixture.start();
        link = machine.connect(&fixture);
    }
    while flying.iter().any(Option::is_some) {
        let (head, _) = machine.ring.wait(&machine.ram);
        let (page, fill) = flying[usize::from(head / 3)].take().expect("it was in flight");
        assert_eq!(machine.ring.status(&machine.ram, head), 0);
        pages[page] = fill;
    }
    for (page, fill) in pages.iter().enumerate() {
        let read = machine.ring.execute(&machine.ram, IN, page as u64 * 8, &[(DATA, 4096, WRITE)]);
        assert_eq!(read, 0, "page {page}");
        assert_eq!(machine.ram.get(DATA, 4096), [*fill; 4096], "page {page}");
    }
    drop(link);
    fixture.terminate();
}
