//! Host paths: the specification's layout below `SVC_ROOT` (default `/`).

use std::path::{Path, PathBuf};

use super::vars;
use svc_machine::name::ImageVersion;

/// File name of the agents' socket in [`Layout::bridge_sockets`].
pub const BRIDGE_SOCKET: &str = "bridge.sock";

/// All paths on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the layout below `SVC_ROOT`.
    pub fn from_process() -> Self {
        Self::new(vars::SVC_ROOT.env_value().unwrap_or_else(|| vars::SVC_ROOT.default_value()))
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn opt(&self, rest: &str) -> PathBuf {
        self.root.join("opt/svc").join(rest)
    }

    fn state(&self, rest: &str) -> PathBuf {
        self.root.join("var/lib/svc").join(rest)
    }

    pub fn host_env(&self) -> PathBuf {
        self.opt("env/host.env")
    }

    pub fn store_env(&self) -> PathBuf {
        self.opt("env/r2.env")
    }

    pub fn boot_env(&self) -> PathBuf {
        self.opt("env/boot.env")
    }

    /// Database container environment, including the password. Owned by root; read by podman and `svc-update`.
    pub fn postgres_env(&self) -> PathBuf {
        self.opt("env/postgres.env")
    }

    /// Ids of the keys trusted by root's updater.
    pub fn trusted_keys(&self) -> PathBuf {
        self.update_state().join("trusted-keys.json")
    }

    /// The updater's own settings, including its trusted keys.
    pub fn update_env(&self) -> PathBuf {
        self.opt("env/update.env")
    }

    pub fn releases(&self) -> PathBuf {
        self.opt("releases")
    }

    pub fn release(&self, version: &ImageVersion) -> PathBuf {
        self.releases().join(version.as_str())
    }

    /// Symlink to the current release, replaced by updates.
    pub fn current(&self) -> PathBuf {
        self.opt("current")
    }

    /// Symlink into the current release: `bin`, `app` or `runtime`.
    pub fn link(&self, name: &str) -> PathBuf {
        self.opt(name)
    }

    /// The restore gate's marker. The gateway may only start if it exists.
    pub fn restore_complete(&self) -> PathBuf {
        self.opt("restore-complete")
    }

    /// Home directory of the `svc` user, with the owner's program settings. The owner's files are in [`Layout::home`].
    pub fn user_home(&self) -> PathBuf {
        self.root.join("home/svc")
    }

    pub fn home(&self) -> PathBuf {
        self.root.join("home/svc/home")
    }

    pub fn apps(&self) -> PathBuf {
        self.home().join("apps")
    }

    /// The current release's default apps.
    pub fn bundled_apps(&self) -> PathBuf {
        self.opt("current/app/apps")
    }

    /// Record of bundled app copies. Stored alongside the apps so that it moves with them and the same users can write
    /// it.
    pub fn bundled_apps_record(&self) -> PathBuf {
        self.apps().join(".bundled-apps.json")
    }

    /// Shell build in the current release.
    pub fn shell(&self) -> PathBuf {
        self.opt("app/shell")
    }

    pub fn runtime(&self) -> PathBuf {
        self.opt("runtime")
    }

    /// The owner's settings: cost limits, time zone, agents, prices and storage quotas.
    pub fn settings(&self) -> PathBuf {
        self.home().join("system/config.json")
    }

    pub fn logs(&self) -> PathBuf {
        self.home().join("system/logs")
    }

    /// The owner's last valid settings.
    pub fn last_good_settings(&self) -> PathBuf {
        self.state("good-config.json")
    }

    /// Days for which all interactions have been counted.
    pub fn usage_seals(&self) -> PathBuf {
        self.state("usage-seals.json")
    }

    /// Dispatches that have been accepted but not yet recorded.
    pub fn dispatches(&self) -> PathBuf {
        self.state("dispatches")
    }

    pub fn tls_cert(&self) -> PathBuf {
        self.state("tls/cert.pem")
    }

    pub fn tls_key(&self) -> PathBuf {
        self.state("tls/key.pem")
    }

    /// CA-issued certificate chain for [`Layout::tls_key`].
    pub fn tls_chain(&self) -> PathBuf {
        self.state("tls/chain.pem")
    }

    /// ACME account, including its key.
    pub fn acme_account(&self) -> PathBuf {
        self.state("tls/acme-account.json")
    }

    /// The certificate settings from the last heartbeat response; `host.env` has the initial name.
    pub fn certificate_settings(&self) -> PathBuf {
        self.state("tls/settings.json")
    }

    /// The gateway's certificate, reported by the heartbeat.
    pub fn certificate(&self) -> PathBuf {
        self.state("certificate.json")
    }

    pub fn update_state(&self) -> PathBuf {
        self.state("update")
    }

    /// Exists while an update is in progress or interrupted.
    pub fn update_journal(&self) -> PathBuf {
        self.update_state().join("journal.json")
    }

    /// Outcome of the last update, reported by the heartbeat.
    pub fn last_update(&self) -> PathBuf {
        self.update_state().join("last.json")
    }

    /// Proof keys from the last heartbeat response; `host.env` has the initial ones.
    pub fn proof_keys(&self) -> PathBuf {
        self.state("proof-keys.json")
    }

    /// Result of the last backup run.
    pub fn last_backup(&self) -> PathBuf {
        self.state("last-backup.json")
    }

    /// Snapshot held back from becoming the latest because the database shrank.
    pub fn held_snapshot(&self) -> PathBuf {
        self.state("held-snapshot.json")
    }

    /// Result of the last snapshot check of a kind: `verify` or `drill`.
    pub fn last_check(&self, kind: &str) -> PathBuf {
        self.state(&format!("last-{kind}.json"))
    }

    /// For each snapshot: the last complete read, any corruption it found, and the error if a later read failed.
    pub fn verification_history(&self) -> PathBuf {
        self.state("verified.json")
    }

    /// Dump being loaded for a drill or the side database, and the lock for checks and the side database.
    pub fn drill_state(&self) -> PathBuf {
        self.state("drill")
    }

    /// The side database's state.
    pub fn side_database_state(&self) -> PathBuf {
        self.state("side.json")
    }

    /// cloud-init instance data.
    pub fn instance_data(&self) -> PathBuf {
        self.root.join("run/cloud-init/instance-data.json")
    }

    /// This machine's epoch, if the platform has raised it.
    pub fn raised_epoch(&self) -> PathBuf {
        self.state("epoch.json")
    }

    /// Progress of the current or last backup.
    pub fn backup_progress(&self) -> PathBuf {
        self.state("backup-progress.json")
    }

    /// Exists while this machine's writers are stopping or stopped.
    pub fn quiesce(&self) -> PathBuf {
        self.state("quiesce.json")
    }

    pub fn quiesce_lock(&self) -> PathBuf {
        self.state("quiesce.lock")
    }

    pub fn backup_lock(&self) -> PathBuf {
        self.state("backup.lock")
    }

    /// Backup uploads that may still be open in the store.
    pub fn open_uploads(&self) -> PathBuf {
        self.state("open-uploads.json")
    }

    /// Clock readings from the last run of `svc-heartbeat`, which deletes expired log files.
    pub fn retention_clock(&self) -> PathBuf {
        self.state("heartbeat-clock.json")
    }

    pub fn retention_lock(&self) -> PathBuf {
        self.state("heartbeat.lock")
    }

    /// Request file for a unit run, watched by a path unit.
    pub fn request(&self, name: &str) -> PathBuf {
        self.state("requests").join(name)
    }

    /// Exists while this machine's heartbeats fail.
    pub fn heartbeat_failure(&self) -> PathBuf {
        self.state("heartbeat-failure.json")
    }

    /// Exists once the platform has reported that this machine has been replaced or deleted.
    pub fn superseded(&self) -> PathBuf {
        self.state("superseded.json")
    }

    /// Dump, journal and lock of a restore or an import.
    pub fn restore_state(&self) -> PathBuf {
        self.state("restore")
    }

    /// Registration request as first sent, and its result.
    pub fn registration(&self) -> PathBuf {
        self.state("register.json")
    }

    /// Object store credentials as last renewed by the platform; `r2.env` has the initial ones.
    pub fn store_credentials(&self) -> PathBuf {
        self.state("store-credentials.json")
    }

    /// The `UPGRADE_TOKEN` after its last rotation; `host.env` has the initial one.
    pub fn upgrade_token(&self) -> PathBuf {
        self.state("upgrade-token.json")
    }

    /// File-backup key, cache and status.
    pub fn files_state(&self) -> PathBuf {
        self.state("files")
    }

    /// Result of restoring the owner's files. Success is only recorded once they've been moved into place.
    pub fn files_restore_outcome(&self) -> PathBuf {
        self.files_state().join("restored.json")
    }

    /// File-backup key, readable only by the gateway's user.
    pub fn files_key(&self) -> PathBuf {
        self.files_state().join("key")
    }

    /// Agents' running tool calls, as last recorded by the watcher.
    pub fn tool_calls(&self) -> PathBuf {
        self.state("tool-calls.json")
    }

    /// Tool calls that a hook couldn't report. Written by the owner's programs and read by the watcher.
    pub fn audit_gaps(&self) -> PathBuf {
        self.undelivered_hooks_dir().join("audit-gaps.jsonl")
    }

    /// Held by root while an archive is being exported.
    pub fn export_lock(&self) -> PathBuf {
        self.root.join("run/svc/export.lock")
    }

    /// Held by root while an archive is being imported.
    pub fn import_lock(&self) -> PathBuf {
        self.root.join("run/svc/import.lock")
    }

    /// Directory where hooks leave files for the watcher. Belongs to the owner's user.
    pub fn undelivered_hooks_dir(&self) -> PathBuf {
        self.root.join("run/svc/hooks")
    }

    /// Directory of svc-watch's sockets: `watch.sock` for all hooks, including agents' hooks, and `changes.sock` for
    /// svc-files. Belongs to the gateway's user.
    pub fn watch_sockets(&self) -> PathBuf {
        self.root.join("run/svc/watch")
    }

    /// Directory of `bridge.sock`, for agents with a token. Belongs to the gateway's user.
    pub fn bridge_sockets(&self) -> PathBuf {
        self.root.join("run/svc/bridge")
    }

    /// Directory of `gateway.sock`, hidden from agents' units. Belongs to the gateway's user.
    pub fn gateway_sockets(&self) -> PathBuf {
        self.root.join("run/svc/gateway")
    }

    /// Directory of `history.sock`, which the gateway connects to. Belongs to the gateway's user.
    pub fn history_sockets(&self) -> PathBuf {
        self.root.join("run/svc/files")
    }

    /// Directory of `shell.sock`, `code.sock` and `agent.sock`, which the gateway connects to. Hidden from agents'
    /// units. Belongs to the owner's user.
    pub fn owner_sockets(&self) -> PathBuf {
        self.root.join("run/svc/owner")
    }
}
