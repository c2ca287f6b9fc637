//! The command lines of `svcctl` and of the other applets, from their clap definitions.

use clap::{Arg, ArgAction, Command};

use svc::applets::APPLETS;

use super::{GeneratedSection, table};

/// The applet that has its own page.
const OPERATOR_TOOL: &str = "svcctl";

pub fn generated_sections() -> [GeneratedSection; 2] {
    let (tool, programs): (Vec<_>, Vec<_>) = APPLETS
        .iter()
        .map(|applet| (applet.command)())
        .partition(|command| command.get_name() == OPERATOR_TOOL);
    let render_all = |commands: Vec<Command>| -> String {
        commands
            .into_iter()
            .map(|mut command| {
                command.build();
                render(&command, None)
            })
            .collect()
    };
    [
        GeneratedSection::new("commands svcctl", render_all(tool)),
        GeneratedSection::new("commands programs", render_all(programs)),
    ]
}

/// Renders a command's section, then those of its subcommands. Global options are listed only where they are
/// declared.
fn render(command: &Command, parent: Option<&Command>) -> String {
    let name = command
        .get_display_name()
        .map_or_else(|| command.get_name().to_owned(), |name| name.replace('-', " "));
    let name = command.get_bin_name().map_or(name, str::to_owned);
    let mut section = format!("## `{name}`\n\n");
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        section.push_str(&format!("{}\n\n", sentence(&about.to_string())));
    }
    let usage = command.clone().render_usage().to_string();
    section.push_str(&format!("```text\n{}\n```\n\n", usage.trim_start_matches("Usage: ").trim()));
    let is_shown = |arg: &&Arg| {
        let is_inherited = parent.is_some() && arg.is_global_set();
        !arg.is_hide_set() && !is_inherited && !prints_and_exits(arg)
    };
    let rows: Vec<_> = command.get_arguments().filter(is_shown).map(row).collect();
    if !rows.is_empty() {
        section.push_str(&format!("{}\n", table(&["argument", "default", "meaning"], rows)));
    }
    if let Some(after) = command.get_after_long_help().or(command.get_after_help()) {
        section.push_str(&render_after_help(&after.to_string()));
    }
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set()) {
        section.push_str(&render(sub, Some(command)));
    }
    section
}

/// Whether the argument is `--help` or `--version`.
fn prints_and_exits(arg: &Arg) -> bool {
    use ArgAction::{Help, HelpLong, HelpShort, Version};
    matches!(arg.get_action(), Help | HelpShort | HelpLong | Version)
}

fn row(arg: &Arg) -> [String; 3] {
    let takes_value = arg.get_action().takes_values();
    let values: Vec<_> = match arg.get_value_names() {
        Some(names) if takes_value => names.iter().map(ToString::to_string).collect(),
        _ => Vec::new(),
    };
    let flags =
        [arg.get_short().map(|short| format!("-{short}")), arg.get_long().map(|long| format!("--{long}"))];
    let flags: Vec<_> = flags.into_iter().flatten().collect();
    let values = values.join(" ");
    let syntax = match (flags.is_empty(), values.is_empty()) {
        (true, _) => values,
        (false, true) => flags.join(", "),
        (false, false) if arg.is_require_equals_set() => format!("{}[={values}]", flags.join(", ")),
        (false, false) => format!("{} {values}", flags.join(", ")),
    };
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match (arg.is_required_set(), takes_value && !defaults.is_empty()) {
        (true, _) => "**required**".to_owned(),
        (false, true) => format!("`{}`", defaults.join(",")),
        (false, false) => "–".to_owned(),
    };
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut meaning = sentence(&help);
    let choices = arg.get_possible_values();
    let choices: Vec<_> = choices.iter().filter(|choice| takes_value && !choice.is_hide_set()).collect();
    if !choices.is_empty() {
        let names: Vec<_> = choices.iter().map(|choice| format!("`{}`", choice.get_name())).collect();
        meaning.push_str(&format!(" One of {}.", names.join(", ")));
    }
    [format!("`{syntax}`"), default, meaning.trim().to_owned()]
}

/// Returns the text as one line that ends with a period or a colon. Escapes `<`, which would start an HTML
/// element.
fn sentence(text: &str) -> String {
    let mut line = escape(&text.split_whitespace().collect::<Vec<_>>().join(" "));
    if !line.is_empty() && !line.ends_with(['.', ':']) {
        line.push('.');
    }
    line
}

/// Escapes `<` outside code.
fn escape(line: &str) -> String {
    let parts = line.split('`').enumerate();
    let parts =
        parts.map(|(index, part)| if index % 2 == 0 { part.replace('<', "&lt;") } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("`")
}

/// Renders the text after a command's help: examples and indented lines as code, other lines as paragraphs. A line
/// indented by three spaces continues an item of a numbered list.
fn render_after_help(text: &str) -> String {
    let (mut markdown, mut is_in_code) = (String::new(), false);
    for line in text.trim_end().lines() {
        let example = line.trim_start().strip_prefix("Example: ");
        let indent = line.len() - line.trim_start().len();
        let is_code_line = example.is_some() || (indent >= 2 && indent != 3);
        if is_code_line != is_in_code {
            let begin =
                if markdown.is_empty() || markdown.ends_with("\n\n") { "```text\n" } else { "\n```text\n" };
            markdown.push_str(if is_code_line { begin } else { "```\n\n" });
            is_in_code = is_code_line;
        }
        match example {
            Some(example) => markdown.push_str(example),
            None if is_in_code => markdown.push_str(line.strip_prefix("  ").unwrap_or(line)),
            None => {
                // In Markdown, a numbered list that does not start with 1 must follow a blank line.
                if line.starts_with(|first: char| first.is_ascii_digit()) && !markdown.ends_with("\n\n") {
                    markdown.push('\n');
                }
                markdown.push_str(&escape(line.trim_start()));
            }
        }
        markdown.push('\n');
    }
    markdown.push_str(if is_in_code { "```\n\n" } else { "\n" });
    markdown
}

#[test]
fn command_is_rendered_with_arguments_and_examples() {
    let sub = Command::new("set")
        .about("Set <it>")
        .arg(Arg::new("user").value_name("USER").required(true).help("The user"))
        .arg(
            Arg::new("plan")
                .long("plan")
                .value_name("PLAN")
                .default_value("max")
                .value_parser(["max", "min"]),
        )
        .after_help("Prose.\n\nExample: tool set ada");
    let mut command = Command::new("tool").subcommand(sub);
    command.build();
    let page = render(&command, None);
    for line in [
        "## `tool set`",
        "Set &lt;it>.",
        "| `USER` | **required** | The user. |",
        "| `--plan PLAN` | `max` | One of `max`, `min`. |",
        "tool set ada",
    ] {
        assert!(page.lines().any(|rendered| rendered == line), "{line}\n{page}");
    }
}
