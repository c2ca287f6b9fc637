//! Writes the user-data files at first boot, like cloud-init.
//!
//! Supports only the JSON form of `#cloud-config`, which the platform renders. `runcmd` is ignored: it starts
//! `svc-first-boot.service`, whose steps the init performs itself.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub(super) struct UserData {
    #[serde(default)]
    write_files: Vec<WriteFile>,
}

#[derive(Debug, Deserialize)]
struct WriteFile {
    path: PathBuf,
    #[serde(default)]
    content: String,
    encoding: Option<String>,
    permissions: Option<String>,
}

impl UserData {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (first, rest) = text.split_once('\n').context("user-data has only one line")?;
        ensure!(
            first.trim_end() == "#cloud-config",
            "user-data must start with #cloud-config, not {first:?}"
        );
        serde_json::from_str(rest).context("user-data is not JSON")
    }

    /// Writes the files under `root` instead of `/`.
    pub(super) fn write_files(&self, root: &Path) -> Result<()> {
        for file in &self.write_files {
            file.write(root).with_context(|| format!("write_files: {}", file.path.display()))?;
        }
        Ok(())
    }
}

impl WriteFile {
    fn write(&self, root: &Path) -> Result<()> {
        let relative = self.path.strip_prefix("/").context("the path is not absolute")?;
        ensure!(
            relative.components().all(|part| matches!(part, Component::Normal(_))),
            "the path escapes the root"
        );
        let content = match self.encoding.as_deref() {
            None | Some("" | "text/plain") => self.content.clone().into_bytes(),
            Some("b64" | "base64") => {
                BASE64_STANDARD.decode(&self.content).context("the content is not base64")?
            }
            Some(encoding) => bail!("encoding {encoding:?} is not supported"),
        };
        let mode = match self.permissions.as_deref() {
            None => 0o644,
            Some(octal) => u32::from_str_radix(octal.trim_start_matches("0o"), 8)
                .context("the permissions are not octal")?,
        };
        let target = root.join(relative);
        fs::create_dir_all(target.parent().unwrap_or(root))?;
        fs::write(&target, content)?;
        fs::set_permissions(&target, Permissions::from_mode(mode))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(files: &str) -> Result<tempfile::TempDir> {
        let root = tempfile::tempdir()?;
        UserData::parse(&format!("#cloud-config\n{{\"write_files\": {files}, \"runcmd\": []}}"))?
            .write_files(root.path())?;
        Ok(root)
    }

    #[test]
    fn write_files_creates_files_with_modes() {
        let root = write(
            r#"[{"path": "/opt/svc/env/host.env", "permissions": "0600", "content": "A=1\n"},
                {"path": "/etc/x", "encoding": "b64", "content": "AAH/"}]"#,
        )
        .unwrap();
        let secret = root.path().join("opt/svc/env/host.env");
        assert_eq!(fs::read_to_string(&secret).unwrap(), "A=1\n");
        assert_eq!(fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read(root.path().join("etc/x")).unwrap(), [0, 1, 255]);
    }

    #[test]
    fn invalid_user_data_is_rejected() {
        assert!(UserData::parse("#!/bin/sh\n{}").is_err());
        assert!(UserData::parse("#cloud-config\nwrite_files: []").is_err());
        assert!(write(r#"[{"path": "/../etc/passwd", "content": ""}]"#).is_err());
        assert!(write(r#"[{"path": "etc/passwd", "content": ""}]"#).is_err());
        assert!(write(r#"[{"path": "/x", "encoding": "gzip", "content": ""}]"#).is_err());
    }
}
