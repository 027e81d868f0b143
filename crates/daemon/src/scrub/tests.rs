//! Tests of a scrub over a verifier of their own.

use super::*;
use crate::api::ScrubAction;
use cbd_runtime::verify::{Load, VERIFY_STEP, Verifier};
use cbd_types::{ByteRange, DamagedCopy, Finding, Flaw, Verified, VerifiedMetadata, Verify};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Bytes of the device.
const SIZE: u64 = 8 * VERIFY_STEP;

/// What the verifiers of a test have in common.
#[derive(Default)]
struct Disk {
    requests: Mutex<Vec<Verify>>,
    most_in_flight: AtomicUsize,
    open: AtomicUsize,
    opened: AtomicUsize,
    /// Requests that are answered; none if all are.
    answers: Option<u64>,
    fails_to_open: bool,
    load: AtomicU64,
    /// The device is longer from the second time on that its size is read.
    grows: bool,
    sizes: AtomicUsize,
    /// Clients use the disk all the time.
    is_in_use: bool,
    /// How often the metadata was looked at to the end.
    metadata_passes: AtomicUsize,
    /// Whether a look at the metadata does not come to its end.
    metadata_is_slow: AtomicBool,
    /// Whether the metadata cannot be looked at.
    metadata_fails: AtomicBool,
}

impl Disk {
    /// One copy is repaired each time, one is not.
    fn verify_metadata(&self, found: &mut VerifiedMetadata, may_run: &dyn Fn() -> bool) -> Result<bool> {
        if self.metadata_fails.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Stopped, "the cache was stopped"));
        }
        found.structures = 30;
        for is_repaired in [true, false] {
            let structure = cbd_types::Structure::Tail;
            found.add(DamagedCopy { structure, number: 1, at: 8192, is_readable: true, is_repaired });
        }
        while self.metadata_is_slow.load(Ordering::SeqCst) {
            if !may_run() {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.metadata_passes.fetch_add(1, Ordering::SeqCst);
        Ok(true)
    }
}

struct Fake {
    disk: Arc<Disk>,
    in_flight: Vec<(u64, Verify)>,
    /// Whether the thread has waited for those in flight.
    has_waited: bool,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.disk.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Verifier for Fake {
    fn submit(&mut self, id: u64, request: Verify) {
        self.in_flight.push((id, request));
        self.disk.most_in_flight.fetch_max(self.in_flight.len(), Ordering::SeqCst);
    }

    fn take(&mut self) -> Vec<(u64, Result<Verified>)> {
        let mut requests = self.disk.requests.lock();
        let answered = requests.len() as u64;
        if self.disk.answers.is_some_and(|answers| answered >= answers)
            || !std::mem::take(&mut self.has_waited)
        {
            return Vec::new();
        }
        requests.extend(self.in_flight.iter().map(|(_, request)| *request));
        self.in_flight.drain(..).map(|(id, request)| (id, Ok(result_of(&request)))).collect()
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        if self.disk.answers.is_some() {
            std::thread::sleep(timeout.min(Duration::from_millis(5)));
        }
        self.has_waited = true;
        Ok(())
    }

    fn give_up(&mut self) {
        self.in_flight.clear();
    }
}

/// The third step has a flaw.
fn result_of(request: &Verify) -> Verified {
    let flawed = ByteRange { start: 2 * VERIFY_STEP + 4096, end: 2 * VERIFY_STEP + 8192 };
    let findings = if request.range.intersection(&flawed).is_some() {
        vec![Finding { range: flawed, flaw: Flaw::BackingDiffers, repaired: request.repair }]
    } else {
        Vec::new()
    };
    Verified { cache_bytes: 4096, findings, ..Verified::default() }
}

struct Scene {
    dir: tempfile::TempDir,
    disk: Arc<Disk>,
    scrub: Arc<Scrub>,
}

impl Scene {
    fn new(disk: Disk) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let scrub = Arc::new(Scrub::open(dir.path(), (0, 3), "u".to_owned()));
        Self { dir, disk: Arc::new(disk), scrub }
    }

