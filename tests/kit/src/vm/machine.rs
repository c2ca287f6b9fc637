//! A virtual machine: a disk layered on the image, a seed with its user-data, and a QEMU process while it is on.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;

use super::accel::Accel;
use super::image::Image;
use super::qmp;
use super::shell::{self, Shell, ShellOutput};
use crate::child::{self, AtExit};

const TOOL_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for a guest to shut down after its power button is pressed; then its power is cut.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(180);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Processors, memory and disk; a resize changes only the first two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineSize {
    pub cores: u32,
    pub memory_mib: u32,
    /// Initial disk size.
    pub disk_gib: u32,
}

/// Parameters for a new machine.
pub struct MachineSpec<'a> {
    pub name: &'a str,
    pub user_data: &'a str,
    pub size: MachineSize,
    pub address: Ipv4Addr,
    /// The port on `address` that is forwarded to the machine's port 443.
    pub https_port: u16,
    /// Directory for the disk, the seed and the logs.
    pub dir: PathBuf,
    /// Path of the QMP socket, at most 107 bytes.
    pub qmp_socket: PathBuf,
    pub image: &'a Image,
    pub accel: Accel,
}

/// A machine, on or off.
pub struct Machine {
    pub name: String,
    pub address: Ipv4Addr,
    /// Directory for the disk, the seed and the logs.
    pub dir: PathBuf,
    https_port: u16,
    image: Image,
    accel: Accel,
    qmp_socket: PathBuf,
    state: Mutex<QemuState>,
}

#[derive(Default)]
struct QemuState {
    qemu: Option<Child>,
    last_powered_on_at: Option<Timestamp>,
    size: Option<MachineSize>,
}

impl QemuState {
    fn is_on(&mut self) -> bool {
        let Some(qemu) = self.qemu.as_mut() else { return false };
        if let Ok(None) = qemu.try_wait() {
            return true;
        }
        child::unregister(qemu.id());
        self.qemu = None;
        false
    }
}

impl Machine {
    /// Creates the disk and the seed.
    ///
    /// # Errors
    /// Fails if they cannot be created.
    pub fn new(spec: MachineSpec<'_>) -> Result<Self> {
        let MachineSpec { name, user_data, size, address, https_port, dir, qmp_socket, image, accel } = spec;
        fs::create_dir_all(&dir)?;
        fs::write(dir.join("user-data"), user_data)?;
        fs::write(dir.join("meta-data"), format!("instance-id: {name}\nlocal-hostname: {name}\n"))?;
        let mut seed = Command::new("genisoimage");
        seed.current_dir(&dir)
            .args(["-quiet", "-output", "seed.iso", "-volid", "cidata", "-joliet", "-rock"]);
        seed.args(["user-data", "meta-data"]);
        child::run(seed, TOOL_TIMEOUT)?;
        let mut disk = Command::new("qemu-img");
        disk.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(image.disk().canonicalize()?);
        disk.arg(dir.join("disk.qcow2")).arg(format!("{}G", size.disk_gib));
        child::run(disk, TOOL_TIMEOUT)?;
        Ok(Self {
            name: name.to_owned(),
            address,
            https_port,
            dir,
            image: image.clone(),
            accel,
            qmp_socket,
            state: Mutex::default(),
        })
    }

