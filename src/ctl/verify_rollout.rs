//! `svcctl verify-rollout`: checks a release on a running host before its rollout (specification, part 9).

use super::args::VerifyRollout;
use super::connect::{can_carry_secret, read_secret};
use super::local::LocalChecks;
use super::output::Output;
use super::report;
use crate::vars;
use svc_base::applet::Failure;
use svc_base::config::Env;
use svc_base::diagnosis::{Findings, Level, Report};
use svc_verify::{HostClient, check_release, fetch_database_server};

pub async fn run(args: VerifyRollout, local: LocalChecks, out: &Output) -> Result<(), Failure> {
    let is_remote = args.app_url.is_some();
    let threshold = if args.strict { Level::Skipped } else { Level::Problem };
    let host = connect_host(args, local)?;
    let database = async {
        let findings = Findings::new("vps-database");
        if is_remote {
            return findings.skipped("the database can be checked only on the host");
        }
        let server = fetch_database_server(&host).await;
        match (local.check_own_database)(server.as_deref()) {
            Ok(what) => findings.ok(what),
            Err(reason) => findings.problem(
                reason,
                "correct DATABASE_URL in /opt/svc/env/host.env, then run `systemctl restart svc-gateway`",
            ),
        }
    };
    let findings = check_release(&host, database).await;
    report::print(&Report { subject: "rollout".to_owned(), findings }, threshold, out)
}

fn connect_host(args: VerifyRollout, local: LocalChecks) -> Result<HostClient, Failure> {
    let Some(base) = args.app_url else {
        let socket = args.socket.unwrap_or_else(local.gateway_socket);
        return Ok(HostClient::over_socket(&socket)?);
    };
    let mut env = Env::from_process();
    if !can_carry_secret(&base) {
        env.add_option_error(
            "--app-url",
            "must be https, because requests carry the session token (plain http is allowed only to this \
             machine)",
        );
    }
    let token = match &args.session_file {
        Some(file) => read_secret(&mut env, "--session-file", file),
        None => env.required_secret(&vars::SVC_SESSION_TOKEN),
    };
    let token = env.finish(token)?;
    Ok(HostClient::through_router(base, &token)?)
}
