//! `svcctl doctor`: checks this machine as a host, a platform along with its API, or just a platform's API.

use std::path::PathBuf;
use std::time::Duration;

use http::StatusCode;
use jiff::{SignedDuration, Timestamp};
use secrecy::SecretString;
use url::Url;

use super::api::{ApiClient, CallError};
use super::args::{Doctor, GlobalOptions, Subject};
use super::connect::{HTTPS_REQUIRED, can_carry_secret, connect};
use super::local::LocalChecks;
use super::output::Output;
use super::report;
use super::show;
use super::vars;
use svc_base::applet::Failure;
use svc_base::config::platform_env_file;
use svc_base::diagnosis::{self, Check, Findings, Level, Report};
use svc_wire::fleet::Fleet;
use svc_wire::host::ComponentStatus;
use svc_wire::operator::WhoAmI;

/// The platform package's env file.
const PACKAGED_ENV_FILE: &str = "/etc/svc/platform.env";
const CHECK_TIMEOUT: Duration = Duration::from_secs(45);
/// Warn about tokens that expire sooner than this.
const MIN_REMAINING_TOKEN_LIFETIME: SignedDuration = SignedDuration::from_hours(14 * 24);

pub async fn run(
    global: &GlobalOptions,
    args: Doctor,
    local: LocalChecks,
    out: &Output,
) -> Result<(), Failure> {
    let find_packaged_file = || Some(PathBuf::from(PACKAGED_ENV_FILE)).filter(|file| file.exists());
    let env_file = platform_env_file(args.env_file).or_else(find_packaged_file);
    let subject = args.subject.unwrap_or_else(|| {
        let is_configured = env_file.is_some() || vars::PLATFORM_DATABASE_URL.env_value().is_some();
        match is_configured {
            _ if (local.is_host)() => Subject::Host,
            true => Subject::Platform,
            false => Subject::Api,
        }
    });
    let report = match subject {
        Subject::Host => (local.check_host)().await,
        Subject::Platform => {
            let report = (local.check_platform)(env_file.as_deref()).await;
            let mut findings = report.findings;
            match create_api_client(report.api_access, Duration::from_secs(global.timeout)) {
                Ok(api) => findings.extend(run_api_checks(&api).await),
                Err(reason) => {
                    findings.extend(reason.into_list());
                    for check in ["operator", "router", "fleet"] {
                        let skipped = Findings::new(check).skipped("cannot call the platform API");
                        findings.extend(skipped.into_list());
                    }
                }
            }
            Report { subject: "platform".to_owned(), findings }
        }
        Subject::Api => {
            let findings = run_api_checks(&connect(global)?).await;
            Report { subject: "platform".to_owned(), findings }
        }
    };
    report::print(&report, Level::Problem, out)
}

/// Creates an API client for the checked platform, or returns a finding that says why it can't.
fn create_api_client(
    api_access: Option<(Url, SecretString)>,
    timeout: Duration,
) -> Result<ApiClient, Findings> {
    let findings = Findings::new("platform");
    let Some((url, secret)) = api_access else {
        return Err(findings.skipped("PLATFORM_PUBLIC_URL or PLATFORM_SECRET is missing or invalid"));
    };
    // The platform itself accepts any http URL.
    if !can_carry_secret(&url) {
        let what = format!("PLATFORM_PUBLIC_URL: {HTTPS_REQUIRED}");
        return Err(findings.problem(what, "set PLATFORM_PUBLIC_URL to an https URL"));
    }
    ApiClient::new(url, &secret, timeout).map_err(|error| {
        let what = format!("cannot create a platform API client: {error:#}");
        findings.problem(what, "correct PLATFORM_SECRET or SSL_CERT_FILE, then run this command again")
    })
}

/// Runs the checks that call the platform API.
async fn run_api_checks(api: &ApiClient) -> Vec<diagnosis::Finding> {
    diagnosis::run_checks(vec![
        Check::new("platform", CHECK_TIMEOUT, check_readiness(api)),
        Check::new("operator", CHECK_TIMEOUT, check_operator(api)),
        Check::new("router", CHECK_TIMEOUT, check_router(api)),
        Check::new("fleet", CHECK_TIMEOUT, check_fleet(api)),
    ])
    .await
}

/// Response body of `/readyz/control`.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Readiness {
    database: String,
    store: String,
    /// `None` from older releases.
    clock: Option<String>,
    clock_skew_ms: Option<i64>,
}

impl Readiness {
    fn describe(&self) -> String {
        let mut text = format!("database {}, store {}", self.database, self.store);
        if let Some(clock) = &self.clock {
            text.push_str(&format!(", clock {clock}"));
        }
        if let Some(skew) = self.clock_skew_ms.filter(|_| self.clock.as_deref() != Some("ok")) {
            text.push_str(&format!(" ({skew} ms from the database's)"));
        }
        text
    }
}

async fn check_readiness(api: &ApiClient) -> Findings {
    let findings = Findings::new("platform");
    let next =
        "run `systemctl status svc-platform; journalctl -u svc-platform -n 50` on the platform's machine";
    match api.get_once(&["readyz", "control"]).await {
        Ok((status, body)) => match serde_json::from_str::<Readiness>(&body) {
            Ok(_) if status.is_success() => {
                findings.ok("the platform is running and can reach its database and its store")
            }
            Ok(readiness) => {
                let what = format!("the platform is running but not ready: {}", readiness.describe());
                findings.problem(what, next)
            }
            Err(_) => findings.problem(describe_foreign_response(status), FOREIGN_RESPONSE_ADVICE),
        },
        Err(error) => findings.problem(error.brief(), next),
    }
}

