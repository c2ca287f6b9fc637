//! Deliberate defects, injected from outside: in the store, or on a disk. The product has no hooks for them.

use std::fmt;
use std::fs;
use std::str::FromStr;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::first_machine::MachineRecord;
use super::stack::Stack;
use crate::s3::{Fault, FaultRule};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedDefect {
    /// The store rejects snapshots.
    Backup,
    /// The store returns corrupted content.
    Restore,
    /// The host presents a TLS key other than the registered one.
    Pin,
    /// The recovery's fence is removed.
    Fence,
}

impl InjectedDefect {
    pub const ALL: [Self; 4] = [Self::Backup, Self::Restore, Self::Pin, Self::Fence];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Backup => "backup",
            Self::Restore => "restore",
            Self::Pin => "pin",
            Self::Fence => "fence",
        }
    }

    /// The step at which the scenario must fail.
    pub fn failing_step(self) -> &'static str {
        match self {
            Self::Backup => "backup",
            Self::Restore => "recover",
            Self::Pin => "use",
            Self::Fence => "fenced",
        }
    }
}

impl fmt::Display for InjectedDefect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for InjectedDefect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let defect = Self::ALL.into_iter().find(|defect| defect.as_str() == text);
        defect.ok_or_else(|| "must be backup, restore, pin or fence".to_owned())
    }
}

/// Makes the store fail every snapshot write.
pub fn fail_snapshot_puts(stack: &Stack) {
    for method in ["PUT", "POST"] {
        stack.store.add_fault(
            FaultRule::new(Fault::Status(500)).method(method).key("/system/db/snapshots/").always(),
        );
    }
    println!("      (injected defect: the store fails every snapshot write)");
}

/// Makes the store corrupt every snapshot and sidecar that is read.
pub fn corrupt_snapshot_gets(stack: &Stack) {
    stack.store.add_fault(FaultRule::new(Fault::CorruptBody).method("GET").key(".dump").always());
    println!("      (injected defect: the store corrupts every snapshot and sidecar that is read)");
}

/// Replaces the certificate and key on the host's disk, and restarts its gateway.
///
/// # Errors
/// Fails if the files cannot be written, or the gateway cannot be restarted.
pub async fn replace_tls_key(stack: &Stack, machine: &MachineRecord) -> Result<()> {
    let (cert, key) = stack.ca.issue(&["svc-host"])?;
    let tls = stack.provider.disk(&machine.server)?.join("var/lib/svc/tls");
    stack.provider.stop_service(&machine.server, "svc-gateway").await?;
    fs::write(tls.join("cert.pem"), cert)?;
    fs::write(tls.join("key.pem"), key)?;
    let started = stack.provider.run_unit(&machine.server, "svc-gateway", &[]).await?;
    ensure!(started.status.success(), "svc-gateway: {}", String::from_utf8_lossy(&started.stderr));
    println!("      (injected defect: the host has a different TLS key)");
    Ok(())
}

/// Resets the pointer's fence to the first machine's epoch, as if that machine had not been fenced off.
///
/// # Errors
/// Fails if there is no pointer.
pub fn remove_fence(stack: &Stack, first: &MachineRecord) -> Result<()> {
    let mut pointer = stack.slot.read_pointer(&stack.store)?;
    pointer["fenceEpoch"] = Value::from(first.epoch);
    if let Some(fields) = pointer.as_object_mut() {
        fields.remove("fenceMachineId");
    }
    stack.slot.write(&stack.store, "system/db/latest", &pointer);
    // The log must have the same value: otherwise, its fence would still apply.
    let entry = format!("system/db/pointer-log/{:016}.json", pointer["seq"].as_u64().unwrap_or_default());
    stack.slot.write(&stack.store, &entry, &pointer);
    println!("      (injected defect: the pointer's fence is back at epoch {})", first.epoch);
    Ok(())
}
