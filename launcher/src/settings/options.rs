//! The options of a launch.

use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use accelerator_collective::Topology;
use accelerator_host::{ACCUMULATION_STEPS, DEVICE, PRECISION, Variable};
use clap::Args;

use crate::gpu::GpuIds;
use crate::output::OnOutputError;
use crate::settings::file::SettingsFile;
use crate::settings::hosts::{Endpoint, HostList};

/// The options of a launch. An option that was not given is `None`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// A program, or the source file of a binary or an example of a cargo package.
    ///
    /// Cargo first builds the target of a source file. A name without a slash is looked up in the current folder, then
    /// among the examples and binaries of the cargo package, then on the PATH. Everything after the script is passed to
    /// it unchanged.
    #[arg(value_name = "SCRIPT")]
    pub(crate) script: Option<PathBuf>,

    /// Number of processes (ranks) to start on this machine, or a range of it, MIN:MAX [default: 1].
    ///
    /// MIN:MAX starts MAX. If one rank fails first in two attempts in a row, or cannot be started,
    /// the job restarts with one rank fewer, down to MIN. It grows again: see --regrow-after.
    #[arg(short = 'n', long, value_name = "N|MIN:MAX", value_parser = processes, allow_negative_numbers = true)]
    pub(crate) num_processes: Option<Processes>,

    /// Number of processes (ranks) to start on this host: N; `gpu`, one per GPU; `cpu`, one per core; `auto`, one per
    /// GPU or, without GPUs, one.
    ///
    /// On one host, `--num-processes N` means the same. Hosts may start different numbers of ranks.
    #[arg(
        long,
        value_name = "N|auto|gpu|cpu",
        alias = "processes-per-machine",
        conflicts_with = "num_processes",
        allow_negative_numbers = true
    )]
    pub(crate) nproc_per_node: Option<PerHost>,

    /// Number of hosts that run the job, or a range of it, MIN:MAX [default: 1]. Start accel-launch on each host, with
    /// the same program and arguments.
    ///
    /// With MIN:MAX, the job starts with the hosts that have joined, at least MIN. Hosts may join and leave while it
    /// runs.
    #[arg(long, value_name = "N|MIN:MAX", value_parser = processes, alias = "num-machines", allow_negative_numbers = true, help_heading = "Several hosts")]
    pub(crate) nnodes: Option<Processes>,

    /// The number of this host, from 0. Host 0 coordinates all hosts and shows the output of all ranks.
    #[arg(
        long,
        value_name = "K",
        alias = "machine-rank",
        allow_negative_numbers = true,
        help_heading = "Several hosts"
    )]
    pub(crate) node_rank: Option<usize>,

    /// The address at which the other hosts reach host 0 [default port: 29400]. The ports of ranks must also be open
    /// between hosts.
    ///
    /// If you omit it, `--master-addr HOST --master-port PORT` take its place.
    #[arg(long, value_name = "HOST[:PORT]", help_heading = "Several hosts")]
    pub(crate) rdzv_endpoint: Option<Endpoint>,

    /// The network interface on which this host's ranks listen [default: the one that routes to host 0]
    /// (ACCEL_NETWORK_INTERFACE). From a comma-separated list, the first that this host has is used.
    #[arg(long, value_name = "NAME", help_heading = "Several hosts")]
    pub(crate) network_interface: Option<String>,

    /// Seconds that a host waits for host 0, and host 0 for the other hosts [default: 600].
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true, help_heading = "Several hosts")]
    pub(crate) join_timeout: Option<Duration>,

    /// The hosts of the job, host 0 first, and the number of ranks on each. Starts a launcher on each host over SSH.
    ///
    /// `node[01-03]:2` stands for three hosts, as in Slurm's lists. If you omit :N, the host runs as many ranks as
    /// --nproc-per-node says, or 1. The program must be at the same path on all hosts (--rsync copies it), and `ssh` must
    /// log in without a password. The hosts get the variables of this environment and a token of their own.
    #[arg(
        long,
        value_name = "HOST[:N],...",
        conflicts_with_all = ["hostfile", "nnodes", "node_rank", "num_processes"],
        group = "over_ssh",
        help_heading = "Several hosts"
    )]
    pub(crate) hosts: Option<HostList>,

    /// The same as --hosts, from a file as for Open MPI (`HOST slots=N`), MPICH (`HOST:N`) or DeepSpeed.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["nnodes", "node_rank", "num_processes"],
        group = "over_ssh",
        help_heading = "Several hosts"
    )]
    pub(crate) hostfile: Option<PathBuf>,

    /// Copy this file or folder to the same path on all hosts before ranks start, by rsync over SSH; can be repeated.
    /// Only changes are sent.
    #[arg(
        long,
        value_name = "PATH",
        requires = "over_ssh",
        help_heading = "Several hosts"
    )]
    pub(crate) rsync: Vec<PathBuf>,

    /// An option for `ssh`, written as in its configuration file (`Port=2222`); can be repeated.
    #[arg(
        long,
        value_name = "KEY=VALUE",
        requires = "over_ssh",
        help_heading = "Several hosts"
    )]
    pub(crate) ssh_option: Vec<String>,

    /// More arguments for `ssh`, separated by blanks (`-F FILE`); can be repeated.
    #[arg(
        long,
        value_name = "ARGS",
        allow_hyphen_values = true,
        requires = "over_ssh",
        help_heading = "Several hosts"
    )]
    pub(crate) ssh_args: Vec<String>,

    /// Do not copy accel-launch to the hosts: start the one that each host has at the same path.
    #[arg(long, requires = "over_ssh", help_heading = "Several hosts")]
    pub(crate) no_push: bool,

    /// A word of the command by which the user has started this launcher over SSH; repeated for each.
    #[arg(long, hide = true, allow_hyphen_values = true)]
    pub(crate) client_word: Vec<OsString>,

    /// Run this example of the cargo package instead of a script.
    #[arg(long, value_name = "NAME", help_heading = "Cargo targets", conflicts_with_all = ["bin", "script"])]
    pub(crate) example: Option<String>,

    /// Run this binary of the cargo package instead of a script.
    #[arg(
        long,
        value_name = "NAME",
        help_heading = "Cargo targets",
        conflicts_with = "script"
    )]
    pub(crate) bin: Option<String>,

    /// The cargo package to which the target belongs.
    #[arg(short, long, value_name = "NAME", help_heading = "Cargo targets")]
    pub(crate) package: Option<String>,

    /// Do not build the target: start this program, which was built from it before.
    #[arg(long, value_name = "PATH", help_heading = "Cargo targets")]
    pub(crate) prebuilt: Option<PathBuf>,

    /// Cargo features to build with; can be repeated.
    #[arg(short = 'F', long, value_name = "LIST", help_heading = "Cargo targets")]
    pub(crate) features: Vec<String>,

    /// Build without the package's default features.
    #[arg(long, help_heading = "Cargo targets")]
    pub(crate) no_default_features: bool,

    /// The cargo profile to build with, such as `dev` for a quick build [default: release].
    #[arg(long, value_name = "NAME", help_heading = "Cargo targets")]
    pub(crate) profile: Option<String>,

    /// Build with the release profile (the default).
    #[arg(
        short,
        long,
        help_heading = "Cargo targets",
        conflicts_with = "profile"
    )]
    pub(crate) release: bool,

    /// The address on which the store listens [default: 127.0.0.1]; with several hosts, the address of host 0.
    #[arg(long, value_name = "HOST", value_parser = host, alias = "main-process-ip")]
    pub(crate) master_addr: Option<String>,

    /// The port of the store; 0 picks a free one [default: 0].
    #[arg(long, value_name = "PORT", alias = "main-process-port")]
    pub(crate) master_port: Option<u16>,

    /// Number of threads of each rank (RAYON_NUM_THREADS and OMP_NUM_THREADS).
    ///
    /// By default, the number of cores divided by the number of ranks; the default does not apply to a single rank, or
    /// if the variables are already set.
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub(crate) threads_per_process: Option<NonZeroUsize>,

    /// The NVIDIA GPUs that ranks use: `all`, or numbers or ids separated by commas, such as 0,2
    /// [default: all].
    ///
    /// Sets CUDA_VISIBLE_DEVICES for the ranks; local rank R uses the R-th GPU of the list, from 0. Numbers are as
    /// `accel-launch env` and nvidia-smi show them. If CUDA_VISIBLE_DEVICES is already set, they are indices
    /// into it, from 0.
    #[arg(long, value_name = "LIST", allow_negative_numbers = true)]
    pub(crate) gpu_ids: Option<GpuIds>,

    /// Allow more ranks than GPUs: local rank R uses GPU R mod N (ACCEL_OVERSUBSCRIBE_GPUS=1).
    ///
    /// Without it, a GPU job with more ranks than GPUs fails before training.
    #[arg(long)]
    pub(crate) oversubscribe_gpus: bool,

    /// Also write each rank's output to DIR/latest/rank-N.log, and a report of failures and
    /// survived losses to DIR/latest/failure.json.
    ///
    /// Each run has its own folder in DIR, named after its start time (UTC), and DIR/latest links to the newest.
    /// After restart K, ranks write to rank-N.restart-K.log in the same folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,

    /// Seconds between SIGTERM, which asks ranks to end, and SIGKILL [default: 5].
    ///
    /// When a rank fails, the other ranks have this time to exit by themselves before they get SIGTERM.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) grace: Option<Duration>,

    /// The largest number of restarts of a failed job [default: 0; with MIN:MAX processes or hosts, or --on-loss
    /// continue, 3].
    ///
    /// A restart ends all ranks and starts new ones; the program resumes from its newest checkpoint.
    /// The count is never reset, however long the job runs between restarts. Ranks that were preempted and have saved
    /// (exit code 75) are restarted at once; such a restart does not count.
    #[arg(long, value_name = "N")]
    pub(crate) max_restarts: Option<u64>,

    /// Seconds before the first restart [default: 1]. The delay doubles with each restart, up to 60.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) restart_delay: Option<Duration>,

    /// The reaction to the loss of a rank: `end` all ranks, or let the others `continue` in the same processes
    /// [default: end].
    ///
    /// With `continue:MIN`, they continue if at least MIN are left; otherwise the job restarts: see --max-restarts. The
    /// program must call `recover`, as docs/elastic.md shows. A new process replaces the lost one: see --regrow-after.
    #[arg(long, value_name = "end|continue[:MIN]", value_parser = on_loss)]
    pub(crate) on_loss: Option<OnLoss>,

    /// Seconds after which a job with fewer than MAX processes tries to return to MAX [default: 60; with --on-loss
    /// continue, 0]. The time doubles after each attempt that fails.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) regrow_after: Option<Duration>,

    /// The precision in which the program's `forward` computes: no, bf16 or f16 (also written fp16) (ACCEL_PRECISION)
    /// [default: the program's].
    #[arg(long, value_name = "no|bf16|f16", value_parser = precision, help_heading = "Settings of the program")]
    pub(crate) mixed_precision: Option<String>,

    /// Micro-batches per optimizer step (ACCEL_ACCUMULATION_STEPS) [default: the program's].
    #[arg(
        long,
        value_name = "N",
        value_parser = count,
        allow_negative_numbers = true,
        help_heading = "Settings of the program"
    )]
    pub(crate) gradient_accumulation_steps: Option<NonZeroUsize>,

    /// The device of each rank: cuda, rocm, metal, vulkan, wgpu, flex, cpu or ndarray (ACCEL_DEVICE) [default: the program's].
    #[arg(long, value_name = "NAME", value_parser = device, help_heading = "Settings of the program")]
    pub(crate) device: Option<String>,

    /// Do not prefix lines of output with `[rank]`.
    #[arg(long)]
    pub(crate) no_prefix: bool,

    /// Print only the output of the ranks, unless something fails.
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The file of settings to use instead of the default one, which `accel-launch config` writes. Flags and
    /// variables override the file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config_file: Option<PathBuf>,

    /// Show what would be started and where each setting comes from; start nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// The fate of the job if its output cannot be written; not an option of the command line.
    #[arg(skip)]
    pub(crate) on_output_error: OnOutputError,

    /// The settings that no flag or variable has overridden.
    #[arg(skip)]
    pub(crate) file: Option<SettingsFile>,

    /// The launcher's part of the command line, with the settings of the file, and with flags of other launchers replaced
    /// by those above.
    #[arg(skip)]
    pub(crate) words: Vec<OsString>,
}

