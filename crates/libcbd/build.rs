//! Gives the shared library its soname: programs are linked against `libcbd.so.0`, which changes with every
//! incompatible change of the ABI.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcbd.so.0");
}
