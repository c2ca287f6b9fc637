//! The options of an import, which are passed to each of its steps.

/// Options of an import.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct ImportOptions {
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

impl ImportOptions {
    /// Returns the options as arguments of a step.
    pub fn to_arguments(self) -> impl Iterator<Item = &'static str> {
        let flags = [
            (self.check, "--check"),
            (self.of_another_user, "--of-another-user"),
            (self.no_backup, "--no-backup"),
        ];
        flags.into_iter().filter_map(|(is_given, flag)| is_given.then_some(flag))
    }
}
