//! Object keys (specification, part 2; contract, part 4). A slot's objects are under `<idpUserId>/<slot>/`.

use jiff::Timestamp;
use object_store::path::Path;

use svc_machine::epoch::Epoch;
use svc_machine::name::{IdpUserId, ImageVersion, Slot};

/// The file name of a host bundle, in the store and in URLs.
pub const BUNDLE_FILE: &str = "svc-host-bundle.tar.gz";

/// Number of digits in a pointer-log entry's name, enough for the highest `seq`.
const SEQ_DIGITS: usize = 16;

/// A substring of the full key, with the slot's prefix, of every snapshot and sidecar.
pub const SNAPSHOTS_DIR: &str = "/system/db/snapshots/";

/// The suffix of the key of every database pointer.
pub const POINTER_SUFFIX: &str = "/system/db/latest";

/// A substring of the key of every entry in a database pointer's log.
pub const POINTER_LOG_DIR: &str = "/system/db/pointer-log/";

/// The prefix of a slot's keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotPrefix(Path);

impl SlotPrefix {
    pub fn new(user: &IdpUserId, slot: &Slot) -> Self {
        Self(Path::from_iter([user.as_str(), slot.as_str()]))
    }

    fn join(&self, parts: &[&str]) -> Path {
        parts.iter().fold(self.0.clone(), |path, part| path.join(*part))
    }

    pub fn root(&self) -> &Path {
        &self.0
    }

    pub fn vps_meta(&self) -> Path {
        self.join(&["system", "vps-meta.json"])
    }

    pub fn pointer(&self) -> Path {
        self.join(&["system", "db", "latest"])
    }

    /// Returns the directory of the pointer's log. Each entry in it claims one `seq`.
    pub fn pointer_log(&self) -> Path {
        self.join(&["system", "db", "pointer-log"])
    }

    /// Returns the path of the log entry that claims `seq`. Names sort in numeric order.
    pub fn pointer_entry(&self, seq: u64) -> Path {
        self.pointer_paths().entry(seq)
    }

    /// Returns the paths of the pointer to the latest snapshot of the database.
    pub fn pointer_paths(&self) -> PointerPaths {
        PointerPaths { latest: self.pointer(), log: self.pointer_log() }
    }

    /// Returns the root of the repository that contains the backups of the owner's files.
    pub fn files(&self) -> Path {
        self.join(&["files"])
    }

    /// Returns the paths of the pointer to the latest snapshot of the owner's files.
    pub fn files_pointer_paths(&self) -> PointerPaths {
        PointerPaths { latest: self.join(&["files", "latest"]), log: self.join(&["files", "pointer-log"]) }
    }

    pub fn snapshots(&self) -> Path {
        self.join(&["system", "db", "snapshots"])
    }

    /// Returns the path of a snapshot's object. `key` is relative to the slot: `system/db/snapshots/….dump`. `None` for
    /// any other format, so that no pointer can refer to another slot.
    pub fn snapshot(&self, key: &str) -> Option<Path> {
        let key: SnapshotKey = key.parse().ok()?;
        Some(self.snapshots().join(key.as_str().rsplit('/').next()?))
    }

    /// Returns the path of a snapshot's sidecar; `None` as in [`Self::snapshot`].
    pub fn sidecar(&self, key: &str) -> Option<Path> {
        let dump = self.snapshot(key)?;
        Some(self.snapshots().join(format!("{}.json", dump.filename()?)))
    }
}

/// The paths of a pointer's objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointerPaths {
    pub latest: Path,
    /// The directory of the log.
    pub log: Path,
}

impl PointerPaths {
    /// Returns the path of the log entry that claims `seq`. Names sort in numeric order.
    pub fn entry(&self, seq: u64) -> Path {
        self.log.clone().join(format!("{seq:0SEQ_DIGITS$}.json"))
    }

    /// Returns the `seq` that a log entry claims; `None` if the object is not an entry, for example because it is in a
    /// directory below the log.
    pub fn entry_seq(&self, object: &Path) -> Option<u64> {
        let digits = object.filename()?.strip_suffix(".json")?;
        let is_number = digits.len() == SEQ_DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
        let seq = digits.parse().ok().filter(|_| is_number)?;
        (self.entry(seq) == *object).then_some(seq)
    }
}

/// The key of a snapshot, relative to its slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotKey(String);

impl SnapshotKey {
    pub const PATTERN: &str = "^system/db/snapshots/[A-Za-z0-9._-]{1,200}\\.dump$";

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for SnapshotKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = text.strip_prefix("system/db/snapshots/").and_then(|name| name.strip_suffix(".dump"));
        let is_valid = |name: &str| {
            let is_plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
            // An outage policy for epoch 1 allows `<day>*-1.dump*`. This also matches `…Z-900.dump-1.dump` and
            // `…Z-1.dumpZ-900.dump`, so names with a second epoch are rejected.
            let has_one_epoch =
                !name.contains(".dump") && (!name.contains("Z-") || parse_time_and_epoch(text).is_some());
            is_plain && (1..=200).contains(&name.len()) && !name.contains("..") && has_one_epoch
        };
        if name.is_some_and(is_valid) {
            Ok(Self(text.to_owned()))
        } else {
            Err("must be the key of a snapshot, system/db/snapshots/<time>-<epoch>.dump")
        }
    }
}

