//! Checks command lines quoted in documentation against a program's definition: commands, options, and the number of
//! arguments. Placeholders, optional parts and alternatives are supported.

use clap::{Arg, Command};

/// The number of checked command lines, and the errors in them.
#[derive(Debug, Default)]
pub struct QuoteReport {
    pub checked: usize,
    pub errors: Vec<String>,
}

/// The language of a text, which determines how its lines are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Markdown,
    Rust,
}

impl Language {
    /// Returns the language of a file with this name.
    pub fn of_file(path: &str) -> Option<Self> {
        match path.rsplit_once('.')?.1 {
            "md" => Some(Self::Markdown),
            "rs" => Some(Self::Rust),
            _ => None,
        }
    }
}

/// Checks every command line that begins with the name of `program`. The caller must have called [`Command::build`].
pub fn check(program: &Command, text: &str, language: Language) -> QuoteReport {
    let commands = find_command_lines(program.get_name(), text, language);
    let checked = commands.len();
    let describe_error = |(arguments, quoting): (String, Quoting)| {
        let parser_error = || if quoting == Quoting::Line { parse_error(program, &arguments) } else { None };
        let reason = find_error(program, &arguments, quoting).or_else(parser_error)?;
        Some(format!("`{} {arguments}`: {reason}", program.get_name()))
    };
    QuoteReport { checked, errors: commands.into_iter().filter_map(describe_error).collect() }
}

/// How a command is delimited in the surrounding text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quoting {
    /// By a line of code: the command is complete.
    Line,
    /// By backticks: the command may omit arguments.
    Backticks,
    /// Not delimited: the command ends before the first word that cannot be part of it.
    Undelimited,
}

/// Whether a word is a short option, or part of a usage line that names no argument, such as `[OPTIONS]` and
/// `<--version <VERSION>|--request>`.
fn is_notation(word: &str) -> bool {
    let is_alternative = word.starts_with(['-', '|']) || word.starts_with("<-") || word.contains("|-");
    is_alternative || ["…", "OPTIONS", "COMMAND", "<COMMAND>"].contains(&word)
}

/// Finds the first error in a program's arguments, if any.
fn find_error(program: &Command, arguments: &str, quoting: Quoting) -> Option<String> {
    let mut command = program;
    let (mut positionals, mut path) = (0, program.get_name().to_owned());
    let words = match quoting {
        Quoting::Line => split_shell_words(arguments),
        Quoting::Backticks | Quoting::Undelimited => {
            arguments.split_whitespace().map(str::to_owned).collect()
        }
    };
    let mut words = words.iter();
    while let Some(raw) = words.next() {
        let is_last = raw.ends_with([':', ',', ';', '.', ')']) && quoting == Quoting::Undelimited;
        let word = raw.trim_matches(['[', ']', ',', ';', ':', '.', '(', ')', '"', '\'']);
        if let Some(option) = word.strip_prefix("--") {
            let name = option.split(['=', '[']).next().unwrap_or_default();
            let Some(argument) = command.get_arguments().find(|argument| argument.get_long() == Some(name))
            else {
                return Some(format!("{path} has no --{name}"));
            };
            if takes_next_word(argument) && !option.contains('=') {
                words.next();
            }
        } else if is_notation(word) {
        } else if command.has_subcommands() && !is_placeholder(word) {
            let subcommands = word.split('|').map(|name| command.find_subcommand(name));
            match subcommands.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().next()) {
                Some(subcommand) => {
                    path = format!("{path} {word}");
                    command = subcommand;
                }
                // The text is prose: the program's name is the subject of a sentence.
                None if quoting == Quoting::Undelimited => return None,
                None => return Some(format!("{path} has no command {word}")),
            }
        } else if quoting == Quoting::Undelimited && !is_placeholder(word) {
            return None;
        } else {
            positionals += 1;
            if positionals > command.get_positionals().count() && path != program.get_name() {
                return Some(format!("{path} takes no argument {word}"));
            }
        }
        if is_last {
            return None;
        }
    }
    None
}

/// Returns the error that the program itself reports for a complete command line. Invalid values are allowed, because
/// they can be placeholders. A usage line with optional parts is not parsed.
fn parse_error(program: &Command, arguments: &str) -> Option<String> {
    use clap::error::ErrorKind::{DisplayHelp, DisplayVersion, InvalidValue, ValueValidation};
    if arguments.contains(['[', '|', '…']) || arguments.contains("<COMMAND>") {
        return None;
    }
    let words = std::iter::once(program.get_name().to_owned()).chain(split_shell_words(arguments));
    let error = program.clone().try_get_matches_from(words).err()?;
    let is_allowed = matches!(error.kind(), DisplayHelp | DisplayVersion | InvalidValue | ValueValidation);
    (!is_allowed).then(|| error.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" "))
}

