//! `cbd.h` says what the source says: it is made from it, and the one that is checked in is the same.
//!
//! After a change of the C interface: `CBD_HEADER=write cargo test -p libcbd --test header`.

use std::path::Path;

fn generated(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("the configuration");
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/c/mod.rs"));
    let mut header = Vec::new();
    builder.generate().expect("a header").write(&mut header);
    // What Rust calls the safety of a function is in C what it takes of its pointers.
    String::from_utf8(header).expect("text").replace(" * # Safety\n *", " * Pointers:")
}

#[test]
fn the_header_that_is_checked_in_is_that_of_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = root.join("include/cbd.h");
    let header = generated(root);
    if std::env::var_os("CBD_HEADER").is_some_and(|wish| wish == "write") {
        std::fs::write(&file, &header).expect("the header can be written");
    }
    let kept = std::fs::read_to_string(&file).expect("the header");
    assert!(
        kept == header,
        "include/cbd.h is not what the source says; make it anew with CBD_HEADER=write cargo test -p libcbd --test header"
    );
}