    /// The scrub as the next daemon has it.
    fn restarted(&self) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("scrub")).unwrap();
        std::fs::copy(self.dir.path().join("scrub/u.json"), dir.path().join("scrub/u.json")).unwrap();
        let scrub = Arc::new(Scrub::open(dir.path(), (0, 3), "u".to_owned()));
        Self { dir, disk: Arc::new(Disk::default()), scrub }
    }

    fn start(&self, request: ScrubRequest) -> Result<u64> {
        self.scrub.change(&request, SIZE, now_s())
    }

    fn act(&self, action: ScrubAction) -> Result<u64> {
        self.scrub.change(&ScrubRequest { action, ..ScrubRequest::default() }, SIZE, now_s())
    }

    fn info(&self) -> ScrubInfo {
        self.scrub.info(SIZE, now_s())
    }

    /// Starts the thread of the pass, if it can go on.
    fn turn(&self) -> Option<std::thread::JoinHandle<()>> {
        let turn = self.scrub.take_turn(now_s())?;
        let disk = Arc::clone(&self.disk);
        Some(std::thread::spawn(move || {
            let open = || {
                if disk.fails_to_open {
                    return Err(Error::new(ErrorKind::System, "there is no ring"));
                }
                disk.open.fetch_add(1, Ordering::SeqCst);
                disk.opened.fetch_add(1, Ordering::SeqCst);
                Ok(Box::new(Fake { disk: Arc::clone(&disk), in_flight: Vec::new(), has_waited: false })
                    as Box<dyn Verifier>)
            };
            let size = || match disk.sizes.fetch_add(1, Ordering::SeqCst) {
                0 => SIZE,
                _ => SIZE + if disk.grows { VERIFY_STEP } else { 0 },
            };
            let load = || {
                let used = if disk.is_in_use { disk.load.fetch_add(1, Ordering::SeqCst) } else { 0 };
                Load { requests: disk.load.load(Ordering::SeqCst), disk: used }
            };
            let metadata = |found: &mut VerifiedMetadata, may_run: &dyn Fn() -> bool| {
                disk.verify_metadata(found, may_run)
            };
            let method = || "reads".to_owned();
            turn.run(&Surroundings {
                open: &open,
                size: &size,
                load: &load,
                method: &method,
                metadata: &metadata,
            });
        }))
    }

    fn run(&self) {
        self.turn().expect("the pass can go on").join().unwrap();
    }

    fn until(&self, done: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < end, "{:?}", self.info());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn answered(&self) -> usize {
        self.disk.requests.lock().len()
    }
}

#[test]
fn a_pass_looks_at_all_with_two_requests_in_flight_and_keeps_what_it_found() {
    let scene = Scene::new(Disk::default());
    scene.start(ScrubRequest { repair: true, ..ScrubRequest::default() }).unwrap();
    scene.run();
    let requests = scene.disk.requests.lock().clone();
    assert_eq!(requests.len(), 8);
    assert!(requests.iter().all(|it| it.repair && it.level == cbd_types::VerifyLevel::Agree));
    assert_eq!(scene.disk.most_in_flight.load(Ordering::SeqCst), 2);
    let info = scene.info();
    assert_eq!((info.state, info.position, info.began), (ScrubState::Idle, 0, None));
    let last = info.last.unwrap();
    assert_eq!((last.results.verified_bytes, last.results.found, last.results.repaired), (SIZE, 1, 1));
    assert_eq!(last.results.method, "reads");
    assert_eq!((info.found_total["backing_differs"], info.repaired_total), (1, 1));
    assert_eq!(scene.restarted().info().last, Some(last), "the next daemon has the results");
}

#[test]
fn a_second_start_is_refused_with_what_runs() {
    let scene = Scene::new(Disk::default());
    scene.start(ScrubRequest::default()).unwrap();
    let error = scene.start(ScrubRequest::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.line().contains("at 0 %") && error.line().contains("--stop"), "{error}");
}

#[test]
fn a_pass_goes_on_where_it_was_after_a_pause_and_after_a_restart() {
    let scene = Scene::new(Disk { answers: Some(3), ..Disk::default() });
    scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    scene.until(|| scene.info().position >= 3 * VERIFY_STEP);
    scene.act(ScrubAction::Pause).unwrap();
    thread.join().unwrap();
    assert_eq!(scene.disk.open.load(Ordering::SeqCst), 0, "its queue is closed");
    assert_eq!(scene.info().state, ScrubState::Paused);
    assert!(scene.turn().is_none(), "it is paused");
    let position = scene.info().position;
    let next = scene.restarted();
    assert_eq!((next.info().state, next.info().position), (ScrubState::Paused, position));
    next.act(ScrubAction::Resume).unwrap();
    next.run();
    let first = next.disk.requests.lock()[0].range.start;
    assert_eq!(first, position);
    assert_eq!(next.info().last.unwrap().results.verified_bytes, SIZE, "both parts count");
}

