//! One module per group of commands: each sends requests and prints the responses. `dump` and `risk` are helpers.

mod alarm;
mod audit;
mod backup;
mod deploy;
mod dump;
mod files;
mod kept_server;
mod machine;
mod operation;
mod operator;
mod pointer;
mod power;
mod provision;
mod risk;
mod slot;
mod usage;

use clap::CommandFactory;
use serde_json::json;

use super::api::ApiClient;
use super::args::{Args, BundleCommand, Command};
use super::connect::{connect, open_store};
use super::local::LocalChecks;
use super::output::{Output, print};
use super::show::{self, View};
use super::{bundle, doctor, verify_rollout};
use svc_base::applet::{Exit, Failure, OrExit};

pub async fn run(args: Args, local: LocalChecks) -> Result<(), Failure> {
    let out = Output { is_json: args.global.json };
    match args.command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "svcctl", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Bundle(BundleCommand::Keys) => show_bundle_keys(&connect(&args.global)?, &out).await,
        Command::Bundle(command) => run_bundle_command(command, &out).await,
        Command::Doctor(doctor_args) => doctor::run(&args.global, doctor_args, local, &out).await,
        Command::VerifyRollout(rollout_args) => verify_rollout::run(rollout_args, local, &out).await,
        command => {
            let api = connect(&args.global)?;
            run_api_command(&api, command, &out).await
        }
    }
}

async fn run_api_command(api: &ApiClient, command: Command, out: &Output) -> Result<(), Failure> {
    match command {
        Command::Slot(command) => slot::run(api, command, out).await,
        Command::Provision(args) => provision::run(api, args, out).await,
        Command::List(args) => machine::list(api, args, out).await,
        Command::Status { machine } => machine::status(api, &machine, out).await,
        Command::Fleet => {
            let response = api.get(&["vps", "fleet"], &[]).await?;
            out.print_response(&response, |view| Ok(show::fleet::show(view, &response.parse()?)))
        }
        Command::Recover(args) => machine::recover(api, args, out).await,
        Command::Resize(args) => machine::resize(api, args, out).await,
        Command::Machine(command) => machine::run(api, command, out).await,
        Command::Power(command) => power::run(api, command, out).await,
        Command::Fail(args) => machine::fail(api, args, out).await,
        Command::Delete(args) => machine::delete(api, args, out).await,
        Command::Alarm(command) => alarm::run(api, command, out).await,
        Command::Backup(command) => backup::run(api, command, out).await,
        Command::Files(command) => files::run(api, command, out).await,
        Command::Pointer(command) => pointer::run(api, command, out).await,
        Command::Deploy(command) => deploy::run(api, command, out).await,
        Command::Undelete(args) => kept_server::undelete(api, args, out).await,
        Command::Resume(args) => kept_server::resume(api, args, out).await,
        Command::Discard(args) => kept_server::discard(api, args, out).await,
        Command::Operation(args) => operation::run(api, args, out).await,
        Command::Operator(command) => operator::run(api, command, out).await,
        Command::Usage(args) => usage::run(api, args, out).await,
        Command::Audit(args) => audit::run(api, args, out).await,
        Command::Bundle(_) | Command::Completions { .. } | Command::Doctor(_) | Command::VerifyRollout(_) => {
            unreachable!("`run` handles these commands")
        }
    }
}

/// Runs a command that accesses the bundles in the object store directly, not through the platform.
async fn run_bundle_command(command: BundleCommand, out: &Output) -> Result<(), Failure> {
    match command {
        BundleCommand::Publish { dir, image_version } => {
            let published = bundle::publish(&open_store()?, &dir, &image_version).await?;
            print(&if out.is_json { format!("{}\n", published.to_json()) } else { format!("{published}\n") })
        }
        BundleCommand::List => {
            let bundles = bundle::list(&open_store()?).await?;
            if out.is_json {
                return print(&format!("{}\n", json!({"bundles": bundles})));
            }
            print(&show::bundle::list(&View::for_stdout(), &bundles))
        }
        BundleCommand::Keys => unreachable!("`run` handles this command, because it needs the platform"),
    }
}

async fn show_bundle_keys(api: &ApiClient, out: &Output) -> Result<(), Failure> {
    let fleet = api.get(&["vps", "fleet"], &[]).await?;
    let keys = fleet.parse::<serde_json::Value>()?["bundleKeys"].take();
    if keys.is_null() {
        return Err(Failure::new(
            Exit::Unavailable,
            anyhow::anyhow!(
                "the platform's release is too old to report trusted keys\n  next: update the platform"
            ),
        ));
    }
    if out.is_json {
        return print(&format!("{keys}\n"));
    }
    let keys = serde_json::from_value(keys).or_exit(Exit::Internal)?;
    print(&show::bundle_keys::show(&View::for_stdout(), &keys))
}
