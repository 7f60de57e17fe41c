//! The client's end of one agent: the process that reaches it, and its output.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::ToSocketAddrs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use accelerator_collective::internal::is_own_address;
use accelerator_host::machine::host_name;
use accelerator_host::sync::Mutex;
use rustix::pipe::{PipeFlags, pipe_with};

use super::agent::{AgentHello, NEEDS, Order, command_of_sent, greeted, send};
use crate::agent::line::spawn;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::process::{End, Process, RankProcess};
use crate::settings::hosts::ListedHost;
use crate::supervisor::signals::Relay;
use crate::text::needed_glibc;

/// The number of bytes kept of an agent's output.
const TAIL: usize = 4096;

/// The time for which the rest of the output of a process that has ended may keep others waiting.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(500);

/// The way in which the program gets to a host.
#[derive(Clone, Debug)]
pub(super) enum Delivery {
    /// It is sent over the connection.
    Push(Arc<[u8]>),
    /// The host has it; this command runs it.
    Present(String),
}

/// The settings of `ssh` calls.
#[derive(Clone, Debug)]
pub(super) struct Ssh {
    /// Its options by the user, which come first and win.
    pub(super) arguments: Vec<OsString>,
    /// The way in which the program gets to hosts.
    pub(super) delivery: Delivery,
}

impl Ssh {
    /// The command that starts an agent on `host`.
    pub(super) fn command(&self, host: &ListedHost) -> Command {
        let mut command = Command::new("ssh");
        command.args(&self.words(host)[1..]);
        command.args(["--", &host.name]);
        command.arg(match &self.delivery {
            Delivery::Push(program) => command_of_sent(program.len()),
            Delivery::Present(command) => command.clone(),
        });
        command
    }

    /// `ssh` and its options for `host`.
    pub(super) fn words(&self, host: &ListedHost) -> Vec<OsString> {
        let mut words = vec![OsString::from("ssh")];
        words.extend(self.arguments.iter().cloned());
        words.extend(["-T".into(), "-x".into()]);
        for option in [
            "BatchMode=yes",
            "ConnectTimeout=10",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
            "ClearAllForwardings=yes",
            "ForwardAgent=no",
            "ControlMaster=no",
            "ControlPath=none",
            "LogLevel=ERROR",
        ] {
            words.extend(["-o".into(), option.into()]);
        }
        if let Some(user) = &host.user {
            words.extend(["-l".into(), user.into()]);
        }
        if let Some(port) = host.port {
            words.extend(["-p".into(), port.to_string().into()]);
        }
        words
    }
}

/// An agent that was started.
#[derive(Debug)]
pub(super) struct Client {
    process: Process,
    stdin: Option<File>,
    hello: Receiver<io::Result<AgentHello>>,
    /// Gives nothing; ends when all that the agent prints was read.
    printed: Receiver<()>,
    stderr: Arc<Mutex<AgentStderr>>,
}

/// The standard error of an agent.
#[derive(Debug, Default)]
pub(super) struct AgentStderr {
    tail: Vec<u8>,
    is_shown: bool,
}

impl AgentStderr {
    /// The last of it, as text.
    pub(super) fn tail(&self) -> String {
        String::from_utf8_lossy(&self.tail).trim().to_owned()
    }
}

/// The use of the output of an agent that has its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Show {
    /// It is that of the job.
    Output,
    /// Nothing: the job's comes from another host.
    Nothing,
}