/// The reaction to the loss of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnLoss {
    /// All ranks end.
    End,
    /// The others continue if at least this many are left.
    Continue(NonZeroUsize),
}

/// A number of processes or hosts, or a range of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Processes {
    /// The fewest to continue with.
    pub(crate) least: NonZeroUsize,
    /// The most.
    pub(crate) most: NonZeroUsize,
}

impl Processes {
    /// Exactly so many.
    pub(crate) fn exactly(count: NonZeroUsize) -> Self {
        Self {
            least: count,
            most: count,
        }
    }

    /// Returns `true` if there may be fewer than the most.
    pub(crate) fn is_range(self) -> bool {
        self.least < self.most
    }
}

impl Options {
    /// Returns the number of ranks started on this host.
    pub(crate) fn processes(&self) -> Processes {
        self.num_processes
            .unwrap_or(Processes::exactly(NonZeroUsize::MIN))
    }

    /// Returns the variables by which ranks read options: each with the option and its value.
    pub(crate) fn program_variables(&self) -> Vec<(&'static str, &'static str, String)> {
        let steps = self
            .gradient_accumulation_steps
            .map(|steps| steps.to_string());
        let all = [
            (
                PRECISION.name,
                "--mixed-precision",
                self.mixed_precision.clone(),
            ),
            (
                ACCUMULATION_STEPS.name,
                "--gradient-accumulation-steps",
                steps,
            ),
            (DEVICE.name, "--device", self.device.clone()),
        ];
        let given = all.into_iter();
        given
            .filter_map(|(variable, option, value)| Some((variable, option, value?)))
            .collect()
    }

