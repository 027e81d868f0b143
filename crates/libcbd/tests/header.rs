//! `cbd.h` matches the source: it is generated from it, and this test compares the checked-in file.
//!
//! After a change of the C interface: `CBD_HEADER=write cargo test -p libcbd --test header`.

use std::path::Path;

fn generated(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("the configuration");
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/c/mod.rs"));
    let mut header = Vec::new();
    builder.generate().expect("a header").write(&mut header);
    // The "Safety" section of a Rust function is the description of its pointers in C.
    String::from_utf8(header).expect("text").replace(" * # Safety\n *", " * Pointers:")
}

#[test]
fn the_checked_in_header_is_that_of_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = root.join("include/cbd.h");
    let header = generated(root);
    if std::env::var_os("CBD_HEADER").is_some_and(|wish| wish == "write") {
        std::fs::write(&file, &header).expect("the header can be written");
    }
    let kept = std::fs::read_to_string(&file).expect("the header");
    assert!(
        kept == header,
        "include/cbd.h differs from the source; generate it again with CBD_HEADER=write cargo test -p libcbd --test header"
    );
}
