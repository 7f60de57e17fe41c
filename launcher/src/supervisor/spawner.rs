//! The trait through which the ranks of an attempt are started.
//!
//! A [`Spawner`] decides where a rank runs: on this machine ([`LocalSpawner`]), or on another host (`agent/head.rs`).
//! The supervisor signals and waits for ranks as [`RankProcess`]es, wherever they run. `commands/launch/` chooses the
//! spawner of a job.

use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::leftovers::Swept;
use crate::error::{Error, Result};
use crate::event::Channel;
use crate::process::{Process, RankProcess};
use crate::settings::rank_env::RankEnv;
use crate::settings::{Layout, Settings};
use crate::text::list;

/// Starts ranks. The main thread calls its methods.
pub(crate) trait Spawner {
    /// Waits until every host is there on which ranks are to run, and adds their layout to `settings`.
    ///
    /// # Errors
    /// When a host does not come in time, or a signal arrives on `channel`.
    fn gather(&self, settings: Settings, _channel: &Channel) -> Result<Settings> {
        Ok(settings)
    }

    /// Begins an attempt, whose ranks meet at `store`.
    fn begin(&self, _settings: &Settings, _store: SocketAddr) -> Result<()> {
        Ok(())
    }

    /// Lets hosts go whose ranks have left the job; ends the job if it needs a host that wants to leave.
    fn let_go(&self) {}

    /// The ranks that the job should have now on other hosts, if they differ from those of the running group because
    /// hosts want to leave or have come.
    fn resize(&self, _growth: Growth) -> Option<Resize> {
        None
    }

    /// The group of the `survivors` of a loss, numbered as in the running group.
    fn without_lost(&self, survivors: &[usize]) -> Option<Resize> {
        Some(Resize {
            layout: Layout::new(vec![survivors.len()]),
            former: survivors.iter().copied().map(Some).collect(),
            why: format!("continues with {}", list(survivors)),
        })
    }

    /// Returns the time at which to ask again, if nothing happens before.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Begins the group that follows the running one, whose ranks meet at `store`; the next calls of
    /// [`spawn`](Self::spawn) are for those of its ranks that are new.
    fn begin_next(&self, _settings: &Settings, _store: SocketAddr) -> Result<()> {
        Ok(())
    }

    /// The variables by which a process that runs learns that it is `rank` of the group with these settings, whose store
    /// is on `port`.
    fn place(&self, rank: usize, settings: &Settings, port: u16) -> Vec<(String, String)> {
        RankEnv::new(settings, port, None, None).place_of(rank)
    }

    /// Returns `true` if the job may have other hosts.
    fn has_hosts(&self) -> bool {
        false
    }

    /// Returns `true` if hosts could be taken in that are not in the group that was begun last.
    fn has_more(&self) -> bool {
        false
    }

    /// Ranks of the group that was begun last have failed to join: does without their hosts for a while.
    fn postpone(&self, _ranks: &[usize]) {}

    /// Checks if the host of `rank`, which failed, was taken in a short while ago. If so, the job does without that
    /// host for a while.
    fn blame(&self, _rank: usize) -> bool {
        false
    }

    /// The group that was begun last takes over.
    fn adopt_next(&self) {}

    /// The group that was begun last is given up: ends its ranks on other hosts.
    fn drop_next(&self) {}

    /// Starts `rank` with its variables of `environment`.
    ///
    /// # Errors
    /// When the rank cannot be started; a [usage error](Error::is_usage) if no other rank could be started either.
    fn spawn(&self, rank: usize, environment: &RankEnv) -> Result<Box<dyn RankProcess>>;

    /// Ends the attempt on other hosts: leftover processes there get `first`, and SIGKILL after `grace`.
    fn end(&self, _first: Signal, _grace: Duration, _channel: &Channel) -> Swept {
        Swept::default()
    }
}

/// The permission to start ranks beside those that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// They may.
    Now,
    /// The last try has failed a short while ago.
    Later,
}

/// Another number of ranks.
#[derive(Clone, Debug)]
pub(crate) struct Resize {
    /// The ranks of all hosts.
    pub(crate) layout: Layout,
    /// The rank that each rank of the new layout has in the running group; `None` if its process is new.
    pub(crate) former: Vec<Option<usize>>,
    /// The change, for the user; follows "the job".
    pub(crate) why: String,
}

/// The program that the ranks of this host run.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) spawner: LocalSpawner,
    /// The folder of its package, if cargo built it.
    pub(crate) package_dir: Option<PathBuf>,
}

/// Starts every rank on this machine, with the same program and arguments.
#[derive(Clone, Debug)]
pub(crate) struct LocalSpawner {
    pub(crate) program: PathBuf,
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
                "{shown} cannot be run: the loader or the interpreter that it names is missing"
            ))
        } else {
            Error::system(format!("rank {rank} could not be started from {shown}"))
        }
        .with_source(error)
    }
}

/// Rank 0 reads the standard input of the launcher if that is a pipe. A terminal is left alone: the ranks are not
/// in its foreground, and the kernel would stop one that reads from it.
fn stdin_of(rank: usize) -> Stdio {
    if rank == 0 && !io::stdin().is_terminal() {
        Stdio::inherit()
    } else {
        Stdio::null()
    }
}
