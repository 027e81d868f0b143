//! Gives the shared library its name for the loader: programs are linked against `libcbd.so.0`, which changes when programs that
//! were built before would no longer work.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcbd.so.0");
}
