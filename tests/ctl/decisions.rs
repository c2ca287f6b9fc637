//! The requests sent for an operator's decisions, the output of `--wait`, token files, and platform outages.

use super::*;

#[tokio::test]
async fn options_and_decisions_reach_the_platform() {
    let send = async |args: &[&str], replies: Vec<Reply>| {
        let platform = FakePlatform::start(replies).await;
        let output = platform.svcctl(args).await;
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        let last = platform.requests().pop().unwrap();
        assert!(last.header("idempotency-key").is_some(), "{args:?}");
        let body = serde_json::from_str(&last.body).unwrap_or(Value::Null);
        (last.line, body)
    };
    let record = || Reply::Json(200, record("running", None));
    let options = [
        "--accept-loss",
        "--replace-first",
        "--server-type",
        "cpx32",
        "--location",
        "hel1",
        "--fallback-locations",
        "fsn1,nbg1",
        "--image-version",
        "v2",
    ];
    let recover: Vec<&str> = ["recover", "user_1", "--yes"].into_iter().chain(options).collect();
    let (line, body) = send(&recover, vec![accepted()]).await;
    assert_eq!(line, "POST /vps/recover HTTP/1.1");
    assert_eq!(
        body,
        json!({"idpUserId": "user_1", "slot": "primary", "acceptLoss": true, "replaceFirst": true,
               "serverType": "cpx32", "location": "hel1", "fallbackLocations": ["fsn1", "nbg1"], "imageVersion": "v2"})
    );
    // Flags that are not set are omitted, because platforms running an earlier release reject unknown fields.
    let (_, body) = send(&["recover", "user_1", "--yes"], vec![accepted()]).await;
    assert_eq!(body, json!({"idpUserId": "user_1", "slot": "primary"}));
    let options = ["--accept-loss", "--allow-empty", "--yes"];
    let (_, body) = send(&[&PROVISION[..], &options].concat(), vec![unsupported_quote(), accepted()]).await;
    assert_eq!((&body["acceptLoss"], &body["allowEmpty"]), (&json!(true), &json!(true)));
    let (_, body) = send(&PROVISION, vec![unsupported_quote(), accepted()]).await;
    assert_eq!(body, json!({"idpUserId": "user_1", "slot": "primary", "handle": "ada"}));
    let delete = ["delete", MACHINE, "--yes", "--now", "--accept-loss"];
    let (line, _) = send(&delete, vec![record(), accepted()]).await;
    assert_eq!(line, format!("DELETE /vps/{MACHINE}?now=true&acceptLoss=true HTTP/1.1"));
    let (line, _) = send(&["delete", MACHINE, "--yes"], vec![record(), accepted()]).await;
    assert_eq!(line, format!("DELETE /vps/{MACHINE} HTTP/1.1"));
    let decided = || Reply::Json(200, operation("recover", "running", &[]));
    let (line, body) = send(&["operation", "continue", OPERATION, "--accept-loss"], vec![decided()]).await;
    assert_eq!(line, format!("POST /vps/operations/{OPERATION}/continue HTTP/1.1"));
    assert_eq!(body, json!({"acceptLoss": true}));
    let (_, body) = send(&["operation", "continue", OPERATION], vec![decided()]).await;
    assert_eq!(body, json!({}));
    let abandon = ["operation", "abandon", OPERATION];
    let (line, _) = send(&abandon, vec![decided(), record(), decided()]).await;
    assert_eq!(line, format!("POST /vps/operations/{OPERATION}/abandon HTTP/1.1"));
    let (line, _) = send(&["undelete", MACHINE], vec![accepted()]).await;
    assert_eq!(line, format!("POST /vps/{MACHINE}/undelete HTTP/1.1"));
    let (line, _) = send(&["resume", MACHINE], vec![record(), record()]).await;
    assert_eq!(line, format!("POST /vps/{MACHINE}/resume HTTP/1.1"));
    let power = |action: &str| {
        let accepted =
            json!({"machineId": MACHINE, "status": "running", "operationId": OPERATION, "action": action});
        Reply::Json(202, accepted)
    };
    for action in ["off", "reboot"] {
        let (line, body) = send(&["power", action, MACHINE, "--yes"], vec![record(), power(action)]).await;
        assert_eq!((line, body), (format!("POST /vps/{MACHINE}/power HTTP/1.1"), json!({"action": action})));
    }
    let accept = ["backup", "accept", MACHINE, "--yes"];
    let (line, body) = send(&accept, vec![record(), accepted()]).await;
    assert_eq!((line, body), (format!("POST /vps/{MACHINE}/backup-accept HTTP/1.1"), json!({})));
    let (_, body) = send(&["power", "on", MACHINE], vec![record(), power("on")]).await;
    assert_eq!(body, json!({"action": "on"}));
    let mut discarded = super::record("running", None);
    discarded["operationId"] = OPERATION.into();
    let discarded = Reply::Json(202, discarded);
    let (line, body) = send(&["discard", MACHINE, "--yes"], vec![record(), discarded]).await;
    assert_eq!((line, body), (format!("POST /vps/{MACHINE}/discard HTTP/1.1"), json!({"acceptLoss": false})));
}

