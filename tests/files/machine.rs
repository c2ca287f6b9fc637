//! A machine whose files are saved, and the platform that stores the repository's key.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use axum::Router;
use axum::response::IntoResponse;
use http::{HeaderMap, StatusCode, Uri};
use jiff::Timestamp;
use kit::s3::S3Server;
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use svc_files::RepositoryKey;

use crate::host::machine::{BUCKET, Machine, RunningApplet};

/// Longer than the interval between saves of an unchanged home directory, which also advance `savedUntil`.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A stub of the platform's route for the file backup key.
pub struct FilesPlatform {
    base: String,
    key: Arc<str>,
    has_lost_key: Arc<AtomicBool>,
}

impl FilesPlatform {
    pub async fn start() -> Result<Self> {
        svc::http::tls::install_provider();
        let key: Arc<str> = RepositoryKey::generate()?.password().expose_secret().into();
        let has_lost_key = Arc::new(AtomicBool::new(false));
        let (response_key, is_lost) = (key.clone(), has_lost_key.clone());
        let respond = async move |uri: Uri, headers: HeaderMap| {
            let is_authorized = headers
                .get("authorization")
                .is_some_and(|value| value == "Bearer upgrade-token-of-a-machine");
            if is_authorized && is_lost.load(Ordering::SeqCst) {
                let problem = json!({"code": "conflict", "detail": "no key opens the repository"});
                (StatusCode::CONFLICT, axum::Json(problem)).into_response()
            } else if is_authorized && uri.path().ends_with("/files-key") {
                axum::Json(json!({"key": &*response_key})).into_response()
            } else {
                (StatusCode::UNAUTHORIZED, axum::Json(json!({"code": "unauthorized"}))).into_response()
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let base = format!("http://{}", listener.local_addr()?);
        let app = Router::new().fallback(respond);
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { base, key, has_lost_key })
    }

    /// From now on, the platform refuses to send a key, as if it had lost the one that opens the repository.
    pub fn lose_key(&self) {
        self.has_lost_key.store(true, Ordering::SeqCst);
    }

    pub fn key(&self) -> String {
        self.key.to_string()
    }
}

pub struct Host {
    pub machine: Machine,
}

impl Host {
    pub fn new(store: &S3Server, platform: &FilesPlatform, epoch: u32) -> Result<Self> {
        let machine = Machine::bare(epoch)?;
        fs::write(machine.path("opt/svc/env/r2.env"), "")?;
        let store_env = store.env(BUCKET);
        let store_env: Vec<_> =
            store_env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        machine.set_env_vars("r2.env", &store_env)?;
        machine.set_env_vars("host.env", &[("PLATFORM_INTERNAL_URL", &platform.base)])?;
        for dir in ["home/svc/home/system", "home/svc/home/apps", "run/svc/hooks"] {
            fs::create_dir_all(machine.path(dir))?;
        }
        Ok(Self { machine })
    }

    /// The user's home directory.
    pub fn home(&self) -> PathBuf {
        self.machine.path("home/svc")
    }

    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.home().join(path);
        fs::create_dir_all(path.parent().context("the path has no parent")?)?;
        Ok(fs::write(path, text)?)
    }

    /// Starts the watcher, and waits until it is listening.
    pub fn start_watcher(&self) -> Result<RunningApplet> {
        let watcher = self.machine.spawn(&["svc-watch"], &[])?;
        let deadline = Instant::now() + TIMEOUT;
        while !self.machine.path("run/svc/watch/changes.sock").exists() {
            ensure!(Instant::now() < deadline, "svc-watch is not listening: {}", watcher.stderr());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(watcher)
    }

    pub fn start_service(&self, failpoints: &str) -> Result<RunningApplet> {
        self.machine.spawn(&["svc-sync-agent", "files"], &[("FAILPOINTS", failpoints)])
    }

    /// Returns the lines of `backup.jsonl`.
    pub fn read_backup_records(&self) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.home().join("home/system/logs/backup.jsonl"))?;
        Ok(text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
    }

    pub fn read_status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&fs::read_to_string(self.machine.path("var/lib/svc/files/status.json"))?)?)
    }

    pub fn read_outcome(&self) -> Result<Value> {
        Ok(serde_json::from_str(&fs::read_to_string(self.machine.path("var/lib/svc/files/restored.json"))?)?)
    }

    /// Starts the service, and waits until everything written before the call is saved.
    pub async fn start_and_save(&self) -> Result<RunningApplet> {
        let before = Timestamp::now();
        let service = self.start_service("")?;
        self.wait_until_saved_up_to(before).await?;
        Ok(service)
    }

    /// Waits until everything written so far is in the store.
    pub async fn wait_until_saved(&self) -> Result<()> {
        self.wait_until_saved_up_to(Timestamp::now()).await
    }

    /// Waits until everything written before `time` is in the store.
    pub async fn wait_until_saved_up_to(&self, time: Timestamp) -> Result<()> {
        let is_saved = |status: &Value| {
            let saved: Option<Timestamp> = status["savedUntil"].as_str().and_then(|time| time.parse().ok());
            saved.is_some_and(|saved| saved > time)
        };
        self.wait_for_status("the files are saved", is_saved).await
    }

    pub async fn wait_for_error(&self, part: &str) -> Result<()> {
        let has_failed = |status: &Value| status["error"].as_str().is_some_and(|error| error.contains(part));
        self.wait_for_status(part, has_failed).await
    }

    async fn wait_for_status(&self, description: &str, condition: impl Fn(&Value) -> bool) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let status = self.read_status().unwrap_or_default();
            if condition(&status) {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "timed out waiting for: {description}; the status is {status}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Describes each entry below a directory: its kind and mode, the target of a symbolic link, and the number of links,
/// modification time and content of a file. Leaves out `system/logs`, where saves and restores are recorded.
pub fn describe_tree(root: &Path) -> Result<BTreeMap<String, String>> {
    let mut descriptions = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.ends_with("home/system/logs") {
                continue;
            }
            let meta = fs::symlink_metadata(&path)?;
            let content = if meta.is_symlink() {
                format!("-> {}", fs::read_link(&path)?.display())
            } else if meta.is_dir() {
                pending.push(path.clone());
                String::new()
            } else {
                format!(
                    "{} links, time {}.{}: {}",
                    meta.nlink(),
                    meta.mtime(),
                    meta.mtime_nsec(),
                    fs::read_to_string(&path)?
                )
            };
            let name = path.strip_prefix(root)?.display().to_string();
            descriptions.insert(name, format!("{:o} {content}", meta.mode()));
        }
    }
    Ok(descriptions)
}
