//! A launch from its options to its exit code: [`run`] and the methods of [`Launch`] are the whole walk, step by step.

mod dry_run;
mod job_loop;
mod program;
mod restart;
mod runnable;

use std::ffi::OsString;
use std::process::ExitCode;

use crate::agent::head::Head;
use crate::agent::node::Node;
use crate::agent::ssh;
use crate::error::{Error, Result, chain};
use crate::event::Channel;
use crate::output;
use crate::settings::gpus::Gpus;
use crate::settings::nodes::{self, HostPlace};
use crate::settings::options::Options;
use crate::settings::{Setting, Settings, variable};
use crate::supervisor::attempt::Attempt;
use crate::supervisor::shim::LivenessPipe;
use crate::supervisor::signals::{self, Relay, Stopper};
use crate::supervisor::spawner::{Program, Spawner};
use crate::variables;
use job_loop::{JobLoop, JobVerdict};
use program::FoundProgram;

/// Starts the program of `options` with its own `arguments`, and waits until the job has ended.
///
/// `command` is the launcher's own command line; `liveness` is the pipe from its shim, if it has one.
///
/// # Errors
/// When the job fails before its ranks run; their failure is in the exit code.
pub(crate) fn run(
    options: &Options,
    arguments: &[OsString],
    command: &[OsString],
    liveness: Option<LivenessPipe>,
) -> Result<ExitCode> {
    variables::check()?;
    if let Some(hosts) = options.host_list()? {
        options.check_effects()?;
        let (channel, relay) = listen_to_signals(liveness)?;
        return ssh::run(&hosts, options, arguments, command, relay, channel);
    }
    let command = match options.client_word.as_slice() {
        [] => command,
        words => words,
    };
    let (options, place) = resolve_options(options)?;
    let settings = resolve_settings(&options, command)?;
    let (channel, relay) = listen_to_signals(liveness)?;
    let found = FoundProgram::find(&options, arguments, &channel);
    if options.dry_run {
        return dry_run::describe(&found?, &settings, &options);
    }
    let launch = Launch {
        options: &options,
        command,
        settings,
        channel,
        relay,
    };
    match place {
        None => launch.on_one_host(&found?),
        Some(place) if place.host == 0 => launch.on_host_0(place, &found?),
        Some(place) => launch.on_other_host(place, found),
    }
}

/// Returns the settings of a launch with these options on this host, and where each comes from.
///
/// # Errors
/// When options or variables contradict each other.
pub(super) fn settings_of(options: &Options) -> Result<Vec<Setting>> {
    let (options, _) = resolve_options(options)?;
    Ok(resolve_settings(&options, &[])?.table)
}

/// A launch whose options have been read, before anything of it has begun.
struct Launch<'a> {
    options: &'a Options,
    /// The command line that the user has typed.
    command: &'a [OsString],
    settings: Settings,
    channel: Channel,
    relay: Relay,
}

