//! The bill of materials, CycloneDX 1.5: the crates that are linked into the binary, with Rust's library and glibc.
//!
//! Made here and not by cargo-cyclonedx, which takes the features of the whole workspace, puts a new number and time into
//! each run, and knows nothing of the C library that a static binary carries.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{child, fetch};

const DEADLINE: Duration = Duration::from_secs(120);
#[cfg(target_arch = "x86_64")]
const TARGET: &str = "x86_64-unknown-linux-gnu";
#[cfg(target_arch = "aarch64")]
const TARGET: &str = "aarch64-unknown-linux-gnu";

type Crate = (String, String);

/// The bill of `svc`, built from `source`, as JSON.
///
/// # Errors
/// When cargo does not tell, or its answers contradict each other.
pub fn generate(source: &Path, svc: &Path) -> Result<String> {
    let linked = linked(source)?;
    let mut ask = cargo(source);
    ask.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]);
    let metadata: Value = serde_json::from_str(&child::run(ask, DEADLINE)?)?;
    let checksums = checksums(&std::fs::read_to_string(source.join("Cargo.lock"))?);
    let mut components = Vec::new();
    let mut ours = None;
    for package in metadata["packages"].as_array().context("packages")? {
        let name = package["name"].as_str().context("a name")?.to_owned();
        let version = package["version"].as_str().context("a version")?.to_owned();
        let id = (name, version);
        if id.0 == "svc" {
            ours = Some(id.1.clone());
        } else if linked.contains(&id) {
            components.push(component(&id, package, checksums.get(&id)));
        }
    }
    ensure!(
        components.len() + 1 == linked.len(),
        "cargo tree names {}, cargo metadata {}",
        linked.len(),
        components.len() + 1
    );
    components.extend(foreign());
    components.sort_by_key(|one| one["bom-ref"].as_str().unwrap_or_default().to_owned());
    let version = ours.context("the package svc")?;
    let sha256 = fetch::sha256(svc)?;
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        // Of the binary, so that the same binary has the same bill.
        "serialNumber": format!("urn:uuid:{}", number(&sha256)),
        "version": 1,
        "metadata": {"component": {
            "type": "application", "bom-ref": "svc", "name": "svc", "version": version,
            "licenses": [{"expression": "Apache-2.0"}],
            "hashes": [{"alg": "SHA-256", "content": sha256}],
        }},
        "components": components,
    });
    Ok(serde_json::to_string_pretty(&bill)? + "\n")
}

/// Names and versions of what is linked: normal dependencies of the build that ships, without macros.
fn linked(source: &Path) -> Result<BTreeSet<Crate>> {
    let mut tree = cargo(source);
    tree.args([
        "tree",
        "--locked",
        "--package",
        "svc",
        "--edges",
        "normal,no-proc-macro",
        "--no-default-features",
    ]);
    tree.args(["--target", TARGET, "--prefix", "none", "--format", "{p}"]);
    let listed = child::run(tree, DEADLINE)?;
    let named = listed.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    });
    Ok(named.collect())
}

fn cargo(source: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(source);
    cargo
}

fn component((name, version): &Crate, package: &Value, checksum: Option<&String>) -> Value {
    let purl = format!("pkg:cargo/{name}@{version}");
    let mut component =
        json!({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl});
    // Before SPDX had its operators, crates wrote `MIT/Apache-2.0`.
    if let Some(license) = package["license"].as_str() {
        component["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
    }
    if let Some(checksum) = checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    if let Some(url) = package["repository"].as_str() {
        component["externalReferences"] = json!([{"type": "vcs", "url": url}]);
    }
    component
}

/// What comes from the compiler and from the system that linked it.
fn foreign() -> Vec<Value> {
    let said = |program: &str, args: &[&str]| {
        let mut ask = Command::new(program);
        ask.args(args);
        child::run(ask, DEADLINE).ok().map(|text| text.trim().to_owned())
    };
    let library = |name: &str, version: String, license: &str| {
        json!({"type": "library", "bom-ref": format!("{name}@{version}"), "name": name, "version": version,
               "licenses": [{"expression": license}]})
    };
    let rustc = said("rustc", &["--version"]).and_then(|text| text.split(' ').nth(1).map(str::to_owned));
    let glibc = said("dpkg-query", &["-W", "-f", "${Version}", "libc6-dev"]);
    let glibc =
        glibc.or_else(|| said("getconf", &["GNU_LIBC_VERSION"])?.split(' ').nth(1).map(str::to_owned));
    let rust = rustc.map(|version| library("rust-std", version, "MIT OR Apache-2.0"));
    let glibc = glibc.map(|version| library("glibc", version, "LGPL-2.1-or-later"));
    rust.into_iter().chain(glibc).collect()
}

/// `checksum` of each package of `Cargo.lock`.
fn checksums(lock: &str) -> BTreeMap<Crate, String> {
    let value = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""))?;
        Some(line.trim_end_matches('"').to_owned())
    };
    let packages = lock.split("[[package]]").skip(1);
    packages
        .filter_map(|block| {
            Some(((value(block, "name")?, value(block, "version")?), value(block, "checksum")?))
        })
        .collect()
}

/// A UUID (version 8, RFC 9562) of a digest.
fn number(sha256: &str) -> String {
    let hex = &sha256[..32];
    format!("{}-{}-8{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..32])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_file_gives_each_crate_its_checksum() {
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n\n[[package]]\nname = \"svc\"\nversion = \"0.1.0\"\n";
        let read = checksums(lock);
        assert_eq!(read.len(), 1);
        assert_eq!(read[&("a".to_owned(), "1.0.0".to_owned())], "ab");
    }

    #[test]
    fn a_bill_names_what_is_linked_and_not_what_builds_or_tests() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().and_then(Path::parent).unwrap();
        let linked = linked(source).unwrap();
        let has = |name: &str| linked.iter().any(|(known, _)| known == name);
        for name in ["svc", "rustls", "ring", "tokio-postgres", "object_store"] {
            assert!(has(name), "{name}");
        }
        for name in ["kit", "proptest", "s3s", "serde_derive", "aws-lc-rs", "cc"] {
            assert!(!has(name), "{name}");
        }
    }

    #[test]
    fn the_same_binary_has_the_same_number() {
        assert_eq!(number(&"ab".repeat(32)), "abababab-abab-8bab-8bab-abababababab");
    }
}
