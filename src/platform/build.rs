//! The migrations are embedded by a macro, which cargo does not see reading them.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
    println!("cargo:rerun-if-changed=build.rs");
}
