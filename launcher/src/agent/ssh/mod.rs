//! Starts a launcher on every host of a list over SSH, and ends with the exit code of the job.
//!
//! The client, which the user starts, runs no ranks: it starts an agent on each host, tells it what to run, and passes on
//! signals to the first one, whose launcher is the head. What that one prints is the job's output. Where the client or a
//! connection ends, the agents end everything on their hosts.

mod agent;
mod client;
mod job;
mod rsync;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use accelerator_collective::internal::Token;
use accelerator_host::{INSECURE, SET_BY_LAUNCHER, TOKEN_FILE};

use crate::error::{Error, Result, chain};
use crate::event::Channel;
use crate::settings::hosts::{HostList, ListedHost};
use crate::settings::options::Options;
use crate::supervisor::signals::Relay;
use crate::supervisor::store::given_token;
use crate::text::{note, print, shell_line};
use crate::variables;
use agent::Order;
pub(crate) use agent::run as run_agent;
use client::{Delivery, Ssh, is_own};
use job::SshJob;

/// Runs a job on `hosts`. `command` is the launcher's own command line as it was typed; `arguments` are the script's own.
///
/// # Errors
/// When a host is not reached or cannot run the job; when a signal arrives before the job runs.
pub(crate) fn run(
    hosts: &HostList,
    options: &Options,
    arguments: &[OsString],
    command: &[OsString],
    relay: Relay,
    channel: Channel,
) -> Result<ExitCode> {
    let mut words = Vec::new();
    for option in &options.ssh_option {
        words.extend(["-o".into(), option.into()]);
    }
    let more = options
        .ssh_args
        .iter()
        .flat_map(|text| text.split_whitespace());
    words.extend(more.map(OsString::from));
    let ssh = Ssh {
        arguments: words,
        delivery: delivery(options)?,
    };
    let paths = rsync::absolute_paths(&options.rsync)?;
    if options.dry_run {
        return describe(hosts, &ssh, &paths);
    }
    if !paths.is_empty() && !options.quiet {
        note(&format!(
            "copying what --rsync names to {} hosts",
            hosts.hosts().len()
        ));
    }
    rsync::copy(&ssh, hosts.hosts(), &paths, &channel)?;
    let token = token()?;
    let folder = std::env::current_dir()
        .map_err(|error| Error::system("the current folder cannot be read").with_source(error))?;
    let variables: Vec<_> = passed_on().collect();
    let order = |host: usize, endpoint: &str| {
        let mut words = placed(&options.words, hosts, options, host, endpoint);
        // Reports show the words that the user has typed.
        let at = words.len().min(1);
        words.splice(at..at, command.iter().map(|word| client_word(word)));
        words.extend(arguments.iter().cloned());
        Order {
            token: token.clone(),
            folder: folder.clone(),
            arguments: words,
            variables: variables.clone(),
        }
    };
    let job = SshJob::new(hosts.hosts(), &ssh, options, &order, relay);
    job.run(&channel).map(ExitCode::from)
}

/// Describes the number of ranks on a host.
fn ranks(host: &ListedHost, options: &Options) -> String {
    match (host.ranks, options.nproc_per_node) {
        (Some(ranks), _) => ranks.to_string(),
        (None, Some(ranks)) => ranks.to_string(),
        (None, None) => "1".to_owned(),
    }
}

/// The launcher's part of the command line on one of the hosts.
fn placed(
    own: &[OsString],
    hosts: &HostList,
    options: &Options,
    host: usize,
    endpoint: &str,
) -> Vec<OsString> {
    let all = hosts.hosts();
    let [program, rest @ ..] = own else {
        return Vec::new();
    };
    let mut words = vec![program.clone()];
    let place = [
        ("--nnodes", all.len().to_string()),
        ("--node-rank", host.to_string()),
        ("--nproc-per-node", ranks(&all[host], options)),
        ("--rdzv-endpoint", endpoint.to_owned()),
    ];
    for (name, value) in place {
        words.extend([name.into(), value.into()]);
    }
    // The options above, and those that are for the client alone.
    let replaced = [
        "--config-file",
        "--hosts",
        "--hostfile",
        "--nproc-per-node",
        "--processes-per-machine",
        "--rdzv-endpoint",
        "--rsync",
        "--ssh-option",
        "--ssh-args",
    ];
    let mut rest = rest.iter();
    while let Some(word) = rest.next() {
        let text = word.to_string_lossy().replace('_', "-");
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (&*text, None),
        };
        match replaced.contains(&name) {
            _ if name == "--no-push" => {}
            true if value.is_none() => drop(rest.next()),
            true => {}
            false => words.push(word.clone()),
        }
    }
    words
}

