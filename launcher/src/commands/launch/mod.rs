//! A launch from its options to its exit code.

mod job_loop;
mod restart;
mod runnable;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::agent::head::Head;
use crate::agent::node::{Node, Program};
use crate::agent::ssh;
use crate::cargo::Build;
use crate::error::{Error, Result, chain};
use crate::event::Channel;
use crate::gpu::GpuId;
use crate::output::{self, Output};
use crate::settings::gpus::Gpus;
use crate::settings::nodes::{self, HostPlace};
use crate::settings::options::Options;
use crate::settings::rank_env::RankEnv;
use crate::settings::target::{Selector, Target};
use crate::settings::{Settings, variable};
use crate::supervisor::attempt::Attempt;
use crate::supervisor::shim::LivenessPipe;
use crate::supervisor::signals::{self, Relay, Stopper};
use crate::supervisor::spawner::{LocalSpawner, Spawner};
use crate::text::{columns, print};
use crate::variables;
use job_loop::{JobLoop, JobVerdict};

/// Starts what `options` ask for with the script's own `arguments`, and waits until the job has ended.
///
/// `command` is the launcher's own command line; `liveness` is the pipe from its shim, if it has one.
///
/// # Errors
/// For what goes wrong before the ranks run; what goes wrong in them is in the exit code.
pub(crate) fn run(
    options: &Options,
    arguments: &[OsString],
    command: &[OsString],
    liveness: Option<LivenessPipe>,
) -> Result<ExitCode> {
    variables::check()?;
    if let Some(hosts) = options.host_list()? {
        options.check_effects()?;
        let channel = Channel::new();
        let relay = relay(&channel, liveness)?;
        return ssh::run(&hosts, options, arguments, command, relay, channel);
    }
    let command = match options.client_word.as_slice() {
        [] => command,
        words => words,
    };
    let target = Target::parse(options);
    let (options, place) = nodes::resolve(options, variable)?;
    let options = &options;
    options.check_effects()?;
    if place.is_none() {
        accelerator_collective::launcher::check_alone(variable).map_err(|error| {
            Error::usage(format!(
                "{}; this is the launcher, so start it once a job: outside of that launcher, or with one process; or once \
                 a host, with --nnodes",
                chain(&error)
            ))
        })?;
    }
    // What is set to nothing hides every GPU from CUDA; elsewhere it is not set.
    let gpus = Gpus::resolve(options, |name| std::env::var_os(name))?;
    let words = command
        .iter()
        .map(|word| word.to_string_lossy().into_owned());
    let settings = Settings {
        command: words.collect(),
        ..Settings::resolve(options, gpus, variable)
    };
    if settings.least_ranks < settings.ranks && settings.max_restarts == 0 {
        return Err(Error::usage(
            "--num-processes MIN:MAX goes on with fewer processes after a failure, which takes a \
             restart; give --max-restarts at least 1, or one number of processes",
        ));
    }
    let channel = Channel::new();
    let relay = relay(&channel, liveness)?;
    let (target, build) = match target.and_then(|target| found(target, options, &channel)) {
        Ok(found) => found,
        Err(error) => {
            return match place {
                // Host 0 would wait for this one.
                Some(place) if place.host > 0 && !options.dry_run && !error.is_interrupted() => {
                    let node = Node {
                        place,
                        options,
                        settings,
                        command,
                        relay,
                    };
                    node.run(channel, |_| Err(error))
                }
                _ => Err(error),
            };
        }
    };
    let arguments = match (&build, arguments) {
        (Some(_), [dashes, rest @ ..]) if dashes == "--" => rest,
        _ => arguments,
    };
    if options.dry_run {
        return describe(&target, build.as_ref(), &settings, options, arguments);
    }
    let has_several_hosts = place.is_some();
    let program = |channel: &Channel| -> Result<Program> {
        let package_dir = build.as_ref().map(Build::package_dir);
        let program = match (&target, &build) {
            (Target::Program(path), _) => {
                runnable::check_first_line(path)?;
                if has_several_hosts {
                    // Hosts may differ, and a rank that cannot start ends those of all.
                    runnable::check(path, channel)?;
                }
                path.clone()
            }
            (_, Some(build)) => build.run(options, channel)?,
            (target, None) => {
                return Err(Error::usage(format!("{target:?} was not found")));
            }
        };
        Ok(Program {
            spawner: LocalSpawner {
                program,
                arguments: arguments.to_vec(),
            },
            package_dir: package_dir.map(Path::to_path_buf),
        })
    };
    let job = LaunchedJob {
        options,
        command,
        relay,
        is_built: build.is_some(),
        arguments,
    };
    match place {
        None => job.on_one_host(settings, channel, program),
        Some(place) if place.host == 0 => job.on_host_0(place, settings, channel, program),
        Some(place) => {
            let LaunchedJob { relay, .. } = job;
            let node = Node {
                place,
                options,
                settings,
                command,
                relay,
            };
            node.run(channel, program)
        }
    }
}

