//! One function per command: it sends the request and prints the response.

mod alarm;
mod audit;
mod backup;
mod deploy;
mod dump;
mod kept;
mod machine;
mod operation;
mod operator;
mod pointer;
mod power;
mod risk;
mod slot;
mod usage;

use std::path::Path;
use std::time::Duration;

use clap::CommandFactory;
use secrecy::SecretString;
use serde_json::json;
use url::Url;

use super::api::ApiClient;
use super::args::{Args, BundleCommand, Command, Global};
use super::local::LocalChecks;
use super::out::{Out, print};
use super::show::{self, View};
use super::{bundle, doctor, rollout};
use crate::vars;
use svc_base::applet::{Exit, Failure, OrExit};
use svc_base::config::Env;
use svc_store::bucket::Bucket;
use svc_store::config::StoreConfig;

pub async fn run(args: Args, local: LocalChecks) -> Result<(), Failure> {
    let out = Out { json: args.global.json };
    match args.command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "svcctl", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Bundle(BundleCommand::Keys) => bundle_keys(&connect(&args.global)?, &out).await,
        Command::Bundle(command) => run_bundle_command(command, &out).await,
        Command::Doctor(asked) => doctor::run(&args.global, asked, local, &out).await,
        Command::VerifyRollout(asked) => rollout::run(asked, local, &out).await,
        command => {
            let api = connect(&args.global)?;
            call(&api, command, &out).await
        }
    }
}

async fn call(api: &ApiClient, command: Command, out: &Out) -> Result<(), Failure> {
    match command {
        Command::Slot(command) => slot::run(api, command, out).await,
        Command::Provision(args) => machine::provision(api, args, out).await,
        Command::List(args) => machine::list(api, args, out).await,
        Command::Status { machine } => machine::status(api, &machine, out).await,
        Command::Fleet => {
            let response = api.get(&["vps", "fleet"], &[]).await?;
            out.print_response(&response, |view| Ok(show::fleet::show(view, &response.read()?)))
        }
        Command::Recover(args) => machine::recover(api, args, out).await,
        Command::Resize(args) => machine::resize(api, args, out).await,
        Command::Machine(command) => machine::run(api, command, out).await,
        Command::Power(command) => power::run(api, command, out).await,
        Command::Fail(args) => machine::fail(api, args, out).await,
        Command::Delete(args) => machine::delete(api, args, out).await,
        Command::Alarm(command) => alarm::run(api, command, out).await,
        Command::Backup(command) => backup::run(api, command, out).await,
        Command::Pointer(command) => pointer::run(api, command, out).await,
        Command::Deploy(command) => deploy::run(api, command, out).await,
        Command::Undelete(args) => kept::undelete(api, args, out).await,
        Command::Resume(args) => kept::resume(api, args, out).await,
        Command::Discard(args) => kept::discard(api, args, out).await,
        Command::Operation(args) => operation::run(api, args, out).await,
        Command::Operator(command) => operator::run(api, command, out).await,
        Command::Usage(args) => usage::run(api, args, out).await,
        Command::Audit(args) => audit::run(api, args, out).await,
        Command::Bundle(_) | Command::Completions { .. } | Command::Doctor(_) | Command::VerifyRollout(_) => {
            unreachable!("these need no platform and were run before")
        }
    }
}

/// Bundles are published to the object store, not through the platform.
async fn run_bundle_command(command: BundleCommand, out: &Out) -> Result<(), Failure> {
    match command {
        BundleCommand::Publish { dir, image_version } => {
            let published = bundle::publish(&open_store()?, &dir, &image_version).await?;
            print(&if out.json { format!("{}\n", published.json()) } else { format!("{published}\n") })
        }
        BundleCommand::List => {
            let bundles = bundle::list(&open_store()?).await?;
            if out.json {
                return print(&format!("{}\n", json!({"bundles": bundles})));
            }
            print(&show::bundle::list(&View::of_stdout(), &bundles))
        }
        BundleCommand::Keys => unreachable!("it needs the platform and was run before"),
    }
}

async fn bundle_keys(api: &ApiClient, out: &Out) -> Result<(), Failure> {
    let fleet = api.get(&["vps", "fleet"], &[]).await?;
    let keys = fleet.read::<serde_json::Value>()?["bundleKeys"].take();
    if keys.is_null() {
        return Err(Failure::new(
            Exit::Unavailable,
            anyhow::anyhow!(
                "the platform's release is too old to report the keys\n  next: update the platform"
            ),
        ));
    }
    if out.json {
        return print(&format!("{keys}\n"));
    }
    let keys = serde_json::from_value(keys).or_exit(Exit::Internal)?;
    print(&show::bundle_keys::show(&View::of_stdout(), &keys))
}

fn open_store() -> Result<Bucket, Failure> {
    let mut env = Env::from_process();
    let store = StoreConfig::read(&mut env);
    Ok(env.finish(store)?.open()?)
}

pub(super) fn connect(global: &Global) -> Result<ApiClient, Failure> {
    let mut env = Env::from_process();
    let base = match &global.platform_url {
        Some(url) => Some(url.clone()),
        None => env.required::<Url>(&vars::PLATFORM_PUBLIC_URL),
    };
    if base.as_ref().is_some_and(|base| !is_private(base)) {
        env.mistake(
            &vars::PLATFORM_PUBLIC_URL,
            "must be https (plain http only to this machine): it carries the secret",
        );
    }
    let secret = match &global.secret_file {
        Some(file) => secret_from(&mut env, "--secret-file", file),
        None => env.required_secret(&vars::PLATFORM_SECRET),
    };
    let (base, secret) = env.finish(base.zip(secret))?;
    Ok(ApiClient::new(base, &secret, Duration::from_secs(global.timeout))?)
}

pub(super) fn secret_from(env: &mut Env, flag: &str, file: &Path) -> Option<SecretString> {
    match std::fs::read_to_string(file) {
        Ok(text) if !text.trim().is_empty() => Some(SecretString::from(text.trim())),
        Ok(_) => {
            env.option_mistake(flag, "the file is empty");
            None
        }
        Err(error) => {
            env.option_mistake(flag, format!("{}: {error}", file.display()));
            None
        }
    }
}

pub(super) fn is_private(base: &Url) -> bool {
    let here = match base.host() {
        Some(url::Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    };
    base.scheme() == "https" || (base.scheme() == "http" && here)
}
