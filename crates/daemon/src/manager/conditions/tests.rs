//! Conditions in the log: which lines a sequence of samples makes.

use super::*;
use cbd_engine::Host;
use cbd_types::HostId;

fn observed(topic: Topic, fault: Option<&str>, count: Option<u64>) -> Observed {
    let fault = fault.map(|text| Fault::from_text(text.to_owned()));
    let is_present = count.is_none();
    Observed {
        transport: 0,
        backend: Some(BackendId(1)),
        topic,
        path: "/dev/sdb".to_owned(),
        fault,
        is_present,
        count,
    }
}

struct Clock(Conditions, Instant);

impl Clock {
    fn new() -> Self {
        Self(Conditions::default(), Instant::now())
    }

    /// The lines of a sample that is taken `seconds` after the last one.
    fn sample(&mut self, seconds: u64, observed: Observed) -> Vec<String> {
        self.1 += Duration::from_secs(seconds);
        words(self.0.sample(&[observed], self.1))
    }
}

fn words(lines: Vec<Line>) -> Vec<String> {
    let words = |line: Line| format!("{}{}", if line.is_over { "over: " } else { "" }, line.text);
    lines.into_iter().map(words).collect()
}

#[test]
fn the_duration_of_a_condition_counts_from_its_beginning_and_not_from_its_first_report() {
    let mut clock = Clock::new();
    let silent = |age: Option<u64>| {
        let mut observed = observed(Topic::Silent, age.map(|_| "no answer"), None);
        if let (Some(fault), Some(age)) = (&mut observed.fault, age) {
            fault.age = Duration::from_secs(age);
        }
        observed
    };
    assert_eq!(clock.sample(1, silent(Some(10))), ["/dev/sdb: no answer"]);
    assert_eq!(clock.sample(3, silent(Some(13))), [""; 0]);
    assert_eq!(
        clock.sample(2, silent(None)),
        ["over: /dev/sdb: the backing device answers again (it lasted 15 s)"]
    );
}

#[test]
fn the_last_pass_logs_what_is_new_and_what_is_in_force_beyond_the_limit_of_lines() {
    let mut clock = Clock::new();
    for second in 0..20 {
        let fault = if second % 2 == 0 { Some("EIO") } else { None };
        clock.sample(1, observed(Topic::Writeback, fault, None));
    }
    let last = clock.0.end(&[observed(Topic::Writeback, Some("ENOSPC"), None)], clock.1);
    let [new, in_force] = &words(last)[..] else { panic!("two lines") };
    assert_eq!(new, "/dev/sdb: ENOSPC");
    assert!(
        in_force.starts_with("over: /dev/sdb: stopped ") && in_force.ends_with(" began: ENOSPC"),
        "{in_force}"
    );
    // A sample that the background thread has taken before, and that comes after the last pass.
    assert_eq!(clock.sample(1, observed(Topic::Writeback, Some("EIO"), None)), [""; 0]);
}

#[test]
fn a_condition_is_logged_when_it_begins_when_it_changes_and_when_it_ends() {
    let mut clock = Clock::new();
    let writeback = |fault| observed(Topic::Writeback, fault, None);
    assert_eq!(clock.sample(1, writeback(None)), [""; 0]);
    assert_eq!(clock.sample(1, writeback(Some("EIO"))), ["/dev/sdb: EIO"]);
    assert_eq!(clock.sample(1, writeback(Some("EIO"))), [""; 0]);
    assert_eq!(clock.sample(1, writeback(Some("ENOSPC"))), ["/dev/sdb: ENOSPC"]);
    assert_eq!(clock.sample(1, writeback(None)), ["over: /dev/sdb: writeback works again (it lasted 3 s)"]);
    assert_eq!(clock.sample(1, writeback(None)), [""; 0]);
}

#[test]
fn an_error_that_begins_and_ends_between_two_samples_is_logged_by_its_counter() {
    let mut clock = Clock::new();
    let clients = |count| observed(Topic::Clients, Some("EIO"), Some(count));
    assert_eq!(clock.sample(1, clients(0)), [""; 0]);
    assert_eq!(clock.sample(1, clients(3)), ["/dev/sdb: EIO"]);
    assert_eq!(clock.sample(1, clients(3)), [""; 0]);
    assert_eq!(clock.sample(1, clients(4)), [""; 0]);
    assert_eq!(
        clock.sample(10, clients(4)),
        ["over: /dev/sdb: requests of clients no longer fail (it lasted 2 s, 4 in all)"]
    );
    assert_eq!(clock.sample(1, clients(5)), ["/dev/sdb: EIO"]);
}

#[test]
fn the_duration_of_a_condition_ends_with_the_error_and_not_when_its_end_is_noticed() {
    let mut clock = Clock::new();
    let writeback =
        |is_present, count| Observed { is_present, ..observed(Topic::Writeback, Some("EIO"), Some(count)) };
    assert_eq!(clock.sample(1, writeback(true, 1)), ["/dev/sdb: EIO"]);
    // The last failure, and the time until the next attempt, which succeeds.
    assert_eq!(clock.sample(2, writeback(true, 2)), [""; 0]);
    assert_eq!(clock.sample(1, writeback(true, 2)), [""; 0]);
    assert_eq!(
        clock.sample(5, writeback(false, 2)),
        ["over: /dev/sdb: writeback works again (it lasted 8 s, 2 in all)"]
    );
    assert_eq!(clock.sample(1, writeback(false, 3)), ["/dev/sdb: EIO"]);
    assert_eq!(clock.sample(2, writeback(false, 3)), [""; 0]);
    assert_eq!(
        clock.sample(2, writeback(false, 3)),
        ["over: /dev/sdb: writeback works again (it lasted 0 s, 3 in all)"]
    );
}

