//! Two caches with a common moment: the two disks alone, without the region, show one cut of what clients wrote.

use cbd_sim::explorer::Tally;
use cbd_sim::group::{Command, explore_with};
use cbd_sim::{from_environment, group};

fn play(command: Command, seeds: u64) -> Tally {
    let mut all = Tally::default();
    (1..=seeds).for_each(|seed| all.add(explore_with(command, seed, None)));
    all
}

#[test]
fn two_disks_alone_show_one_moment_while_it_is_held() {
    let tally = play(Command::Together, from_environment("CBD_SEEDS", 5));
    assert!(tally.findings.is_empty(), "{:?}", tally.findings);
    // The test proves nothing unless these events occur.
    for name in [
        "common_moment_requested",
        "common_moment_held",
        "write_while_held",
        "full_while_held",
        "crash_while_closing",
        "crash_while_held",
        "power_cut",
    ] {
        let count = tally.faults.get(name);
        assert!(count.is_some_and(|count| *count > 0), "{name} never happened: {:?}", tally.faults);
    }
}

#[test]
fn two_checkpoints_one_after_the_other_have_no_common_moment() {
    let tally = play(Command::OneByOne, 3);
    let is_found = |text: &str| text.contains("the disks alone have no common moment");
    assert!(
        tally.findings.iter().any(|finding| is_found(&finding.text)),
        "the control found nothing in {} histories: {:?}",
        tally.histories,
        tally.findings
    );
    assert_eq!(group::NAME, "group");
}
