//! The seam through which the ranks of an attempt are started.
//!
//! A [`Spawner`] decides where a rank runs: on this machine ([`LocalSpawner`]), on another host, or in a batch system.
//! The supervisor signals and waits for ranks as [`RankProcess`]es, wherever they run. `commands/launch.rs` chooses the
//! spawner of a job.

use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::error::{Error, Result};
use crate::settings::rank_env::RankEnv;
use crate::supervisor::job::End;
use crate::supervisor::process::Process;

/// Starts ranks.
pub(crate) trait Spawner {
    /// Starts `rank` with its variables of `environment`. The main thread calls it.
    ///
    /// # Errors
    /// When the rank cannot be started; a [usage error](Error::is_usage) where no other rank could be started either.
    fn spawn(&self, rank: usize, environment: &RankEnv) -> Result<Box<dyn RankProcess>>;
}

/// A rank that was started. Dropped before [`reap`](Self::reap), it is killed with the processes that it started.
pub(crate) trait RankProcess: Debug {
    /// Its process id on the host that it runs on.
    fn pid(&self) -> i32;

    /// Its process id where it runs on this machine.
    fn local_pid(&self) -> Option<i32>;

    /// Its standard output, once.
    fn take_stdout(&mut self) -> Option<File>;

    /// Its standard error, once.
    fn take_stderr(&mut self) -> Option<File>;

    /// A function that blocks until the rank has ended and returns how; another thread calls it. The rank is not
    /// reaped.
    fn waiter(&self) -> Box<dyn FnOnce() -> End + Send>;

    /// Sends `signal` to the rank, if it has not been reaped.
    fn signal(&self, signal: Signal);

    /// Sends `signal` to the rank and to the processes of its group.
    fn signal_group(&self, signal: Signal);

    /// Whether any process of its group is left. Called after [`reap`](Self::reap).
    fn has_group(&self) -> bool;

    /// Frees what the system keeps of the rank, which has ended; processes that it started may go on.
    fn reap(&mut self);

    /// Gives the rank up, which did not end on SIGKILL: it is not touched any more.
    fn abandon(&mut self);
}

/// Starts every rank on this machine, with the same program and arguments.
#[derive(Clone, Debug)]
pub(crate) struct LocalSpawner {
    /// The program.
    pub(crate) program: PathBuf,
    /// Its arguments.
    pub(crate) arguments: Vec<OsString>,
}

impl Spawner for LocalSpawner {
    fn spawn(&self, rank: usize, environment: &RankEnv) -> Result<Box<dyn RankProcess>> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .stdin(stdin_of(rank))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        environment.apply(rank, &mut command);
        match Process::spawn(&mut command) {
            Ok(process) => Ok(Box::new(process)),
            Err(error) => Err(self.not_started(rank, error)),
        }
    }
}

impl LocalSpawner {
    fn not_started(&self, rank: usize, error: io::Error) -> Error {
        let shown = self.program.display();
        if error.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) {
            Error::usage(format!(
                "{shown} is neither a program for this machine nor a script that begins with `#!` and its interpreter"
            ))
        } else if error.kind() == ErrorKind::NotFound && !self.program.exists() {
            Error::usage(format!("{shown} is gone"))
        } else if error.kind() == ErrorKind::NotFound {
            Error::usage(format!(
                "{shown} cannot be run: the interpreter that its first line names is missing"
            ))
        } else {
            Error::system(format!("rank {rank} could not be started from {shown}"))
        }
        .with_source(error)
    }
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
