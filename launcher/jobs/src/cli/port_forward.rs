//! `accel-jobs port-forward`.

use std::io;
use std::process::ExitCode;

use clap::Args;

use super::JobsLocation;
use crate::engine::PortPair;
use crate::error::Result;
use crate::spec::JobName;

#[derive(Args, Debug)]
pub(super) struct ForwardArgs {
    /// The job.
    name: JobName,
    /// The port of this machine, and that of node 0 or of TensorBoard.
    #[arg(value_name = "LOCAL:REMOTE", default_value = "9090:6006", value_parser = ports)]
    ports: PortPair,
}

pub(super) fn run(arguments: &ForwardArgs, location: &JobsLocation) -> Result<ExitCode> {
    let (records, record, engine) = location.job(&arguments.name)?;
    let folder = records.job_folder(&arguments.name);
    engine.forward(&record, &folder, arguments.ports, &mut io::stdout().lock())?;
    Ok(ExitCode::SUCCESS)
}

fn ports(text: &str) -> std::result::Result<PortPair, String> {
    let pair = || {
        let (local, remote) = text.split_once(':')?;
        Some(PortPair {
            local: local.parse().ok()?,
            remote: remote.parse().ok()?,
        })
    };
    pair().ok_or_else(|| "expected LOCAL:REMOTE, such as 9090:6006".to_owned())
}
