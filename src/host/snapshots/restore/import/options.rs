//! Import options, passed on to each step.

/// Options of an import.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct ImportOptions {
    /// Check the archive and change nothing
    #[arg(long)]
    pub check: bool,
    /// Accept an archive from another user
    #[arg(long, alias = "of-another-user")]
    pub from_another_user: bool,
    /// Do not take a snapshot of the current database first
    #[arg(long)]
    pub no_backup: bool,
}

impl ImportOptions {
    /// Returns the options as step arguments.
    pub fn to_arguments(self) -> impl Iterator<Item = &'static str> {
        let flags = [
            (self.check, "--check"),
            (self.from_another_user, "--from-another-user"),
            (self.no_backup, "--no-backup"),
        ];
        flags.into_iter().filter_map(|(is_set, flag)| is_set.then_some(flag))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct ImportArgs {
        #[command(flatten)]
        options: ImportOptions,
    }

    #[test]
    fn of_another_user_alias_is_accepted() {
        for flag in ["--from-another-user", "--of-another-user"] {
            let options = ImportArgs::try_parse_from(["import", flag]).unwrap().options;
            assert!(options.to_arguments().eq(["--from-another-user"]), "{flag}");
        }
    }
}
