//! Tests for attributing changes to overlapping calls.

use proptest::prelude::*;

use super::*;

fn agent(name: &str) -> Agent {
    Agent { actor: "claude-code".to_owned(), name: name.to_owned(), dispatch: Some(name.to_owned()) }
}

fn window(agent_name: &str, call: &str, claim: Option<&str>) -> CallWindow {
    CallWindow {
        session: agent_name.to_owned(),
        tool_use: call.to_owned(),
        tool: if claim.is_some() { "Write" } else { "Bash" }.to_owned(),
        agent: agent(agent_name),
        subagent: None,
        process: None,
        opened: Timestamp::UNIX_EPOCH,
        claim: claim.map(|path| vec![ClaimedPath(path.into())]),
        is_background: false,
    }
}

fn change(op: FileOperation, path: &str) -> Change {
    Change { op, path: path.as_bytes().to_vec(), size: 1 }
}

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn attributions(entries: &[AuditEntry]) -> Vec<(String, String, bool)> {
    let names = |entry: &AuditEntry| entry.agent_name.clone().unwrap_or_default();
    entries.iter().map(|entry| (entry.path.clone(), names(entry), entry.ambiguous)).collect()
}

#[test]
fn claimed_file_and_its_new_directories_belong_to_the_tool() {
    let mut windows = CallWindows::default();
    windows.begin(window("ada", "1", None));
    windows.begin(window("bob", "2", Some("n/e/w")));
    let changes = [
        change(FileOperation::Mkdir, "n"),
        change(FileOperation::Mkdir, "n/e"),
        change(FileOperation::Write, "n/e/w"),
        change(FileOperation::Write, "n/x"),
    ];
    let immediate = windows.attribute(changes.to_vec(), NOW);
    assert_eq!(attributions(&immediate), [("n/x".to_owned(), "ada".to_owned(), false)]);
    let entries = windows.end_successful("bob", "2", Some(change(FileOperation::Write, "n/e/w")), NOW);
    assert_eq!(entries.iter().map(|entry| entry.path.as_str()).collect::<Vec<_>>(), ["n", "n/e", "n/e/w"]);
    assert!(entries.iter().all(|entry| entry.agent_name.as_deref() == Some("bob") && !entry.ambiguous));
    assert!(windows.end(|_| true).is_empty());
}

#[test]
fn change_claimed_by_failed_tool_belongs_to_commands() {
    let mut windows = CallWindows::default();
    windows.begin(window("ada", "1", None));
    windows.begin(window("bob", "2", Some("w")));
    assert!(windows.attribute(vec![change(FileOperation::Write, "w")], NOW).is_empty());
    let released = windows.end(|window| window.tool_use == "2");
    assert_eq!(attributions(&released), [("w".to_owned(), "ada".to_owned(), false)]);
    windows.begin(window("bob", "3", Some("w")));
    windows.end(|window| window.session == "ada");
    assert!(windows.attribute(vec![change(FileOperation::Write, "w")], NOW).is_empty());
    assert!(windows.end(|_| true).is_empty(), "a change without a running command must not be attributed");
}

#[test]
fn change_claimed_by_killed_tool_is_ambiguous() {
    let mut windows = CallWindows::default();
    windows.begin(window("bob", "1", Some("w")));
    assert!(windows.attribute(vec![change(FileOperation::Write, "w")], NOW).is_empty());
    let entries = windows.end_killed(|window| window.session == "bob");
    assert_eq!(attributions(&entries), [("w".to_owned(), "bob".to_owned(), true)]);
    assert_eq!(entries[0].tool.as_deref(), Some("Write"));
    windows.begin(window("ada", "2", None));
    windows.begin(window("bob", "3", Some("w")));
    assert!(windows.attribute(vec![change(FileOperation::Write, "w")], NOW).is_empty());
    let entries = windows.end_killed(|window| window.session == "bob");
    assert_eq!(attributions(&entries), [("w".to_owned(), "ada, bob".to_owned(), true)]);
    assert_eq!(entries[0].tool, None);
}

#[test]
fn change_claimed_by_killed_tool_waits_for_other_claim() {
    let mut windows = CallWindows::default();
    windows.begin(window("ada", "1", Some("w")));
    windows.begin(window("bob", "2", Some("w")));
    assert!(windows.attribute(vec![change(FileOperation::Write, "w")], NOW).is_empty());
    assert!(windows.end_killed(|window| window.session == "bob").is_empty());
    let entries = windows.end_successful("ada", "1", None, NOW);
    assert_eq!(attributions(&entries), [("w".to_owned(), "ada".to_owned(), false)]);
}

#[test]
fn several_calls_by_one_agent_are_unambiguous() {
    let mut windows = CallWindows::default();
    windows.begin(window("ada", "1", None));
    windows.begin(window("ada", "2", None));
    let entries = windows.attribute(vec![change(FileOperation::Delete, "x")], NOW);
    assert_eq!(attributions(&entries), [("x".to_owned(), "ada".to_owned(), false)]);
    assert_eq!(entries[0].dispatch_id.as_deref(), Some("ada"));
}

#[test]
fn claim_is_serialized_as_text_only_if_utf8() {
    let mut claiming = window("ada", "1", Some("w"));
    claiming.claim.as_mut().unwrap().push(ClaimedPath(b"\xff/x".to_vec()));
    let saved = serde_json::to_string(&claiming).unwrap();
    assert!(saved.contains(r#""claim":["w",[255,47,120]]"#), "{saved}");
    assert_eq!(serde_json::from_str::<CallWindow>(&saved).unwrap(), claiming);
}

#[test]
fn begin_evicts_oldest_window_at_capacity() {
    let mut windows = CallWindows::default();
    for call in 1..=MAX_WINDOWS {
        assert_eq!(windows.begin(window("ada", &call.to_string(), None)), None);
    }
    assert_eq!(windows.begin(window("ada", "more", None)).unwrap().tool_use, "1");
    assert_eq!(windows.all().len(), MAX_WINDOWS);
}

proptest! {
    /// A change belongs to exactly the agents whose commands were running.
    #[test]
    fn change_belongs_to_running_commands(steps in prop::collection::vec((0_u8..3, 0_usize..3), 1..60)) {
        let names = ["ada", "bob", "eve"];
        let mut running = [0_usize; 3];
        let mut windows = CallWindows::default();
        for (step, agent) in steps {
            match step {
                0 => {
                    windows.begin(window(names[agent], &running[agent].to_string(), None));
                    running[agent] += 1;
                }
                1 if running[agent] > 0 => {
                    running[agent] -= 1;
                    let call = running[agent].to_string();
                    prop_assert!(windows.end_successful(names[agent], &call, None, NOW).is_empty());
                }
                _ => {
                    let entries = windows.attribute(vec![change(FileOperation::Write, "f")], NOW);
                    let mut expected: Vec<&str> = (0..3).filter(|agent| running[*agent] > 0).map(|agent| names[agent]).collect();
                    prop_assert_eq!(entries.len(), usize::from(!expected.is_empty()));
                    for entry in entries {
                        let mut actual: Vec<String> = entry.agent_name.unwrap_or_default().split(", ").map(str::to_owned).collect();
                        actual.sort();
                        expected.sort_unstable();
                        prop_assert_eq!(&actual, &expected);
                        prop_assert_eq!(entry.ambiguous, expected.len() > 1);
                    }
                }
            }
        }
    }
}
