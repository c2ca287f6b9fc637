//! Builds the default apps and the shell with `scripts/build-default-apps.mjs`, and checks the result.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::{Apps, BundlePart, Options, project_dir};
use crate::child;

/// Environment variable with the identity provider's publishable key, which is embedded in the shell.
pub const KEY_VAR: &str = "NEXT_PUBLIC_IDP_PUBLISHABLE_KEY";
/// Hosts that must not occur in a bundle: the fallback of a shell built without a key, and the example host.
pub const PLACEHOLDER_HOSTS: [&str; 2] = ["placeholder-idp.invalid", "idp.example.com"];

const TIMEOUT: Duration = Duration::from_secs(1200);

/// Returns a publishable key in the identity provider's format, for the provider at `host`.
pub fn test_key(host: &str) -> String {
    format!("pk_test_{}", STANDARD.encode(format!("{host}$")))
}

/// Builds the apps, the shell and the packages into `dir`, and adds them to `options`. With `None` as the key, the
/// shell is omitted; an empty key is rejected.
pub fn build(options: &mut Options, dir: &Path, key: Option<&str>) -> Result<()> {
    let mut node = Command::new("node");
    node.arg(project_dir().join("scripts/build-default-apps.mjs")).arg("--out").arg(dir);
    match key {
        Some("") => bail!(
            "{KEY_VAR} is not set. It is embedded in the shell, which would otherwise use a placeholder identity \
             provider. Set it to the publishable key of your identity provider (pk_test_… or pk_live_…), or omit the \
             shell with --no-shell"
        ),
        Some(key) => node.env(KEY_VAR, key),
        None => node.arg("--no-shell"),
    };
    child::run(node, TIMEOUT)
        .context("cannot build the default apps (requires Node.js 20 or newer, and npm)")?;
    for part in ["apps", "shell", "packages"] {
        check_placeholders(&dir.join(part))?;
    }
    options.apps = Apps::Built(dir.join("apps"));
    let part = |name: &str, dir: PathBuf, manifest: &Path| -> Result<BundlePart> {
        let version = read_package_version(manifest)?
            .with_context(|| format!("no version in {}", manifest.display()))?;
        Ok(BundlePart { name: name.to_owned(), version, dir })
    };
    if key.is_some() {
        let manifest = project_dir().join("apps/shell/package.json");
        options.shell = Some(part("shell", dir.join("shell"), &manifest)?);
    }
    let bridge = dir.join("packages/svc-bridge");
    options.packages = vec![part("svc-bridge", bridge.clone(), &bridge.join("package.json"))?];
    Ok(())
}

/// Reads the version from a `package.json`; `None` if the file cannot be read or has no version.
pub fn read_package_version(manifest: &Path) -> Result<Option<String>> {
    let Ok(text) = fs::read(manifest) else { return Ok(None) };
    let json: Value =
        serde_json::from_slice(&text).with_context(|| format!("cannot parse {}", manifest.display()))?;
    Ok(json["version"].as_str().map(str::to_owned))
}

/// Rejects built files that contain a placeholder host, in plain text or inside a publishable key.
pub fn check_placeholders(dir: &Path) -> Result<()> {
    let encodings: Vec<(&str, Vec<u8>)> = PLACEHOLDER_HOSTS.into_iter().flat_map(encodings).collect();
    let mut pending = vec![dir.to_owned()];
    while let Some(dir) = pending.pop() {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                pending.push(path);
                continue;
            }
            let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let placeholder = encodings.iter().find(|(_, encoding)| contains(&content, encoding));
            let host = placeholder.map(|(host, _)| *host).unwrap_or_default();
            ensure!(
                placeholder.is_none(),
                "{} contains the placeholder identity provider {host}: set {KEY_VAR} to your identity provider's key",
                path.display()
            );
        }
    }
    Ok(())
}

/// Returns a host name in plain text, and the prefix that is common to the base64 encodings of all texts that start
/// with it.
fn encodings(host: &str) -> [(&str, Vec<u8>); 2] {
    let prefix_len = host.len() / 3 * 3;
    [(host, host.as_bytes().to_vec()), (host, STANDARD.encode(&host[..prefix_len]).into_bytes())]
}

fn contains(content: &[u8], encoding: &[u8]) -> bool {
    content.windows(encoding.len()).any(|part| part.eq_ignore_ascii_case(encoding))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_placeholders_finds_hosts_in_text_and_keys() {
        for host in PLACEHOLDER_HOSTS {
            for content in [format!("const h=\"https://{host}/x\""), format!("k=\"{}\"", test_key(host))] {
                let dir = tempfile::tempdir().unwrap();
                fs::create_dir(dir.path().join("assets")).unwrap();
                fs::write(dir.path().join("assets/index.js"), &content).unwrap();
                let error = check_placeholders(dir.path()).unwrap_err().to_string();
                assert!(error.contains(host) && error.contains("index.js"), "{error}");
            }
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("index.js"), test_key("idp.svc.test")).unwrap();
        check_placeholders(dir.path()).unwrap();
    }

    #[test]
    fn default_apps_are_vite_apps_built_into_dist() {
        let mut slugs = Vec::new();
        for entry in fs::read_dir(project_dir().join("apps")).unwrap() {
            let dir = entry.unwrap().path();
            let Ok(text) = fs::read(dir.join("svc.json")) else { continue };
            let manifest: Value = serde_json::from_slice(&text).unwrap();
            let built = (&manifest["runtime"], &manifest["build"]["output"]);
            assert_eq!(built, (&Value::from("vite"), &Value::from("dist")), "{}", dir.display());
            assert!(dir.join("index.html").is_file() && dir.join("vite.config.ts").is_file());
            slugs.push(manifest["slug"].as_str().unwrap().to_owned());
        }
        slugs.sort();
        assert_eq!(slugs, ["notes", "tasks"]);
    }

    #[test]
    fn build_rejects_shell_without_key() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = Options::new(Path::new("svc"), "v1", dir.path()).unwrap();
        let error = build(&mut options, dir.path(), Some("")).unwrap_err().to_string();
        assert!(error.contains(KEY_VAR) && error.contains("--no-shell"), "{error}");
    }
}
