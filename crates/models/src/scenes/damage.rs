//! Damage concurrent with overwrites of the damaged data.

use super::{Ending, Scene, block, large};
use crate::client::Client;
use crate::setup::{Setup, Shape, must};
use cbd_types::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flips a bit in the region's data of a block.
fn break_block(setup: &mut Setup, number: u64) {
    match setup.offset_of(block(number).start) {
        Some(offset) => setup.flip(offset + 100),
        None => panic!("block {number} is not in the region"),
    }
}

/// Reads a block that may be damaged until it is overwritten.
fn read_damaged(client: &mut Client, is_healed: &AtomicBool) {
    let was_healed = is_healed.load(Ordering::SeqCst);
    if let Err(error) = client.read(block(0)) {
        assert!(error.kind() == ErrorKind::Media && !was_healed, "{error}");
    }
}

pub(super) const QUARANTINE: Scene = Scene {
    name: "quarantine",
    about: "dirty data that writeback finds damaged against a full overwrite of it: the overwrite repairs it",
    usual: 800,
    is_damaged: true,
    crashes: 0,
    prepare: |setup| {
        setup.write(block(0));
        setup.write(block(1));
        break_block(setup, 0);
    },
    play: |stage| {
        let is_healed = Arc::new(AtomicBool::new(false));
        let healed = Arc::clone(&is_healed);
        stage.client(move |client, random| {
            must(client.write(block(2)));
            must(client.write(block(0)));
            is_healed.store(true, Ordering::SeqCst);
            if random.chance(500) {
                must(client.flush());
            }
            must(client.read(block(0)));
        });
        stage.client(move |client, _| {
            for _ in 0..3 {
                read_damaged(client, &healed);
                client.rest();
            }
        });
    },
    ..Scene::USUAL
};

pub(super) const MARKED_BAD: Scene = Scene {
    name: "marked-bad",
    about: "reads of dirty data that writeback finds damaged at that moment: the backing device's older bytes are not returned",
    usual: 150,
    is_damaged: true,
    crashes: 0,
    prepare: |setup| {
        setup.write(block(0));
        setup.write(block(1));
        break_block(setup, 0);
    },
    play: |stage| {
        stage.client(|client, _| match client.read(block(0)) {
            Ok(()) => panic!("damaged data was read"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Media, "{error}"),
        });
        stage.spawn(|stage, _| {
            stage.cache.request_drain();
        });
    },
    ending: Ending::Damage,
    ..Scene::USUAL
};

pub(super) const REREAD: Scene = Scene {
    name: "reread",
    about: "clean data that a read finds damaged against writes of it: what the backing device has is never newer",
    usual: 1000,
    shape: Shape::ONE_LANE.reclaiming_above(20),
    prepare: |setup| {
        setup.write(block(0));
        setup.write(block(1));
        setup.drain();
        break_block(setup, 0);
    },
    play: |stage| {
        for _ in 0..2 {
            stage.client(|client, _| {
                for _ in 0..2 {
                    must(client.read(block(0)));
                    client.rest();
                }
            });
        }
        stage.client(|client, random| {
            must(client.write(block(0)));
            for number in 0..random.below(5) {
                must(client.write(large(40 + number)));
            }
            must(client.read(block(0)));
        });
    },
    ..Scene::USUAL
};
