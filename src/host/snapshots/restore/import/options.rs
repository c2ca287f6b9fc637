//! The options of an import, which each of its steps gets as well.

/// Options of an import.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Options {
    /// Check the archive and change nothing
    #[arg(long)]
    pub check: bool,
    /// Accept the archive of another user
    #[arg(long)]
    pub of_another_user: bool,
    /// Do not take a snapshot of the current database first
    #[arg(long)]
    pub no_backup: bool,
}

impl Options {
    /// The options as arguments of a step.
    pub fn arguments(self) -> impl Iterator<Item = &'static str> {
        let flags = [
            (self.check, "--check"),
            (self.of_another_user, "--of-another-user"),
            (self.no_backup, "--no-backup"),
        ];
        flags.into_iter().filter_map(|(is_given, word)| is_given.then_some(word))
    }
}
