//! Parsers of untrusted input, run on mutated documents: none of them panics, and none accepts a document that
//! violates its rules.
//!
//! A [`Target`] is a parser with its rules; `cargo xtask fuzz` also runs it with libFuzzer. Valid documents are
//! generated and then mutated, because random bytes are refused at the first check. Inputs that once violated a rule
//! are kept below `tests/corpus/<target>` and are always replayed. The short form runs a few cases on every change;
//! the long form (`cargo xtask test --long`) runs for a minute.

mod mutation;
mod parsers;
mod userdata;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::long::Figures;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use mutation::{Mutation, mutate};
use parsers::Target;

const LONG_DURATION: Duration = Duration::from_secs(60);
/// The deadline of the long form is checked between rounds.
const CASES_PER_ROUND: u32 = 400;

/// The input of a parser: a valid document, and the mutations to apply.
type Case = (Vec<u8>, Vec<Mutation>);

impl Target {
    fn case(&self) -> impl Strategy<Value = Case> + use<> {
        let changes = prop_oneof![
            1 => Just(Vec::new()),
            4 => prop::collection::vec(any::<Mutation>(), 1..6),
        ];
        (self.valid.clone(), changes)
    }

    fn check(&self, case: &Case) -> Result<(), TestCaseError> {
        let (valid, mutations) = case;
        let bytes = mutate(valid.clone(), mutations);
        if bytes == *valid {
            (self.accepts)(valid).map_err(TestCaseError::fail)?;
        }
        (self.holds)(&bytes).map_err(TestCaseError::fail)
    }

    /// # Errors
    /// The smallest case that violated a rule or panicked.
    fn play(&self, cases: u32) -> Result<(), String> {
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        let mut runner = TestRunner::new(config);
        runner.run(&self.case(), |case| self.check(&case)).map_err(|error| match error {
            TestError::Abort(why) => format!("{}: {why}", self.name),
            TestError::Fail(why, (valid, mutations)) => {
                let bytes = mutate(valid, &mutations);
                let (name, text, hex) = (self.name, String::from_utf8_lossy(&bytes), hex::encode(&bytes));
                format!("{name}: {why}\ninput {text:?}\nto keep it, add a file to tests/corpus/{name} with the bytes {hex}")
            }
        })
    }

    fn corpus(&self) -> Result<Vec<(PathBuf, Vec<u8>)>> {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(self.name);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
            let path = entry?.path();
            files.push((path.clone(), std::fs::read(path)?));
        }
        ensure!(!files.is_empty(), "{} is empty", dir.display());
        Ok(files)
    }
}

/// User-data is parsed by cloud-init, a separate program; libFuzzer also runs the others.
fn targets() -> Vec<Target> {
    parsers::targets().into_iter().chain([userdata::user_data()]).collect()
}

fn target(name: &str) -> Target {
    targets().into_iter().find(|target| target.name == name).expect("one of the targets")
}

fn short(name: &str) {
    let target = target(name);
    target.play(target.cases).unwrap();
}

fn long(name: &str) -> Result<()> {
    let target = target(name);
    let (begun, mut fuzz_cases) = (Instant::now(), 0);
    let mut end = Ok(());
    while begun.elapsed() < LONG_DURATION && end.is_ok() {
        end = target.play(CASES_PER_ROUND);
        fuzz_cases += u64::from(CASES_PER_ROUND);
    }
    Figures { fuzz_cases, ..Figures::of(&format!("fuzz of {name}")) }.tell()?;
    end.map_err(anyhow::Error::msg)
}

macro_rules! fuzzed {
    ($($short:ident, $long:ident, $name:literal;)+) => {
        $(
            #[test]
            fn $short() {
                short($name);
            }

            #[test]
            #[ignore = "long: runs for a minute"]
            fn $long() -> Result<()> {
                long($name)
            }
        )+

        /// A target without tests would prove nothing.
        #[test]
        fn every_target_is_played() {
            let names: Vec<_> = targets().iter().map(|target| target.name).collect();
            assert_eq!(names, [$($name),+]);
        }
    };
}

