//! Prefix-compressed stack of paths, such as the directories of a deep tree.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// A stack of paths. Each stores only the suffix that differs from the next one: thousands of full paths with hundreds
/// of components each would take gigabytes.
#[derive(Debug, Default)]
pub struct PathStack {
    /// For each path below the top, the length of the prefix shared with the next path, and the remaining bytes.
    earlier: Vec<(usize, Box<[u8]>)>,
    last: Vec<u8>,
}

impl PathStack {
    pub fn push(&mut self, path: &Path) {
        let path = path.as_os_str().as_bytes();
        let last = &mut self.last;
        let shared = last.iter().zip(path).take_while(|(a, b)| a == b).count();
        self.earlier.push((shared, last[shared..].into()));
        last.truncate(shared);
        last.extend_from_slice(&path[shared..]);
    }

    /// Removes and returns the most recently added path.
    pub fn pop(&mut self) -> Option<PathBuf> {
        let (shared, rest) = self.earlier.pop()?;
        let last = &mut self.last;
        let path = PathBuf::from(OsString::from_vec(last.clone()));
        last.truncate(shared);
        last.extend_from_slice(&rest);
        Some(path)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn deep_paths_store_only_differing_suffixes() {
        let parent: PathBuf = std::iter::repeat_n("n".repeat(250), 900).collect();
        let mut stack = PathStack::default();
        for number in 0..1000 {
            stack.push(&parent.join(number.to_string()));
        }
        let bytes: usize = stack.earlier.iter().map(|(_, rest)| rest.len()).sum();
        assert!(bytes < 4000, "{bytes}");
        assert_eq!(stack.pop(), Some(parent.join("999")));
    }

    proptest! {
        #[test]
        fn paths_are_popped_in_reverse_order(
            steps in prop::collection::vec(prop::option::of("[ab/]{0,6}"), 0..40),
        ) {
            let (mut stack, mut model) = (PathStack::default(), Vec::new());
            for step in steps {
                match step {
                    Some(path) => {
                        stack.push(Path::new(&path));
                        model.push(PathBuf::from(path));
                    }
                    None => prop_assert_eq!(stack.pop(), model.pop()),
                }
            }
            while let Some(path) = model.pop() {
                let popped = stack.pop().unwrap();
                prop_assert_eq!(popped.as_os_str(), path.as_os_str());
            }
            prop_assert_eq!(stack.pop(), None);
        }
    }
}
