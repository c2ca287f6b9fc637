//! Env files: those that user-data creates on a machine, and those that operators write.

use proptest::prelude::*;
use svc::config::{Env, format_env_line, parse_env_file};
use svc::host::system::config::{
    DatabaseUrl, Identity, PlatformAccess, read_image_version, read_initial_proof_keys,
};
use svc::host::system::layout::Layout;
use svc::store::config::StoreConfig;
use svc::store::key::SlotPrefix;

use super::Target;
use super::systemd;

pub fn env_file() -> Target {
    Target {
        name: "env-file",
        valid: files().boxed(),
        check_any: check_any_file,
        check_valid: check_valid_file,
        cases: 1500,
    }
}

fn files() -> impl Strategy<Value = Vec<u8>> {
    let line = prop_oneof![
        6 => ("[A-Za-z_][A-Za-z0-9_]{0,12}", "[^\\r\\n\\x00]{0,24}").prop_map(|(name, value)| format_env_line(&name, &value)),
        1 => "[#;][^\\r\\n\\x00\\\\]{0,12}\n",
        1 => Just("\n".to_owned()),
        1 => "[A-Z]{1,5}=[a-z0-9:/._-]{0,12}\n",
    ];
    prop::collection::vec(line, 0..12).prop_map(|lines| lines.concat().into_bytes())
}

/// Checks that names are valid, that systemd reads the same pairs, and that written pairs are read back unchanged.
fn check_any_file(bytes: &[u8]) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Ok(()) };
    let pairs = match parse_env_file(text) {
        Ok(pairs) => pairs,
        Err(line) if (1..=text.lines().count()).contains(&line) => return Ok(()),
        Err(line) => {
            return Err(format!("reported line {line} of a file with {} lines", text.lines().count()));
        }
    };
    let is_name_char = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name =
        |name: &str| name.chars().all(is_name_char) && !name.starts_with(|c: char| c.is_ascii_digit());
    if let Some((name, _)) = pairs.iter().find(|(name, _)| name.is_empty() || !is_name(name)) {
        return Err(format!("{name:?} was accepted as a name"));
    }
    let read = systemd::parse_env_file(text);
    if read != pairs {
        return Err(format!("{pairs:?} was parsed, but systemd reads {read:?}"));
    }
    let rewritten: String = pairs.iter().map(|(name, value)| format_env_line(name, value)).collect();
    if parse_env_file(&rewritten).as_ref() == Ok(&pairs) {
        Ok(())
    } else {
        Err(format!("{rewritten:?}, written from the parsed pairs, is parsed differently"))
    }
}

/// Checks that every line that defines a variable is parsed.
fn check_valid_file(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let pairs = parse_env_file(text).map_err(|line| format!("line {line} was rejected"))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with(['#', ';'])).count();
    if pairs.len() == lines { Ok(()) } else { Err(format!("{} of {lines} lines were parsed", pairs.len())) }
}

/// Text in every secret variable's value; neither an error nor debug output may contain it.
const SECRET: &str = "hunter2-hunter2";

pub fn boot_env() -> Target {
    Target {
        name: "boot-env",
        valid: boot_envs().boxed(),
        check_any: check_any_boot,
        check_valid: check_valid_boot,
        cases: 800,
    }
}

