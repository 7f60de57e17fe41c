//! The command line: which command runs, and where the options of the launcher end and the arguments of the program
//! begin.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{self, ExitCode};

use accelerator_host::cli::BUILD_OPTIONS;
use accelerator_host::process::find_installed;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::agent::ssh;
use crate::argv::{Argv, CONFIG, ENV};
use crate::commands::bench::{self, AllReduceArgs, BenchArgs};
use crate::commands::checkpoint::{self, CheckpointArgs};
use crate::commands::config::{self, ConfigArgs};
use crate::commands::env::{self, EnvArgs};
use crate::commands::estimate::{self, EstimateArgs};
use crate::commands::inspect::{self, InspectArgs};
use crate::commands::launch;
use crate::commands::plan::{self, PlanArgs};
use crate::commands::runs::{self, RunsArgs};
use crate::commands::selftest::{self, RankArgs, TestArgs};
use crate::commands::tune::{self, TuneArgs};
use crate::error::{Error, Result, chain};
use crate::settings::file::SettingsFile;
use crate::settings::options::Options;
use crate::supervisor::shim::LivenessPipe;
use crate::text::print;

/// Starts a training program on many processes.
#[derive(Debug, Parser)]
#[command(
    name = "accel-launch",
    version,
    override_usage = "accel-launch [OPTIONS] SCRIPT [ARGS]...\n       \
        accel-launch [OPTIONS] --example NAME [ARGS]...\n       \
        accel-launch [OPTIONS] --bin NAME [ARGS]...\n       \
        accel-launch env|plan|test [OPTIONS]\n       \
        accel-launch config [OPTIONS]\n       \
        accel-launch inspect [PID]\n       \
        accel-launch bench all-reduce [OPTIONS]\n       \
        accel-launch checkpoint list|show|verify DIR\n       \
        accel-launch runs list|show|compare|diff|report|board|export|upload|sync|gc|reproduce\n       \
        accel-launch tune SPEC -- PROGRAM [ARGS]...\n       \
        accel-launch tune list|show|best|resume|stop DIR\n       \
        accel-launch submit --name NAME [--engine slurm|kubernetes|ray] -- PROGRAM [ARGS]...\n       \
        accel-launch jobs list|get|logs|wait|stop|delete|top|data|image\n       \
        accel-launch estimate-memory FILE.safetensors\n       \
        accel-launch completions SHELL\n       \
        accel-launch man",
    after_help = AFTER_HELP,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Option<Subcommands>,
    #[command(flatten)]
    options: Options,
    /// The script's arguments, which clap does not see.
    #[arg(skip)]
    arguments: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    /// Show this machine and its environment, and where each setting comes from.
    Env(Box<EnvArgs>),
    /// Write the file of settings that every launch reads, from the options or, without options, from answers on a
    /// terminal.
    Config(Box<ConfigArgs>),
    /// Show which rank gets which sample.
    Plan(PlanArgs),
    /// Show the operation that each rank of a running job is in, and the rank that the others wait for.
    Inspect(InspectArgs),
    /// List the checkpoints in a folder, show the contents of one, or verify them.
    Checkpoint(CheckpointArgs),
    /// List, show and compare tracked runs, export them, or run them again.
    Runs(RunsArgs),
    /// Search the hyperparameters of a program, or show searches.
    Tune(TuneArgs),
    /// Submit a program to this machine, Slurm, Kubernetes or Ray (needs `accel-jobs`).
    Submit(JobsArgs),
    /// List, show and end submitted jobs (needs `accel-jobs`).
    Jobs(JobsArgs),
    /// Estimate from a model's file how much memory its training takes.
    #[command(name = "estimate-memory")]
    Estimate(EstimateArgs),
    /// Test that ranks connect, compute and detect failures on this machine.
    Test(TestArgs),
    /// A rank of the self-test.
    #[command(name = "__rank", hide = true)]
    Rank(RankArgs),
    /// The launcher of a host that another one has started over SSH.
    #[command(name = "__agent", hide = true)]
    Agent,
    /// Print the completions of a shell: `accel-launch completions bash > /etc/bash_completion.d/accel-launch`.
    Completions(CompletionsArgs),
    /// Print the manual page: `accel-launch man > accel-launch.1`.
    Man,
    /// Measure collectives between ranks of this machine, and compare them with its memory bandwidth.
    Bench(BenchArgs),
    /// A rank of a measurement.
    #[command(name = "__bench", hide = true)]
    BenchRank(AllReduceArgs),
}