impl Client {
    /// Starts the agent of a host over SSH, or of this host if `ssh` is `None`. What it prints later is shown as
    /// `show` says; `relay` is told when it has said hello.
    pub(super) fn start(
        ssh: Option<(&Ssh, &ListedHost)>,
        show: Show,
        relay: &Relay,
    ) -> Result<Self> {
        let mut command = match ssh {
            Some((ssh, host)) => ssh.command(host),
            None => {
                let mut command = Command::new("/proc/self/exe");
                command.arg0("accel-launch").arg("__agent");
                command
            }
        };
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)
            .map_err(|error| Error::system("no pipe can be made").with_source(error))?;
        command
            .stdin(Stdio::from(reader))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = Process::spawn(&mut command).map_err(|error| {
            let name = command.get_program().to_string_lossy().into_owned();
            Error::system(format!("{name} could not be started")).with_source(error)
        })?;
        // Otherwise this process would hold the agent's end of the pipe too.
        drop(command);
        let stdin = File::from(writer);
        let stderr = Arc::new(Mutex::new(AgentStderr::default()));
        let (printing, printed) = mpsc::channel();
        if let Some(pipe) = process.take_stderr() {
            let (printing, stderr) = (printing.clone(), Arc::clone(&stderr));
            spawn("agent-stderr", move || {
                keep(pipe, &stderr);
                drop(printing);
            })?;
        }
        let (said, hello) = mpsc::channel();
        if let (Some(mut pipe), Ok(mut input)) = (process.take_stdout(), stdin.try_clone()) {
            let program = ssh.and_then(|(ssh, _)| match &ssh.delivery {
                Delivery::Push(program) => Some(Arc::clone(program)),
                Delivery::Present(_) => None,
            });
            let relay = relay.clone();
            spawn("agent-stdout", move || {
                // If it does not take the program, it does not say hello either.
                let _ = program.map(|program| input.write_all(&program));
                drop(input);
                let hello = greeted(&mut pipe);
                let has_come = hello.is_ok();
                let _ = said.send(hello);
                relay.send(Event::Message);
                if has_come {
                    let _ = match show {
                        Show::Output => io::copy(&mut pipe, &mut io::stdout()),
                        Show::Nothing => io::copy(&mut pipe, &mut io::sink()),
                    };
                }
                drop(printing);
            })?;
        }
        Ok(Self {
            process,
            stdin: Some(stdin),
            hello,
            printed,
            stderr,
        })
    }

    pub(super) fn process(&self) -> &dyn RankProcess {
        &self.process
    }

    /// Returns the hello of the agent, or the error in its place, if one has come since the last call.
    pub(super) fn hello(&self) -> Option<io::Result<AgentHello>> {
        self.hello.try_recv().ok()
    }

    /// Gives it its order; from here on its errors are those of the job, if they are shown.
    pub(super) fn order(&self, order: &Order, show: Show) {
        self.stderr.lock().is_shown = show == Show::Output;
        if let Some(mut stdin) = self.stdin.as_ref() {
            // If it is gone, its end is reported.
            let _ = send(&mut stdin, order);
        }
    }

    /// Passes a signal on to its launcher.
    pub(super) fn signal(&self, signal: i32) {
        if let (Some(mut stdin), Ok(number)) = (self.stdin.as_ref(), u8::try_from(signal)) {
            let _ = stdin.write_all(&[number]);
        }
    }

    /// Makes the agent kill everything.
    pub(super) fn kill(&mut self) {
        self.stderr.lock().is_shown = false;
        self.stdin = None;
    }

    /// Returns the last part of the standard error of its process, which has ended.
    pub(super) fn last_words(&mut self) -> String {
        self.stdin = None;
        self.process.reap();
        let _ = self.printed.recv_timeout(LAST_WORDS);
        self.stderr.lock().tail()
    }
}

/// Describes why the agent of a host did not start: the end of its process, and its output.
pub(super) fn not_started(host: &ListedHost, end: End, said: &str) -> String {
    let ssh = match &host.user {
        _ if host.port.is_none() => format!("ssh {host}"),
        _ => format!("ssh -p {} {host}", host.port.unwrap_or_default()),
    };
    let says = |texts: &[&str]| texts.iter().any(|text| said.contains(text));
    let elsewhere =
        "install an accel-launch that runs on it at the same path on all hosts, and give --no-push";
    let why = if says(&["IDENTIFICATION HAS CHANGED"]) {
        format!(
            "its key is not the one that ssh knows: another machine may answer in its place. Where the host was set up \
             anew, remove the old key as ssh says below, run `{ssh}` once, and compare the key"
        )
    } else if says(&["Host key verification failed"]) {
        format!("ssh does not know its key: run `{ssh}` once, and compare the key")
    } else if says(&["Permission denied ("]) {
        format!("ssh may not log in there without a password: `{ssh}` has to work with a key")
    } else if says(&UNREACHABLE) {
        format!("it is not reached: `{ssh}` has to work from this machine")
    } else if says(&["no folder for temporary files"]) {
        format!("accel-launch cannot be put there: name a folder in TMPDIR there, or {elsewhere}")
    } else if says(&[NEEDS]) {
        format!("its processor does not run this accel-launch; {elsewhere}")
    } else if let Some(version) = needed_glibc(said) {
        format!("its C library is older than {version}, which this accel-launch needs; {elsewhere}")
    } else if says(&["error while loading shared"]) {
        format!("it lacks a library that this accel-launch needs; install it there, or {elsewhere}")
    } else if [End::Code(126), End::Code(127)].contains(&end) || says(&["Exec format error"]) {
        format!(
            "this accel-launch does not run there ({end}): the host has another processor or another C library; \
             {elsewhere}"
        )
    } else {
        format!("{ssh} ended with {end}")
    };
    let said = match said {
        "" => String::new(),
        _ => format!("\n  {}", said.replace('\n', "\n  ")),
    };
    format!("host {host} was not started: {why}{said}")
}