impl Launch<'_> {
    /// Runs all ranks on this host.
    fn on_one_host(self, found: &FoundProgram<'_>) -> Result<ExitCode> {
        let first = self.prepare_first_attempt(self.settings.clone(), found)?;
        // After the store, so that a port that is taken is known before the wait.
        let program = found.make_ready(&self.channel)?;
        let verdict = self.run_attempts(first, &program, &program.spawner)?;
        Ok(ExitCode::from(verdict.code))
    }

    /// Runs ranks on all hosts, for which this one decides.
    fn on_host_0(self, place: HostPlace, found: &FoundProgram<'_>) -> Result<ExitCode> {
        let head = Head::listen(place, self.options, &self.settings, &self.relay)?;
        let ended = self.run_as_head(&head, found);
        let (code, text) = match &ended {
            Ok(verdict) => (verdict.code, verdict.text.clone()),
            Err(error) => (error.code(), Some(chain(error))),
        };
        head.finish(code, text);
        ended.map(|verdict| ExitCode::from(verdict.code))
    }

    fn run_as_head(self, head: &Head, found: &FoundProgram<'_>) -> Result<JobVerdict> {
        let program = found.make_ready(&self.channel)?;
        let settings = head.gather(self.settings.clone(), &self.channel)?;
        let first = self.prepare_first_attempt(settings, found)?;
        let spawner = head.spawner(program.spawner.clone());
        self.run_attempts(first, &program, &spawner)
    }

    /// Runs ranks here as host 0 decides, which is told if there is no program: it would wait for this host.
    fn on_other_host(self, place: HostPlace, found: Result<FoundProgram<'_>>) -> Result<ExitCode> {
        let found = match found {
            Err(error) if error.is_interrupted() => return Err(error),
            found => found,
        };
        let node = Node {
            place,
            options: self.options,
            settings: self.settings,
            command: self.command,
            relay: self.relay,
        };
        node.run(self.channel, |channel| found?.make_ready(channel))
    }

    /// Makes the folder of this run, and the store and output of the first attempt.
    fn prepare_first_attempt(
        &self,
        mut settings: Settings,
        found: &FoundProgram<'_>,
    ) -> Result<Attempt> {
        settings.log_dir = settings
            .log_dir
            .as_deref()
            .map(output::create_run_folder)
            .transpose()?;
        let logs = settings.log_dir.clone();
        let pointed = logs.as_deref().map(output::point_latest);
        let attempt = Attempt::prepare(settings, &self.channel)?;
        let output = attempt.output();
        if let (Some(Err(error)), Some(run)) = (pointed, logs) {
            output.note(&format!(
                "the logs are in {}; {} cannot lead to them: {error}",
                run.display(),
                run.with_file_name(output::LATEST).display()
            ));
        }
        let options = self.options;
        if !options.quiet && options.num_processes.is_none() && options.hosts() == 1 {
            let passed = found.number_of_processes().map(|option| {
                format!(
                    ", if it comes before the program; {option} comes after it, and is passed to it"
                )
            });
            output.note(&format!(
                "starting 1 process; --num-processes N starts more{}",
                passed.unwrap_or_default()
            ));
        }
        if !options.quiet {
            found.warn_of_misplaced(output);
        }
        Ok(attempt)
    }

    /// Runs the first attempt and those that follow it, until the job has ended.
    fn run_attempts(
        self,
        first: Attempt,
        program: &Program,
        spawner: &dyn Spawner,
    ) -> Result<JobVerdict> {
        let job = JobLoop {
            options: self.options,
            settings: first.settings().clone(),
            spawner,
            package_dir: program.package_dir.as_deref(),
            command: self.command,
            relay: self.relay,
        };
        job.run(first, self.channel)
    }
}

/// Fills the options up with the hosts that an engine tells; returns the place of this host among several.
fn resolve_options(options: &Options) -> Result<(Options, Option<HostPlace>)> {
    let (options, place) = nodes::resolve(options, variable)?;
    options.check_effects()?;
    if place.is_none() {
        accelerator_collective::internal::check_alone(variable).map_err(|error| {
            Error::usage(format!(
                "{}; this is the launcher, so start it once a job: outside of that launcher, or with one process; or once \
                 a host, with --nnodes",
                chain(&error)
            ))
        })?;
    }
    Ok((options, place))
}

/// Fills the options up with defaults and variables.
fn resolve_settings(options: &Options, command: &[OsString]) -> Result<Settings> {
    // CUDA hides every GPU if its variable is empty, which `variable` takes for not set.
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
            "--num-processes MIN:MAX continues with fewer processes after a failure by restarting the job: set \
             --max-restarts to at least 1, or give one number of processes",
        ));
    }
    Ok(settings)
}

/// Sends the signals of the user and of the shim to a new channel.
fn listen_to_signals(liveness: Option<LivenessPipe>) -> Result<(Channel, Relay)> {
    let channel = Channel::new();
    let relay = Relay::new(channel.sender.clone());
    let stopper = match liveness {
        Some(_) => Stopper::Shim,
        None => Stopper::System,
    };
    signals::listen(relay.clone(), stopper)?;
    if let Some(liveness) = liveness {
        liveness.listen(relay.clone(), || {});
    }
    Ok((channel, relay))
}