impl Cli {
    /// Reads a command line whose first item is the program's name.
    ///
    /// # Errors
    /// The error is clap's, which prints itself; `--help` and `--version` are such errors too.
    pub(crate) fn read(
        arguments: impl IntoIterator<Item = OsString>,
    ) -> std::result::Result<Self, clap::Error> {
        let mut command = command_line();
        // Fills in the parts that clap derives late, such as `--help`.
        command.build();
        let words: Vec<OsString> = arguments.into_iter().collect();
        let command_word = words.get(1).cloned().unwrap_or_default();
        Self::read_by(&mut command, words)
            .map_err(|error| with_usage(error, &command, &command_word))
    }

    fn read_by(
        command: &mut Command,
        words: Vec<OsString>,
    ) -> std::result::Result<Self, clap::Error> {
        let mut argv = Argv::split(command, words)?;
        let file = argv.settings_file(command).map_err(refused)?;
        if let Some(file) = &file {
            let at = argv.options_at;
            argv.launcher.splice(at..at, file.words());
        }
        let matches = command.try_get_matches_from_mut(&argv.launcher)?;
        let mut cli = Self::from_arg_matches(&matches)?;
        cli.arguments = argv.script;
        match &mut cli.command {
            None => (cli.options.file, cli.options.words) = (file, argv.launcher),
            Some(Subcommands::Env(arguments)) => {
                (arguments.options.file, arguments.options.words) = (file, argv.launcher);
            }
            Some(Subcommands::Config(arguments)) => {
                if let (Some(launch), Some((_, given))) =
                    (command.find_subcommand(CONFIG), matches.subcommand())
                {
                    let path = arguments.path().map_err(refused)?;
                    arguments.given = SettingsFile::of(path, launch, given).map_err(refused)?;
                }
            }
            Some(_) => {}
        }
        Ok(cli)
    }

    /// Returns `true` if processes are started that must not outlive the launcher.
    pub(crate) fn runs_a_job(&self) -> bool {
        match &self.command {
            None => !self.options.dry_run,
            Some(Subcommands::Bench(arguments)) => arguments.starts_processes(),
            Some(Subcommands::Tune(arguments)) => arguments.starts_processes(),
            // An agent starts its shim itself, when it has its order.
            Some(_) => false,
        }
    }

    /// Runs the command; without one, launches the script.
    ///
    /// `line` is the command line that was read, and `liveness` the pipe from its shim.
    ///
    /// # Errors
    /// The errors of the command.
    pub(crate) fn run(
        &self,
        line: &[OsString],
        liveness: Option<LivenessPipe>,
    ) -> Result<ExitCode> {
        let Some(command) = &self.command else {
            return launch::run(&self.options, &self.arguments, line, liveness);
        };
        match command {
            Subcommands::Env(arguments) => env::run(arguments),
            Subcommands::Config(arguments) => config::run(arguments),
            Subcommands::Plan(arguments) => plan::run(arguments),
            Subcommands::Inspect(arguments) => inspect::run(arguments),
            Subcommands::Checkpoint(arguments) => checkpoint::run(arguments),
            Subcommands::Runs(arguments) => runs::run(arguments),
            Subcommands::Tune(arguments) => tune::run(arguments, liveness),
            Subcommands::Submit(arguments) => become_accel_jobs(Some("submit"), arguments),
            Subcommands::Jobs(arguments) => become_accel_jobs(None, arguments),
            Subcommands::Estimate(arguments) => estimate::run(arguments),
            Subcommands::Test(arguments) => selftest::run(arguments),
            Subcommands::Rank(arguments) => Ok(selftest::rank(arguments)),
            Subcommands::Agent => ssh::run_agent(line.first().map(OsString::as_os_str)),
            Subcommands::Completions(arguments) => completions(arguments, command_line()),
            Subcommands::Man => man(command_line()),
            Subcommands::Bench(arguments) => bench::run(arguments, line, liveness),
            Subcommands::BenchRank(arguments) => Ok(bench::rank(arguments)),
        }
    }
}