fuzzed! {
    a_changed_pointer_leads_nowhere_else, long_a_changed_pointer_leads_nowhere_else, "pointer";
    a_changed_side_record_is_of_its_dump, long_a_changed_side_record_is_of_its_dump, "side-record";
    a_changed_manifest_is_not_believed, long_a_changed_manifest_is_not_believed, "manifest";
    a_changed_signature_is_worth_nothing, long_a_changed_signature_is_worth_nothing, "signature";
    a_changed_archive_stays_in_its_directory, long_a_changed_archive_stays_in_its_directory, "archive";
    tar_entries_of_changed_archives_keep_limits, long_tar_entries_of_changed_archives_keep_limits, "tar-entries";
    a_changed_env_file_reads_back, long_a_changed_env_file_reads_back, "env-file";
    a_changed_boot_env_is_told_without_secrets, long_a_changed_boot_env_is_told_without_secrets, "boot-env";
    changed_app_manifest_names_no_more, long_changed_app_manifest_names_no_more, "app-manifest";
    changed_bridge_request_stays_one_statement, long_changed_bridge_request_stays_one_statement, "bridge-request";
    changed_bridge_filter_means_the_same_nested, long_changed_bridge_filter_means_the_same_nested, "bridge-filter";
    changed_cursor_resumes_its_own_order_alone, long_changed_cursor_resumes_its_own_order_alone, "bridge-cursor";
    changed_jwt_is_never_another_user, long_changed_jwt_is_never_another_user, "jwt";
    changed_proof_is_never_another_principal, long_changed_proof_is_never_another_principal, "proof";
    changed_heartbeat_is_stored_within_bounds, long_changed_heartbeat_is_stored_within_bounds, "heartbeat";
    changed_hook_input_sends_no_content, long_changed_hook_input_sends_no_content, "hook-input";
    changed_agent_frames_are_written_back, long_changed_agent_frames_are_written_back, "agent-frames";
    changed_agent_output_keeps_bounded_texts, long_changed_agent_output_keeps_bounded_texts, "agent-output";
    changed_event_id_is_refused, long_changed_event_id_is_refused, "event-id";
    changed_listing_loads_nothing_else, long_changed_listing_loads_nothing_else, "import-listing";
    changed_import_manifest_is_another_archives, long_changed_import_manifest_is_another_archives, "import-manifest";
    changed_keys_are_for_nothing_else, long_changed_keys_are_for_nothing_else, "jwks";
    changed_owner_config_keeps_bounds, long_changed_owner_config_keeps_bounds, "owner-config";
    changed_usage_report_is_safe_to_print, long_changed_usage_report_is_safe_to_print, "usage-report";
    changed_cookie_takes_no_name_of_ours, long_changed_cookie_takes_no_name_of_ours, "set-cookie";
    changed_connection_headers_end_at_the_hop, long_changed_connection_headers_end_at_the_hop, "hop-by-hop";
    changed_path_stays_in_the_apps_folder, long_changed_path_stays_in_the_apps_folder, "app-path";
    changed_session_counts_its_own_calls, long_changed_session_counts_its_own_calls, "codex-session";
    changed_dump_head_has_a_number_or_none, long_changed_dump_head_has_a_number_or_none, "dump-head";
    a_changed_user_data_is_one_document, long_a_changed_user_data_is_one_document, "user-data";
}

/// The page lists the parsers with rules; a missing row would suggest a parser without any.
#[test]
fn every_target_has_its_row() {
    let page = include_str!("../../docs/security.md");
    let (_, section) = page.split_once("### Documents that a less trusted side writes").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut rows: Vec<_> =
        section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let mut names: Vec<_> = targets().iter().map(|target| target.name).collect();
    rows.sort_unstable();
    names.sort_unstable();
    assert_eq!(rows, names);
}

#[test]
fn what_once_broke_a_rule_breaks_none() -> Result<()> {
    let mut broken = Vec::new();
    for target in targets() {
        for (path, bytes) in target.corpus()? {
            broken.extend((target.holds)(&bytes).err().map(|rule| format!("{}: {rule}", path.display())));
        }
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(())
}

/// Tests the runner itself: it detects rules that are violated occasionally, and a parser that panics.
#[test]
fn a_parser_that_accepts_too_much_is_found() {
    fn valid() -> BoxedStrategy<Vec<u8>> {
        Just(b"{\"key\":\"a/b.dump\"}".to_vec()).boxed()
    }
    fn leads_up(bytes: &[u8]) -> Result<(), String> {
        if bytes.windows(2).any(|pair| pair == b"..") { Err("leads up".to_owned()) } else { Ok(()) }
    }
    fn panics(bytes: &[u8]) -> Result<(), String> {
        assert!(!bytes.is_empty(), "an index out of bounds");
        Ok(())
    }
    fn refuses(_: &[u8]) -> Result<(), String> {
        Err("refused".to_owned())
    }
    fn fine(_: &[u8]) -> Result<(), String> {
        Ok(())
    }
    let of = |holds, accepts| Target { name: "broken", valid: valid(), holds, accepts, cases: 0 };
    of(fine, fine).play(3000).unwrap();
    for (what, target, said) in [
        ("a rule", of(leads_up, fine), "leads up"),
        ("a panic", of(panics, fine), "an index out of bounds"),
        ("a refusal", of(fine, refuses), "refused"),
    ] {
        let found = target.play(3000).expect_err(what);
        assert!(found.contains(said) && found.contains("tests/corpus/broken"), "{what}: {found}");
    }
}
