//! A launch from its options to its exit code.

use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::thread;

use crate::cargo::Build;
use crate::cli::Options;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::failure;
use crate::job::Cause;
use crate::output::{Output, Stream};
use crate::rendezvous::Store;
use crate::settings::Settings;
use crate::signals;
use crate::spawn::Process;
use crate::supervise::supervise;
use crate::target::Target;
use crate::text::{columns, print};
use crate::tool::Channel;

/// Starts what `options` ask for with the script's own `arguments`, and sees it through.
///
/// # Errors
/// For what goes wrong before the ranks run; what goes wrong in them is in the exit code.
pub(crate) fn run(options: &Options, arguments: &[OsString]) -> Result<ExitCode> {
    let target = Target::parse(options)?;
    let settings = Settings::resolve(options, |name| std::env::var(name).ok());
    let (sender, notices) = mpsc::channel();
    let channel = Channel { sender, notices };
    signals::listen(channel.sender.clone())?;
    let build = match &target {
        Target::Program(_) => None,
        Target::Cargo(selector) => Some(Build::find(selector, options, &channel)?),
    };
    let arguments = match (&build, arguments) {
        (Some(_), [dashes, rest @ ..]) if dashes == "--" => rest,
        _ => arguments,
    };
    if options.dry_run {
        return describe(&target, build.as_ref(), &settings, arguments);
    }

    let output = Output::open(
        settings.ranks.get(),
        settings.prefix,
        settings.log_dir.as_deref(),
        channel.sender.clone(),
    )?;
    // Before the build, so that a port that is taken is known before the wait.
    let store = Store::open(
        &settings.master_addr,
        settings.master_port,
        settings.ranks.get(),
        &settings.job,
    )?;
    if !options.quiet && options.num_processes.is_none() {
        output.note("starting 1 process; --num-processes N starts more");
    }
    if !options.quiet && build.is_some() {
        warn_of_misplaced(options, arguments, &output);
    }
    let program = match (target, &build) {
        (Target::Program(path), _) => path,
        (Target::Cargo(_), Some(build)) => build.run(options, &channel)?,
        (Target::Cargo(selector), None) => {
            return Err(Error::usage(format!("{selector} was not found")));
        }
    };
    let environment = Environment::new(
        &settings,
        store.address(),
        build.as_ref().map(Build::package_dir),
    );
    let mut group = start(&program, arguments, &environment)?;
    let readers = read_output(&mut group, &output)?;
    let pids: Vec<i32> = group
        .iter()
        .map(|process| process.pid().as_raw_pid())
        .collect();

    let outcome = supervise(
        &mut group,
        settings.grace,
        &channel.sender,
        &channel.notices,
        |ranks| {
            // The terminal may be stopped, and the main thread must not wait for it.
            let (output, text) = (
                output.clone(),
                format!("waiting for {} to end", list(ranks)),
            );
            let _ = thread::Builder::new().spawn(move || output.note(&text));
        },
    );
    output.drain(readers, outcome.drained, &channel.notices);
    drop(store);

    if outcome.cause().is_none() && !outcome.left_behind.is_empty() {
        output.note(&format!(
            "ended processes that {} had left behind",
            list(&outcome.left_behind)
        ));
    }
    if let Some(report) = failure::report(&outcome, &pids, &output) {
        output.note(&report);
    } else if let Some(Cause::Signal(signal)) = outcome.cause() {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
        let stuck: Vec<usize> = (0..pids.len())
            .filter(|&rank| outcome.end(rank).is_none())
            .collect();
        if !stuck.is_empty() {
            output.note(&format!(
                "{} did not end on {name}, nor on SIGKILL",
                list(&stuck)
            ));
        } else if !options.quiet {
            output.note(&format!("ended by {name}"));
        }
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

/// Starts one process a rank. Should one fail to start, those before it are ended.
fn start(
    program: &Path,
    arguments: &[OsString],
    environment: &Environment,
) -> Result<Vec<Process>> {
    let mut group = Vec::with_capacity(environment.ranks());
    for rank in 0..environment.ranks() {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(stdin_of(rank))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        environment.apply(rank, &mut command);
        let process = Process::spawn(&mut command).map_err(|error| {
            let shown = program.display();
            if error.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) {
                Error::usage(format!(
                    "{shown} is neither a program for this machine nor a script that begins with `#!` and its interpreter"
                ))
            } else if error.kind() == ErrorKind::NotFound {
                // The file itself has been found before.
                Error::usage(format!("{shown} cannot be run: the interpreter that its first line names is missing"))
            } else {
                Error::system(format!("rank {rank} could not be started from {shown}"))
            }
            .with_source(error)
        })?;
        group.push(process);
    }
    Ok(group)
}

/// Rank 0 reads what is piped to the launcher. A terminal is left alone: the ranks are not
/// in its foreground, and the kernel would stop one that reads from it.
fn stdin_of(rank: usize) -> Stdio {
    if rank == 0 && !io::stdin().is_terminal() {
        Stdio::inherit()
    } else {
        Stdio::null()
    }
}

/// Starts the readers of all streams and returns how many they are.
fn read_output(group: &mut [Process], output: &Output) -> Result<usize> {
    let mut readers = 0;
    for (rank, process) in group.iter_mut().enumerate() {
        let pipes = [
            (Stream::Out, process.take_stdout()),
            (Stream::Err, process.take_stderr()),
        ];
        for (stream, pipe) in pipes {
            if let Some(pipe) = pipe {
                output.read(rank, stream, pipe)?;
                readers += 1;
            }
        }
    }
    Ok(readers)
}

/// Says so when an option of the launcher stands where the program gets it.
fn warn_of_misplaced(options: &Options, arguments: &[OsString], output: &Output) {
    let target = match (&options.example, &options.bin) {
        (Some(name), _) => format!("--example {name}"),
        (None, Some(name)) => format!("--bin {name}"),
        (None, None) => return,
    };
    let launcher_options = [
        "--num-processes",
        "--log-dir",
        "--features",
        "--package",
        "--profile",
        "--release",
    ];
    let misplaced = arguments
        .iter()
        .find(|argument| launcher_options.iter().any(|option| argument == option));
    if let Some(option) = misplaced {
        output.note(&format!(
            "{} stands after `{target}` and goes to the program; the launcher's options come before it",
            option.to_string_lossy()
        ));
    }
}

/// What `--dry-run` prints.
fn describe(
    target: &Target,
    build: Option<&Build>,
    settings: &Settings,
    arguments: &[OsString],
) -> Result<ExitCode> {
    let program = match target {
        Target::Program(path) => path.clone(),
        Target::Cargo(selector) => PathBuf::from(format!("<the program built from {selector}>")),
    };
    let mut text = String::from("dry run: nothing is built or started\n\n");
    if let Some(build) = build {
        text.push_str(&format!("build:   {}\n", build.command_line()));
    }
    let words =
        std::iter::once(program.as_os_str()).chain(arguments.iter().map(OsString::as_os_str));
    let command: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    text.push_str(&format!("command: {}\n\n", command.join(" ")));

    let port = SocketAddr::from(([0, 0, 0, 0], settings.master_port));
    let environment = Environment::new(settings, port, build.map(Build::package_dir));
    let variables: Vec<_> = (0..environment.ranks())
        .map(|rank| environment.of(rank))
        .collect();
    let mut ranks =
        vec![["rank", "local rank", "world size", "local world size"].map(str::to_owned)];
    ranks.extend(variables.iter().map(|variables| {
        ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| {
            let value = variables.iter().find(|(known, _)| *known == name);
            value
                .map(|(_, value)| value.to_string_lossy().into_owned())
                .unwrap_or_default()
        })
    }));
    text.push_str(&columns(&ranks));
    text.push('\n');
    let mut table = vec![["setting", "value", "from"].map(str::to_owned)];
    table.extend(settings.table.iter().map(|setting| {
        [
            setting.name.to_owned(),
            setting.value.clone(),
            setting.origin.clone(),
        ]
    }));
    text.push_str(&columns(&table));
    print(&text)
}

/// "rank 1", or "ranks 0, 2".
fn list(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", numbers.join(", "))
}