    /// The hosts on which launchers are to be started.
    ///
    /// # Errors
    /// When the host file cannot be read.
    pub(crate) fn host_list(&self) -> crate::error::Result<Option<HostList>> {
        match &self.hostfile {
            Some(path) => HostList::read(path).map(Some),
            None => Ok(self.hosts.clone()),
        }
    }

    /// Returns the largest number of hosts of the job.
    pub(crate) fn hosts(&self) -> usize {
        self.nnodes.map_or(1, |hosts| hosts.most.get())
    }

    /// Checks that each given option has an effect, with the options that it depends on.
    ///
    /// # Errors
    /// When an option has none: the error names both.
    pub(crate) fn check_effects(&self) -> crate::error::Result<()> {
        let is_elastic = self.is_elastic();
        let idle = [
            (
                self.restart_delay.is_some() && self.max_restarts.is_none() && !is_elastic,
                "--restart-delay",
                "no job is restarted without --max-restarts",
            ),
            (
                self.regrow_after.is_some() && !is_elastic,
                "--regrow-after",
                "the number of ranks changes only with --num-processes MIN:MAX, --nnodes MIN:MAX or --on-loss continue",
            ),
        ];
        match idle.into_iter().find(|(is_idle, ..)| *is_idle) {
            Some((_, option, why)) => Err(crate::error::Error::usage(format!(
                "{option} would have no effect: {why}; give that, or leave {option} out"
            ))),
            None => Ok(()),
        }
    }