#[test]
fn a_stopped_pass_leaves_nothing_and_the_schedule_counts_from_then() {
    let scene = Scene::new(Disk { answers: Some(0), ..Disk::default() });
    scene.scrub.set(&SettingsChange { scrub_every_s: Some(86_400), ..SettingsChange::default() });
    let thread = scene.turn().expect("it is due, since there was none");
    assert!(scene.info().began.is_some());
    scene.act(ScrubAction::Stop).unwrap();
    thread.join().unwrap();
    let info = scene.info();
    assert_eq!((info.state, info.last), (ScrubState::Idle, None));
    assert!(info.next.unwrap() >= now_s() + 86_000);
    assert!(scene.turn().is_none(), "it is not due");
    assert_eq!(scene.act(ScrubAction::Stop).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn the_rate_bounds_what_is_looked_at() {
    let scene = Scene::new(Disk::default());
    // Eight steps: the last is submitted after 7/16 s.
    scene.start(ScrubRequest { rate: Some(16 * VERIFY_STEP), ..ScrubRequest::default() }).unwrap();
    let begun = Instant::now();
    scene.run();
    assert!(begun.elapsed() >= Duration::from_millis(400), "{:?}", begun.elapsed());
    for rate in [0, 1] {
        let request = ScrubRequest { rate: Some(rate), ..ScrubRequest::default() };
        assert_eq!(scene.start(request).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(scene.info().state, ScrubState::Idle, "a refused start begins nothing");
}

#[test]
fn a_pass_waits_while_clients_use_the_cache_if_it_is_to() {
    let scene = Scene::new(Disk { answers: Some(1), ..Disk::default() });
    scene.scrub.set(&SettingsChange { scrub_idle_only: Some(true), ..SettingsChange::default() });
    scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    scene.until(|| {
        scene.disk.load.fetch_add(1, Ordering::SeqCst);
        scene.info().state == ScrubState::WaitingForLoad
    });
    scene.until(|| scene.info().state == ScrubState::Running);
    scene.act(ScrubAction::Stop).unwrap();
    thread.join().unwrap();
}

#[test]
fn a_scheduled_pass_runs_in_its_window_only_and_one_of_a_user_at_any_time() {
    let scene = Scene::new(Disk::default());
    let second = now_s() % 86_400;
    let hour = |hours: u64| format!("{:02}:00", (second / 3600 + hours) % 24);
    let window = format!("{}-{}", hour(10), hour(12));
    let every = SettingsChange {
        scrub_every_s: Some(86_400),
        scrub_window: Some(window.clone()),
        ..SettingsChange::default()
    };
    scene.scrub.set(&every);
    assert!(scene.turn().is_none(), "its window is closed");
    assert!(scene.info().next.unwrap() > now_s());
    scene.scrub.set(&SettingsChange { scrub_window: Some(String::new()), ..SettingsChange::default() });
    let turn = scene.scrub.take_turn(now_s()).expect("it is due");
    drop(turn);
    scene.scrub.set(&SettingsChange { scrub_window: Some(window), ..SettingsChange::default() });
    assert_eq!(scene.info().state, ScrubState::WaitingForWindow);
    assert!(scene.turn().is_none(), "the window has closed during the pass");
    scene.act(ScrubAction::Stop).unwrap();
    scene.start(ScrubRequest::default()).unwrap();
    scene.run();
    assert_eq!(scene.info().last.unwrap().results.verified_bytes, SIZE);
}

#[test]
fn a_command_that_changes_the_backend_does_not_wait_for_a_disk() {
    let scene = Scene::new(Disk { answers: Some(0), ..Disk::default() });
    scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    scene.until(|| scene.disk.open.load(Ordering::SeqCst) == 1);
    let begun = Instant::now();
    let held = scene.scrub.hold(Instant::now() + Duration::from_secs(60));
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(scene.disk.open.load(Ordering::SeqCst), 0);
    thread.join().unwrap();
    assert_eq!(scene.info().state, ScrubState::WaitingForBackend);
    assert!(scene.turn().is_none(), "the command has the backend");
    drop(held);
    scene.scrub.begin_end();
    assert!(scene.turn().is_none(), "the daemon ends");
}

#[test]
fn a_pass_that_cannot_look_says_why_and_is_tried_again_later() {
    let scene = Scene::new(Disk { fails_to_open: true, ..Disk::default() });
    let number = scene.start(ScrubRequest::default()).unwrap();
    scene.run();
    let info = scene.info();
    assert!(info.error.unwrap().contains("there is no ring"));
    assert_eq!(info.state, ScrubState::WaitingForBackend);
    assert!(scene.turn().is_none(), "not at once");
    let error = scene.scrub.wait(number, Duration::from_millis(1), SIZE, |_| Ok(())).unwrap_err();
    assert!(error.line().contains("there is no ring"));
}

#[test]
fn a_wait_ends_with_the_pass_and_when_it_is_stopped() {
    let scene = Scene::new(Disk::default());
    let number = scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    let pass = scene.scrub.wait(number, Duration::from_millis(1), SIZE, |_| Ok(())).unwrap();
    assert_eq!(pass.results.found, 1);
    thread.join().unwrap();
    let scene = Scene::new(Disk { answers: Some(0), ..Disk::default() });
    let number = scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    let error = scene
        .scrub
        .wait(number, Duration::from_millis(1), SIZE, |_| scene.act(ScrubAction::Stop).map(drop))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stopped);
    thread.join().unwrap();
    assert_eq!(scene.answered(), 0);
}

#[test]
fn a_wait_for_a_pass_that_was_stopped_does_not_return_the_results_of_an_earlier_one() {
    let scene = Scene::new(Disk::default());
    scene.start(ScrubRequest::default()).unwrap();
    scene.run();
    // In the same second.
    let number = scene.start(ScrubRequest::default()).unwrap();
    scene.act(ScrubAction::Stop).unwrap();
    let wait = |number| scene.scrub.wait(number, Duration::from_millis(1), SIZE, |_| Ok(()));
    assert_eq!(wait(number).unwrap_err().kind(), ErrorKind::Stopped);
    let third = scene.start(ScrubRequest::default()).unwrap();
    scene.run();
    assert_eq!(wait(number).unwrap_err().kind(), ErrorKind::Stopped, "nor those of a later one");
    assert_eq!(wait(third).unwrap().results.found, 1);
}

#[test]
fn a_device_that_grows_during_a_pass_is_looked_at_to_its_end() {
    let scene = Scene::new(Disk { grows: true, ..Disk::default() });
    scene.start(ScrubRequest::default()).unwrap();
    scene.run();
    assert_eq!(scene.info().last.unwrap().results.verified_bytes, SIZE + VERIFY_STEP);
}

#[test]
fn an_error_of_the_file_is_reported_until_it_is_written_again() {
    let scene = Scene::new(Disk::default());
    let folder = scene.dir.path().join("scrub");
    std::fs::write(&folder, "in the way").unwrap();
    scene.start(ScrubRequest::default()).unwrap();
    assert!(scene.info().error.unwrap().contains("cannot be written"));
    std::fs::remove_file(&folder).unwrap();
    scene.run();
    assert_eq!(scene.info().error, None);
}

#[test]
fn a_damaged_file_begins_at_0_and_says_so() {
    let scene = Scene::new(Disk::default());
    scene.start(ScrubRequest::default()).unwrap();
    std::fs::write(scene.dir.path().join("scrub/u.json"), "{").unwrap();
    let next = Scrub::open(scene.dir.path(), (0, 3), "u".to_owned());
    let info = next.info(SIZE, now_s());
    assert_eq!((info.state, info.position), (ScrubState::Idle, 0));
    assert!(info.error.unwrap().contains("begins at 0"));
}

#[test]
fn beside_clients_that_use_the_disk_a_pass_without_a_rate_takes_little_of_it() {
    let slow = || Disk { answers: Some(u64::MAX), is_in_use: true, ..Disk::default() };
    let scene = Scene::new(slow());
    scene.start(ScrubRequest::default()).unwrap();
    let begun = Instant::now();
    let thread = scene.turn().unwrap();
    scene.until(|| scene.disk.requests.lock().len() > 1);
    assert_eq!(scene.info().state, ScrubState::BesideClients);
    // A request takes 5 ms, and the pause behind it 150 times as long.
    assert!(begun.elapsed() > Duration::from_millis(500), "{:?}", begun.elapsed());
    scene.act(ScrubAction::Stop).unwrap();
    thread.join().unwrap();
    assert!(scene.disk.requests.lock().iter().all(|request| request.range.len() == 128 << 10));
    assert_eq!(scene.disk.most_in_flight.load(Ordering::SeqCst), 1);
    // A rate is the user's choice.
    let scene = Scene::new(slow());
    scene.start(ScrubRequest { rate: Some(1 << 40), ..ScrubRequest::default() }).unwrap();
    scene.run();
    assert_eq!(scene.info().last.unwrap().results.verified_bytes, SIZE);
    assert_eq!(scene.disk.requests.lock()[0].range.len(), VERIFY_STEP);
}

#[test]
fn a_thread_that_ends_behind_the_removal_of_the_backend_writes_no_file() {
    let scene = Scene::new(Disk { answers: Some(1), ..Disk::default() });
    scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    scene.scrub.remove();
    thread.join().unwrap();
    scene.scrub.set(&SettingsChange { scrub_rate: Some(1 << 20), ..SettingsChange::default() });
    assert!(!scene.dir.path().join("scrub/u.json").exists());
}

#[test]
fn each_pass_looks_at_the_metadata_once_also_over_restarts() {
    let scene = Scene::new(Disk { answers: Some(3), ..Disk::default() });
    scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    scene.until(|| scene.info().position >= 3 * VERIFY_STEP);
    scene.act(ScrubAction::Pause).unwrap();
    thread.join().unwrap();
    let metadata = scene.info().results.unwrap().metadata.unwrap();
    assert_eq!((metadata.structures, metadata.repaired, metadata.unrepaired), (30, 1, 1));
    assert_eq!(metadata.copies[0].structure, "tail");
    let next = scene.restarted();
    next.act(ScrubAction::Resume).unwrap();
    next.run();
    assert_eq!(next.disk.metadata_passes.load(Ordering::SeqCst), 0, "that was done before");
    let info = next.info();
    assert_eq!(info.last.unwrap().results.metadata, Some(metadata));
    assert_eq!(info.metadata_repaired_total, 1);
    next.start(ScrubRequest::default()).unwrap();
    next.run();
    assert_eq!(next.disk.metadata_passes.load(Ordering::SeqCst), 1, "another pass looks again");
    assert_eq!(next.info().metadata_repaired_total, 2);
}

#[test]
fn a_look_at_the_metadata_ends_with_a_pause_and_begins_again() {
    let scene = Scene::new(Disk { metadata_is_slow: AtomicBool::new(true), ..Disk::default() });
    scene.start(ScrubRequest::default()).unwrap();
    let thread = scene.turn().unwrap();
    scene.until(|| scene.info().state == ScrubState::Running);
    scene.act(ScrubAction::Pause).unwrap();
    thread.join().unwrap();
    assert_eq!((scene.disk.metadata_passes.load(Ordering::SeqCst), scene.answered()), (0, 0));
    scene.disk.metadata_is_slow.store(false, Ordering::SeqCst);
    scene.act(ScrubAction::Resume).unwrap();
    scene.run();
    assert_eq!(scene.disk.metadata_passes.load(Ordering::SeqCst), 1);
    assert_eq!(scene.info().last.unwrap().results.verified_bytes, SIZE);
}

#[test]
fn a_cache_that_stops_before_its_metadata_was_looked_at_leaves_the_pass_for_later() {
    let scene = Scene::new(Disk { metadata_fails: AtomicBool::new(true), ..Disk::default() });
    scene.start(ScrubRequest::default()).unwrap();
    scene.run();
    let info = scene.info();
    assert_eq!((info.state, info.position, info.last), (ScrubState::WaitingForBackend, 0, None));
    assert!(info.error.unwrap().contains("the cache was stopped"));
}