    /// Powers on; does nothing if the machine is already on.
    ///
    /// # Errors
    /// Fails if the log cannot be opened or QEMU cannot be started.
    pub fn power_on(&self, size: MachineSize) -> Result<()> {
        let mut state = self.state();
        if state.is_on() {
            return Ok(());
        }
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.join("qemu.log"))?;
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(self.accel.args()).args(["-display", "none", "-vga", "none"]);
        qemu.args(["-smp", &size.cores.to_string(), "-m", &size.memory_mib.to_string()]);
        // `cache=unsafe` is enough: if QEMU is killed, its writes are in the host's page cache, and only the guest's
        // own cache is lost.
        let disk =
            format!("file={},if=virtio,format=qcow2,cache=unsafe,discard=unmap", self.path("disk.qcow2"));
        let seed = format!("file={},if=virtio,format=raw,readonly=on", self.path("seed.iso"));
        qemu.args(["-drive", &disk, "-drive", &seed]);
        qemu.arg("-kernel").arg(self.image.kernel()).arg("-initrd").arg(self.image.initrd());
        qemu.args([
            "-append",
            "root=/dev/vda rw console=ttyS0 ds=nocloud net.ifnames=0 systemd.show_status=0 quiet",
        ]);
        let (address, https) = (self.address, self.https_port);
        let forward = |port: u16, to: u16| format!("hostfwd=tcp:{address}:{port}-:{to}");
        let net = format!("user,model=virtio-net-pci,{},{}", forward(https, 443), forward(shell::PORT, 22));
        qemu.args(["-nic", &net]);
        qemu.args(["-chardev", &format!("file,id=serial,path={},append=on", self.path("serial.log"))]);
        qemu.args(["-serial", "chardev:serial", "-device", "virtio-rng-pci"]);
        qemu.args(["-qmp", &format!("unix:{},server=on,wait=off", self.qmp_socket.display())]);
        qemu.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let qemu = qemu.spawn().context("cannot start qemu-system-x86_64")?;
        child::kill_on_exit(qemu.id(), AtExit::Kill);
        *state = QemuState { qemu: Some(qemu), last_powered_on_at: Some(Timestamp::now()), size: Some(size) };
        Ok(())
    }

    /// Powers on with the previous size, regardless of the provider's record.
    ///
    /// # Errors
    /// Fails if the machine has never been on, the log cannot be opened, or QEMU cannot be started.
    pub fn power_on_at_previous_size(&self) -> Result<()> {
        let size = self.state().size;
        self.power_on(size.with_context(|| format!("{} has never been on", self.name))?)
    }

    /// Cuts the power: the guest's unwritten data is lost.
    pub fn cut_power(&self) {
        if let Some(mut qemu) = self.state().qemu.take() {
            qemu.kill().ok();
            qemu.wait().ok();
            child::unregister(qemu.id());
        }
    }

    /// Presses the power button. Cuts the power if that fails, or if the guest is still on after `SHUTDOWN_TIMEOUT`.
    pub async fn shut_down(&self) {
        if qmp::execute(&self.qmp_socket, "system_powerdown").await.is_ok() {
            let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
            while self.is_on() && Instant::now() < deadline {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
        self.cut_power();
    }

    /// Whether QEMU is running. QEMU exits when the guest powers itself off.
    pub fn is_on(&self) -> bool {
        self.state().is_on()
    }

    /// The time of the last power-on.
    pub fn last_powered_on_at(&self) -> Option<Timestamp> {
        self.state().last_powered_on_at
    }

    /// Runs a script as root.
    ///
    /// # Errors
    /// Fails if the machine is unreachable or the timeout expires. The script's exit status is not checked.
    pub async fn run(&self, script: &str, timeout: Duration) -> Result<ShellOutput> {
        self.shell().run(script, timeout).await.with_context(|| self.name.clone())
    }

    /// Uploads a file; an existing target keeps its owner and mode.
    ///
    /// # Errors
    /// Fails like [`Self::run`], or if the file cannot be read or written.
    pub async fn upload(&self, file: &Path, to: &str, timeout: Duration) -> Result<()> {
        let input = fs::File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
        let output = self.shell().run_with(input.into(), &format!("cat >{to}"), timeout).await?;
        output.into_stdout().map(drop).with_context(|| format!("cannot upload {to} to {}", self.name))
    }

    fn shell(&self) -> Shell {
        Shell { address: self.address, key: self.image.key() }
    }

    /// Like [`Self::run`], but retries until the machine is reachable, for at most `timeout`; the last attempt may take
    /// another `timeout`.
    ///
    /// # Errors
    /// Fails if the machine is off, or still unreachable after the timeout.
    pub async fn run_when_reachable(&self, script: &str, timeout: Duration) -> Result<ShellOutput> {
        let deadline = Instant::now() + timeout;
        loop {
            ensure!(self.is_on(), "{} is off", self.name);
            match self.run(script, timeout).await {
                Ok(output) => return Ok(output),
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    }

    /// The machine's console output.
    pub fn serial(&self) -> String {
        let bytes = fs::read(self.dir.join("serial.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Saves the journal in [`Self::dir`]; returns the file's path.
    pub async fn save_journal(&self) -> Result<PathBuf> {
        let output = self.run("journalctl --no-pager -o short-iso-precise", Duration::from_secs(120)).await?;
        let path = self.dir.join("journal.txt");
        fs::write(&path, output.stdout)?;
        Ok(path)
    }

    fn path(&self, name: &str) -> String {
        Path::new(&self.dir).join(name).display().to_string()
    }

    fn state(&self) -> MutexGuard<'_, QemuState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.cut_power();
    }
}
