//! Running a tool (cargo, rustc) to its end, under the same supervision as a rank.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

use accelerator_host::process::Drain;

use crate::error::{BEFORE_START, Error, Result, ended_by};
use crate::event::Channel;
use crate::process::{End, Process, RankProcess};
use crate::supervisor::group::{NoopObserver, supervise, watch};
use crate::supervisor::job::Cause;
use crate::supervisor::leftovers::KillScope;

/// The time that a tool may take to end after a signal, and that a pipe may take to end after the tool.
const TOOL_GRACE: Duration = Duration::from_secs(5);

/// The use of a tool's standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stderr {
    /// It is shown as it comes.
    Show,
    /// It is kept.
    Keep,
}

/// The end of a tool, and its output.
#[derive(Clone, Debug)]
pub(crate) struct ToolOutput {
    /// The end of the process.
    pub(crate) end: End,
    /// Its standard output.
    pub(crate) stdout: Vec<u8>,
    /// Its standard error, if it was kept.
    pub(crate) stderr: Vec<u8>,
}

/// Runs `command` and waits for its end; a signal to the launcher ends it.
///
/// # Errors
/// When it cannot be started, or a signal ended it.
pub(crate) fn run(mut command: Command, stderr: Stderr, channel: &Channel) -> Result<ToolOutput> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    if stderr == Stderr::Keep {
        command.stderr(Stdio::piped());
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let mut process = Process::spawn(&mut command).map_err(|error| {
        let message =
            format!("`{program}` could not be started; is it installed, and on the PATH?");
        Error::system(message).with_source(error)
    })?;
    let stdout = process.take_stdout().map(drain).transpose()?;
    let stderr = process.take_stderr().map(drain).transpose()?;
    let mut group: [Box<dyn RankProcess>; 1] = [Box::new(process)];
    watch(0, &*group[0], &channel.sender);
    // A compiler cache that cargo started may stay: it serves other builds.
    let outcome = supervise(
        &mut group,
        TOOL_GRACE,
        KillScope::Groups,
        channel,
        &mut NoopObserver,
    );
    if let Some(Cause::Signal(signal)) = outcome.cause() {
        return Err(ended_by(signal, BEFORE_START));
    }
    Ok(ToolOutput {
        end: outcome.end(0).unwrap_or(End::Code(1)),
        stdout: bytes(stdout),
        stderr: bytes(stderr),
    })
}

fn drain(pipe: File) -> Result<Drain> {
    Drain::start(pipe, usize::MAX).map_err(|error| {
        Error::system("a thread to read a tool's output could not be started").with_source(error)
    })
}

/// Returns the output of a tool that has ended; a daemon that it has left behind may keep the pipe open.
fn bytes(reader: Option<Drain>) -> Vec<u8> {
    reader.map_or_else(Vec::new, |reader| reader.finish(TOOL_GRACE).bytes)
}