/// Prints an error of the command line on one line, with a line of usage; or the help.
pub(crate) fn report(error: &clap::Error) -> ExitCode {
    let is_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    // A closed pipe is no error.
    let _ = match is_help || !error.use_stderr() {
        true => error.print(),
        false => io::stderr().write_all(in_two_lines(error).as_bytes()),
    };
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Formats an error of the command line.
fn in_two_lines(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let message = text.split("\n\n").next().unwrap_or_default();
    let message: Vec<_> = message.lines().map(str::trim).collect();
    let mut text = message.join(" ");
    let kinds = [
        ContextKind::SuggestedArg,
        ContextKind::SuggestedSubcommand,
        ContextKind::SuggestedValue,
    ];
    let near = kinds.into_iter().find_map(|kind| match error.get(kind)? {
        ContextValue::String(near) => Some(near),
        ContextValue::Strings(near) => near.first(),
        _ => None,
    });
    if let Some(near) = near {
        let near = match near.starts_with("--") {
            true => near.replace('_', "-"),
            false => near.clone(),
        };
        text.push_str(&format!("; did you mean '{near}'?"));
    }
    if error.kind() == ErrorKind::ArgumentConflict
        && text.contains("--num-processes")
        && text.contains("--host")
    {
        text.push_str(": give the number of ranks per host instead, by --hosts host0:4,host1:4 or --nproc-per-node 4");
    }
    if let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg)
        && error.kind() == ErrorKind::UnknownArgument
        && BUILD_OPTIONS.contains(&option.as_str())
    {
        text.push_str("; only a launch builds programs: build it by cargo, and give its path, such as target/release/train");
    }
    text.push('\n');
    if let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage) {
        let usage = usage.to_string();
        let usage = usage.trim_start_matches("Usage: ");
        let usage = usage.lines().next().unwrap_or_default();
        text.push_str(&format!("usage: {usage} (--help shows more)\n"));
    }
    text
}

/// Adds the usage of the command that the line is of, if clap has not.
fn with_usage(mut error: clap::Error, command: &Command, word: &OsStr) -> clap::Error {
    if error.get(ContextKind::Usage).is_none() && error.kind() != ErrorKind::Io {
        let mut command = command.find_subcommand(word).unwrap_or(command).clone();
        let usage = command.render_usage();
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    }
    error
}

/// Makes the error of a file of settings, which needs no usage.
fn refused(error: Error) -> clap::Error {
    clap::Error::raw(ErrorKind::Io, format_args!("{}\n", chain(&error)))
}

/// The whole command line. `env` and `config` do not show the options of a launch again.
fn command_line() -> Command {
    let hidden = |command: Command| {
        let name = command.get_name().to_owned();
        let command = command.mut_args(|option| {
            let is_own = ["json", "config_file"].contains(&option.get_id().as_str());
            option.hide(!is_own)
        });
        command
            .override_usage(format!("accel-launch {name} [OPTIONS]"))
            .after_help("It also takes the options of a launch, which `accel-launch --help` lists.")
    };
    underscored(Cli::command())
        .mut_subcommand(ENV, hidden)
        .mut_subcommand(CONFIG, hidden)
}

/// The command, whose options may also be written with underscores, as other launchers' are.
fn underscored(command: clap::Command) -> clap::Command {
    let names: Vec<String> = command
        .get_subcommands()
        .map(|subcommand| subcommand.get_name().to_owned())
        .collect();
    let command = command.mut_args(|option| {
        let aliases = option.get_all_aliases().unwrap_or_default();
        let names = option.get_long().into_iter().chain(aliases);
        let dashed = names.filter(|name| name.contains('-'));
        let underscored: Vec<String> = dashed.map(|name| name.replace('-', "_")).collect();
        option.aliases(underscored)
    });
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, underscored)
    })
}

const AFTER_HELP: &str = "\
Options before the script are the launcher's; everything after the script is the script's.
If `--` directly follows a cargo target, it is dropped, as with `cargo run`. To run a program
that has the name of a command, such as `env`, write `./env`.

Rank 0 reads the launcher's standard input, unless that is a terminal.