/// An option that tells a launcher one word of the client's command line.
fn client_word(word: &OsStr) -> OsString {
    let mut option = OsString::from("--client-word=");
    option.push(word);
    option
}

fn delivery(options: &Options) -> Result<Delivery> {
    let own = || -> std::io::Result<_> { std::fs::read("/proc/self/exe") };
    if !options.no_push {
        let program = own();
        let program = program
            .map_err(|error| Error::system("the own program cannot be read").with_source(error))?;
        return Ok(Delivery::Push(program.into()));
    }
    let path = std::env::current_exe().ok();
    let command = path
        .as_deref()
        .and_then(|path: &Path| agent::command_of_present(path));
    command.map(Delivery::Present).ok_or_else(|| {
        Error::usage("--no-push: the path of accel-launch has a character that a shell reads")
    })
}

/// The token of the job: that of `ACCEL_TOKEN_FILE`, or a new one.
fn token() -> Result<String> {
    let token = match given_token()? {
        Some(given) => given.token,
        None => Token::generate().map_err(|error| Error::usage(chain(&error)))?,
    };
    String::from_utf8(token.secret().to_vec())
        .map_err(|error| Error::usage("ACCEL_TOKEN_FILE is no text").with_source(error))
}

/// The variables of this process that hold for every host: not those that describe this machine, this session, or a job
/// in which this launcher runs.
fn passed_on() -> impl Iterator<Item = (OsString, OsString)> {
    const OWN: [&str; 20] = [
        "_",
        "CUDA_VISIBLE_DEVICES",
        "DISPLAY",
        "HOME",
        "HOSTNAME",
        "LOGNAME",
        "MAIL",
        "OLDPWD",
        "PWD",
        "SHELL",
        "SHLVL",
        "TEMP",
        "TMP",
        "TMPDIR",
        "USER",
        "WAYLAND_DISPLAY",
        "XAUTHORITY",
        TOKEN_FILE.name,
        INSECURE.name,
        SET_BY_LAUNCHER.name,
    ];
    const PREFIXES: [&str; 10] = [
        "DBUS_",
        "HYDRA_",
        "MPI_",
        "OMPI_",
        "PET_",
        "PMI",
        "SLURM",
        "SSH_",
        "TORCHELASTIC_",
        "XDG_",
    ];
    let outer: Vec<String> = variables::of_outer_launcher().collect();
    std::env::vars_os().filter(move |(name, _)| {
        let name = name.to_string_lossy();
        !OWN.contains(&&*name)
            && !PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            && !outer.contains(&name.into_owned())
    })
}

/// Prints the report of `--dry-run`.
fn describe(hosts: &HostList, ssh: &Ssh, paths: &[PathBuf]) -> Result<ExitCode> {
    let mut text = String::from("dry run: nothing is built or started\n\n");
    let line = |command: Command| {
        shell_line(std::iter::once(command.get_program()).chain(command.get_args()))
    };
    for (number, host) in hosts.hosts().iter().enumerate() {
        let how = match is_own(host) {
            true => "this host".to_owned(),
            false => {
                if !paths.is_empty() {
                    let copy = line(rsync::command(ssh, host, paths));
                    text.push_str(&format!("host {number}: {host}: {copy}\n"));
                }
                line(ssh.command(host))
            }
        };
        text.push_str(&format!("host {number}: {host}: {how}\n"));
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &str) -> Vec<OsString> {
        words.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_host_gets_its_place_and_none_of_the_list() {
        let hosts: HostList = "a:2,b".parse().unwrap();
        let options = Options {
            nproc_per_node: "3".parse().ok(),
            ..Options::default()
        };
        let own = line(
            "accel-launch --quiet --config_file f --hosts a:2,b --ssh_option=x --no_push --rsync train --nproc_per_node 3 --log-dir d train",
        );
        for (host, ranks) in [(0, 2), (1, 3)] {
            let expected = format!(
                "accel-launch --nnodes 2 --node-rank {host} --nproc-per-node {ranks} --rdzv-endpoint h:7 --quiet --log-dir d \
                 train"
            );
            let words = placed(&own, &hosts, &options, host, "h:7");
            assert_eq!(words, line(&expected));
        }
    }

    #[test]
    fn this_host_is_known_by_name_and_address() {
        let own = |text: &str| is_own(&text.parse::<HostList>().unwrap().hosts()[0]);
        for text in ["localhost", "127.0.0.1:2", "127.0.1.1", "[::1]"] {
            assert!(own(text), "{text}");
        }
        for text in ["root@localhost", "192.0.2.1", "no-such-host.invalid"] {
            assert!(!own(text), "{text}");
        }
    }
}
