//! A route that changes between requests.

use super::{Scene, block};
use crate::setup::must;

pub(super) const ATTACH: Scene = Scene {
    name: "attach",
    about: "a cache that is attached against the requests of two queues: none is lost or waits for ever, none goes past the cache \
            while another one goes through it, and what went straight to the disk is durable after the next flush",
    usual: 600,
    // What no flush has covered may be lost.
    crashes: 0,
    looks: true,
    is_uncached: true,
    play: |stage| {
        for number in 0..2 {
            stage.client(move |client, random| {
                for _ in 0..random.between(2, 4) {
                    must(client.write(block(2 * number + random.below(3))));
                    must(client.read(block(random.below(5))));
                    client.rest();
                    if random.chance(300) {
                        must(client.flush());
                    }
                }
                must(client.flush());
            });
        }
        stage.spawn(|stage, random| {
            if random.chance(400) {
                stage.hold_route(false);
            }
            stage.hold_route(true);
        });
    },
    ..Scene::USUAL
};
