//! The dependencies that are allowed between crates.

use super::{Measure, Rule};
use crate::shell;
use crate::workspace::cargo;
use serde_json::Value;
use std::time::Duration;

/// Dependencies point downwards.
pub const LAYER: Rule =
    Rule { name: "layer", about: "dependencies of a crate on its own or a higher layer", limit: 0 };

/// The crate that tests share. Any crate's tests may depend on it. No product crate may, except through an optional feature that
/// releases leave out.
const TESTKIT: &str = "cbd-testkit";

/// Crates that are not delivered to users.
const PROOFS: [&str; 7] =
    ["cbd-sim", "cbd-models", "cbd-bench", "cbd-fuzz", "cbd-harness", "cbd-guest", "xtask"];

/// The crates from the lowest layer to the highest. A crate depends only on crates of lower layers, tests
/// included.
const LAYERS: [&[&str]; 13] = [
    // System calls.
    &["cbd-sys"],
    // Basic types, and parts of the system.
    &["cbd-types", "cbd-holder", "cbd-lock"],
    // Memory, its layout, disks.
    &["cbd-format", "cbd-guard", "cbd-backing"],
    &["cbd-pmem", "cbd-engine", "cbd-pcache", "cbd-channel"],
    &["cbd-device", "cbd-export"],
    // The engine with threads, and the exports.
    &["cbd-runtime", "cbd-nbd", "cbd-vhost", "cbd-fuse", "cbd-ublk", "cbd-remote"],
    &[TESTKIT],
    // Tools for regions without a daemon; the daemon; proofs.
    &["cbd-inspect", "cbd-daemon", "cbd-sim"],
    // The programs and libraries that users start or link.
    &["cbd-advise", "cbd-demo", "blkverify", "libcbd", "cbd-models"],
    &["cbdctrl"],
    // Tools.
    &["cbd-bench", "cbd-freestanding", "cbd-fuzz", "cbd-harness"],
    &["cbd-guest"],
    &["xtask"],
];

/// Measures all crates.
///
/// # Errors
/// The error of cargo, as text.
pub fn measure() -> Result<Vec<Measure>, String> {
    let text = shell::output_of(
        &mut cargo(["metadata", "--no-deps", "--format-version", "1"]),
        Duration::from_secs(120),
    )
    .map_err(|end| format!("cargo metadata: {end}"))?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| format!("cargo metadata: {error}"))?;
    let mut measures = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let mut measure = Measure::none(&LAYER, name);
        let Some(own) = layer(name) else {
            measure.add(|| format!("{name} has no layer in xtask/src/tidy/layers.rs"));
            measures.push(measure);
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let other = dependency["name"].as_str().unwrap_or_default();
            let is_permitted = if other == TESTKIT {
                let is_for_tests = dependency["kind"] == "dev" || dependency["optional"] == true;
                is_for_tests || PROOFS.contains(&name)
            } else {
                // A crate's tests may enable its own features.
                other == name || layer(other).is_none_or(|other| other < own)
            };
            if !is_permitted {
                measure.add(|| format!("{name} depends on {other}"));
            }
        }
        measures.push(measure);
    }
    Ok(measures)
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}
