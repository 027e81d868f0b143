//! The coverage-guided fuzzer: libFuzzer around the target that `CBD_FUZZ_TARGET` names. `cargo xtask fuzz`
//! builds it with the compiler's coverage instrumentation and starts it.
//!
//! With `CBD_FUZZ_PREPARE=DIRECTORY` it writes the initial inputs of the target to this directory, prints the length of
//! its longest input in bytes, and ends.
#![no_main]

use cbd_fuzz::{Target, store, target};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::OnceLock;

fn chosen() -> &'static Target {
    static CHOSEN: OnceLock<&'static Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("CBD_FUZZ_TARGET").unwrap_or_default();
        target(&name).unwrap_or_else(|| panic!("CBD_FUZZ_TARGET is '{name}', which is not a target"))
    })
}

/// Called before libFuzzer reads its arguments.
fn prepare() {
    if let Some(directory) = std::env::var_os("CBD_FUZZ_PREPARE") {
        let target = chosen();
        store::plant(target, Path::new(&directory)).expect("the initial inputs can be written");
        println!("{}", target.length_max);
        std::process::exit(0);
    }
}

fuzz_target!(init: prepare(), |data: &[u8]| (chosen().run)(data));
