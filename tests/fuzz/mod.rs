//! Runs parsers for untrusted input on mutated documents: no parser may panic, or accept a document that violates its
//! rules.
//!
//! A [`Target`] is a parser with its rules; `cargo xtask fuzz` also runs it with libFuzzer. Valid documents are
//! generated and then mutated, because random bytes are rejected at the first check. Selected inputs, among them those
//! that once violated a rule, are kept under `tests/corpus/<target>` and are always replayed. A short run, on every
//! change, tests up to 2000 cases per target; a long run (`cargo xtask test --long`) takes a minute per target.

mod mutation;
mod parsers;
mod userdata;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use mutation::{Mutation, mutate};
use parsers::Target;

const LONG_DURATION: Duration = Duration::from_secs(60);
/// Number of cases between checks of a long run's deadline.
const CASES_PER_ROUND: u32 = 400;

/// A parser's input: a valid document, and the mutations to apply.
type Case = (Vec<u8>, Vec<Mutation>);

impl Target {
    fn strategy(&self) -> impl Strategy<Value = Case> + use<> {
        let mutations = prop_oneof![
            1 => Just(Vec::new()),
            4 => prop::collection::vec(any::<Mutation>(), 1..6),
        ];
        (self.valid.clone(), mutations)
    }

    fn check(&self, case: &Case) -> Result<(), TestCaseError> {
        let (valid, mutations) = case;
        let bytes = mutate(valid.clone(), mutations);
        if bytes == *valid {
            (self.check_valid)(valid).map_err(TestCaseError::fail)?;
        }
        (self.check_any)(&bytes).map_err(TestCaseError::fail)
    }

    /// Runs random cases.
    ///
    /// # Errors
    /// Returns the smallest case that violated a rule or panicked.
    fn run_cases(&self, cases: u32) -> Result<(), String> {
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        let mut runner = TestRunner::new(config);
        runner.run(&self.strategy(), |case| self.check(&case)).map_err(|error| match error {
            TestError::Abort(reason) => format!("{}: {reason}", self.name),
            TestError::Fail(reason, (valid, mutations)) => {
                let bytes = mutate(valid, &mutations);
                let (name, text, hex) = (self.name, String::from_utf8_lossy(&bytes), hex::encode(&bytes));
                format!("{name}: {reason}\ninput {text:?}\nto keep this input, add a file to tests/corpus/{name} with the bytes {hex}")
            }
        })
    }