/// Describes a response from another server, such as a proxy.
fn describe_foreign_response(status: StatusCode) -> String {
    format!("{status}: the response is not from the platform API")
}

const FOREIGN_RESPONSE_ADVICE: &str =
    "set PLATFORM_PUBLIC_URL or --platform-url to the URL of the platform API";

/// Reports the credential's owner, with a warning if the token expires soon.
async fn check_operator(api: &ApiClient) -> Findings {
    let findings = Findings::new("operator");
    let result = api.get(&["operators", "whoami"], &[]).await.and_then(|response| response.parse::<WhoAmI>());
    match result {
        Ok(operator) => {
            let mut what = format!(
                "you are {}, with the scopes {}",
                operator.name,
                show::operator::join_scopes(&operator.scopes, ", ")
            );
            let expires_at: Option<Timestamp> = operator.expires_at.as_deref().and_then(|at| at.parse().ok());
            let Some(expires_at) = expires_at else { return findings.ok(what) };
            what.push_str(&format!("; the token expires {}", expires_at.strftime("%Y-%m-%d %H:%M UTC")));
            if expires_at.duration_since(Timestamp::now()) < MIN_REMAINING_TOKEN_LIFETIME {
                let next = format!("run `svcctl operator rotate {} --token-file FILE`", operator.name);
                return findings.warning(what, next);
            }
            findings.ok(what)
        }
        Err(CallError::Problem(problem)) if problem.is_unauthorized() => {
            findings.problem(CallError::from(problem).brief(), "check PLATFORM_SECRET or --secret-file")
        }
        Err(error) => findings.skipped(error.brief()),
    }
}

/// Response body of `/readyz`.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct RouterReadiness {
    /// Sent by every release.
    status: String,
    /// `None` from older releases.
    routes: Option<String>,
    routes_age_seconds: Option<u64>,
}

async fn check_router(api: &ApiClient) -> Findings {
    let findings = Findings::new("router");
    match api.get_once(&["readyz"]).await {
        Ok((status, body)) => router_findings(status, &body, findings),
        Err(error) => findings.skipped(error.brief()),
    }
}

/// Adds the finding for the router's `/readyz` response.
fn router_findings(status: StatusCode, body: &str, findings: Findings) -> Findings {
    let Ok(readiness) = serde_json::from_str::<RouterReadiness>(body) else {
        return findings.problem(describe_foreign_response(status), FOREIGN_RESPONSE_ADVICE);
    };
    let Some(routes) = readiness.routes else {
        // Older releases send `ok` or `failing`. A proxy's JSON may also have a `status`, but with a different value.
        return match readiness.status.parse::<ComponentStatus>() {
            Ok(_) => findings.skipped("the platform's release is too old to report the state of its routes"),
            Err(_) => findings.problem(describe_foreign_response(status), FOREIGN_RESPONSE_ADVICE),
        };
    };
    if routes == "current" {
        return findings.ok("the router's routes are current");
    }
    let age = readiness.routes_age_seconds.map_or_else(String::new, |age| format!(", {age} s old"));
    let what = format!("the router's routes are {}{age}", routes.replace('_', " "));
    let next =
        "restore the platform's connection to its database; the routes are then refreshed automatically";
    if status.is_success() { findings.warning(what, next) } else { findings.problem(what, next) }
}

async fn check_fleet(api: &ApiClient) -> Findings {
    let findings = Findings::new("fleet");
    let result = api.get(&["vps", "fleet"], &[]).await.and_then(|response| response.parse::<Fleet>());
    match result {
        Ok(fleet) => show::fleet::findings(&fleet, findings),
        Err(CallError::Problem(problem)) if problem.is_unauthorized() => findings
            .problem("the platform does not accept this secret", "check PLATFORM_SECRET or --secret-file"),
        Err(error) => findings.skipped(error.brief()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn router_findings_distinguish_old_release_from_proxy() {
        let level = |status: u16, body: &str| {
            let status = StatusCode::from_u16(status).unwrap();
            router_findings(status, body, Findings::new("router")).into_list()[0].level
        };
        assert_eq!(level(200, r#"{"status":"ok","routes":"current"}"#), Level::Ok);
        assert_eq!(level(503, r#"{"status":"failing","routes":"not_loaded"}"#), Level::Problem);
        assert_eq!(level(200, r#"{"status":"ok","database":"ok","store":"ok"}"#), Level::Skipped);
        assert_eq!(level(503, r#"{"status":"failing","database":"failing","store":"ok"}"#), Level::Skipped);
        assert_eq!(level(502, "<html>502 Bad Gateway</html>"), Level::Problem);
        assert_eq!(level(502, r#"{"message":"bad gateway"}"#), Level::Problem);
        assert_eq!(level(502, r#"{"status":502,"error":"Bad Gateway"}"#), Level::Problem);
        assert_eq!(level(502, r#"{"status":"error","message":"bad gateway"}"#), Level::Problem);
    }

    #[test]
    fn describe_lists_each_component() {
        let describe = |json| serde_json::from_str::<Readiness>(json).unwrap().describe();
        let clock =
            r#"{"status":"failing","database":"ok","store":"ok","clock":"failing","clockSkewMs":9000}"#;
        let expected = "database ok, store ok, clock failing (9000 ms from the database's)";
        assert_eq!(describe(clock), expected);
        let store = r#"{"database":"ok","store":"failing","clock":"ok","clockSkewMs":3}"#;
        assert_eq!(describe(store), "database ok, store failing, clock ok");
        let older_release = r#"{"database":"failing","store":"ok"}"#;
        assert_eq!(describe(older_release), "database failing, store ok");
    }
}