/// Marks where a page of snapshots begins: the page contains only keys that sort below this string, which need not be a
/// key itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotCursor(String);

impl SnapshotCursor {
    pub const PATTERN: &str = "^system/db/snapshots/[A-Za-z0-9._~-]{1,220}$";

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for SnapshotCursor {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_valid = |name: &str| {
            let is_plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~".contains(&b));
            is_plain && (1..=220).contains(&name.len())
        };
        if text.strip_prefix("system/db/snapshots/").is_some_and(is_valid) {
            Ok(Self(text.to_owned()))
        } else {
            Err("must be a cursor from an earlier page")
        }
    }
}

/// Returns a snapshot's key: `system/db/snapshots/<YYYY-MM-DDTHH-MM-SS.mmmZ>-<epoch>.dump`, relative to the slot.
pub fn snapshot_key(taken_at: Timestamp, epoch: Epoch) -> String {
    format!("system/db/snapshots/{}-{epoch}.dump", snapshot_name_prefix(taken_at))
}

/// Returns the name prefix of snapshots taken at this time; later snapshots' names sort after it.
pub fn snapshot_name_prefix(taken_at: Timestamp) -> String {
    svc_base::clock::rfc3339_ms(taken_at).replace(':', "-")
}

/// Parses the time and epoch of a key that has exactly the format of [`snapshot_key`].
fn parse_time_and_epoch(key: &str) -> Option<(Timestamp, Epoch)> {
    let (_, epoch) = key.strip_suffix(".dump")?.split_once("Z-")?;
    let (taken_at, epoch) = (time_in(key)?, epoch.parse().ok()?);
    (snapshot_key(taken_at, epoch) == key).then_some((taken_at, epoch))
}

/// Returns the time in a snapshot's key; `None` if the key does not have the format of [`snapshot_key`].
pub fn taken_at(key: &str) -> Option<Timestamp> {
    parse_time_and_epoch(key).map(|(taken_at, _)| taken_at)
}

/// Returns the epoch in a snapshot's key; `None` if the key does not have the format of [`snapshot_key`].
pub fn epoch_of(key: &str) -> Option<Epoch> {
    parse_time_and_epoch(key).map(|(_, epoch)| epoch)
}

/// Returns the time at the beginning of the name in a key or cursor.
pub(super) fn time_in(key: &str) -> Option<Timestamp> {
    let name = key.strip_prefix("system/db/snapshots/")?;
    let (date, rest) = name.split_once('T')?;
    let (time, _epoch) = rest.split_once("Z-")?;
    format!("{date}T{}Z", time.replace('-', ":")).parse().ok()
}

/// Whether the time and epoch in a sidecar match the snapshot's key. In a key that does not have the format of
/// [`snapshot_key`], only an epoch at the end is compared.
pub(super) fn matches_sidecar(key: &str, taken_at: Timestamp, epoch: Epoch) -> bool {
    if parse_time_and_epoch(key).is_some() {
        return snapshot_key(taken_at, epoch) == key;
    }
    let suffix = key.strip_suffix(".dump").and_then(|name| name.rsplit_once('-')).map(|(_, suffix)| suffix);
    suffix.and_then(|suffix| suffix.parse::<Epoch>().ok()).is_none_or(|key_epoch| key_epoch == epoch)
}

/// Whether the object is a snapshot's sidecar.
pub fn is_sidecar(object: &Path) -> bool {
    object.filename().is_some_and(|name| name.ends_with(".dump.json"))
}

/// The directory with all bundles, at the root of the bucket.
pub const BUNDLES_DIR: &str = "system-bundles";

