//! What a person reads once all of it runs: where it is, and lines that work when they are pasted.

use std::path::Path;
use std::time::Duration;

use super::handbill::Handbill;
use super::place::{Files, psql, quoted};
use crate::story::stack::Stack;

/// A session of a day: nobody wants to mint one with each call.
const SESSION_SECONDS: u32 = 86_400;

pub(super) fn text(stack: &Stack, handbill: &Handbill, files: &Files, took: Duration) -> String {
    let Handbill { platform_url, router_url, app_host, code_host, owner, idp, s3, .. } = handbill;
    let (operator, json) = (shown(&files.operator), shown(&files.handbill));
    let (user, psql, seconds) = (&owner.idp_user_id, psql(stack), took.as_secs_f64());
    let mint = quoted(&format!("{}?sub={user}&ttl={SESSION_SECONDS}", idp.mint_url));
    let call = format!("curl -sS -H 'Host: {app_host}' -H \"Authorization: Bearer $TOKEN\"");
    let query = format!("{call} -H 'content-type: application/json' {router_url}/api/bridge/query");
    let insert = r#"{"action":"insert","app":"notes","table":"notes","data":{"title":"hello"}}"#;
    let find = r#"{"action":"find","app":"notes","table":"notes"}"#;
    format!(
        "dev: ready after {seconds:.1} s; Ctrl-C ends it, and nothing stays

  platform    {platform_url}
  router      {router_url}   Host: {app_host} or {code_host}
  identity    {issuer}
  store       {endpoint}   bucket {bucket}
  provider    {provider}   a simulator; its servers are processes
  machine     {machine} of {user}, handle {handle}
  logs        {dir}/platform.log, {dir}/hosts/*/var/log/*.log
  all of it   {json}, for programs

As the operator:
  . {operator}
  svcctl list
  svcctl status {handle}

As the owner:
  TOKEN=$(curl -sS {mint})
  {call} {router_url}/api/apps
  {query} -d '{insert}'
  {query} -d '{find}'
In a browser, http://{app_host}:{port}/apps/notes/ once it has the cookie __session=$TOKEN.

The databases:
  {psql} {machine_database}
  {psql} {platform_database}
",
        issuer = idp.issuer,
        endpoint = s3.endpoint,
        bucket = s3.bucket,
        provider = handbill.provider_url,
        machine = owner.machine_id,
        handle = owner.handle,
        dir = handbill.dir,
        port = router_url.rsplit(':').next().unwrap_or_default(),
        machine_database = quoted(&owner.database_url),
        platform_database = quoted(&handbill.platform_database_url),
    )
}

/// As it is written from where the reader stands; with a slash, because `.` would search the path for a bare name.
fn shown(path: &Path) -> String {
    let here = std::env::current_dir().ok();
    let short = here.and_then(|here| Some(path.strip_prefix(here).ok()?.to_owned()));
    quoted(
        &short
            .filter(|short| short.components().count() > 1)
            .unwrap_or_else(|| path.to_owned())
            .display()
            .to_string(),
    )
}