#[tokio::test]
async fn accept_resolves_slot_to_its_machine() {
    const OLD: &str = "019a0000-0000-7000-8000-000000000009";
    let mut waiting = operation("recover", "waiting", &[]);
    waiting["question"] = json!({"code": "last_backup_held_back", "detail": "Held back."});
    let page = |machine: Value| Reply::Json(200, json!({"machines": [machine], "nextCursor": null}));
    let platform = FakePlatform::start([
        page(record("recovering", None)),
        Reply::Json(200, record("recovering", Some(waiting.clone()))),
        Reply::Json(202, json!({"machineId": OLD, "requestedAt": "2026-01-01T00:00:00.000Z"})),
    ])
    .await;
    let output = platform.svcctl(&["backup", "accept", "user_1/second", "--yes"]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(&format!("the host of machine {OLD}")), "{text}");
    assert!(text.contains(&format!("run `svcctl operation continue {OPERATION}` to use it")), "{text}");
    let lines: Vec<_> = platform.requests().into_iter().map(|request| request.line).collect();
    assert_eq!(lines[0], "GET /vps?idpUserId=user_1&slot=second HTTP/1.1");
    assert_eq!(lines[2], format!("POST /vps/{MACHINE}/backup-accept HTTP/1.1"));

    // While a deletion waits for a decision, the slot has no active machine.
    let mut deleted = record("running", Some(waiting));
    deleted["deletedAt"] = "2026-01-01T00:00:00.000Z".into();
    deleted["copies"] = json!({"live": null, "newestSnapshotAt": null, "exposedSeconds": null, "kept": [
        {"machineId": MACHINE, "providerServerId": "1", "reason": "deleted", "until": null, "unsavedSince": null}]});
    let detail = || Reply::Json(200, deleted.clone());
    let empty_page = Reply::Json(200, json!({"machines": [], "nextCursor": null}));
    let replies = [empty_page, page(deleted.clone()), detail(), detail(), accepted()];
    let platform = FakePlatform::start(replies).await;
    let output = platform.svcctl(&["backup", "accept", "ada", "--yes"]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(
        platform.requests().pop().unwrap().line,
        format!("POST /vps/{MACHINE}/backup-accept HTTP/1.1")
    );
}

#[tokio::test]
async fn undelete_names_a_server_that_is_being_deleted() {
    let mut deleted = record("running", None);
    deleted["deletedAt"] = "2026-01-01T00:00:00.000Z".into();
    deleted["copies"] = json!({"live": null, "newestSnapshotAt": null, "exposedSeconds": null, "kept": [
        {"machineId": MACHINE, "providerServerId": "1", "reason": "deleted", "until": "2026-01-02T00:00:00.000Z",
         "unsavedSince": null}]});
    let empty_page = Reply::Json(200, json!({"machines": [], "nextCursor": null}));
    let page = Reply::Json(200, json!({"machines": [deleted.clone()], "nextCursor": null}));
    let platform = FakePlatform::start([page, Reply::Json(200, deleted), empty_page]).await;
    let output = platform.svcctl(&["undelete", "ada"]).await;
    assert_eq!(output.status.code(), Some(65));
    let text = stderr(&output);
    assert!(text.contains(&format!("the server of machine {MACHINE} is being deleted")), "{text}");
    assert!(text.contains("svcctl operation abandon") && !text.contains("no kept server"), "{text}");
}

#[tokio::test]
async fn abandon_warns_that_the_machine_is_powered_on() {
    const OLD: &str = "019a0000-0000-7000-8000-000000000009";
    let recovery = || Reply::Json(200, operation("recover", "running", &[]));
    let mut new = record("recovering", None);
    new["copies"] = json!({"live": null, "newestSnapshotAt": null, "exposedSeconds": null, "kept": [
        {"machineId": OLD, "providerServerId": "1", "reason": "replaced", "until": null, "unsavedSince": null}]});
    let mut old = record("running", None);
    old["machineId"] = OLD.into();
    old["replacedBy"] = MACHINE.into();
    for (powered_off_at, has_note) in [(json!("2026-01-01T00:00:00.000Z"), true), (Value::Null, false)] {
        old["poweredOffAt"] = powered_off_at;
        let replies = [recovery(), Reply::Json(200, new.clone()), Reply::Json(200, old.clone()), recovery()];
        let platform = FakePlatform::start(replies).await;
        let output = platform.svcctl(&["operation", "abandon", OPERATION]).await;
        assert!(output.status.success(), "{}", stderr(&output));
        let note = format!("run `svcctl power off {OLD}` to power it off again");
        assert_eq!(stderr(&output).contains(&note), has_note, "{}", stderr(&output));
    }
}

#[tokio::test]
async fn release_of_informational_alarm_needs_no_confirmation() {
    for alarm in ["provider_limit", "rollout_halted"] {
        let refusal = problem(409, "invalid_state", "There is nothing to release.");
        let platform = FakePlatform::start([Reply::Json(409, refusal)]).await;
        let output = platform.svcctl(&["alarm", "release", alarm]).await;
        assert_eq!(output.status.code(), Some(65), "{alarm}: {}", stderr(&output));
        assert_eq!(platform.requests().len(), 1, "{alarm}");
    }
}

/// The platform creates the removal operation shortly after the request, so `svcctl` polls for its id.
#[tokio::test]
async fn discard_names_server_and_operation() {
    let mut replaced = record("running", None);
    replaced["replacedBy"] = OPERATION.into();
    replaced["providerServerId"] = "4711".into();
    let mut with_removal = replaced.clone();
    with_removal["operations"] =
        json!([operation("remove_server", "running", &[]), operation("remove_server", "cancelled", &[])]);
    let mut repeated = replaced.clone();
    repeated["operationId"] = OPERATION.into();
    repeated["alreadyOrdered"] = true.into();
    for (response, polls, has_note) in
        [(replaced.clone(), vec![replaced.clone(), with_removal], false), (repeated, vec![], true)]
    {
        let replies = [replaced.clone(), response].into_iter().chain(polls);
        let platform = FakePlatform::start(replies.map(|reply| Reply::Json(200, reply))).await;
        let output = platform.svcctl(&["discard", MACHINE, "--yes"]).await;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}", stderr(&output));
        for part in [
            "server     4711: being deleted, with its disk",
            &format!("operation  {OPERATION}"),
            "status     replaced",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(text.contains("was already requested; nothing was changed"), has_note, "{text}");
    }
}

#[tokio::test]
async fn power_off_reports_progress_and_repeated_requests() {
    let reply = |operation: Value| {
        Reply::Json(
            202,
            json!({"machineId": MACHINE, "action": "off", "status": "running", "operationId": operation}),
        )
    };
    let mut off = record("running", Some(operation("power_off", "succeeded", &["stop_server"])));
    off["poweredOffAt"] = "2026-01-01T00:00:00.000Z".into();
    let mut running = off.clone();
    running["operations"] = json!([operation("power_off", "running", &[])]);
    let platform = FakePlatform::start([
        Reply::Json(200, record("running", None)),
        reply(json!(OPERATION)),
        Reply::Json(200, running),
        Reply::Json(200, off.clone()),
    ])
    .await;
    let output = platform.svcctl(&["power", "off", MACHINE, "--yes", "--wait"]).await;
    let printed = stderr(&output);
    assert!(output.status.success(), "{printed}");
    assert_eq!(
        printed.lines().next(),
        Some(&*format!("machine {MACHINE} is being powered off")),
        "{printed}"
    );
    assert!(printed.ends_with(&format!("machine {MACHINE} is powered off\n")), "{printed}");

    // A repeated request does not wait, even if the machine has failed.
    off["status"] = "failed".into();
    let replies = [Reply::Json(200, off.clone()), reply(Value::Null), Reply::Json(200, off.clone())];
    let platform = FakePlatform::start(replies).await;
    let output = platform.svcctl(&["power", "off", MACHINE, "--yes", "--wait"]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output), "note: the machine had already been powered off; nothing was changed\n");
    let platform = FakePlatform::start([Reply::Json(200, off), reply(Value::Null)]).await;
    let output = platform.svcctl(&["power", "off", MACHINE, "--yes"]).await;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        printed.contains("status        off\n") && printed.contains("had already been powered off"),
        "{printed}"
    );
}

