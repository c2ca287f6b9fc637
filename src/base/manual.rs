//! Generates man pages from clap help: section 1 for user commands, section 8 for services.

use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

const USER_COMMAND: &str = "svcctl";

/// Writes `<command>.<section>` for a command and its subcommands.
///
/// # Errors
/// If a file can't be written.
pub fn write_pages(mut command: Command, dir: &Path) -> io::Result<()> {
    command.build();
    let section = if command.get_name() == USER_COMMAND { "1" } else { "8" };
    write_page(&command, section, dir)
}

fn write_page(command: &Command, section: &str, dir: &Path) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut text = Vec::new();
    Man::new(command.clone()).section(section).source("svc").manual("svc").render(&mut text)?;
    std::fs::write(dir.join(format!("{name}.{section}")), text)?;
    let subcommands = command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set());
    subcommands.into_iter().try_for_each(|sub| write_page(sub, section, dir))
}
