//! The command line.

mod argv;

use std::ffi::OsString;
use std::net::ToSocketAddrs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use accelerator_collective::Topology;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::bench::{AllReduceArgs, BenchArgs};
use crate::commands::checkpoint::CheckpointArgs;
use crate::commands::env::EnvArgs;
use crate::commands::estimate::EstimateArgs;
use crate::commands::plan::PlanArgs;
use crate::gpu::GpuIds;
use crate::output::OnOutputError;
use crate::selftest::{RankArgs, TestArgs};
use argv::Argv;

/// What the launcher was asked to do.
#[derive(Debug)]
pub(crate) enum Invocation {
    /// Start a script.
    Launch {
        /// The launcher's options.
        options: Box<Options>,
        /// The script's arguments.
        arguments: Vec<OsString>,
    },
    /// Show the environment.
    Env(EnvArgs),
    /// Show who gets which sample.
    Plan(PlanArgs),
    /// Estimate the memory that a model takes.
    Estimate(EstimateArgs),
    /// Show or verify checkpoints.
    Checkpoint(CheckpointArgs),
    /// Test this installation.
    Test(TestArgs),
    /// Be a rank of such a test.
    Rank(RankArgs),
    /// Measure collectives.
    Bench(BenchArgs),
    /// Be a rank of such a measurement.
    BenchRank(AllReduceArgs),
}

/// A number of processes, or a range of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Processes {
    /// The fewest to go on with.
    pub(crate) least: NonZeroUsize,
    /// How many to start with.
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

    /// Whether there may be fewer than at the start.
    pub(crate) fn is_range(self) -> bool {
        self.least < self.most
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

impl Invocation {
    /// Whether processes are started that must not outlive the launcher.
    pub(crate) fn runs_a_job(&self) -> bool {
        match self {
            Self::Launch { options, .. } => !options.dry_run,
            Self::Bench(arguments) => arguments.starts_processes(),
            _ => false,
        }
    }

    /// Reads a command line whose first item is the program's name.
    ///
    /// # Errors
    /// Clap's, which knows how to print itself; `--help` and `--version` are such errors too.
    pub(crate) fn parse(
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<Self, clap::Error> {
        let mut command = underscored(Cli::command());
        // Fills in the parts that clap derives late, such as `--help`.
        command.build();
        let argv = Argv::split(&command, arguments);
        let cli = Cli::from_arg_matches(&command.try_get_matches_from(argv.launcher)?)?;
        Ok(match cli.command {
            Some(Sub::Env(arguments)) => Self::Env(arguments),
            Some(Sub::Estimate(arguments)) => Self::Estimate(arguments),
            Some(Sub::Plan(arguments)) => Self::Plan(arguments),
            Some(Sub::Checkpoint(arguments)) => Self::Checkpoint(arguments),
            Some(Sub::Test(arguments)) => Self::Test(arguments),
            Some(Sub::Rank(arguments)) => Self::Rank(arguments),
            Some(Sub::Bench(arguments)) => Self::Bench(arguments),
            Some(Sub::BenchRank(arguments)) => Self::BenchRank(arguments),
            None => Self::Launch {
                options: Box::new(cli.options),
                arguments: argv.script,
            },
        })
    }
}

/// The command, whose options may also be written with underscores, as other launchers' are.
fn underscored(command: clap::Command) -> clap::Command {
    let names: Vec<String> = command
        .get_subcommands()
        .map(|subcommand| subcommand.get_name().to_owned())
        .collect();
    let command = command.mut_args(|option| match option.get_long() {
        Some(long) if long.contains('-') => {
            let alias = long.replace('-', "_");
            option.alias(alias)
        }
        _ => option,
    });
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, underscored)
    })
}

/// Starts a training program on many processes.
#[derive(Debug, Parser)]
#[command(
    name = "accel-launch",
    version,
    override_usage = "accel-launch [OPTIONS] SCRIPT [ARGS]...\n       \
        accel-launch [OPTIONS] --example NAME [ARGS]...\n       \
        accel-launch [OPTIONS] --bin NAME [ARGS]...\n       \
        accel-launch env|plan|test [OPTIONS]\n       \
        accel-launch bench all-reduce [OPTIONS]\n       \
        accel-launch checkpoint list|show|verify DIR\n       \
        accel-launch estimate-memory FILE.safetensors",
    after_help = AFTER_HELP,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Option<Sub>,
    #[command(flatten)]
    options: Options,
}