#[tokio::test]
async fn undelete_reports_that_the_machine_is_being_reinstated() {
    let reply = |already_undone: bool| {
        Reply::Json(
            202,
            json!({"machineId": MACHINE, "kind": "customer", "status": "failed", "epoch": 2,
                                "operationId": OPERATION, "alreadyUndone": already_undone}),
        )
    };
    let machine_at = |status: &str, state: &str| {
        let mut machine = record(status, Some(operation("reinstate", state, &[])));
        if status == "failed" {
            machine["failure"] = json!({"cause": "reinstating", "stage": null, "message": null});
        }
        Reply::Json(200, machine)
    };
    let platform = FakePlatform::start([reply(false)]).await;
    let output = platform.svcctl(&["undelete", MACHINE]).await;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        printed.contains("being reinstated: it serves again after its next healthy heartbeat"),
        "{printed}"
    );
    for already_undone in [false, true] {
        let replies =
            [reply(already_undone), machine_at("failed", "running"), machine_at("running", "succeeded")];
        let platform = FakePlatform::start(replies).await;
        let output = platform.svcctl(&["undelete", MACHINE, "--wait"]).await;
        let printed = stderr(&output);
        assert!(output.status.success(), "{printed}");
        assert!(
            printed
                .contains(&format!("machine {MACHINE} is being reinstated\nmachine {MACHINE} is running\n")),
            "{printed}"
        );
        assert!(!printed.contains("is failed"), "{printed}");
        assert_eq!(
            printed.starts_with("note: the deletion had already been undone"),
            already_undone,
            "{printed}"
        );
    }
}