/// Returns the target, with its build if cargo builds it.
fn found(target: Target, options: &Options, channel: &Channel) -> Result<(Target, Option<Build>)> {
    let name = match target {
        Target::Program(_) => return Ok((target, None)),
        Target::Cargo(ref selector) => {
            let build = Build::find(selector, options, channel)?;
            return Ok((target, Some(build)));
        }
        Target::Name(name) => name,
    };
    match Build::find_named(&name, options, channel) {
        Ok(Some(build)) => Ok((Target::Cargo(Selector::AnyNamed(name)), Some(build))),
        Ok(None) => Ok((Target::on_path(&name, options)?, None)),
        Err(error) if error.is_usage() || error.is_interrupted() => Err(error),
        // A package that cargo cannot read is in no way of a program of the PATH.
        Err(error) => match Target::on_path(&name, options) {
            Ok(target) => Ok((target, None)),
            Err(_) => Err(error),
        },
    }
}

/// Sends what the user and the shim signal to `channel`.
fn relay(channel: &Channel, liveness: Option<LivenessPipe>) -> Result<Relay> {
    let relay = Relay::new(channel.sender.clone());
    let stopper = match liveness {
        Some(_) => Stopper::Shim,
        None => Stopper::System,
    };
    signals::listen(relay.clone(), stopper)?;
    if let Some(liveness) = liveness {
        liveness.listen(relay.clone(), || {});
    }
    Ok(relay)
}

/// A launch whose options have been read.
struct LaunchedJob<'a> {
    options: &'a Options,
    /// The launcher's own command line.
    command: &'a [OsString],
    relay: Relay,
    /// True if cargo builds the program.
    is_built: bool,
    /// The program's arguments.
    arguments: &'a [OsString],
}

impl LaunchedJob<'_> {
    /// All ranks run on this host.
    fn on_one_host(
        self,
        settings: Settings,
        channel: Channel,
        program: impl FnOnce(&Channel) -> Result<Program>,
    ) -> Result<ExitCode> {
        let (settings, attempt) = self.prepare(settings, &channel)?;
        // After the store, so that a port that is taken is known before the wait.
        let program = program(&channel)?;
        let verdict = self.repeat(settings, attempt, channel, &program, &program.spawner)?;
        Ok(ExitCode::from(verdict.code))
    }

    /// This host decides for all.
    fn on_host_0(
        self,
        place: HostPlace,
        settings: Settings,
        channel: Channel,
        program: impl FnOnce(&Channel) -> Result<Program>,
    ) -> Result<ExitCode> {
        let head = Head::listen(place, self.options, &settings, &self.relay)?;
        let run = || {
            let program = program(&channel)?;
            let settings = head.gather(settings, &channel)?;
            let (settings, attempt) = self.prepare(settings, &channel)?;
            let spawner = head.spawner(program.spawner.clone());
            self.repeat(settings, attempt, channel, &program, &spawner)
        };
        let ended = run();
        let (code, text) = match &ended {
            Ok(verdict) => (verdict.code, verdict.text.clone()),
            Err(error) => (error.code(), Some(chain(error))),
        };
        head.finish(code, text);
        ended.map(|verdict| ExitCode::from(verdict.code))
    }

    /// Makes the folder of this run, and the store and output of the first attempt.
    fn prepare(&self, mut settings: Settings, channel: &Channel) -> Result<(Settings, Attempt)> {
        settings.log_dir = settings
            .log_dir
            .as_deref()
            .map(output::create_run_folder)
            .transpose()?;
        let pointed = settings.log_dir.as_deref().map(output::point_latest);
        let attempt = Attempt::prepare(settings.clone(), channel)?;
        let output = attempt.output();
        if let (Some(Err(error)), Some(run)) = (pointed, &settings.log_dir) {
            output.note(&format!(
                "the logs are in {}; {} cannot lead to them: {error}",
                run.display(),
                run.with_file_name(output::LATEST).display()
            ));
        }
        let options = self.options;
        if !options.quiet && options.num_processes.is_none() && options.hosts() == 1 {
            output.note("starting 1 process; --num-processes N starts more");
        }
        if !options.quiet && self.is_built {
            warn_of_misplaced(options, self.arguments, output);
        }
        Ok((settings, attempt))
    }

    fn repeat(
        &self,
        settings: Settings,
        attempt: Attempt,
        channel: Channel,
        program: &Program,
        spawner: &dyn Spawner,
    ) -> Result<JobVerdict> {
        let job = JobLoop {
            options: self.options,
            settings,
            spawner,
            package_dir: program.package_dir.as_deref(),
            command: self.command,
            relay: self.relay.clone(),
        };
        job.run(attempt, channel)
    }
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

/// The output of `--dry-run`.
fn describe(
    target: &Target,
    build: Option<&Build>,
    settings: &Settings,
    options: &Options,
    arguments: &[OsString],
) -> Result<ExitCode> {
    let program = match target {
        Target::Program(path) => path.clone(),
        Target::Name(name) => PathBuf::from(name),
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

    let port = settings.master_port;
    let environment = RankEnv::new(settings, port, None, build.map(Build::package_dir));
    let variables: Vec<_> = environment
        .ranks()
        .map(|rank| environment.of(rank))
        .collect();
    // What follows from the numbers of ranks on other hosts is known when they meet.
    let hosts = options.hosts();
    let is_first = options.node_rank.unwrap_or(0) == 0;
    let gpu = |rank| settings.gpus.of(rank).map(GpuId::to_string);
    let has_gpus = environment.ranks().any(|rank| gpu(rank).is_some());
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
        let known_later = |name: &str, is_known: bool| match is_known {
            true => of(name),
            false => "known later".to_owned(),
        };
        [
            known_later("RANK", is_first),
            of("LOCAL_RANK"),
            known_later("WORLD_SIZE", hosts == 1),
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
