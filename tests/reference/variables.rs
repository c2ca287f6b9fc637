//! The tables of environment variables, and the rules for their declarations.

use std::collections::BTreeMap;

use svc::applets::APPLETS;
use svc::host::system::root_settings::ALLOWED_FROM_OTHERS;
use svc::host::system::vars as host;
use svc::variable::{DefaultValue, Section, Variable};

use super::{GeneratedSection, table};
use crate::files::{ProjectFile, load_files};
use crate::{assert_no_problems, source};

/// Returns every section of every package.
fn sections() -> impl Iterator<Item = &'static Section> {
    let all = [
        svc::vars::SECTIONS,
        svc::http::vars::SECTIONS,
        svc::store::vars::SECTIONS,
        svc::platform::vars::SECTIONS,
        host::SECTIONS,
        svc::ctl::vars::SECTIONS,
    ];
    all.into_iter().flatten()
}

/// Returns a generated section for each table. Variable sections with the same id form one table, even across packages.
pub fn generated_sections() -> Vec<GeneratedSection> {
    let mut tables: BTreeMap<&str, Vec<&'static Section>> = BTreeMap::new();
    for section in sections() {
        tables.entry(section.id).or_default().push(section);
    }
    tables
        .into_iter()
        .map(|(id, sections)| GeneratedSection::new(format!("variables {id}"), render(&sections)))
        .collect()
}

/// Renders a table. Properties that all of its variables share are printed once, above it.
fn render(sections: &[&'static Section]) -> String {
    let first = sections[0];
    let rows = sections.iter().flat_map(|section| Row::rows_of(section)).collect::<Vec<_>>();
    let has_one_source = rows.iter().all(|row| row.source == first.source);
    let has_same_readers = rows.iter().all(|row| row.readers == first.readers);
    let mut common = Vec::new();
    common.extend(has_one_source.then(|| format!("Set in: {}.", first.source)));
    if has_same_readers && !first.readers.is_empty() {
        common.push(format!("Read by: {}.", format_programs(first.readers)));
    }
    let cells = |Row { variable, source, readers }: &Row| {
        let mut cells =
            vec![format!("`{}`", variable.name), variable.format.to_owned(), default_text(variable.default)];
        cells.extend((!has_one_source).then(|| (*source).to_owned()));
        cells.extend((!has_same_readers).then(|| format_programs(readers)));
        cells.push(variable.meaning.split_whitespace().collect::<Vec<_>>().join(" "));
        cells
    };
    let mut head = vec!["variable", "format", "default"];
    head.extend((!has_one_source).then_some("set in"));
    head.extend((!has_same_readers).then_some("read by"));
    head.push("meaning");
    format!("{}\n\n{}", common.join(" "), table(&head, rows.iter().map(cells)))
}

/// A variable, with the defaults from its section.
struct Row {
    variable: &'static Variable,
    source: &'static str,
    readers: &'static [&'static str],
}

impl Row {
    fn rows_of(section: &'static Section) -> impl Iterator<Item = Self> {
        section.variables.iter().map(|variable| Self {
            variable,
            source: variable.source.unwrap_or(section.source),
            readers: variable.readers.unwrap_or(section.readers),
        })
    }
}

fn default_text(default: DefaultValue) -> String {
    match default {
        DefaultValue::Required => "**required**".to_owned(),
        DefaultValue::Unset => "–".to_owned(),
        DefaultValue::Value(value) => format!("`{value}`"),
        DefaultValue::Derived(text) => text.to_owned(),
    }
}

/// Formats the names of programs and units as code, and other text unchanged.
fn format_programs(names: &[&str]) -> String {
    let formatted = names.iter().map(|name| match name.contains(' ') {
        true => (*name).to_owned(),
        false => format!("`{name}`"),
    });
    formatted.collect::<Vec<_>>().join(", ")
}

/// Host settings that root reads only from its own environment and `update.env`, or that only other users' services
/// read.
const DENIED_FROM_OTHERS: [&Variable; 27] = [
    &host::ACME_RETRY_SECONDS,
    &host::BRIDGE_CHANGES_KEEP_SECONDS,
    &host::BRIDGE_STATEMENT_TIMEOUT_MS,
    &host::FILES_UPLOAD_KIB_PER_SECOND,
    &host::GATEWAY_AUTH,
    &host::GATEWAY_TLS_CERT_FILE,
    &host::HEARTBEAT_SECONDS,
    &host::IDP_AUDIENCE,
    &host::IDP_ISSUER,
    &host::IDP_JWKS_URL,
    &host::POSTGRES_PASSWORD,
    &host::REGISTER_GATEWAY_DEADLINE_SECONDS,
    &host::REGISTER_PLATFORM_DEADLINE_SECONDS,
    &host::SVC_BUNDLE_KEYS_SEQUENCE,
    &host::SVC_BUNDLE_PUBLIC_KEYS,
    &host::SVC_BUNDLE_SHA256,
    &host::SVC_ENVIRONMENT,
    &host::SVC_HOST_BUNDLE_URL,
    &host::SVC_PG_BIN_DIR,
    &host::SVC_POSTGRES_IMAGE,
    &host::SVC_PRODUCTION,
    &host::SVC_ROOT,
    &host::SVC_SYSTEMCTL,
    &host::SVC_UPDATE_HEALTH_SECONDS,
    &host::SVC_UPDATE_SNAPSHOT_SECONDS,
    &host::VPS_META_AT_LEAST_SECONDS,
    &host::VPS_META_SECONDS,
];

