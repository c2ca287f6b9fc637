//! The software bill of materials (SBOM), CycloneDX 1.5: the crates linked into the binary, Rust's standard library,
//! and glibc.
//!
//! cargo-cyclonedx is not used: it includes the features of the whole workspace, writes a new serial number and time on
//! each run, and omits the statically linked C library.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{child, fetch};

const TIMEOUT: Duration = Duration::from_secs(120);
#[cfg(target_arch = "x86_64")]
const TARGET: &str = "x86_64-unknown-linux-gnu";
#[cfg(target_arch = "aarch64")]
const TARGET: &str = "aarch64-unknown-linux-gnu";

/// A crate's name and version.
type Crate = (String, String);

/// Generates the bill of materials for `svc`, built from `source`, as JSON.
///
/// # Errors
/// Fails if `svc` or `Cargo.lock` cannot be read, if cargo fails, or if its outputs contradict each other.
pub fn generate(source: &Path, svc: &Path) -> Result<String> {
    let linked_crates = list_linked_crates(source)?;
    let mut metadata = cargo_command(source);
    metadata.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]);
    let metadata: Value = serde_json::from_str(&child::run(metadata, TIMEOUT)?)?;
    let checksums = parse_checksums(&std::fs::read_to_string(source.join("Cargo.lock"))?);
    let mut components = Vec::new();
    let mut workspace_crates = 0;
    let mut svc_version = None;
    for package in metadata["packages"].as_array().context("cargo metadata lists no packages")? {
        let name = package["name"].as_str().context("a package has no name")?.to_owned();
        let version = package["version"].as_str().context("a package has no version")?.to_owned();
        let id = (name, version);
        if id.0 == "svc" {
            svc_version = Some(id.1.clone());
        }
        if package["source"].is_null() {
            // This workspace's packages are part of `svc`.
            workspace_crates += usize::from(linked_crates.contains(&id));
        } else if linked_crates.contains(&id) {
            components.push(build_component(&id, package, checksums.get(&id)));
        }
    }
    ensure!(
        components.len() + workspace_crates == linked_crates.len(),
        "cargo tree lists {} packages, cargo metadata {}",
        linked_crates.len(),
        components.len() + workspace_crates
    );
    components.extend(system_libraries());
    components.sort_by_key(|component| component["bom-ref"].as_str().unwrap_or_default().to_owned());
    let version = svc_version.context("cargo metadata has no package svc")?;
    let sha256 = fetch::sha256(svc)?;
    let sbom = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        // Derived from the binary, so that the same binary has the same SBOM.
        "serialNumber": format!("urn:uuid:{}", serial_uuid(&sha256)),
        "version": 1,
        "metadata": {"component": {
            "type": "application", "bom-ref": "svc", "name": "svc", "version": version,
            "licenses": [{"expression": "Apache-2.0"}],
            "hashes": [{"alg": "SHA-256", "content": sha256}],
        }},
        "components": components,
    });
    Ok(serde_json::to_string_pretty(&sbom)? + "\n")
}

/// Lists the linked crates: normal dependencies of the shipped build, without procedural macros.
fn list_linked_crates(source: &Path) -> Result<BTreeSet<Crate>> {
    let mut tree = cargo_command(source);
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
    let output = child::run(tree, TIMEOUT)?;
    let crates = output.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    });
    Ok(crates.collect())
}

fn cargo_command(source: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(source);
    cargo
}

fn build_component((name, version): &Crate, package: &Value, checksum: Option<&String>) -> Value {
    let purl = format!("pkg:cargo/{name}@{version}");
    let mut component =
        json!({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl});
    // Older crates write `MIT/Apache-2.0`, which predates SPDX operators.
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

/// Returns the components for Rust's standard library and the build machine's C library; omits one whose version is
/// unknown.
fn system_libraries() -> Vec<Value> {
    let output_of = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args);
        child::run(command, TIMEOUT).ok().map(|text| text.trim().to_owned())
    };
    let library = |name: &str, version: String, license: &str| {
        json!({"type": "library", "bom-ref": format!("{name}@{version}"), "name": name, "version": version,
               "licenses": [{"expression": license}]})
    };
    let rustc = output_of("rustc", &["--version"]).and_then(|text| text.split(' ').nth(1).map(str::to_owned));
    let glibc = output_of("dpkg-query", &["-W", "-f", "${Version}", "libc6-dev"]);
    let glibc =
        glibc.or_else(|| output_of("getconf", &["GNU_LIBC_VERSION"])?.split(' ').nth(1).map(str::to_owned));
    let rust = rustc.map(|version| library("rust-std", version, "MIT OR Apache-2.0"));
    let glibc = glibc.map(|version| library("glibc", version, "LGPL-2.1-or-later"));
    rust.into_iter().chain(glibc).collect()
}

/// Parses the `checksum` of each package in `Cargo.lock`.
fn parse_checksums(lock: &str) -> BTreeMap<Crate, String> {
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

/// Derives a UUID (version 8, RFC 9562) from a digest.
fn serial_uuid(sha256: &str) -> String {
    let hex = &sha256[..32];
    format!("{}-{}-8{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..32])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_checksums_reads_only_registry_packages() {
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n\n[[package]]\nname = \"svc\"\nversion = \"0.1.0\"\n";
        let checksums = parse_checksums(lock);
        assert_eq!(checksums.len(), 1);
        assert_eq!(checksums[&("a".to_owned(), "1.0.0".to_owned())], "ab");
    }

    #[test]
    fn list_linked_crates_excludes_build_and_test_crates() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().and_then(Path::parent).unwrap();
        let linked_crates = list_linked_crates(source).unwrap();
        let has = |name: &str| linked_crates.iter().any(|(crate_name, _)| crate_name == name);
        for name in ["svc", "rustls", "ring", "tokio-postgres", "object_store"] {
            assert!(has(name), "{name}");
        }
        for name in ["kit", "proptest", "s3s", "serde_derive", "aws-lc-rs", "cc"] {
            assert!(!has(name), "{name}");
        }
    }

    #[test]
    fn sbom_lists_every_linked_crate() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().and_then(Path::parent).unwrap();
        let sbom = generate(source, &source.join("Cargo.toml")).unwrap();
        let linked_crates = list_linked_crates(source).unwrap();
        // The workspace's crates are part of `svc`.
        let is_ours = |name: &str| name.starts_with("svc") || name == "crc-fast";
        for (name, version) in linked_crates.iter().filter(|(name, _)| !is_ours(name)) {
            assert!(sbom.contains(&format!("\"pkg:cargo/{name}@{version}\"")), "{name}");
        }
    }

    #[test]
    fn serial_uuid_is_derived_from_digest() {
        assert_eq!(serial_uuid(&"ab".repeat(32)), "abababab-abab-8bab-8bab-abababababab");
    }
}
