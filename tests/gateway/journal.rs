//! Tests the entries that the gateway sends to the systemd journal. The test receives them on a socket at the journal's
//! path.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::child::OwnedChild;

use super::host::Machine;

/// Replaces the journal's socket with `$1` and runs a command. The script must run in a private mount namespace, so
/// that the machine's own journal is unaffected.
const FAKE_JOURNAL_SCRIPT: &str = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && \
    touch /run/systemd/journal/socket && mount --bind \"$1\" /run/systemd/journal/socket && shift && exec \"$@\"";

type Entry = BTreeMap<String, Vec<String>>;

/// Parses the native protocol: `NAME=value`, or `NAME`, an eight-byte length, and the value.
fn parse_entry(mut bytes: &[u8]) -> Result<Entry> {
    let mut fields = Entry::new();
    while !bytes.is_empty() {
        let end = bytes.iter().position(|&byte| byte == b'\n').context("an unterminated line")?;
        let line = std::str::from_utf8(&bytes[..end])?;
        bytes = &bytes[end + 1..];
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name, value.to_owned()),
            None => {
                let (size, rest) = bytes.split_at_checked(8).context("a truncated length")?;
                let size = usize::try_from(u64::from_le_bytes(size.try_into()?))?;
                let (value, rest) = rest.split_at_checked(size).context("a truncated value")?;
                bytes = rest.strip_prefix(b"\n").context("an unterminated value")?;
                (line, String::from_utf8(value.to_vec())?)
            }
        };
        fields.entry(name.to_owned()).or_default().push(value);
    }
    Ok(fields)
}

#[tokio::test(flavor = "multi_thread")]
async fn journal_lines_have_machine_and_request_fields() -> Result<()> {
    svc::http::tls::install_provider();
    // Without a database, `/readyz` fails and the log states the reason.
    let machine = Machine::new("postgres://nobody:secret-word@127.0.0.1:1/none")?;
    let socket = machine.path("journal.sock");
    let journal = UnixDatagram::bind(&socket)?;
    journal.set_read_timeout(Some(Duration::from_millis(100)))?;
    let stderr = File::create(machine.path("stderr"))?;
    let meta = stderr.metadata()?;

    let gateway = machine.command();
    let mut command = Command::new("unshare");
    // In a user namespace, an unprivileged user can mount file systems.
    command.args(["-Urm", "sh", "-c", FAKE_JOURNAL_SCRIPT, "sh"]).arg(&socket);
    command.arg(gateway.get_program()).args(gateway.get_args()).env_clear();
    command.envs(gateway.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("JOURNAL_STREAM", format!("{}:{}", meta.dev(), meta.ino())).env("RUST_LOG", "svc=debug");
    let mut process = OwnedChild::spawn(command.stderr(stderr)).context("cannot run unshare")?;

    let mut entries = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut buffer = vec![0; 1 << 16];
    let mut probe = None;
    let id = "journal-request-0001";
    let belongs_to_request = |entry: &Entry| entry.get("SVC_REQUEST_ID").is_some_and(|ids| ids == &[id]);
    let request_entries = loop {
        if let Ok(size) = journal.recv(&mut buffer)
            && size > 0
        {
            entries.push(parse_entry(&buffer[..size])?);
        }
        let gateway_address = entries.iter().find_map(|entry: &Entry| Some(entry.get("ADDRESS")?[0].clone()));
        if let (None, Some(address)) = (&probe, gateway_address) {
            let client = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).build()?;
            let request = client.get(format!("https://{address}/readyz")).header("x-request-id", id);
            probe = Some(tokio::spawn(request.send()));
        }
        let all: Vec<&Entry> = entries.iter().filter(|entry| belongs_to_request(entry)).collect();
        if all.iter().any(|entry| entry["MESSAGE"][0].contains("request completed")) {
            break all.into_iter().cloned().collect::<Vec<_>>();
        }
        if Instant::now() > deadline {
            let printed = std::fs::read_to_string(machine.path("stderr"))?;
            anyhow::bail!("no entries for the request among {entries:#?}\nstderr: {printed}");
        }
    };
    process.kill()?;

    for entry in &entries {
        ensure!(entry.get("SVC_MACHINE_ID") == Some(&vec![machine.id.to_string()]), "{entry:?}");
        ensure!(entry.get("SYSLOG_IDENTIFIER") == Some(&vec!["svc-gateway".to_owned()]), "{entry:?}");
    }
    let cause = request_entries
        .iter()
        .find(|entry| entry["MESSAGE"][0].contains("not ready"))
        .context("no entry with the cause")?;
    ensure!(cause["PRIORITY"] == ["4"] && cause["ERROR"][0].contains("connect"), "{cause:?}");
    let completed = request_entries
        .iter()
        .find(|entry| entry["MESSAGE"][0].contains("request completed"))
        .context("no entry for the completed request")?;
    ensure!(completed["PRIORITY"] == ["6"] && completed["STATUS"] == ["503"], "{completed:?}");
    ensure!(!format!("{entries:?}").contains("secret-word"), "the journal contains a password");
    // Journal entries are not duplicated on standard error.
    let printed = std::fs::read_to_string(machine.path("stderr"))?;
    ensure!(!printed.contains("request completed"), "{printed}");
    Ok(())
}