/// Splits a line into words; a quoted word can contain spaces.
fn split_shell_words(line: &str) -> Vec<String> {
    let (mut words, mut quote) = (vec![String::new()], None);
    for c in line.chars() {
        match quote {
            Some(end) if c == end => quote = None,
            None if matches!(c, '"' | '\'') => quote = Some(c),
            None if c.is_whitespace() => words.push(String::new()),
            _ => words.last_mut().expect("the list starts with a word").push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

fn takes_next_word(option: &Arg) -> bool {
    option.get_action().takes_values() && !option.is_require_equals_set()
}

/// Whether a word is a placeholder, such as `HANDLE`, `<machine>`, `{id}`, or an example's id or name.
fn is_placeholder(word: &str) -> bool {
    word.starts_with(['<', '{'])
        || word.chars().next().is_some_and(|first| first.is_ascii_uppercase() || first.is_ascii_digit())
}

/// Finds the arguments after each mention of a program.
fn find_command_lines(program: &str, text: &str, language: Language) -> Vec<(String, Quoting)> {
    let text = join_lines(text, language);
    let mut command_lines = Vec::new();
    for (start, mention) in text.match_indices(&format!("{program} ")) {
        let (before, rest) = (&text[..start], &text[start + mention.len()..]);
        let line = rest.split('\n').next().unwrap_or_default();
        let line =
            if language == Language::Rust { line.split("\\n").next().unwrap_or_default() } else { line };
        let fences = before.lines().filter(|line| line.trim_start().starts_with("```")).count();
        let is_fenced = language == Language::Markdown && fences % 2 == 1;
        // In a list, a fence and its lines are indented.
        let is_first_on_line = before.rsplit('\n').next().is_some_and(|start| start.trim().is_empty());
        if before.ends_with('`') {
            let quoted = line.split(['`', '"']).next().unwrap_or_default();
            command_lines.push((quoted.to_owned(), Quoting::Backticks));
        } else if before.ends_with("$ ") || (is_fenced && is_first_on_line) {
            let terminators = [" #", " |", " >", " &", ";"];
            let end = terminators.iter().filter_map(|text| line.find(text)).min().unwrap_or(line.len());
            command_lines.push((line[..end].to_owned(), Quoting::Line));
        } else if before.ends_with(['"', ' ', '(']) {
            let rest_of_line = line.split(['`', '"']).next().unwrap_or_default();
            command_lines.push((rest_of_line.to_owned(), Quoting::Undelimited));
        }
    }
    command_lines
}

/// Joins lines that belong together: those that a backslash continues and, in Markdown, those of a code span. Drops
/// Markdown comment lines.
pub fn join_lines(text: &str, language: Language) -> String {
    let mut joined = String::new();
    let is_comment = |line: &&str| language == Language::Markdown && line.starts_with("<!--");
    for line in text.lines().filter(|line| !is_comment(line)) {
        let (line, continues) = match line.strip_suffix('\\') {
            Some(line) => (line, true),
            None => (line, language == Language::Markdown && has_open_code_span(line)),
        };
        joined.push_str(if joined.ends_with('\n') { line } else { line.trim_start() });
        joined.push(if continues { ' ' } else { '\n' });
    }
    joined
}

/// Whether a code span continues on the next line. A code fence is not a code span.
fn has_open_code_span(line: &str) -> bool {
    !line.trim_start().starts_with("```") && line.matches('`').count() % 2 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Command {
        let build = Command::new("build")
            .arg(Arg::new("out").long("out").value_name("DIR"))
            .arg(Arg::new("what").required(true));
        let mut program = Command::new("cargo tool").subcommand(build);
        program.build();
        program
    }

    #[test]
    fn check_finds_errors_in_every_kind_of_quotation() {
        for text in [
            "`cargo tool make`",
            "`A=1 cargo tool build --in X`",
            "\n```sh\ncargo tool build --in X    # why\n```\n",
            "\n```\n$ cargo tool build a b\n```\n",
            "\n```\ncargo tool build --out 'a b'\n```\n",
            "1. Build:\n\n   ```sh\n   cargo tool build --out 'a b'\n   ```\n",
            "run cargo tool build --in X",
        ] {
            assert_eq!(check(&program(), text, Language::Markdown).errors.len(), 1, "{text}");
        }
    }

    #[test]
    fn check_accepts_correct_commands_and_prose() {
        for text in [
            "`cargo tool build [WHAT] [--out DIR]`",
            "\n```sh\ncargo tool build all    # why it is so\ncargo tool build --out 'a b' c > d\n```\n",
            "1. Build:\n\n   ```sh\n   cargo tool build all | tee log\n   ```\n",
            "`cargo tool build --out DIR` omits an argument",
            "the command cargo tool is prose",
        ] {
            let quoted = check(&program(), text, Language::Markdown);
            assert!(quoted.checked > 0 && quoted.errors.is_empty(), "{text}: {quoted:?}");
        }
    }
}
