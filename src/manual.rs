//! Manual pages, made of what each command says of itself: section 1 for what people call, 8 for services.

use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

const FOR_PEOPLE: &str = "svcctl";

/// Writes `<command>.<section>` for a command and each below it.
///
/// # Errors
/// When a file cannot be written.
pub fn write(mut command: Command, dir: &Path) -> io::Result<()> {
    command.build();
    let section = if command.get_name() == FOR_PEOPLE { "1" } else { "8" };
    page(&command, section, dir)
}

fn page(command: &Command, section: &str, dir: &Path) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut text = Vec::new();
    Man::new(command.clone()).section(section).source("svc").manual("svc").render(&mut text)?;
    std::fs::write(dir.join(format!("{name}.{section}")), text)?;
    let below = command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set());
    below.into_iter().try_for_each(|sub| page(sub, section, dir))
}
