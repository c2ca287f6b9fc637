//! Git repositories. Git writes objects before the references to them. If the references are read first, and all
//! objects after them, the snapshot contains the objects of its references, even while git is writing.

use std::ffi::{OsStr, OsString};

/// The directory of the objects.
pub(super) const OBJECTS: &str = "objects";
/// The directory of the references. Git also collects them in the file `packed-refs`, and removes them from the
/// directory only after that.
const REFS: &str = "refs";
const HEAD: &str = "HEAD";

/// Whether a directory with these names is a git repository.
pub(super) fn is_repository(contains: impl Fn(&OsStr) -> bool) -> bool {
    [HEAD, OBJECTS, REFS].iter().all(|name| contains(OsStr::new(name)))
}

/// Sorts the names in a repository in the order in which they are saved.
pub(super) fn sort_for_save(names: &mut [OsString]) {
    names.sort_by_key(|name| match name.to_str() {
        Some(REFS) => 0,
        Some(OBJECTS) => 2,
        _ => 1,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_saved_before_objects() {
        let mut names: Vec<OsString> =
            ["HEAD", "index", "logs", "objects", "packed-refs", "refs"].map(OsString::from).into();
        assert!(is_repository(|name| names.iter().any(|found| found == name)));
        sort_for_save(&mut names);
        assert_eq!(names, ["refs", "HEAD", "index", "logs", "packed-refs", "objects"]);
        names.pop();
        assert!(!is_repository(|name| names.iter().any(|found| found == name)));
    }
}