SIGINT, SIGTERM, SIGHUP and SIGQUIT end all ranks; a second one kills them. SIGUSR1 and SIGUSR2
are forwarded to the ranks. Ctrl-Z (SIGTSTP) suspends the ranks too, and `fg` continues them;
without --hosts, a launcher other than host 0's suspends only the ranks of its own host. No
process that a rank starts outlives the job, not even a daemon, and not even if the launcher is
killed with SIGKILL.

`accel-launch config` writes a file of settings; flags and variables override it. Flags of
accelerate, torchrun and mpirun work if they have an equivalent.

Several hosts: use --hosts, which starts a launcher on each host over SSH. Or run the same
command on each host yourself, with a different --node-rank on each and with the same secret in
the file that ACCEL_TOKEN_FILE names. Every launcher ends with the exit code of the job.

Exit code:
  0             every rank succeeded
  a rank's      the exit code of the rank that failed first
  128 + signal  a signal ended the rank that failed first, or the job
  75            the job should be started again: all ranks were asked to stop and have saved,
                or a host was lost
  2             the command line is wrong, or the ranks would refuse an ACCEL_ variable
                (`accel-launch env` checks them all)
  101           cargo could not build the target

Examples:
  accel-launch --num-processes 2 examples/mnist.rs --epochs 3
  accel-launch --num-processes 4 --log-dir logs target/release/train --batch-size 32
  accel-launch --num-processes 2:4 --max-restarts 10 --log-dir logs target/release/train
  accel-launch --nnodes 2 --node-rank 0 --nproc-per-node 4 --rdzv-endpoint host0 train
  accel-launch --hosts host0:4,host1:4 train";

