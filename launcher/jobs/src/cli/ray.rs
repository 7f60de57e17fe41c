//! `accel-jobs ray`.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::JobsLocation;
use crate::engine::ray::local_ray::{LocalRay, RayRole};
use crate::error::Result;
use crate::output::print;

#[derive(Debug, Subcommand)]
pub(super) enum RayCommand {
    /// Start Ray on this host, by `ray start`; what follows `--` are further options of it.
    Start(StartArgs),
    /// Stop the Ray that `start` has started on this host, and no other.
    Stop,
}

#[derive(Args, Debug)]
pub(super) struct StartArgs {
    /// This host is the head, to which others connect.
    #[arg(long, required_unless_present = "address", conflicts_with = "address")]
    head: bool,

    /// Connect to the head at this address.
    #[arg(long, value_name = "HOST:PORT")]
    address: Option<String>,

    /// Further options of `ray start`, such as --node-ip-address=IP, --dashboard-host=IP, --num-gpus=N.
    #[arg(value_name = "OPTION", last = true)]
    options: Vec<String>,
}

pub(super) fn run(command: &RayCommand, location: &JobsLocation) -> Result<ExitCode> {
    let ray = LocalRay::of(location.records()?.engine_folder("ray"));
    match command {
        RayCommand::Start(arguments) => {
            let role = match &arguments.address {
                Some(address) => RayRole::Worker(address.clone()),
                None => RayRole::Head,
            };
            let words = role.command(&arguments.options);
            print(&format!("{}\n", crate::output::shell_line(&words)))?;
            print(&ray.start(&words)?)
        }
        RayCommand::Stop => print(&ray.stop()?),
    }
}