/// Every host setting is in exactly one of two lists: those that root accepts from other users' files, and those
/// that it does not.
#[test]
fn every_host_setting_is_classified_for_root() {
    let accepted = ALLOWED_FROM_OTHERS.iter().map(|(variable, _)| *variable);
    let listed: Vec<_> = accepted.chain(DENIED_FROM_OTHERS).map(|variable| variable.name).collect();
    let host_sections = host::SECTIONS.iter().chain(svc::store::vars::SECTIONS);
    let wrong = host_sections.flat_map(|section| section.variables).map(|variable| variable.name);
    let wrong = wrong.filter(|name| listed.iter().filter(|listed| listed == &name).count() != 1);
    let rule =
        "must be either in ALLOWED_FROM_OTHERS in root_settings.rs or in DENIED_FROM_OTHERS in this file";
    assert_no_problems(&wrong.map(|name| format!("{name} {rule}")).collect::<Vec<_>>());
}

#[test]
fn every_reader_of_a_variable_exists() {
    let is_known = |name: &str| {
        let unit = crate::root().join("systemd/system").join(name);
        name.contains(' ') || APPLETS.iter().any(|applet| applet.name == name) || unit.is_file()
    };
    let overrides =
        sections().flat_map(|section| section.variables.iter().filter_map(|variable| variable.readers));
    let readers = sections().map(|section| section.readers).chain(overrides).flatten();
    assert_no_problems(
        &readers.filter(|name| !is_known(name)).map(|name| format!("no program {name}")).collect::<Vec<_>>(),
    );
}

/// Host variables that only units use.
const USED_ONLY_BY_UNITS: [&str; 1] = ["SVC_POSTGRES_IMAGE"];

/// Finds declared variables that no code outside tests uses.
fn find_unread_variables(files: &[ProjectFile], declared: &[&str]) -> Vec<String> {
    let is_code = |file: &&ProjectFile| {
        file.path.starts_with("src/") && file.path.ends_with(".rs") && !file.path.ends_with("/vars.rs")
    };
    let mut used: Vec<String> = Vec::new();
    for file in files.iter().filter(is_code) {
        let (tokens, _) =
            source::without_tests(&source::tokenize(&source::blank_comments_and_literals(&file.text)));
        used.extend(tokens.into_iter().map(|token| token.text));
    }
    declared
        .iter()
        .filter(|name| !used.iter().any(|used| used == **name))
        .map(|name| format!("{name} is declared but never read"))
        .collect()
}

#[test]
fn every_declared_variable_is_read() {
    let variables = sections().flat_map(|section| section.variables).map(|variable| variable.name);
    let declared: Vec<_> = variables.filter(|name| !USED_ONLY_BY_UNITS.contains(name)).collect();
    assert_no_problems(&find_unread_variables(&load_files(), &declared));
}

#[test]
fn unread_variable_is_detected() {
    let code =
        ProjectFile::sample("src/a.rs", "env.text(&vars::SVC_A); // SVC_B\n#[cfg(test)]\nmod t { SVC_B }");
    let declaration = ProjectFile::sample("src/vars.rs", "SVC_B: \"text\" = unset;");
    assert_eq!(find_unread_variables(&[code, declaration], &["SVC_A", "SVC_B"]).len(), 1);
}

/// Variables that systemd sets for its services.
const SET_BY_SYSTEMD: [&str; 2] = ["JOURNAL_STREAM", "NOTIFY_SOCKET"];

/// Finds names with an underscore that a file reads from the process environment without a declaration. `Env` accepts
/// only declared variables.
fn find_undeclared_reads(file: &ProjectFile) -> Vec<String> {
    let calls = ["env::var(\"", "env::var_os(\""];
    let reads = calls.iter().flat_map(|call| file.text.split(*call).skip(1));
    let names = reads.filter_map(|rest| rest.split('"').next());
    let undeclared = names.filter(|name| name.contains('_') && !SET_BY_SYSTEMD.contains(name));
    undeclared.map(|name| format!("{}: {name} is read without a declaration", file.path)).collect()
}

#[test]
fn no_variable_is_read_by_a_literal_name() {
    let sources = load_files().into_iter().filter(|file| file.path.starts_with("src/"));
    assert_no_problems(&sources.flat_map(|file| find_undeclared_reads(&file)).collect::<Vec<_>>());
}

#[test]
fn undeclared_variable_is_detected() {
    let text = "std::env::var_os(\"SVC_A\"); std::env::var(\"PATH\"); std::env::var(\"NOTIFY_SOCKET\")";
    assert_eq!(find_undeclared_reads(&ProjectFile::sample("src/a.rs", text)).len(), 1);
}
