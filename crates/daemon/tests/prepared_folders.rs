//! A daemon in folders that another user has prepared: links, pipes, sockets, files and folders of any mode and owner
//! exist at the paths of its own files. It starts or refuses to start, in time, and changes nothing outside its
//! folders.
//!
//! `CBD_TREES` sets the number of trees, `CBD_SEED` the first seed.

use cbd_daemon::api::{RegisterTransport, StartBackend};
use cbd_daemon::config::Config;
use cbd_daemon::control::Control;
use cbd_daemon::manager::Manager;
use cbd_daemon::run::Options;
use cbd_daemon::socket::{ControlSocket, Lock};
use cbd_daemon::state::{RecoveryPoint, StateDir};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Paths that the daemon uses or may create.
const PATHS: [&str; 18] = [
    "state",
    "state/transports.json",
    "state/transports.new",
    "state/daemon-id",
    "state/daemon-id.new",
    "state/lock",
    "state/recovery-points",
    "state/recovery-points/u.log",
    "run",
    "run/control.sock",
    "run/control.sock.lock",
    "run/keeper.sock",
    "run/fuse",
    "run/fuse/cbd0",
    "run/nbd",
    "run/nbd/cbd0.sock",
    "run/ublk",
    "dev",
];

/// A deterministic generator of small random numbers.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// All files below `folder`: path, mode, owner, and bytes or target.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, (u32, u32, u64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(path) = todo.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let content = if metadata.is_file() {
            fs::read(&path).unwrap()
        } else if metadata.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
        } else {
            Vec::new()
        };
        if metadata.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let names = if metadata.is_dir() { 0 } else { metadata.nlink() };
        all.insert(path, (metadata.mode(), metadata.uid(), names, content));
    }
    all
}

fn prepare(at: &Path, outside: &Path, chance: &mut Chance) {
    let foreign = rustix::process::geteuid().is_root() && chance.below(3) == 0;
    // The daemon follows links of its own user; the attacker is another user.
    let link = |target: &Path| {
        if symlink(target, at).is_ok() && rustix::process::geteuid().is_root() {
            lchown(at, Some(4711), None).unwrap();
        }
    };
    match chance.below(12) {
        0 => link(&outside.join("folder")),
        1 => link(&outside.join("file")),
        2 => link(&outside.join("nothing")),
        3 => link(at),
        4 => {
            let _ = rustix::fs::mkfifoat(rustix::fs::CWD, at, 0o666.into());
        }
        5 => drop(UnixListener::bind(at)),
        6 => {
            let bytes: Vec<u8> = (0..chance.below(300)).map(|_| chance.below(256) as u8).collect();
            let _ = fs::write(at, bytes);
        }
        7 => {
            let _ = fs::hard_link(outside.join("file"), at);
            // The target is the same file: neither owner nor mode may change.
            return;
        }
        8 | 9 => {
            let _ = fs::create_dir(at).and_then(|()| {
                fs::set_permissions(
                    at,
                    fs::Permissions::from_mode([0o777, 0o1777, 0o700, 0o2775][chance.below(4) as usize]),
                )
            });
        }
        _ => return,
    }
    if foreign && fs::symlink_metadata(at).is_ok_and(|found| !found.is_symlink()) {
        chown(at, Some(4711), None).unwrap();
    }
}

/// Runs a daemon through all its operations in these folders; it may refuse any of them.
fn run_all_operations(folder: &Path) {
    let options = Options::below(folder);
    let socket = ControlSocket::listen(&options.paths.socket, None);
    let Ok(state) = StateDir::open(&options.paths.state_dir) else { return };
    let lock = Lock::take(&options.paths.state_dir.join("lock"), "the state folder", Duration::ZERO);
    let point = RecoveryPoint {
        time: "now".into(),
        backend_id: 0,
        backend_uuid: Default::default(),
        path: "/dev/sdb".into(),
        drained_epoch: 1,
        drained_ms: 1,
        void: None,
    };
    let _ = state.log_recovery_point("u", &point);
    let _ = state.recovery_points("u");
    let Ok(manager) = Manager::new(&options, Config::default(), state) else { return };
    let manager = Arc::new(manager);
    if manager.restore().is_ok() {
        let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let region = RegisterTransport {
            host: "node0".into(),
            path: path("region"),
            size: Some(16 << 20),
            segment_size: None,
            format: true,
            force: false,
            shared: false,
        };
        let _ = manager.register_transport(&region);
        for export in ["fuse-loop", "auto"] {
            let _ = manager.start_backend(
                0,
                &StartBackend {
                    path: path("disk"),
                    cache_size: Some(9 << 20),
                    start_dev: true,
                    export: Some(export.into()),
                    ..StartBackend::default()
                },
            );
        }
    }
    manager.stop();
    drop((socket, lock));
}

#[test]
fn a_daemon_in_folders_that_another_user_prepared_changes_nothing_outside_and_ends() {
    let first = number("CBD_SEED", 0);
    for seed in first..first + number("CBD_TREES", 60) {
        let place = tempfile::tempdir().unwrap();
        let (outside, folder) = (place.path().join("outside"), place.path().join("place"));
        for path in [&outside, &outside.join("folder"), &folder] {
            fs::create_dir(path).unwrap();
        }
        for (name, bytes) in [("file", "foreign"), ("folder/inner", "also foreign")] {
            fs::write(outside.join(name), bytes).unwrap();
        }
        fs::File::create(folder.join("disk")).unwrap().set_len(4 << 20).unwrap();
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for name in PATHS {
            // A name below a path that is not a folder cannot exist.
            let at = folder.join(name);
            let parent = at.parent().unwrap();
            if chance.below(3) == 0 && (parent == folder || chance.below(2) == 0) {
                let _ = fs::create_dir(parent);
                if fs::symlink_metadata(parent).is_ok_and(|found| found.is_dir()) {
                    prepare(&at, &outside, &mut chance);
                }
            }
        }
        let before = snapshot(&outside);
        let (tell, told) = channel();
        let living = std::thread::spawn(move || {
            run_all_operations(&folder);
            tell.send(()).unwrap();
        });
        let ended = told.recv_timeout(Duration::from_secs(60));
        assert!(ended.is_ok(), "seed {seed}: the daemon hangs or panicked");
        living.join().unwrap();
        assert_eq!(snapshot(&outside), before, "seed {seed}: something outside has changed");
    }
}
