//! Reads users and groups straight from `/etc/passwd` and `/etc/group`: a static binary must not call the libc lookup
//! functions.

use std::collections::HashMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// A system's users and groups. Unreadable files are treated as empty.
#[derive(Default)]
pub struct Accounts {
    passwd: String,
    group: String,
}

/// A process's uid and gids, which the kernel checks against a file's owner and group.
#[derive(Debug, PartialEq, Eq)]
pub struct Credentials {
    uid: u32,
    gids: Vec<u32>,
}

impl Accounts {
    /// Reads `etc/passwd` and `etc/group` under the system root.
    pub fn load(root: &Path) -> Self {
        let read = |path| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        Self { passwd: read("etc/passwd"), group: read("etc/group") }
    }

    /// Builds lookup tables, for resolving the owners of many files.
    pub fn names(&self) -> AccountNames {
        AccountNames { users: NameTable::parse(&self.passwd), groups: NameTable::parse(&self.group) }
    }

    pub fn uid(&self, user: &str) -> Option<u32> {
        find_fields(&self.passwd, user)?.get(2)?.parse().ok()
    }

    /// Returns the user's uid and gids: the primary group, then every group listing the user as a member.
    pub fn credentials(&self, user: &str) -> Option<Credentials> {
        let primary_gid = find_fields(&self.passwd, user)?.get(3)?.parse().ok()?;
        let other_gids = self.group.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            fields.get(3)?.split(',').find(|member| *member == user)?;
            fields.get(2)?.parse().ok()
        });
        Some(Credentials {
            uid: self.uid(user)?,
            gids: std::iter::once(primary_gid).chain(other_gids).collect(),
        })
    }
}

/// Name and id lookup tables for users and groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccountNames {
    users: NameTable,
    groups: NameTable,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct NameTable {
    names: HashMap<u32, String>,
    ids: HashMap<String, u32>,
}

impl NameTable {
    /// Parses `<name>:<password>:<id>:…` lines. The first line wins if a name or id is duplicated.
    fn parse(text: &str) -> Self {
        let mut table = Self::default();
        for line in text.lines() {
            let mut fields = line.split(':');
            let (Some(name), Some(Ok(id))) = (fields.next(), fields.nth(1).map(str::parse)) else { continue };
            table.names.entry(id).or_insert_with(|| name.to_owned());
            table.ids.entry(name.to_owned()).or_insert(id);
        }
        table
    }
}

impl AccountNames {
    pub fn user(&self, uid: u32) -> Option<&str> {
        self.users.names.get(&uid).map(String::as_str)
    }

    pub fn group(&self, gid: u32) -> Option<&str> {
        self.groups.names.get(&gid).map(String::as_str)
    }

    pub fn uid(&self, user: &str) -> Option<u32> {
        self.users.ids.get(user).copied()
    }

    pub fn gid(&self, group: &str) -> Option<u32> {
        self.groups.ids.get(group).copied()
    }
}

/// Returns the fields of the first line whose first field is `name`.
fn find_fields<'a>(text: &'a str, name: &str) -> Option<Vec<&'a str>> {
    text.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields.first() == Some(&name))
}

impl Credentials {
    /// Whether the mode bits let this user read the file as owner, group member or other. Root can read every file.
    pub fn can_read(&self, file: &std::fs::Metadata) -> bool {
        let shift = if file.uid() == self.uid {
            6
        } else if self.gids.contains(&file.gid()) {
            3
        } else {
            0
        };
        self.uid == 0 || file.permissions().mode() >> shift & 0o4 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_include_primary_and_listed_groups() {
        let accounts = Accounts {
            passwd: "root:x:0:0::/root:/bin/sh\nsvc:x:7:8::/:/usr/sbin/nologin\ntruncated:x\n".to_owned(),
            group: "root:x:0:\nsvc:x:8:\nsvc-two:x:9:other,svc\nother:x:10:svc-two\ntruncated:x\n".to_owned(),
        };
        assert_eq!(accounts.credentials("svc"), Some(Credentials { uid: 7, gids: vec![8, 9] }));
        assert_eq!((accounts.uid("root"), accounts.uid("sv")), (Some(0), None));
        assert_eq!(accounts.credentials("truncated"), None);
        let names = accounts.names();
        assert_eq!((names.user(7), names.user(10), names.group(9)), (Some("svc"), None, Some("svc-two")));
        assert_eq!((names.uid("svc"), names.gid("svc"), names.gid("truncated")), (Some(7), Some(8), None));
        assert_eq!(Accounts::default().credentials("root"), None);
    }

    #[test]
    fn can_read_checks_owner_then_group_then_others() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (uid, gid) = file.as_file().metadata().map(|meta| (meta.uid(), meta.gid())).unwrap();
        let owner = Credentials { uid: uid.max(1), gids: vec![gid] };
        let member = Credentials { uid: uid + 1, gids: vec![gid + 1, gid] };
        let outsider = Credentials { uid: uid + 1, gids: vec![gid + 1] };
        for (mode, by_member, by_outsider) in
            [(0o600, false, false), (0o640, true, false), (0o604, false, true), (0o200, false, false)]
        {
            std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            let meta = file.as_file().metadata().unwrap();
            assert_eq!(member.can_read(&meta), by_member, "{mode:o}");
            assert_eq!(outsider.can_read(&meta), by_outsider, "{mode:o}");
            if owner.uid == uid {
                assert_eq!(owner.can_read(&meta), mode & 0o400 != 0, "{mode:o}");
            }
            assert!(Credentials { uid: 0, gids: vec![0] }.can_read(&meta), "{mode:o}");
        }
    }
}