    /// Returns `true` if the number of ranks may change while they run.
    pub(crate) fn is_elastic(&self) -> bool {
        let mut ranges = [self.num_processes, self.nnodes].into_iter().flatten();
        self.survivors().is_some() || ranges.any(Processes::is_range)
    }

    /// Returns the smallest number of ranks that may continue after a loss; `None` if the job does not continue.
    pub(crate) fn survivors(&self) -> Option<NonZeroUsize> {
        match self.on_loss {
            Some(OnLoss::Continue(least)) => Some(least),
            Some(OnLoss::End) | None => None,
        }
    }
}

impl std::fmt::Display for Processes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_range() {
            write!(formatter, "{}:{}", self.least, self.most)
        } else {
            self.most.fmt(formatter)
        }
    }
}

fn count(text: &str) -> Result<NonZeroUsize, String> {
    match text.parse::<usize>().map(NonZeroUsize::new) {
        Ok(Some(count)) if count.get() > Topology::LARGEST => {
            Err(format!("expected at most {}", Topology::LARGEST))
        }
        Ok(Some(count)) => Ok(count),
        Ok(None) => Err("expected at least 1; leave the option out for the default".into()),
        Err(_) => Err("expected a whole number of at least 1".into()),
    }
}

fn processes(text: &str) -> Result<Processes, String> {
    let Some((least, most)) = text.split_once(':') else {
        return count(text).map(Processes::exactly);
    };
    let (least, most) = (count(least)?, count(most)?);
    if least > most {
        return Err("expected MIN:MAX with MIN no greater than MAX, such as 2:4".into());
    }
    Ok(Processes { least, most })
}