#[test]
fn a_condition_that_begins_and_ends_repeatedly_logs_a_bounded_number_of_lines() {
    let mut clock = Clock::new();
    let mut lines = 0;
    for second in 0..1000 {
        let fault = if second % 2 == 0 { Some("EIO") } else { None };
        lines += clock.sample(1, observed(Topic::Writeback, fault, None)).len();
    }
    assert!((60..=110).contains(&lines), "{lines}");
    // Suppressed lines are counted in the next line that is logged.
    for _ in 0..20 {
        lines = clock.sample(1, observed(Topic::Writeback, Some("the end"), None)).len();
        if lines > 0 {
            return;
        }
    }
    panic!("the last change was never logged");
}

#[test]
fn a_region_that_was_unregistered_leaves_a_line_and_no_condition() {
    let mut clock = Clock::new();
    assert_eq!(clock.sample(1, observed(Topic::Region, Some("failed"), None)).len(), 1);
    clock.1 += Duration::from_secs(2);
    assert_eq!(words(clock.0.sample(&[], clock.1)), ["over: /dev/sdb: stopped 2 s after this began: failed"]);
    assert!(clock.0.of.is_empty());
}

#[test]
fn hosts_that_give_no_sign_of_life_are_named_until_they_do() {
    let host = |id: u32, name: &str, since_s: Option<u64>, is_self: bool| SeenHost {
        host: Host {
            id: HostId(id),
            name: name.to_owned(),
            incarnation: 1,
            beat: None,
            is_being_cleared: false,
        },
        is_self,
        since: since_s.map(Duration::from_secs),
    };
    let now = Instant::now();
    let mut conditions = Conditions::default();
    let mut lines = |hosts: &[SeenHost], seconds: u64| -> Vec<(Option<EventName>, String)> {
        let lines = conditions.sample(&[of_hosts(0, "/r", hosts)], now + Duration::from_secs(seconds));
        lines.into_iter().map(|line| (line.event, line.text)).collect()
    };
    let own = host(0, "a", None, true);
    // One that was never seen to live ended before this daemon began.
    assert!(lines(&[own.clone(), host(1, "b", Some(1), false), host(2, "c", None, false)], 20).is_empty());
    let silent = lines(&[own.clone(), host(1, "b", Some(5), false)], 25);
    let text = "/r: no sign of life of host b (1): no other host serves what it has";
    assert_eq!(silent, [(Some(EventName::HostSilent), text.to_owned())]);
    assert!(lines(&[own.clone(), host(1, "b", Some(6), false)], 26).is_empty());
    let back = lines(&[own, host(1, "b", Some(0), false)], 30);
    assert_eq!(back[0].0, Some(EventName::HostAnswers));
    assert!(back[0].1.contains("it lasted 10 s"), "{back:?}");
}

#[test]
fn requests_that_wait_for_another_host_are_named_until_they_do_not() {
    let now = Instant::now();
    let mut conditions = Conditions::default();
    let mut is_alive = true;
    let mut lines = |waiting_s: Option<u64>, seconds: u64| -> Vec<(Option<EventName>, Option<u32>, String)> {
        is_alive &= seconds < 14;
        let wait = if is_alive { HostWait::Alive } else { HostWait::Away };
        let waiting = waiting_s.map(|seconds| (Duration::from_secs(seconds), "b".to_owned(), wait));
        let observed = of_remote_blkdev((0, "/r"), BlkdevId(7), BackendId(1), waiting);
        let lines = conditions.sample(&[observed], now + Duration::from_secs(seconds));
        lines.into_iter().map(|line| (line.event, line.backend.map(|backend| backend.0), line.text)).collect()
    };
    assert!(lines(None, 0).is_empty());
    let [(event, backend, text)] = &lines(Some(4), 10)[..] else { panic!("one line") };
    assert_eq!((*event, *backend), (Some(EventName::BlkdevWaiting), Some(1)));
    assert!(text.starts_with("/r: requests to block device 7 have waited for host b"), "{text}");
    assert!(text.ends_with(
        "that host is alive: its status says why, as a full cache or a disk that is slow or fails"
    ));
    assert!(lines(Some(7), 13).is_empty());
    let [(_, _, text)] = &lines(Some(8), 14)[..] else { panic!("one line") };
    assert!(text.ends_with("gives no sign of life; none fails, and they go on when it is back"), "{text}");
    assert!(lines(Some(9), 15).is_empty());
    let [(event, _, text)] = &lines(None, 16)[..] else { panic!("one line") };
    assert_eq!(*event, Some(EventName::BlkdevResumed));
    assert!(text.contains("it lasted 10 s"), "{text}");
}
