//! Rebuilds the crate when the migrations directory changes, even if only a file is added.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
    println!("cargo:rerun-if-changed=build.rs");
}