/// Arguments of `accel-launch completions`.
#[derive(Args, Clone, Debug)]
struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Prints the completions of a shell for `command`.
fn completions(arguments: &CompletionsArgs, mut command: Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "accel-launch", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Prints the manual page of `command`, in the format of `man`.
fn man(command: Command) -> Result<ExitCode> {
    let mut page = Vec::new();
    Man::new(command)
        .render(&mut page)
        .map_err(|error| Error::system("the manual page cannot be written").with_source(error))?;
    print(&String::from_utf8_lossy(&page))
}

/// The arguments of the other program, which reads them.
#[derive(Args, Clone, Debug)]
#[command(disable_help_flag = true)]
struct JobsArgs {
    #[arg(
        value_name = "ARGS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    arguments: Vec<OsString>,
}

/// Becomes `accel-jobs`, with `command` before the arguments. It is a program of its own, so that clients of engines stay
/// out of the launcher that supervises.
///
/// # Errors
/// When it is not installed, or cannot be started.
fn become_accel_jobs(command: Option<&str>, arguments: &JobsArgs) -> Result<ExitCode> {
    const PROGRAM: &str = "accel-jobs";
    let program = find_installed(PROGRAM).unwrap_or_else(|| PathBuf::from(PROGRAM));
    let words = command.map(OsStr::new).into_iter();
    let words = words.chain(arguments.arguments.iter().map(OsString::as_os_str));
    let error = process::Command::new(&program).args(words).exec();
    Err(match error.kind() {
        std::io::ErrorKind::NotFound => Error::usage(format!(
            "`submit` and `jobs` are commands of {PROGRAM}, which is neither beside accel-launch nor on the PATH; install it \
             by `cargo install --locked --git {} {PROGRAM}`, or in a clone by `cargo install --locked --path launcher/jobs`",
            env!("CARGO_PKG_REPOSITORY"),
        )),
        _ => Error::system(format!("{} cannot be started", program.display())).with_source(error),
    })
}

#[cfg(test)]
#[path = "../../tests/src/documents.rs"]
mod documents;

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use clap::CommandFactory;

    use super::*;
    use crate::settings::options::Processes;

    fn parse(line: &str) -> std::result::Result<Cli, clap::Error> {
        Cli::read(
            std::iter::once("accel-launch")
                .chain(line.split_whitespace())
                .map(OsString::from),
        )
    }

    fn launch(line: &str) -> (Options, Vec<OsString>) {
        let cli = parse(line).unwrap();
        assert!(cli.command.is_none(), "expected a launch: {line}");
        (cli.options, cli.arguments)
    }

    #[test]
    fn documented_command_lines_are_understood() {
        let repository = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let commands = documents::commands(repository, "accel-launch");
        assert!(commands.len() > 40, "found {}", commands.len());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.toml");
        std::fs::write(&file, "num-processes = 2\n").unwrap();
        for words in commands {
            let mut words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
            if let Some(at) = words.iter().position(|word| word == "--config-file") {
                words[at + 1] = file.clone().into();
            }
            let read = Cli::read(words.clone());
            assert!(read.is_ok(), "{words:?}: {}", read.unwrap_err());
        }
    }

    #[test]
    fn the_command_is_sound() {
        command_line().debug_assert();
    }

    #[test]
    fn c22_options_are_known_with_underscores_too() {
        for line in [
            "--num_processes 3 --max_restarts=2 --gpu_ids 0,2 --log_dir d train --num_processes 9",
            "--num-processes 3 --max-restarts=2 --gpu-ids 0,2 --log-dir d train --num_processes 9",
        ] {
            let (options, arguments) = launch(line);
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
        let (options, arguments) = launch("-n 2 --grace 0.5 train --quiet -n 3");
        let two = NonZeroUsize::new(2).unwrap();
        assert_eq!(options.num_processes, Some(Processes::exactly(two)));
        assert_eq!(options.grace, Some(Duration::from_millis(500)));
        assert_eq!(options.script, Some(PathBuf::from("train")));
        assert!(!options.quiet);
        assert_eq!(arguments, ["--quiet", "-n", "3"]);
        let (options, _) = launch("-n 2:4 --max-restarts 5 train");
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
        let command = |line: &str| parse(line).unwrap().command;
        assert!(matches!(
            command("checkpoint show checkpoints/a 3 --json"),
            Some(Subcommands::Checkpoint(_))
        ));
        for line in ["checkpoint", "checkpoint list", "checkpoint show a first"] {
            assert_eq!(parse(line).err().map(|x| x.exit_code()), Some(2), "{line}");
        }
        assert!(matches!(command("env --json"), Some(Subcommands::Env(_))));
        assert!(command("./env --json").is_none());
    }

    fn split(line: &str) -> (String, String) {
        let mut command = crate::cli::Cli::command();
        command.build();
        let arguments = std::iter::once("accel-launch")
            .chain(line.split_whitespace())
            .map(OsString::from);
        let argv = Argv::split(&command, arguments).unwrap();
        let join = |part: &[OsString]| part.join(OsStr::new(" ")).into_string().unwrap();
        (join(&argv.launcher[1..]), join(&argv.script))
    }

    #[test]
    fn a_line_is_split_where_the_programs_arguments_begin() {
        for (line, launcher, script) in [
            (
                "--num-processes 2 a.sh --num-processes 3 -h",
                "--num-processes 2 a.sh",
                "--num-processes 3 -h",
            ),
            ("-n 2 a.sh x", "-n 2 a.sh", "x"),
            (
                "-n2 --quiet --log-dir=d a.sh -- x",
                "-n2 --quiet --log-dir=d a.sh",
                "-- x",
            ),
            ("a.sh", "a.sh", ""),
            ("./env plan", "./env", "plan"),
            // Named targets stand in the place of the script.
            (
                "-n 2 --example mnist --epochs 1",
                "-n 2 --example mnist",
                "--epochs 1",
            ),
            ("--example=mnist --quiet", "--example=mnist", "--quiet"),
            ("--bin b x", "--bin b", "x"),
            // A double dash ends the options.
            ("-n 2 -- -odd --help", "-n 2 -- -odd", "--help"),
            ("-- env x", "-- env", "x"),
            ("--", "--", ""),
            // Subcommands and broken lines are left to clap.
            ("env --json", "env --json", ""),
            ("plan --samples 3", "plan --samples 3", ""),
            ("checkpoint show a 3", "checkpoint show a 3", ""),
            ("./checkpoint list a", "./checkpoint", "list a"),
            ("--no-such a.sh x", "--no-such a.sh", "x"),
            ("--num-processes", "--num-processes", ""),
            ("--help", "--help", ""),
            ("", "", ""),
        ] {
            let (found, rest) = split(line);
            assert_eq!(
                (found.as_str(), rest.as_str()),
                (launcher, script),
                "{line}"
            );
        }
    }
}
