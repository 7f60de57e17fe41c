//! The trait through which the ranks of an attempt are started.
//!
//! A [`Spawner`] decides where a rank runs: on this machine ([`LocalSpawner`]), on another host, or in a batch system.
//! The supervisor signals and waits for ranks as [`RankProcess`]es, wherever they run. `commands/launch/` chooses the
//! spawner of a job.

use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::process::{Process, RankProcess};
use crate::settings::rank_env::RankEnv;

/// Starts ranks.
pub(crate) trait Spawner {
    /// Starts `rank` with its variables of `environment`. The main thread calls it.
    ///
    /// # Errors
    /// When the rank cannot be started; a [usage error](Error::is_usage) where no other rank could be started either.
    fn spawn(&self, rank: usize, environment: &RankEnv) -> Result<Box<dyn RankProcess>>;
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
