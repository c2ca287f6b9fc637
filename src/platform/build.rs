//! Rebuilds the crate when the directory of migrations changes, even if only a file is added.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
    println!("cargo:rerun-if-changed=build.rs");
}
