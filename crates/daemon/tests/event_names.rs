//! The names of events: none goes away or changes, and the page of events describes each.

use cbd_daemon::events::EventName;

/// The names that were released. A name is added at its place in the list, and none is ever removed or changed:
/// monitoring compares with them.
const RELEASED: &str = "\
backend.down backend.grown backend.move.failed backend.moved backend.moving backend.removed backend.started backend.stopped backend.up blkdev.failed blkdev.resumed \
blkdev.started blkdev.stopped blkdev.waiting cache.attached cache.detached cache.healing.began cache.healing.ended cache.recovered cache.resized \
cache.void.began cache.void.ended daemon.started daemon.stopping disk.answers disk.failing disk.recovered disk.silent \
disk.unchecked drain.ended drain.started export.client.failed file.changed file.restored host.answers host.cleared host.silent \
mode.changed mode.changing range.parked \
range.quarantined range.released range.unparked recovery_log.failing recovery_log.recovered \
recovery_point.kept recovery_point.late region.failing \
region.recovered requests.failing requests.recovered scrub.ended scrub.failed scrub.started settings.changed \
transport.failed transport.grown transport.registered transport.unregistered transport.up writeback.paused \
writeback.recovered writeback.resumed writeback.stalled writers.waiting.began writers.waiting.ended";

#[test]
fn the_names_are_those_that_were_released() {
    let mut names = EventName::ALL.map(EventName::name);
    names.sort_unstable();
    assert_eq!(names.join(" "), RELEASED);
}

#[test]
fn the_page_describes_each_name_and_no_other() {
    let page = include_str!("../../../docs/events.md");
    let described: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|name| name.contains('.') && !name.contains(' '))
        .collect();
    let mut sorted = described.clone();
    sorted.sort_unstable();
    assert_eq!(sorted.join(" "), RELEASED);
}