#[tokio::test]
async fn abandon_waits_for_the_machine_to_serve_again() {
    const OLD: &str = "019a0000-0000-7000-8000-000000000009";
    let recovery = |state: &str| Reply::Json(200, operation("recover", state, &[]));
    let mut new = record("failed", Some(operation("recover", "failed", &[])));
    new["copies"] = json!({"live": {"machineId": OLD, "providerServerId": "1"}, "newestSnapshotAt": null,
        "exposedSeconds": null, "kept": []});
    let old = |status: &str, state: &str| {
        let mut operation = operation("reinstate", state, &[]);
        operation["machineId"] = OLD.into();
        let mut machine = record(status, Some(operation));
        machine["machineId"] = OLD.into();
        Reply::Json(200, machine)
    };
    let new = || Reply::Json(200, new.clone());
    let replies = [
        recovery("running"),
        new(),
        recovery("failed"),
        new(),
        old("failed", "running"),
        old("failed", "running"),
        old("running", "succeeded"),
    ];
    let platform = FakePlatform::start(replies).await;
    let output = platform.svcctl(&["operation", "abandon", OPERATION, "--wait"]).await;
    let text = format!("{}{}", stderr(&output), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{text}");
    assert!(text.starts_with(&format!("machine {OLD} is being reinstated\n")), "{text}");
    assert!(text.contains(&format!("machine {OLD} is running\n")), "{text}");

    // If no machine gets the slot back, the wait ends with the operation.
    let mut unserved = record("failed", Some(operation("provision", "failed", &[])));
    unserved["copies"] = json!({"live": null, "newestSnapshotAt": null, "exposedSeconds": null, "kept": []});
    let provisioned = |state: &str| Reply::Json(200, operation("provision", state, &[]));
    let unserved = || Reply::Json(200, unserved.clone());
    let platform =
        FakePlatform::start([provisioned("running"), unserved(), provisioned("failed"), unserved()]).await;
    let output = platform.svcctl(&["operation", "abandon", OPERATION, "--wait"]).await;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.starts_with("provision  failed"), "{text}{}", stderr(&output));
}

