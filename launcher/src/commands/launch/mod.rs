//! A launch from its options to its exit code.

mod job_loop;
mod restart;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::cargo::Build;
use crate::error::{Error, Result, chain};
use crate::event::Channel;
use crate::gpu::id::GpuId;
use crate::output::{Output, logs};
use crate::settings::gpus::Gpus;
use crate::settings::options::Options;
use crate::settings::rank_env::RankEnv;
use crate::settings::target::Target;
use crate::settings::{Settings, variable};
use crate::supervisor::attempt::Attempt;
use crate::supervisor::shim::LivenessPipe;
use crate::supervisor::signals::{self, Relay};
use crate::supervisor::spawner::LocalSpawner;
use crate::text::{columns, print};
use crate::variables;
use job_loop::JobLoop;

/// Starts what `options` ask for with the script's own `arguments`, and waits until the job has ended.
///
/// `command` is the launcher's own command line; `liveness` is the pipe from its shim, where it has one.
///
/// # Errors
/// For what goes wrong before the ranks run; what goes wrong in them is in the exit code.
pub(crate) fn run(
    options: &Options,
    arguments: &[OsString],
    command: &[OsString],
    liveness: Option<LivenessPipe>,
) -> Result<ExitCode> {
    let target = Target::parse(options)?;
    variables::check()?;
    accelerator_collective::check_alone(variable).map_err(|error| {
        Error::usage(format!(
            "{}; this is the launcher, so start it once a job: outside of that launcher, or with one process",
            chain(&error)
        ))
    })?;
    // What is set to nothing hides every GPU from CUDA; elsewhere it is not set.
    let gpus = Gpus::resolve(options, |name| std::env::var_os(name))?;
    let mut settings = Settings::resolve(options, gpus, variable);
    if settings.least_ranks < settings.ranks && settings.max_restarts == 0 {
        return Err(Error::usage(
            "--num-processes MIN:MAX goes on with fewer processes after a failure, which takes a \
             restart; give --max-restarts at least 1, or one number of processes",
        ));
    }
    let channel = Channel::new();
    let relay = Relay::new(channel.sender.clone());
    signals::listen(relay.clone())?;
    if let Some(liveness) = liveness {
        liveness.listen(relay.clone());
    }
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

    settings.log_dir = settings
        .log_dir
        .as_deref()
        .map(logs::create_run_folder)
        .transpose()?;
    let pointed = settings.log_dir.as_deref().map(logs::point_latest);
    // Before the build, so that a port that is taken is known before the wait.
    let attempt = Attempt::prepare(settings.clone(), &channel)?;
    if let (Some(Err(error)), Some(run)) = (pointed, &settings.log_dir) {
        attempt.output().note(&format!(
            "the logs are in {}; {} cannot lead to them: {error}",
            run.display(),
            run.with_file_name(logs::LATEST).display()
        ));
    }
    if !options.quiet && options.num_processes.is_none() {
        attempt
            .output()
            .note("starting 1 process; --num-processes N starts more");
    }
    if !options.quiet && build.is_some() {
        warn_of_misplaced(options, arguments, attempt.output());
    }
    let program = match (target, &build) {
        (Target::Program(path), _) => path,
        (Target::Cargo(_), Some(build)) => build.run(options, &channel)?,
        (Target::Cargo(selector), None) => {
            return Err(Error::usage(format!("{selector} was not found")));
        }
    };
    let spawner = LocalSpawner {
        program,
        arguments: arguments.to_vec(),
    };
    let job = JobLoop {
        options,
        settings,
        spawner: &spawner,
        package_dir: build.as_ref().map(Build::package_dir),
        command,
        relay,
    };
    job.run(attempt, channel)
}

/// Warns when an option of the launcher stands after the target, where the program gets it.
fn warn_of_misplaced(options: &Options, arguments: &[OsString], output: &Output) {
    let target = match (&options.example, &options.bin) {
        (Some(name), _) => format!("--example {name}"),
        (None, Some(name)) => format!("--bin {name}"),
        (None, None) => return,
    };
    let launcher_options = [
        "--num-processes",
        "--gpu-ids",
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
    let environment = RankEnv::new(settings, port, None, build.map(Build::package_dir));
    let variables: Vec<_> = (0..environment.ranks())
        .map(|rank| environment.of(rank))
        .collect();
    let gpu = |rank| settings.gpus.of(rank).map(GpuId::to_string);
    let has_gpus = (0..environment.ranks()).any(|rank| gpu(rank).is_some());
    let last = if has_gpus { "GPU" } else { "" };
    let mut ranks =
        vec![["rank", "local rank", "world size", "local world size", last].map(str::to_owned)];
    ranks.extend(variables.iter().enumerate().map(|(rank, variables)| {
        let of = |name: &str| {
            let value = variables.iter().find(|(known, _)| *known == name);
            value
                .map(|(_, value)| value.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let none_left = if has_gpus { "none" } else { "" };
        [
            of("RANK"),
            of("LOCAL_RANK"),
            of("WORLD_SIZE"),
            of("LOCAL_WORLD_SIZE"),
            gpu(rank).unwrap_or_else(|| none_left.to_owned()),
        ]
    }));
    text.push_str(&columns(&ranks));
    text.push('\n');
    let mut table = vec![["setting", "value", "from"].map(str::to_owned)];
    table.extend(settings.table.iter().map(|setting| {
        [
            setting.name.clone(),
            setting.value.clone(),
            setting.origin.clone(),
        ]
    }));
    table.extend(variables::set().into_iter().map(|(name, value)| {
        let value = value.to_string_lossy().into_owned();
        [name, value, "environment".to_owned()]
    }));
    text.push_str(&columns(&table));
    print(&text)
}