/// Returns the path of a bundle's object; `suffix` is empty, `.sha256`, `.json` or `.json.sig`.
pub fn bundle(version: &ImageVersion, suffix: &str) -> Path {
    Path::from_iter([BUNDLES_DIR, version.as_str(), &format!("{BUNDLE_FILE}{suffix}")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_the_specification() {
        let prefix = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        assert_eq!(prefix.pointer().as_ref(), "user_1/primary/system/db/latest");
        let key = snapshot_key("2026-01-02T03:04:05.678Z".parse().unwrap(), Epoch(7));
        assert_eq!(key, "system/db/snapshots/2026-01-02T03-04-05.678Z-7.dump");
        assert_eq!(taken_at(&key), Some("2026-01-02T03:04:05.678Z".parse().unwrap()));
        assert_eq!(taken_at("system/db/snapshots/x.dump"), None);
        assert_eq!(epoch_of(&key), Some(Epoch(7)));
        assert_eq!(epoch_of("system/db/snapshots/x.dump"), None);
        let path = prefix.snapshot(&key).unwrap();
        assert_eq!(path.as_ref(), format!("user_1/primary/{key}"));
        assert_eq!(prefix.sidecar(&key).unwrap().as_ref(), format!("user_1/primary/{key}.json"));
    }

    #[test]
    fn sidecar_of_an_encoded_user_is_beside_its_dump() {
        let prefix = SlotPrefix::new(&"auth0|x".parse().unwrap(), &Slot::primary());
        let key = snapshot_key("2026-01-02T03:04:05.678Z".parse().unwrap(), Epoch(7));
        let (dump, sidecar) = (prefix.snapshot(&key).unwrap(), prefix.sidecar(&key).unwrap());
        assert_eq!(dump.as_ref(), format!("auth0%7Cx/primary/{key}"));
        assert_eq!(sidecar.as_ref(), format!("{dump}.json"));
        assert!(sidecar.prefix_matches(prefix.root()));
    }

    #[test]
    fn pointer_entries_sort_by_seq() {
        let prefix = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        let entry = prefix.pointer_entry(42);
        assert_eq!(entry.as_ref(), "user_1/primary/system/db/pointer-log/0000000000000042.json");
        let paths = prefix.pointer_paths();
        assert_eq!(paths.entry_seq(&entry), Some(42));
        let largest = prefix.pointer_entry(crate::pointer::MAX_SEQ);
        assert_eq!(paths.entry_seq(&largest), Some(crate::pointer::MAX_SEQ));
        assert!(entry < largest);
        for other in ["1.json", "000000000000004x.json", "0000000000000042", "x/0000000000000042.json"] {
            let object = Path::parse(format!("{}/{other}", prefix.pointer_log())).unwrap();
            assert_eq!(paths.entry_seq(&object), None, "{other}");
        }
    }

    #[test]
    fn snapshot_key_parses_only_valid_names() {
        let key = snapshot_key("2026-01-02T03:04:05.678Z".parse().unwrap(), Epoch(7));
        assert_eq!(key.parse::<SnapshotKey>().unwrap().as_str(), key);
        for bad in [
            "",
            "x",
            "system/db/snapshots/.dump",
            "system/db/snapshots/a..b.dump",
            "system/db/snapshots/a b.dump",
        ] {
            assert!(bad.parse::<SnapshotKey>().is_err(), "{bad}");
        }
    }

    #[test]
    fn snapshot_key_refuses_a_second_epoch() {
        let time = "system/db/snapshots/2026-11-24T03-04-05.678Z";
        for bad in [
            format!("{time}-1.dumpZ-900.dump"),
            format!("{time}-900.dumpZ-1.dump"),
            format!("{time}-900.dump-1.dump"),
            format!("{time}-900.dump.json-1.dump"),
            format!("{time}-900Z-1.dump"),
            format!("{time}-900-1.dump"),
            format!("{time}-007.dump"),
            format!("{time}-4294967296.dump"),
            "system/db/snapshots/2026-11-24T03-04-05Z-1.dump".to_owned(),
            "system/db/snapshots/2026-11-24T03-04-05.6780Z-1.dump".to_owned(),
        ] {
            assert!(bad.parse::<SnapshotKey>().is_err(), "{bad}");
            assert_eq!((taken_at(&bad), epoch_of(&bad)), (None, None), "{bad}");
        }
        for good in ["system/db/snapshots/x.dump", "system/db/snapshots/3-7.dump", &format!("{time}-7.dump")]
        {
            assert!(good.parse::<SnapshotKey>().is_ok(), "{good}");
        }
    }

    #[test]
    fn matches_sidecar_compares_time_and_epoch() {
        let taken_at: Timestamp = "2026-01-02T03:04:05.678Z".parse().unwrap();
        let key = snapshot_key(taken_at, Epoch(7));
        assert!(matches_sidecar(&key, taken_at, Epoch(7)));
        assert!(!matches_sidecar(&key, taken_at, Epoch(8)));
        assert!(!matches_sidecar(&key, Timestamp::UNIX_EPOCH, Epoch(7)));
        assert!(matches_sidecar("system/db/snapshots/3-7.dump", taken_at, Epoch(7)));
        assert!(!matches_sidecar("system/db/snapshots/2026-11-24Tx-1.dump", taken_at, Epoch(900)));
        assert!(matches_sidecar("system/db/snapshots/x.dump", taken_at, Epoch(7)));
    }

    #[test]
    fn snapshot_refuses_keys_outside_the_slot() {
        let prefix = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        for bad in [
            "",
            "x.dump",
            "system/db/snapshots/../../x.dump",
            "system/db/snapshots/a/b.dump",
            "system/db/snapshots/a",
        ] {
            assert_eq!(prefix.snapshot(bad), None, "{bad:?}");
        }
    }
}