/// The options of a launch. What is `None` was not given.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// A program, or the source file of a binary or an example of a cargo package.
    ///
    /// A source file's target is built with cargo first. Everything after the script is
    /// handed to it untouched.
    #[arg(value_name = "SCRIPT")]
    pub(crate) script: Option<PathBuf>,

    /// How many processes (ranks) to start on this machine, or MIN:MAX of them [default: 1].
    ///
    /// MIN:MAX starts MAX. A rank that fails first in two attempts in a row, or cannot be
    /// started, is given up: the job is restarted with one less, and never with fewer than MIN.
    #[arg(short = 'n', long, value_name = "N|MIN:MAX", value_parser = processes, allow_negative_numbers = true)]
    pub(crate) num_processes: Option<Processes>,

    /// Run this example of the cargo package; it stands in the place of the script.
    #[arg(long, value_name = "NAME", help_heading = "Cargo targets", conflicts_with_all = ["bin", "script"])]
    pub(crate) example: Option<String>,

    /// Run this binary of the cargo package; it stands in the place of the script.
    #[arg(
        long,
        value_name = "NAME",
        help_heading = "Cargo targets",
        conflicts_with = "script"
    )]
    pub(crate) bin: Option<String>,

    /// The package that the target belongs to.
    #[arg(short, long, value_name = "NAME", help_heading = "Cargo targets")]
    pub(crate) package: Option<String>,

    /// Cargo features to build with; can be repeated.
    #[arg(short = 'F', long, value_name = "LIST", help_heading = "Cargo targets")]
    pub(crate) features: Vec<String>,

    /// Build without the package's default features.
    #[arg(long, help_heading = "Cargo targets")]
    pub(crate) no_default_features: bool,

    /// The cargo profile to build with, `dev` for a quick build [default: release].
    #[arg(long, value_name = "NAME", help_heading = "Cargo targets")]
    pub(crate) profile: Option<String>,

    /// Build with the release profile, as is the default.
    #[arg(
        short,
        long,
        help_heading = "Cargo targets",
        conflicts_with = "profile"
    )]
    pub(crate) release: bool,

    /// Where the ranks meet: an address of this machine [default: 127.0.0.1].
    #[arg(long, value_name = "HOST", value_parser = host)]
    pub(crate) master_addr: Option<String>,

    /// The port where the ranks meet; 0 takes a free one [default: 0].
    #[arg(long, value_name = "PORT")]
    pub(crate) master_port: Option<u16>,

    /// Threads of a rank (RAYON_NUM_THREADS and OMP_NUM_THREADS).
    ///
    /// By default the cores are divided by the number of ranks; one rank alone, and
    /// variables that are set already, are left as they are.
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub(crate) threads_per_process: Option<NonZeroUsize>,

    /// The NVIDIA GPUs of the ranks: `all`, or numbers or ids with commas between them, such as 0,2
    /// [default: all].
    ///
    /// The ranks find them in CUDA_VISIBLE_DEVICES, and each takes that of its local rank. Numbers
    /// are those of `accel-launch env`, which nvidia-smi has too; where CUDA_VISIBLE_DEVICES is set
    /// already, they are places in it, from 0.
    #[arg(long, value_name = "LIST", allow_negative_numbers = true)]
    pub(crate) gpu_ids: Option<GpuIds>,

    /// Start more ranks than there are GPUs, too: rank R of this machine takes number R modulo
    /// theirs (ACCEL_OVERSUBSCRIBE_GPUS=1).
    ///
    /// Otherwise ranks that compute on GPUs fail before they train where there are too few.
    #[arg(long)]
    pub(crate) oversubscribe_gpus: bool,

    /// Also write each rank's output to DIR/latest/rank-N.log, and a failure to DIR/latest/failure.json.
    ///
    /// Each run has a folder of its own in DIR, named by the time at which it began (UTC), and DIR/latest is a link
    /// to the last. After restart K the files are rank-N.restart-K.log in the same folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,

    /// Seconds between the request to end (SIGTERM) and SIGKILL [default: 5].
    ///
    /// When a rank fails, the others have as long to end by themselves before they are asked to.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) grace: Option<Duration>,

    /// How often a job that failed is started again [default: 0; with MIN:MAX processes 3].
    ///
    /// All ranks are ended and started anew; the program goes on from its last checkpoint. The
    /// number holds for the whole job, however long it ran in between.
    #[arg(long, value_name = "N")]
    pub(crate) max_restarts: Option<u64>,

    /// Seconds before the first restart; twice as many before each later one, up to 60
    /// [default: 1].
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) restart_delay: Option<Duration>,

    /// Do not put `[rank]` before the lines of the output.
    #[arg(long)]
    pub(crate) no_prefix: bool,

    /// Say nothing but what the ranks say, unless something fails.
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// Show what would be started, and where each setting comes from; start nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// What becomes of the job where its output cannot be written; no option of the command line.
    #[arg(skip)]
    pub(crate) on_output_error: OnOutputError,
}

#[derive(Debug, Subcommand)]
enum Sub {
    /// Show what is known of this machine and its environment, and where each setting comes from.
    Env(EnvArgs),
    /// Show which rank gets which sample.
    Plan(PlanArgs),
    /// List the checkpoints of a folder, show what is in one, or verify them.
    Checkpoint(CheckpointArgs),
    /// Estimate the memory that training a model takes, from its file.
    #[command(name = "estimate-memory")]
    Estimate(EstimateArgs),
    /// Test this installation: whether ranks meet, compute, and notice failures.
    Test(TestArgs),
    /// A rank of the self-test.
    #[command(name = "__rank", hide = true)]
    Rank(RankArgs),
    /// Measure how fast ranks of this machine compute together, beside what its memory can do.
    Bench(BenchArgs),
    /// A rank of a measurement.
    #[command(name = "__bench", hide = true)]
    BenchRank(AllReduceArgs),
}