/// Generates a document with the variables of three env files that `platform/userdata.rs` writes (host, store and
/// boot), and the `DATABASE_URL` that the updater adds to the host's.
fn boot_envs() -> impl Strategy<Value = Vec<u8>> {
    let user = "[A-Za-z0-9][A-Za-z0-9._|:@+-]{0,30}";
    let (slot, handle, version) = ("[a-z][a-z0-9-]{0,31}", "[a-z][a-z0-9-]{1,38}", "[0-9]{1,4}\\.[0-9]{1,3}");
    (user, slot, handle, version, any::<u32>(), any::<u128>()).prop_map(
        |(user, slot, handle, version, epoch, machine)| {
            let pairs = [
                ("SVC_MACHINE_ID", uuid::Uuid::from_u128(machine).to_string()),
                ("SVC_USER_ID", user),
                ("SVC_HANDLE", handle),
                ("SVC_SLOT", slot),
                ("SVC_EPOCH", epoch.to_string()),
                ("SVC_IMAGE_VERSION", version),
                ("PLATFORM_INTERNAL_URL", "https://platform.example:8443/base".to_owned()),
                ("UPGRADE_TOKEN", SECRET.to_owned()),
                ("SVC_PROOF_KEYS", r#"{"keys":[{"kid":"first","x":"AAAA"}]}"#.to_owned()),
                ("OBJECT_STORE_URL", "s3://fleet".to_owned()),
                ("OBJECT_STORE_ENDPOINT", "https://store.example".to_owned()),
                ("AWS_ACCESS_KEY_ID", "AKIA".to_owned()),
                ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
                ("AWS_CREDENTIAL_EXPIRATION", "2026-12-01T00:00:00.000Z".to_owned()),
                ("DATABASE_URL", format!("postgres://postgres:{SECRET}@127.0.0.1:5432/svc")),
                ("REGISTRATION_TOKEN", SECRET.to_owned()),
            ];
            pairs.iter().map(|(name, value)| format_env_line(name, value)).collect::<String>().into_bytes()
        },
    )
}

/// The identity that an applet reads from the files at startup, and what it would print: errors, or debug output that
/// contains the secret.
struct StartupResult {
    identity: Option<Identity>,
    printed: Option<String>,
}

fn read_settings(bytes: &[u8]) -> StartupResult {
    let dir = tempfile::tempdir().expect("create a temporary directory");
    let path = dir.path().join("host.env");
    std::fs::write(&path, bytes).expect("write a file");
    let mut env = Env::from_pairs([]).with_file(&path);
    let identity = Identity::read(&mut env);
    let version = read_image_version(&mut env);
    let platform = PlatformAccess::read(&mut env, &Layout::new(dir.path()));
    let store = StoreConfig::read(&mut env);
    let database = DatabaseUrl::read(&mut env);
    let keys = read_initial_proof_keys(&mut env);
    let database_error = database.as_ref().and_then(|url| url.config().err()).map(|error| error.to_string());
    let debug_output = format!("{identity:?} {version:?} {store:?} {database:?}");
    let all = identity.clone().zip(version).zip(platform).zip(store).zip(database).zip(keys);
    let printed = env.finish(all).err().map(|error| error.to_string());
    let printed = [printed, database_error].into_iter().flatten().reduce(|first, second| first + &second);
    // A log may contain debug output, so a secret in it counts as printed.
    let printed = if debug_output.contains(SECRET) { Some(debug_output) } else { printed };
    StartupResult { identity, printed }
}

/// Whether the secret is where logs may show it, such as in a variable's name or in the store's address.
fn has_misplaced_secret(bytes: &[u8]) -> bool {
    let secrets = ["UPGRADE_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "REGISTRATION_TOKEN"];
    let pairs = std::str::from_utf8(bytes).ok().and_then(|text| parse_env_file(text).ok());
    pairs.into_iter().flatten().any(|(name, value)| {
        name.contains(SECRET) || (value.contains(SECRET) && !secrets.contains(&name.as_str()))
    })
}

fn check_any_boot(bytes: &[u8]) -> Result<(), String> {
    if has_misplaced_secret(bytes) {
        return Ok(());
    }
    let StartupResult { identity, printed } = read_settings(bytes);
    if let Some(printed) = printed.filter(|printed| printed.contains(SECRET)) {
        return Err(format!("a secret is printed: {printed}"));
    }
    let Some(identity) = identity else { return Ok(()) };
    let slot = SlotPrefix::new(&identity.user, &identity.slot);
    let root: Vec<&str> = slot.root().as_ref().split('/').collect();
    let is_inside = root.len() == 2 && !root.contains(&"..");
    let is_plain = !identity.handle.as_str().contains(['/', '.', ' ', '\n', '"']);
    if is_inside && is_plain { Ok(()) } else { Err(format!("{identity:?} was accepted")) }
}

fn check_valid_boot(bytes: &[u8]) -> Result<(), String> {
    let StartupResult { identity, printed } = read_settings(bytes);
    if let Some(printed) = printed {
        return Err(printed);
    }
    let identity = identity.ok_or("neither a result nor an error")?;
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let pairs = parse_env_file(text).map_err(|line| format!("line {line}"))?;
    let value_of =
        |variable: &str| pairs.iter().find(|(name, _)| name == variable).map(|(_, value)| value.as_str());
    let is_same = value_of("SVC_USER_ID") == Some(identity.user.as_str())
        && value_of("SVC_SLOT") == Some(identity.slot.as_str())
        && value_of("SVC_MACHINE_ID") == Some(&*identity.machine.to_string())
        && value_of("SVC_EPOCH") == Some(&*identity.epoch.to_string());
    if is_same { Ok(()) } else { Err(format!("parsed as {identity:?}")) }
}