fn on_loss(text: &str) -> Result<OnLoss, String> {
    match text.split_once(':') {
        None if text == "end" => Ok(OnLoss::End),
        None if text == "continue" => Ok(OnLoss::Continue(NonZeroUsize::MIN)),
        Some(("continue", least)) => count(least).map(OnLoss::Continue),
        _ => Err("expected `end`, `continue` or `continue:MIN`, such as continue:2".into()),
    }
}

fn precision(text: &str) -> Result<String, String> {
    match text {
        "fp16" => Ok("f16".to_owned()),
        _ => word_of(PRECISION, text),
    }
}

fn device(text: &str) -> Result<String, String> {
    word_of(DEVICE, text)
}

fn word_of(variable: Variable, text: &str) -> Result<String, String> {
    match variable.accepts(text.as_ref()) {
        true => Ok(text.to_owned()),
        false => Err(format!("expected {}", variable.grammar)),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    /// More than any sensible wait, and far from overflow.
    const MAX_SECONDS: f64 = 1e6;
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=MAX_SECONDS).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err("expected a number of seconds between 0 and 1000000, such as 5 or 0.5".into()),
    }
}

fn host(text: &str) -> Result<String, String> {
    let inner = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let address = inner.filter(|inner| inner.contains(':')).unwrap_or(text);
    match address.parse::<IpAddr>().is_ok() || (!text.is_empty() && !text.contains([':', ' '])) {
        true => Ok(address.to_owned()),
        false => Err("expected an address or a host name; the port goes to --master-port".into()),
    }
}

/// The number of ranks that a host runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PerHost {
    Count(NonZeroUsize),
    /// One per GPU, or one if there is none.
    Auto,
    Gpu,
    /// One per core.
    Cpu,
}

impl fmt::Display for PerHost {
    /// Writes the option's value.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => count.fmt(formatter),
            Self::Auto => formatter.write_str("auto"),
            Self::Gpu => formatter.write_str("gpu"),
            Self::Cpu => formatter.write_str("cpu"),
        }
    }
}

impl FromStr for PerHost {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "gpu" => Ok(Self::Gpu),
            "cpu" => Ok(Self::Cpu),
            _ => match text.parse::<usize>().map(NonZeroUsize::new) {
                Ok(Some(count)) if count.get() <= Topology::LARGEST => Ok(Self::Count(count)),
                _ => Err(format!(
                    "expected a whole number from 1 to {}, auto, gpu or cpu",
                    Topology::LARGEST
                )),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses() {
        for (text, expected) in [
            ("node-0", Some("node-0")),
            ("10.0.0.1", Some("10.0.0.1")),
            ("fd00::1", Some("fd00::1")),
            ("[fd00::1]", Some("fd00::1")),
            ("", None),
            ("node-0:7", None),
            ("[fd00::1]:7", None),
            ("a b", None),
        ] {
            assert_eq!(host(text).ok().as_deref(), expected, "{text}");
        }
    }
}
