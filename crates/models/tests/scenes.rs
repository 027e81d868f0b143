//! Every scene in its short form; `cargo xtask models` plays the long form.

use cbd_models::{Budget, run, scenes};
use cbd_sim::{Watchdog, from_environment};
use std::time::Duration;

fn play(name: &str) {
    let Some(scene) = scenes::find(name) else { panic!("there is no scene '{name}'") };
    let iterations = from_environment("CBD_SCHEDULES", 500);
    let seed = from_environment("CBD_SEED", 1);
    let _watchdog = Watchdog::new(Duration::from_secs(300 + iterations), format!("scene {name}"));
    let outcome = run(scene, &Budget { seed, sweep: None, iterations, time: None });
    if let Some((seed, text)) = outcome.failure {
        panic!("{text}\nrepeat it: cargo xtask models --scene {name} --seed {seed} --iterations 1");
    }
    assert_eq!(outcome.executions, iterations);
    println!("{name}: {} points, {:?}", outcome.points, outcome.checked);
}

/// One test for each scene, and a check that none is missing.
macro_rules! scenes {
    ($($test:ident: $name:literal),+ $(,)?) => {
        $(
            #[test]
            fn $test() {
                play($name);
            }
        )+

        #[test]
        fn every_scene_is_played() {
            let played = [$($name),+];
            assert!(scenes::ALL.iter().all(|scene| played.contains(&scene.name)));
        }
    };
}

scenes! {
    no_epoch_gets_a_record_after_it_was_collected: "straggler",
    writes_that_share_a_fence_do_not_deadlock: "at-once",
    a_younger_epoch_is_not_taken_for_the_oldest: "oldest",
    a_flush_that_another_one_serves_was_closed_before_it: "flushes",
    the_first_write_after_a_rest_is_written_back: "sleep",
    a_read_returns_nothing_of_a_segments_next_life: "pins",
    a_fill_that_was_overtaken_is_not_recorded: "fill",
    data_that_was_read_ahead_and_overtaken_is_not_used: "readahead",
    no_writer_that_waits_for_space_is_forgotten: "waiters",
    a_stop_lets_no_request_wait: "stop",
    a_second_chance_covers_nothing_newer: "second-chance",
    an_overwrite_heals_whatever_writeback_finds: "quarantine",
    a_read_of_what_is_being_marked_bad_fails: "marked-bad",
    a_reread_covers_nothing_newer: "reread",
    zeroes_over_several_lanes_lose_no_write: "zeroes",
    settings_and_status_disturb_nothing: "settings",
    an_index_that_is_resized_loses_no_block: "resizes",
    what_is_being_stored_is_not_taken_for_damage: "metadata",
    a_header_is_repaired_beside_reclaim: "repairs",
    a_cache_is_attached_between_requests: "attach",
}
