//! Keys of objects (specification, part 2; contract, part 4). A slot's objects lie below `<idpUserId>/<slot>/`.

use jiff::Timestamp;
use object_store::path::Path;

use crate::machine::epoch::Epoch;
use crate::machine::name::{IdpUserId, ImageVersion, Slot};

/// The file name of a host bundle, in the store and in URLs.
pub const BUNDLE_FILE: &str = "svc-host-bundle.tar.gz";

/// The place of one slot in the bucket.
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

    pub fn snapshots(&self) -> Path {
        self.join(&["system", "db", "snapshots"])
    }

    /// The object of a snapshot's key as the pointer names it: relative to the slot, `system/db/snapshots/….dump`.
    /// `None` when the key is not of that form, so that no pointer leads out of the slot.
    pub fn snapshot(&self, key: &str) -> Option<Path> {
        let key: SnapshotKey = key.parse().ok()?;
        Some(self.snapshots().join(key.as_str().rsplit('/').next()?))
    }

    /// The side record of a snapshot.
    pub fn side_record(&self, key: &str) -> Option<Path> {
        self.snapshot(key).map(|path| Path::from(format!("{path}.json")))
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
        let fits = |name: &str| {
            let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
            plain && (1..=200).contains(&name.len()) && !name.contains("..")
        };
        if name.is_some_and(fits) {
            Ok(Self(text.to_owned()))
        } else {
            Err("must be the key of a snapshot, system/db/snapshots/<time>-<epoch>.dump")
        }
    }
}

/// `system/db/snapshots/<YYYY-MM-DDTHH-MM-SS.mmmZ>-<epoch>.dump`, relative to the slot.
pub fn snapshot_key(taken_at: Timestamp, epoch: Epoch) -> String {
    let time = crate::clock::rfc3339_ms(taken_at).replace(':', "-");
    format!("system/db/snapshots/{time}-{epoch}.dump")
}

/// The time in a snapshot's key.
pub fn taken_at(key: &str) -> Option<Timestamp> {
    let name = key.strip_prefix("system/db/snapshots/")?;
    let (date, rest) = name.split_once('T')?;
    let (time, _epoch) = rest.split_once("Z-")?;
    format!("{date}T{}Z", time.replace('-', ":")).parse().ok()
}

/// Where all bundles are, at the bucket's root.
pub const BUNDLES: &str = "system-bundles";

/// A bundle's object at the bucket's root; `suffix` is empty, `.sha256`, `.json` or `.json.sig`.
pub fn bundle(version: &ImageVersion, suffix: &str) -> Path {
    Path::from_iter([BUNDLES, version.as_str(), &format!("{BUNDLE_FILE}{suffix}")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_lie_where_the_specification_says() {
        let prefix = SlotPrefix::new(&"user_1".parse().unwrap(), &Slot::primary());
        assert_eq!(prefix.pointer().as_ref(), "user_1/primary/system/db/latest");
        let key = snapshot_key("2026-01-02T03:04:05.678Z".parse().unwrap(), Epoch(7));
        assert_eq!(key, "system/db/snapshots/2026-01-02T03-04-05.678Z-7.dump");
        assert_eq!(taken_at(&key), Some("2026-01-02T03:04:05.678Z".parse().unwrap()));
        assert_eq!(taken_at("system/db/snapshots/x.dump"), None);
        let path = prefix.snapshot(&key).unwrap();
        assert_eq!(path.as_ref(), format!("user_1/primary/{key}"));
        assert_eq!(prefix.side_record(&key).unwrap().as_ref(), format!("user_1/primary/{key}.json"));
    }

    #[test]
    fn a_key_is_what_its_pattern_says() {
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
    fn a_pointer_cannot_lead_out_of_its_slot() {
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
