//! Embeds the commit and its date into `svc --version`; both are `unknown` outside a git checkout.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?.trim().to_owned();
    (out.status.success() && !text.is_empty()).then_some(text)
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Some(dir) = git(&["rev-parse", "--absolute-git-dir"]) {
        println!("cargo:rerun-if-changed={dir}/HEAD");
        println!("cargo:rerun-if-changed={dir}/logs/HEAD");
    }
    let unknown = || "unknown".to_owned();
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(unknown);
    let date = git(&["show", "-s", "--format=%cs", "HEAD"]).unwrap_or_else(unknown);
    println!("cargo:rustc-env=SVC_COMMIT={commit}");
    println!("cargo:rustc-env=SVC_COMMIT_DATE={date}");
}
