//! Rebuilds the crate when a migration changes: a macro embeds the migrations, and cargo does not track the files that
//! a macro reads.

fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
    println!("cargo:rerun-if-changed=build.rs");
}
