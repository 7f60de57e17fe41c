//! Jobs on several hosts: launchers on this machine that reach each other over loopback.

mod ends;
mod losses;
mod meeting;
mod restarts;
mod ssh;

use std::path::PathBuf;

use crate::ports::free_port;
use crate::support::{Ended, Folder, Run};
use accelerator_collective::internal::Token;

/// A folder for a job on several hosts, with a token and a port.
pub(crate) struct Hosts {
    pub(crate) folder: Folder,
    count: usize,
    /// The minimum number of hosts, if it is smaller.
    pub(crate) least: Option<usize>,
    token: PathBuf,
    /// The address of host 0.
    address: &'static str,
    port: u16,
}

impl Hosts {
    pub(crate) fn new(count: usize) -> Self {
        let folder = Folder::new();
        let token = folder.path().join("token");
        Token::generate().unwrap().write_file(&token).unwrap();
        Self {
            folder,
            count,
            least: None,
            token,
            address: "127.0.0.1",
            port: free_port(),
        }
    }

    /// Returns the launcher of a host; the words of `line` are its other arguments.
    pub(crate) fn command(&self, host: usize, line: &str) -> std::process::Command {
        let count = match self.least {
            Some(least) => format!("{least}:{}", self.count),
            None => self.count.to_string(),
        };
        let (address, port) = (self.address, self.port);
        let patience = match line.contains("--join-timeout") {
            true => "",
            false => "--join-timeout 30",
        };
        let place = format!("--nnodes {count} --node-rank {host} --rdzv-endpoint {address}:{port}");
        let mut command = self.folder.command(&format!("{place} {patience} {line}"));
        command
            .env("ACCEL_TOKEN_FILE", &self.token)
            .env("ACCEL_LIVENESS_TIMEOUT", "2");
        command
    }

    pub(crate) fn start(&self, host: usize, line: &str) -> Run {
        Run::start(self.command(host, line))
    }

    /// Starts a launcher on every host, all with the same arguments.
    fn start_all(&self, line: &str) -> Vec<Run> {
        (0..self.count).map(|host| self.start(host, line)).collect()
    }
}

/// Waits until all launchers have ended, with these codes.
#[track_caller]
fn end(runs: impl IntoIterator<Item = Run>, codes: &[i32]) -> Vec<Ended> {
    // All are started before the first is waited for.
    let runs: Vec<Run> = runs.into_iter().collect();
    let ended: Vec<Ended> = runs.into_iter().map(Run::end).collect();
    let found: Vec<i32> = ended.iter().map(Ended::code).collect();
    assert_eq!(found, codes, "{ended:?}");
    ended
}