    fn read_corpus(&self) -> Result<Vec<(PathBuf, Vec<u8>)>> {
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

/// Returns all targets. libFuzzer runs them all except user-data, which a separate program, cloud-init, parses.
fn targets() -> Vec<Target> {
    parsers::targets().into_iter().chain([userdata::user_data()]).collect()
}

fn find_target(name: &str) -> Target {
    targets().into_iter().find(|target| target.name == name).expect("the target exists")
}

fn run_short(name: &str) {
    let target = find_target(name);
    target.run_cases(target.cases).unwrap();
}

fn run_long(name: &str) -> Result<()> {
    let target = find_target(name);
    let (start, mut fuzz_cases) = (Instant::now(), 0);
    let mut result = Ok(());
    while start.elapsed() < LONG_DURATION && result.is_ok() {
        result = target.run_cases(CASES_PER_ROUND);
        fuzz_cases += u64::from(CASES_PER_ROUND);
    }
    Figures { fuzz_cases, ..Figures::new(&format!("fuzzing {name}")) }.record()?;
    result.map_err(anyhow::Error::msg)
}

macro_rules! fuzzed {
    ($($short:ident, $long:ident, $name:literal;)+) => {
        $(
            #[test]
            fn $short() {
                run_short($name);
            }

            #[test]
            #[ignore = "long: runs for a minute"]
            fn $long() -> Result<()> {
                run_long($name)
            }
        )+

        /// A target without a test would never run.
        #[test]
        fn every_fuzz_target_runs() {
            let names: Vec<_> = targets().iter().map(|target| target.name).collect();
            assert_eq!(names, [$($name),+]);
        }
    };
}

fuzzed! {
    mutated_pointer_stays_in_its_slot, long_mutated_pointer_stays_in_its_slot, "pointer";
    mutated_sidecar_must_match_its_dump, long_mutated_sidecar_must_match_its_dump, "sidecar";
    mutated_manifest_is_rejected, long_mutated_manifest_is_rejected, "manifest";
    mutated_signatures_need_the_publishers_signature, long_mutated_signatures_need_the_publishers_signature, "signature";
    mutated_archive_stays_in_its_directory, long_mutated_archive_stays_in_its_directory, "archive";
    tar_entries_of_mutated_archives_keep_limits, long_tar_entries_of_mutated_archives_keep_limits, "tar-entries";
    mutated_env_file_parses_back, long_mutated_env_file_parses_back, "env-file";
    mutated_boot_env_error_has_no_secret, long_mutated_boot_env_error_has_no_secret, "boot-env";
    mutated_app_manifest_keeps_its_names, long_mutated_app_manifest_keeps_its_names, "app-manifest";
    mutated_bridge_request_stays_one_statement, long_mutated_bridge_request_stays_one_statement, "bridge-request";
    mutated_nested_bridge_filter_keeps_meaning, long_mutated_nested_bridge_filter_keeps_meaning, "bridge-filter";
    mutated_cursor_resumes_only_its_own_order, long_mutated_cursor_resumes_only_its_own_order, "bridge-cursor";
    mutated_jwt_never_authenticates_another_user, long_mutated_jwt_never_authenticates_another_user, "jwt";
    mutated_proof_never_authenticates_another_principal, long_mutated_proof_never_authenticates_another_principal, "proof";
    mutated_heartbeat_is_stored_within_bounds, long_mutated_heartbeat_is_stored_within_bounds, "heartbeat";
    mutated_hook_input_sends_no_content, long_mutated_hook_input_sends_no_content, "hook-input";
    mutated_agent_frames_parse_back, long_mutated_agent_frames_parse_back, "agent-frames";
    mutated_agent_output_yields_bounded_texts, long_mutated_agent_output_yields_bounded_texts, "agent-output";
    mutated_event_id_resumes_at_most_one_app, long_mutated_event_id_resumes_at_most_one_app, "event-id";
    mutated_listing_loads_no_forbidden_entry, long_mutated_listing_loads_no_forbidden_entry, "import-listing";
    mutated_import_manifest_matches_archive, long_mutated_import_manifest_matches_archive, "import-manifest";
    mutated_keys_keep_their_purpose, long_mutated_keys_keep_their_purpose, "jwks";
    mutated_owner_config_keeps_bounds, long_mutated_owner_config_keeps_bounds, "owner-config";
    mutated_usage_report_is_safe_to_print, long_mutated_usage_report_is_safe_to_print, "usage-report";
    mutated_cookie_cannot_use_router_name, long_mutated_cookie_cannot_use_router_name, "set-cookie";
    mutated_hop_by_hop_headers_are_removed, long_mutated_hop_by_hop_headers_are_removed, "hop-by-hop";
    mutated_path_stays_in_the_app_directory, long_mutated_path_stays_in_the_app_directory, "app-path";
    mutated_session_counts_only_its_own_calls, long_mutated_session_counts_only_its_own_calls, "codex-session";
    mutated_dump_head_yields_a_count_or_none, long_mutated_dump_head_yields_a_count_or_none, "dump-head";
    mutated_user_data_is_one_document, long_mutated_user_data_is_one_document, "user-data";
}

/// The page lists the targets with their rules; a missing row would suggest that a parser has no rules.
#[test]
fn every_fuzz_target_is_documented() {
    let page = include_str!("../../docs/security.md");
    let (_, section) = page
        .split_once("### Documents that a less trusted side writes")
        .expect("docs/security.md has this section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut rows: Vec<_> =
        section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let mut names: Vec<_> = targets().iter().map(|target| target.name).collect();
    rows.sort_unstable();
    names.sort_unstable();
    assert_eq!(rows, names);
}

#[test]
fn regression_corpus_violates_no_rule() -> Result<()> {
    let mut violations = Vec::new();
    for target in targets() {
        for (path, bytes) in target.read_corpus()? {
            violations
                .extend((target.check_any)(&bytes).err().map(|rule| format!("{}: {rule}", path.display())));
        }
    }
    ensure!(violations.is_empty(), "{}", violations.join("\n"));
    Ok(())
}

/// Tests the runner itself: it detects rules that are violated occasionally, and a parser that panics.
#[test]
fn runner_detects_parsers_that_violate_their_rules() {
    fn valid() -> BoxedStrategy<Vec<u8>> {
        Just(b"{\"key\":\"a/b.dump\"}".to_vec()).boxed()
    }
    fn forbids_parent_dir(bytes: &[u8]) -> Result<(), String> {
        if bytes.windows(2).any(|pair| pair == b"..") { Err("contains `..`".to_owned()) } else { Ok(()) }
    }
    fn panics(bytes: &[u8]) -> Result<(), String> {
        assert!(!bytes.is_empty(), "an index out of bounds");
        Ok(())
    }
    fn refuses(_: &[u8]) -> Result<(), String> {
        Err("refused".to_owned())
    }
    fn accepts(_: &[u8]) -> Result<(), String> {
        Ok(())
    }
    let target_with =
        |check_any, check_valid| Target { name: "broken", valid: valid(), check_any, check_valid, cases: 0 };
    target_with(accepts, accepts).run_cases(3000).unwrap();
    for (failure, target, expected) in [
        ("a rule", target_with(forbids_parent_dir, accepts), "contains `..`"),
        ("a panic", target_with(panics, accepts), "an index out of bounds"),
        ("a refusal", target_with(accepts, refuses), "refused"),
    ] {
        let report = target.run_cases(3000).expect_err(failure);
        assert!(report.contains(expected) && report.contains("tests/corpus/broken"), "{failure}: {report}");
    }
}