#[tokio::test]
async fn wait_ends_when_operation_needs_a_decision() {
    let mut waiting = operation("delete", "waiting", &[]);
    waiting["question"] =
        json!({"code": "last_backup_missing", "detail": "No final backup: its disk is full."});
    let platform = FakePlatform::start([
        Reply::Json(200, record("running", None)),
        accepted(),
        Reply::Json(200, record("running", Some(waiting))),
    ])
    .await;
    let output = platform.svcctl(&["delete", MACHINE, "--yes", "--wait"]).await;
    assert_eq!(output.status.code(), Some(75));
    let text = stderr(&output);
    let retry_step =
        format!("next: either `svcctl operation continue {OPERATION}`: the final backup is retried");
    for part in [
        "the deletion is waiting for your decision",
        "its disk is full",
        &retry_step,
        "or `svcctl operation continue",
        "the deletion is undone",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[tokio::test]
async fn wait_shows_boot_progress_once_for_each_ten_percent() {
    let progress_at = |stage: &str, bytes: u64| {
        let mut booting = record("recovering", Some(operation("recover", "running", &[])));
        booting["bootProgress"] = json!({"stage": "restore", "bytes": bytes, "totalBytes": 1000});
        booting["boot"] = json!({"stage": stage, "at": "2026-01-01T00:00:01.000Z",
            "stages": [{"stage": stage, "at": "2026-01-01T00:00:01.000Z"}]});
        Reply::Json(200, booting)
    };
    let restoring = |bytes| progress_at("restore", bytes);
    let done = Reply::Json(200, record("running", Some(operation("recover", "succeeded", &[]))));
    // Progress reported after its stage has ended is not printed.
    let polls = [restoring(50), restoring(420), restoring(440), restoring(990), progress_at("gateway", 1000)];
    let platform = FakePlatform::start([accepted()].into_iter().chain(polls).chain([done])).await;
    let output = platform.svcctl(&["recover", "user_1", "--yes", "--wait"]).await;
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| line.contains(" of 1000 B")).map(str::trim).collect();
    assert_eq!(lines, ["boot: restore 42%, 420 B of 1000 B", "boot: restore 99%, 990 B of 1000 B"]);
}

#[tokio::test]
async fn hanging_platform_is_distinguished_from_unreachable_one() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let mut open_connections = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            open_connections.push(stream);
        }
    });
    let env = [("PLATFORM_PUBLIC_URL", base.as_str()), ("PLATFORM_SECRET", SECRET)];
    let output = svcctl(&["list", "--timeout", "1"], &env).await;
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(69), "{text}");
    assert!(text.contains("did not respond within 1 s"), "{text}");
    assert!(!text.contains("cannot be reached"), "{text}");
    assert_eq!(text.matches("; retrying in ").count(), 4, "{text}");
    assert!(text.contains(" s (attempt 2 of 5)"), "{text}");
    server.abort();

    let unreachable = [("PLATFORM_PUBLIC_URL", "http://127.0.0.1:1"), ("PLATFORM_SECRET", SECRET)];
    let text = stderr(&svcctl(&["list"], &unreachable).await);
    assert!(text.contains("cannot be reached") && text.contains("check PLATFORM_PUBLIC_URL"), "{text}");
}

fn issued_token(name: &str) -> Reply {
    let time = "2026-01-01T00:00:00.000Z";
    let operator = json!({"name": name, "scopes": ["read"], "state": "active", "expiresAt": time, "lastUsedAt": null,
        "createdAt": time, "createdBy": "operator", "previousTokenExpiresAt": null});
    Reply::Json(201, json!({"operator": operator, "tokenId": OPERATION, "token": "svco_new"}))
}

