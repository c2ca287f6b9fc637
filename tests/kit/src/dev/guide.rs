//! The text that is printed once all services are running: addresses, and commands that can be pasted.

use std::path::Path;
use std::time::Duration;

use super::instance_dir::{PublishedFiles, psql_command, shell_quote};
use super::service_info::ServiceInfo;
use crate::scenario::stack::Stack;

/// The session lifetime: one day, so that a developer need not mint a session for each request.
const SESSION_SECONDS: u32 = 86_400;

pub(super) fn render(stack: &Stack, info: &ServiceInfo, files: &PublishedFiles, elapsed: Duration) -> String {
    let ServiceInfo { platform_url, router_url, app_host, code_host, owner, idp, s3, .. } = info;
    let (operator_file, info_file) = (shell_quote_path(&files.operator), shell_quote_path(&files.info));
    let (user, psql, seconds) = (&owner.idp_user_id, psql_command(stack), elapsed.as_secs_f64());
    let mint = shell_quote(&format!("{}?sub={user}&ttl={SESSION_SECONDS}", idp.mint_url));
    let call = format!("curl -sS -H 'Host: {app_host}' -H \"Authorization: Bearer $TOKEN\"");
    let query = format!("{call} -H 'content-type: application/json' {router_url}/api/bridge/query");
    let insert = r#"{"action":"insert","app":"notes","table":"notes","data":{"title":"hello"}}"#;
    let find = r#"{"action":"find","app":"notes","table":"notes"}"#;
    format!(
        "dev: ready after {seconds:.1} s; Ctrl-C stops and removes everything

  platform    {platform_url}
  router      {router_url}   Host: {app_host} or {code_host}
  identity    {issuer}
  store       {endpoint}   bucket {bucket}
  provider    {provider}   a simulator; its servers are processes
  machine     {machine} of {user}, handle {handle}
  logs        {dir}/platform.log, {dir}/hosts/*/var/log/*.log
  all values  {info_file}, for programs

As the operator:
  . {operator_file}
  svcctl list
  svcctl status {handle}

As the owner:
  TOKEN=$(curl -sS {mint})
  {call} {router_url}/api/apps
  {query} -d '{insert}'
  {query} -d '{find}'
In a browser, open http://{app_host}:{port}/apps/notes/ after setting the cookie __session=$TOKEN.

The databases:
  {psql} {machine_database}
  {psql} {platform_database}
",
        issuer = idp.issuer,
        endpoint = s3.endpoint,
        bucket = s3.bucket,
        provider = info.provider_url,
        machine = owner.machine_id,
        handle = owner.handle,
        dir = info.dir,
        port = router_url.rsplit(':').next().unwrap_or_default(),
        machine_database = shell_quote(&owner.database_url),
        platform_database = shell_quote(&info.platform_database_url),
    )
}

/// Quotes a path for a shell. A path inside the current directory is made relative to that directory. The result always
/// contains a slash, because the shell's `.` searches `PATH` for a bare name.
fn shell_quote_path(path: &Path) -> String {
    let current_dir = std::env::current_dir().ok();
    let relative = current_dir.and_then(|dir| Some(path.strip_prefix(dir).ok()?.to_owned()));
    shell_quote(
        &relative
            .filter(|relative| relative.components().count() > 1)
            .unwrap_or_else(|| path.to_owned())
            .display()
            .to_string(),
    )
}
