//! User-data as cloud-init would act on it: the files that it writes at a machine's first boot.
//!
//! Only the JSON form of `#cloud-config` is understood, which is the one that the platform renders. `runcmd` is not run:
//! what it would start, the init plays itself.

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
        let (first, rest) = text.split_once('\n').context("user-data is one line")?;
        ensure!(first.trim_end() == "#cloud-config", "user-data begins with {first:?}, not #cloud-config");
        serde_json::from_str(rest).context("user-data is not JSON")
    }

    /// Writes the files below `root` as they would be below `/`.
    pub(super) fn write_files(&self, root: &Path) -> Result<()> {
        for file in &self.write_files {
            file.write(root).with_context(|| format!("write_files: {}", file.path.display()))?;
        }
        Ok(())
    }
}

impl WriteFile {
    fn write(&self, root: &Path) -> Result<()> {
        let inside = self.path.strip_prefix("/").context("the path is not absolute")?;
        ensure!(
            inside.components().all(|part| matches!(part, Component::Normal(_))),
            "the path leaves the root"
        );
        let content = match self.encoding.as_deref() {
            None | Some("" | "text/plain") => self.content.clone().into_bytes(),
            Some("b64" | "base64") => BASE64_STANDARD.decode(&self.content).context("not base64")?,
            Some(other) => bail!("encoding {other:?} is not known here"),
        };
        let mode = match self.permissions.as_deref() {
            None => 0o644,
            Some(octal) => u32::from_str_radix(octal.trim_start_matches("0o"), 8).context("permissions")?,
        };
        let place = root.join(inside);
        fs::create_dir_all(place.parent().unwrap_or(root))?;
        fs::write(&place, content)?;
        fs::set_permissions(&place, Permissions::from_mode(mode))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(files: &str) -> Result<tempfile::TempDir> {
        let root = tempfile::tempdir()?;
        UserData::parse(&format!("#cloud-config\n{{\"write_files\": {files}, \"runcmd\": []}}"))?
            .write_files(root.path())?;
        Ok(root)
    }

    #[test]
    fn files_land_below_the_root_with_their_mode() {
        let root = written(
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
    fn what_cloud_init_could_not_use_is_an_error() {
        assert!(UserData::parse("#!/bin/sh\n{}").is_err());
        assert!(UserData::parse("#cloud-config\nwrite_files: []").is_err());
        assert!(written(r#"[{"path": "/../etc/passwd", "content": ""}]"#).is_err());
        assert!(written(r#"[{"path": "etc/passwd", "content": ""}]"#).is_err());
        assert!(written(r#"[{"path": "/x", "encoding": "gzip", "content": ""}]"#).is_err());
    }
}