/// Checks if another attempt to connect may succeed.
pub(super) fn may_pass(end: End, said: &str) -> bool {
    let is_final = [
        "Host key verification failed",
        "Permission denied",
        "Could not resolve",
        "Bad configuration",
        "command-line",
        "unknown option",
    ];
    end == End::Code(255) && !is_final.iter().any(|text| said.contains(text))
}

/// The messages of `ssh` about a host that it cannot connect to.
const UNREACHABLE: [&str; 6] = [
    "Could not resolve",
    "Connection timed out",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
    "banner exchange",
];

/// Keeps the last part of the standard error of a process.
pub(super) fn keep(mut pipe: File, stderr: &Mutex<AgentStderr>) {
    let mut chunk = [0; TAIL];
    while let Ok(count @ 1..) = pipe.read(&mut chunk) {
        let mut state = stderr.lock();
        state.tail.extend_from_slice(&chunk[..count]);
        let over = state.tail.len().saturating_sub(TAIL);
        state.tail.drain(..over);
        let is_shown = state.is_shown;
        drop(state);
        if is_shown {
            // It may be closed.
            let _ = io::stderr().write_all(&chunk[..count]);
        }
    }
}

/// Checks if a host of the list is this one, which needs no SSH.
pub(super) fn is_own(host: &ListedHost) -> bool {
    if host.user.is_some() || host.port.is_some() {
        return false;
    }
    let own = host_name();
    let is_named =
        host.name == "localhost" || host.name == own || own.split('.').next() == Some(&host.name);
    is_named || {
        let addresses = (host.name.as_str(), 0).to_socket_addrs();
        let mut addresses = addresses.into_iter().flatten();
        addresses.any(|address| is_own_address(address.ip()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_is_called_without_a_terminal_and_with_the_options_of_the_user_first() {
        let ssh = Ssh {
            arguments: vec!["-o".into(), "ConnectTimeout=3".into()],
            delivery: Delivery::Present("exec 'x' __agent".to_owned()),
        };
        let host = ListedHost {
            user: Some("ann".to_owned()),
            name: "a".to_owned(),
            port: Some(7),
            ranks: None,
        };
        let command = ssh.command(&host);
        let words: Vec<_> = command
            .get_args()
            .map(|word| word.to_str().unwrap())
            .collect();
        assert_eq!(words[..4], ["-o", "ConnectTimeout=3", "-T", "-x"]);
        let end = ["-l", "ann", "-p", "7", "--", "a", "exec 'x' __agent"];
        assert_eq!(words[words.len() - end.len()..], end);
        assert!(words.contains(&"BatchMode=yes"));
        assert!(!words.iter().any(|word| word.contains("StrictHostKey")));
    }

    #[test]
    fn what_ssh_says_is_explained() {
        let host: crate::settings::hosts::HostList = "ann@a".parse().unwrap();
        let host = &host.hosts()[0];
        for (end, said, says, may) in [
            (
                255,
                "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
                "remove the old key as ssh says below, run `ssh ann@a` once",
                false,
            ),
            (
                255,
                "Host key verification failed.",
                "ssh does not know its key: run `ssh ann@a` once",
                false,
            ),
            (
                255,
                "a: Permission denied (publickey).",
                "without a password",
                false,
            ),
            (
                255,
                "Connection refused",
                "it is not reached: `ssh ann@a`",
                true,
            ),
            (255, "Connection closed", "ended with exit code 255", true),
            (
                255,
                "Could not resolve hostname a",
                "it is not reached",
                false,
            ),
            (
                126,
                "no folder for temporary files",
                "name a folder in TMPDIR",
                false,
            ),
            (126, "Exec format error", "--no-push", false),
            (
                126,
                "this accel-launch needs a processor with avx2",
                "its processor does not run this accel-launch",
                false,
            ),
            (
                1,
                "version `GLIBC_2.4' not found\nversion `GLIBC_2.38' not found (required by 4)",
                "its C library is older than GLIBC_2.38, which",
                false,
            ),
            (
                127,
                "error while loading shared libraries: libx.so.1: cannot open",
                "it lacks a library",
                false,
            ),
        ] {
            let text = not_started(host, End::Code(end), said);
            assert!(text.contains(says) && text.contains("host ann@a"), "{text}");
            assert_eq!(may_pass(End::Code(end), said), may, "{said}");
        }
    }
}
