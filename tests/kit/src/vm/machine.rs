//! One machine: a disk of its own over the image's, a seed with its user-data, and a QEMU while its power is on.

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
use super::shell::{self, Said, Shell};
use crate::child::{self, AtExit};

const TOOL: Duration = Duration::from_secs(60);
/// A guest that does not hear the power button by then never will.
const SHUTDOWN: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(100);

/// Processors and memory, which a resize changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub cores: u32,
    pub memory_mib: u32,
    /// Of the disk, when it is made.
    pub disk_gib: u32,
}

/// What a machine is made of.
pub struct Plan<'a> {
    pub name: &'a str,
    pub user_data: &'a str,
    pub size: Size,
    pub address: Ipv4Addr,
    /// The port of `address` that stands for the machine's 443.
    pub https_port: u16,
    /// Where its disk, its seed and its logs go.
    pub dir: PathBuf,
    /// The path of a socket, of at most 107 bytes.
    pub control: PathBuf,
    pub image: &'a Image,
    pub accel: Accel,
}

/// A machine, on or off.
pub struct Machine {
    pub name: String,
    pub address: Ipv4Addr,
    /// Where its disk, its seed and its logs are.
    pub dir: PathBuf,
    https_port: u16,
    image: Image,
    accel: Accel,
    control: PathBuf,
    power: Mutex<Power>,
}

#[derive(Default)]
struct Power {
    qemu: Option<Child>,
    on_since: Option<Timestamp>,
    size: Option<Size>,
}

impl Machine {
    /// Makes the disk and the seed.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn new(plan: Plan<'_>) -> Result<Self> {
        let Plan { name, user_data, size, address, https_port, dir, control, image, accel } = plan;
        fs::create_dir_all(&dir)?;
        fs::write(dir.join("user-data"), user_data)?;
        fs::write(dir.join("meta-data"), format!("instance-id: {name}\nlocal-hostname: {name}\n"))?;
        let mut seed = Command::new("genisoimage");
        seed.current_dir(&dir)
            .args(["-quiet", "-output", "seed.iso", "-volid", "cidata", "-joliet", "-rock"]);
        seed.args(["user-data", "meta-data"]);
        child::run(seed, TOOL)?;
        let mut disk = Command::new("qemu-img");
        disk.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(image.disk().canonicalize()?);
        disk.arg(dir.join("disk.qcow2")).arg(format!("{}G", size.disk_gib));
        child::run(disk, TOOL)?;
        Ok(Self {
            name: name.to_owned(),
            address,
            https_port,
            dir,
            image: image.clone(),
            accel,
            control,
            power: Mutex::default(),
        })
    }

    /// Power on; one that is on stays as it is.
    ///
    /// # Errors
    /// When QEMU cannot be started.
    pub fn switch_on(&self, size: Size) -> Result<()> {
        let mut power = self.power();
        if power.qemu.is_some() {
            return Ok(());
        }
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.join("qemu.log"))?;
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(self.accel.args()).args(["-display", "none", "-vga", "none"]);
        qemu.args(["-smp", &size.cores.to_string(), "-m", &size.memory_mib.to_string()]);
        // What QEMU has taken outlives its kill, so the host's cache may hold it: only the guest's own cache is lost.
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
        qemu.args(["-qmp", &format!("unix:{},server=on,wait=off", self.control.display())]);
        qemu.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let qemu = qemu.spawn().context("start qemu-system-x86_64")?;
        child::kill_on_exit(qemu.id(), AtExit::Kill);
        *power = Power { qemu: Some(qemu), on_since: Some(Timestamp::now()), size: Some(size) };
        Ok(())
    }

    /// Power on with what it had the last time, whatever its provider knows of it.
    ///
    /// # Errors
    /// When it never was on, or QEMU cannot be started.
    pub fn switch_on_again(&self) -> Result<()> {
        let size = self.power().size;
        self.switch_on(size.with_context(|| format!("{} was never on", self.name))?)
    }

    /// The power goes away: what the guest has not written is lost.
    pub fn cut(&self) {
        if let Some(mut qemu) = self.power().qemu.take() {
            qemu.kill().ok();
            qemu.wait().ok();
            child::unregister(qemu.id());
        }
    }

    /// The power button; one that does not obey is cut.
    pub async fn shut_down(&self) {
        if qmp::command(&self.control, "system_powerdown").await.is_ok() {
            let deadline = Instant::now() + SHUTDOWN;
            while self.is_on() && Instant::now() < deadline {
                tokio::time::sleep(LOOK).await;
            }
        }
        self.cut();
    }

    /// Whether QEMU runs; a guest that switches itself off ends it.
    pub fn is_on(&self) -> bool {
        let mut power = self.power();
        let Some(qemu) = power.qemu.as_mut() else { return false };
        if let Ok(None) = qemu.try_wait() {
            return true;
        }
        child::unregister(qemu.id());
        power.qemu = None;
        false
    }

    /// When its power came on last.
    pub fn on_since(&self) -> Option<Timestamp> {
        self.power().on_since
    }

    /// Runs a script as root.
    ///
    /// # Errors
    /// When it cannot be reached, or the script does not end in time; how it ended is in the answer.
    pub async fn run(&self, script: &str, deadline: Duration) -> Result<Said> {
        self.shell().run(script, deadline).await.with_context(|| self.name.clone())
    }

    /// Brings a file; what is at `to` already keeps owner and mode.
    ///
    /// # Errors
    /// As [`Self::run`], and when it cannot be read here or written there.
    pub async fn bring(&self, file: &Path, to: &str, deadline: Duration) -> Result<()> {
        let input = fs::File::open(file).with_context(|| format!("read {}", file.display()))?;
        let said = self.shell().run_with(input.into(), &format!("cat >{to}"), deadline).await?;
        said.success().map(drop).with_context(|| format!("bring {to} to {}", self.name))
    }

    fn shell(&self) -> Shell {
        Shell { address: self.address, key: self.image.key() }
    }

    /// The same, again and again until the machine can be reached.
    pub async fn run_when_up(&self, script: &str, deadline: Duration) -> Result<Said> {
        let end = Instant::now() + deadline;
        loop {
            ensure!(self.is_on(), "{} is off", self.name);
            match self.run(script, deadline).await {
                Ok(said) => return Ok(said),
                Err(error) if Instant::now() >= end => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    }

    /// What the machine has printed on its console.
    pub fn serial(&self) -> String {
        let bytes = fs::read(self.dir.join("serial.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Keeps the journal beside the other logs, as far as the machine can be asked.
    pub async fn keep_journal(&self) -> Result<PathBuf> {
        let said = self.run("journalctl --no-pager -o short-iso-precise", Duration::from_secs(120)).await?;
        let path = self.dir.join("journal.txt");
        fs::write(&path, said.stdout)?;
        Ok(path)
    }

    fn path(&self, name: &str) -> String {
        Path::new(&self.dir).join(name).display().to_string()
    }

    fn power(&self) -> MutexGuard<'_, Power> {
        self.power.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.cut();
    }
}