const AFTER_HELP: &str = "\
Options before the script are the launcher's, everything after it is the script's. After
a cargo target a first `--` is dropped, as `cargo run` does. To run a program called `env`,
`plan`, `checkpoint`, `estimate-memory`, `bench` or `test`, write `./env`.

Rank 0 reads the launcher's standard input, unless that is a terminal. SIGINT, SIGTERM,
SIGHUP and SIGQUIT end all ranks, and a second one kills them; SIGUSR1 and SIGUSR2 are
handed on. Nothing that the ranks start outlives the job, daemons and `kill -9` of the
launcher included.

Exit code: 0 when every rank succeeds; that of the rank that failed first; 128 + signal
where a signal ended it; 2 for a wrong command line, or an ACCEL_ variable that the ranks
would refuse (`accel-launch env` lists them all); 101 where cargo could not build.

Examples:
  accel-launch --num-processes 2 examples/mnist.rs --epochs 3
  accel-launch --num-processes 4 --log-dir logs target/release/train --batch-size 32
  accel-launch --num-processes 2:4 --max-restarts 10 --log-dir logs target/release/train";

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
    match (text, 0).to_socket_addrs().map(|mut addresses| addresses.next()) {
        Ok(Some(_)) => Ok(text.to_owned()),
        _ => Err("expected an address or a host name that can be resolved; the port goes to --master-port".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Invocation, clap::Error> {
        Invocation::parse(
            std::iter::once("accel-launch")
                .chain(line.split_whitespace())
                .map(OsString::from),
        )
    }

    #[test]
    fn the_command_is_sound() {
        underscored(Cli::command()).debug_assert();
    }

    #[test]
    fn c22_options_are_known_with_underscores_too() {
        for line in [
            "--num_processes 3 --max_restarts=2 --gpu_ids 0,2 --log_dir d train --num_processes 9",
            "--num-processes 3 --max-restarts=2 --gpu-ids 0,2 --log-dir d train --num_processes 9",
        ] {
            let Ok(Invocation::Launch { options, arguments }) = parse(line) else {
                panic!("expected a launch: {line}");
            };
            let three = NonZeroUsize::new(3).unwrap();
            assert_eq!(options.num_processes, Some(Processes::exactly(three)));
            assert_eq!(options.script, Some(PathBuf::from("train")));
            assert_eq!(options.gpu_ids, "0,2".parse().ok());
            assert_eq!(arguments, ["--num_processes", "9"]);
        }
        let help = underscored(Cli::command()).render_long_help().to_string();
        assert!(!help.contains("num_processes"), "{help}");
    }

    #[test]
    fn reads_a_launch() {
        let Ok(Invocation::Launch { options, arguments }) =
            parse("-n 2 --grace 0.5 train --quiet -n 3")
        else {
            panic!("expected a launch");
        };
        let two = NonZeroUsize::new(2).unwrap();
        assert_eq!(options.num_processes, Some(Processes::exactly(two)));
        assert_eq!(options.grace, Some(Duration::from_millis(500)));
        assert_eq!(options.script, Some(PathBuf::from("train")));
        assert!(!options.quiet);
        assert_eq!(arguments, ["--quiet", "-n", "3"]);
    }

    #[test]
    fn reads_a_range_of_processes() {
        let Ok(Invocation::Launch { options, .. }) = parse("-n 2:4 --max-restarts 5 train") else {
            panic!("expected a launch");
        };
        let processes = options.num_processes.unwrap();
        assert!(processes.is_range());
        assert_eq!(processes.to_string(), "2:4");
        assert_eq!(options.max_restarts, Some(5));
    }

    #[test]
    fn refuses_nonsense() {
        for line in [
            "-n 4:2 a",
            "-n 0:2 a",
            "-n 2: a",
            "--max-restarts -1 a",
            "--restart-delay never a",
            "-n 0 a",
            "-n -1 a",
            "-n two a",
            "--grace -1 a",
            "--grace nan a",
            "--no-such a",
            "--master-port 70000 a",
            "--threads-per-process 0 a",
            "--gpu-ids -1 a",
            "--gpu-ids 0,two a",
            "--gpu-ids 1,1 a",
            "--gpu-ids= a",
            "--profile dev --release a",
            "--master-addr 127.0.0.1:80 a",
        ] {
            assert_eq!(
                parse(line).err().map(|error| error.exit_code()),
                Some(2),
                "{line}"
            );
        }
    }

    #[test]
    fn reads_sub_commands() {
        assert!(matches!(
            parse("checkpoint show runs/a 3 --json"),
            Ok(Invocation::Checkpoint(_))
        ));
        for line in ["checkpoint", "checkpoint list", "checkpoint show a first"] {
            assert_eq!(parse(line).err().map(|x| x.exit_code()), Some(2), "{line}");
        }
        assert!(matches!(parse("env --json"), Ok(Invocation::Env(_))));
        assert!(matches!(
            parse("./env --json"),
            Ok(Invocation::Launch { .. })
        ));
    }
}
