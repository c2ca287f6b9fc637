//! The first-party apps and the shell, built by `scripts/build-default-apps.mjs`, and a look at what came out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::{Apps, Options, Part, project};
use crate::child;

/// The publishable key of the identity provider, which the shell is built with.
pub const KEY: &str = "NEXT_PUBLIC_IDP_PUBLISHABLE_KEY";
/// Hosts that no bundle may name: the one that a shell without a key would ask, and the one of examples.
pub const PLACEHOLDER_HOSTS: [&str; 2] = ["placeholder-idp.invalid", "idp.example.com"];

const DEADLINE: Duration = Duration::from_secs(1200);

/// A publishable key as the identity provider of that host would hand it out.
pub fn test_key(host: &str) -> String {
    format!("pk_test_{}", STANDARD.encode(format!("{host}$")))
}

/// Builds all into `dir` and makes it part of a bundle; `key: None` leaves the shell out.
pub fn build(options: &mut Options, dir: &Path, key: Option<&str>) -> Result<()> {
    let mut node = Command::new("node");
    node.arg(project().join("scripts/build-default-apps.mjs")).arg("--out").arg(dir);
    match key {
        Some("") => bail!(
            "{KEY} is not set, and is baked into the shell: without it browsers would ask a placeholder identity \
             provider. Set it to the publishable key of your identity provider (pk_test_… or pk_live_…), or leave the \
             shell out with --no-shell"
        ),
        Some(key) => node.env(KEY, key),
        None => node.arg("--no-shell"),
    };
    child::run(node, DEADLINE).context("build the default apps (it takes Node.js 20 or newer, and npm)")?;
    for part in ["apps", "shell", "packages"] {
        check(&dir.join(part))?;
    }
    options.apps = Apps::Built(dir.join("apps"));
    let part = |name: &str, dir: PathBuf, manifest: &Path| -> Result<Part> {
        let version =
            version_in(manifest)?.with_context(|| format!("no version in {}", manifest.display()))?;
        Ok(Part { name: name.to_owned(), version, dir })
    };
    if key.is_some() {
        let manifest = project().join("apps/shell/package.json");
        options.shell = Some(part("shell", dir.join("shell"), &manifest)?);
    }
    let bridge = dir.join("packages/svc-bridge");
    options.packages = vec![part("svc-bridge", bridge.clone(), &bridge.join("package.json"))?];
    Ok(())
}

/// The version that a `package.json` says; `None` where there is no such file.
pub fn version_in(manifest: &Path) -> Result<Option<String>> {
    let Ok(text) = fs::read(manifest) else { return Ok(None) };
    let json: Value =
        serde_json::from_slice(&text).with_context(|| format!("parse {}", manifest.display()))?;
    Ok(json["version"].as_str().map(str::to_owned))
}

/// Refuses a built file that names a placeholder, as it is or inside a publishable key.
pub fn check(dir: &Path) -> Result<()> {
    let signs: Vec<(&str, Vec<u8>)> = PLACEHOLDER_HOSTS.into_iter().flat_map(signs).collect();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let content = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            let found = signs.iter().find(|(_, sign)| holds(&content, sign));
            let host = found.map(|(host, _)| *host).unwrap_or_default();
            ensure!(
                found.is_none(),
                "{} names the placeholder identity provider {host}: {KEY} is missing or is an example's",
                path.display()
            );
        }
    }
    Ok(())
}

/// A host's name, and how base64 begins that begins with it: what follows changes no whole group of three bytes.
fn signs(host: &str) -> [(&str, Vec<u8>); 2] {
    let whole = host.len() / 3 * 3;
    [(host, host.as_bytes().to_vec()), (host, STANDARD.encode(&host[..whole]).into_bytes())]
}

fn holds(content: &[u8], sign: &[u8]) -> bool {
    content.windows(sign.len()).any(|part| part.eq_ignore_ascii_case(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placeholder_is_found_plain_and_inside_a_key() {
        for host in PLACEHOLDER_HOSTS {
            for content in [format!("const h=\"https://{host}/x\""), format!("k=\"{}\"", test_key(host))] {
                let dir = tempfile::tempdir().unwrap();
                fs::create_dir(dir.path().join("assets")).unwrap();
                fs::write(dir.path().join("assets/index.js"), &content).unwrap();
                let error = check(dir.path()).unwrap_err().to_string();
                assert!(error.contains(host) && error.contains("index.js"), "{error}");
            }
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("index.js"), test_key("idp.svc.test")).unwrap();
        check(dir.path()).unwrap();
    }

    #[test]
    fn a_shell_without_its_key_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = Options::new(Path::new("svc"), "v1", dir.path()).unwrap();
        let error = build(&mut options, dir.path(), Some("")).unwrap_err().to_string();
        assert!(error.contains(KEY) && error.contains("--no-shell"), "{error}");
    }
}
