//! Jobs on several hosts: launchers on this machine that reach each other over loopback.

mod ends;
mod losses;
mod meeting;
mod restarts;
mod ssh;

use std::path::PathBuf;

use crate::ports::free_port;
use crate::support::{Ended, Folder, Run};
use accelerator_collective::launcher::Token;
use serde_json::Value;

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

    /// Returns the launcher of a host, with `options` before the program.
    pub(crate) fn command(
        &self,
        host: usize,
        options: &[&str],
        program: &[&str],
    ) -> std::process::Command {
        let mut command = self.folder.launcher();
        let count = match self.least {
            Some(least) => format!("{least}:{}", self.count),
            None => self.count.to_string(),
        };
        command
            .args(["--nnodes", &count])
            .args(["--node-rank", &host.to_string()])
            .args([
                "--rdzv-endpoint",
                &format!("{}:{}", self.address, self.port),
            ])
            .args(options);
        if !options.contains(&"--join-timeout") {
            command.args(["--join-timeout", "30"]);
        }
        command
            .args(program)
            .env("ACCEL_TOKEN_FILE", &self.token)
            .env("ACCEL_LIVENESS_TIMEOUT", "2");
        command
    }

    pub(crate) fn start(&self, host: usize, options: &[&str], program: &[&str]) -> Run {
        Run::start(self.command(host, options, program))
    }

    /// Starts a launcher on every host, all with the same options.
    fn start_all(&self, options: &[&str], program: &[&str]) -> Vec<Run> {
        let hosts = (0..self.count).map(|host| self.start(host, options, program));
        hosts.collect()
    }

    /// Reads the report in a folder of logs.
    fn report(&self, logs: &str) -> Value {
        let text = self.folder.read(&format!("{logs}/latest/failure.json"));
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{logs}: {text}"))
    }
}

fn end(runs: Vec<Run>) -> Vec<Ended> {
    runs.into_iter().map(Run::end).collect()
}

fn codes(ended: &[Ended]) -> Vec<i32> {
    ended.iter().map(Ended::code).collect()
}
