//! The coverage-guided fuzzer: libFuzzer around the target that `CBD_FUZZ_TARGET` names. `cargo xtask fuzz`
//! builds it with the compiler's coverage instrumentation and starts it.
#![no_main]

use cbd_fuzz::{Target, target};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

fn chosen() -> &'static Target {
    static CHOSEN: OnceLock<&'static Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("CBD_FUZZ_TARGET").unwrap_or_default();
        target(&name).unwrap_or_else(|| panic!("CBD_FUZZ_TARGET is '{name}', which is not a target"))
    })
}

fuzz_target!(|data: &[u8]| (chosen().run)(data));