#[tokio::test]
async fn operator_add_keeps_existing_file_and_reports_lost_token() {
    let dir = tempfile::tempdir().unwrap();
    let existing = dir.path().join("ada.token");
    std::fs::write(&existing, "svco_ada").unwrap();
    let missing = dir.path().join("none").join("bob.token");
    // The file name is so long that the temporary file cannot be created.
    let long = dir.path().join("b".repeat(240));
    let add = async |file: &std::path::Path| {
        let platform = FakePlatform::start([issued_token("bob")]).await;
        let file = file.to_str().unwrap().to_owned();
        let output =
            platform.svcctl(&["operator", "add", "bob", "--scope", "read", "--token-file", &file]).await;
        (output.status.code(), stderr(&output), platform.requests().len())
    };
    for (file, reason) in [(&existing, "already exists"), (&missing, "does not exist")] {
        let (exit_code, printed, request_count) = add(file).await;
        assert_eq!((exit_code, request_count), (Some(65), 0), "{printed}");
        assert!(printed.contains(reason) && printed.contains("nothing was changed"), "{printed}");
    }
    assert_eq!(std::fs::read_to_string(&existing).unwrap(), "svco_ada");
    assert!(!missing.parent().unwrap().exists());

    let (exit_code, printed, request_count) = add(&long).await;
    assert_eq!((exit_code, request_count), (Some(69), 1), "{printed}");
    assert!(
        printed.contains("is lost")
            && printed.contains("next: run `svcctl operator rotate bob --token-file FILE`"),
        "{printed}"
    );

    let platform = FakePlatform::start([issued_token("ada")]).await;
    let file = existing.to_str().unwrap();
    let output = platform.svcctl(&["operator", "rotate", "ada", "--token-file", file]).await;
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(std::fs::read_to_string(&existing).unwrap(), "svco_new\n");
}

#[tokio::test]
async fn audit_follow_survives_a_platform_outage() {
    let page = |ids: &[&str]| {
        let entries: Vec<_> = ids
            .iter()
            .map(|id| json!({"auditId": id, "at": "2026-01-01T00:00:00.000Z", "action": id, "actor": "ada", "target": "t"}))
            .collect();
        Reply::Json(200, json!({"entries": entries, "nextCursor": null}))
    };
    let lost = (0..5).map(|_| Reply::Lost);
    let platform =
        FakePlatform::start([page(&["a"])].into_iter().chain(lost).chain([page(&["b", "a"])])).await;
    // After the scripted replies, the fake platform returns 500, which does not count as an outage.
    let output = platform.svcctl(&["--json", "audit", "--follow"]).await;
    let (printed, printed_entries) = (stderr(&output), String::from_utf8_lossy(&output.stdout).into_owned());
    assert_eq!(output.status.code(), Some(70), "{printed}");
    assert_eq!(printed_entries.matches("\"auditId\":\"a\"").count(), 1, "{printed_entries}");
    assert_eq!(printed_entries.matches("\"auditId\":\"b\"").count(), 1, "{printed_entries}: {printed}");
    assert_eq!(printed.matches("still following: ").count(), 1, "{printed}");
}

#[tokio::test]
async fn interrupted_wait_reports_that_operation_continues() {
    use std::os::unix::process::ExitStatusExt;
    let running = || Reply::Json(200, record("recovering", Some(operation("recover", "running", &[]))));
    let platform = FakePlatform::start([accepted()].into_iter().chain((0..100).map(|_| running()))).await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_svc"));
    command.args(["svcctl", "recover", "user_1", "--yes", "--wait"]).env_clear();
    command.envs([("PLATFORM_PUBLIC_URL", platform.base.as_str()), ("PLATFORM_SECRET", SECRET)]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while platform.requests().len() < 3 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let pid = nix::unistd::Pid::from_raw(child.id().unwrap().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let output = child.wait_with_output().await.unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.signal(), Some(2), "{text}");
    assert!(text.contains("the operation continues"), "{text}");
    assert!(text.contains(&format!("next: `svcctl operation {OPERATION} --wait`")), "{text}");
}
