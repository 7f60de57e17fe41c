//! A page of runs that are being written, served on this machine alone.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use crate::error::{Error, Kind, Result};
use api::Api;
use server::Server;
use watched::WatchedRuns;

mod api;
mod request;
mod response;
mod server;
#[cfg(test)]
mod tests;
mod watched;

/// A page of the runs in a folder, served live to browsers on this machine.
///
/// It shows what a [`Report`](crate::Report) shows, and follows runs while they are written. Requests need the random token
/// that is in the [address](Self::url), and the name of this machine as their host.
///
/// ```
/// use accelerator_track::{Board, Run};
///
/// # fn main() -> accelerator_track::Result<()> {
/// # let temporary = tempfile::tempdir().unwrap();
/// # let runs = temporary.path();
/// let run = Run::builder("mnist").runs_folder(runs).start()?;
/// let board = Board::bind(runs, 0)?;
/// println!("{}", board.url());
/// std::thread::spawn(move || board.serve());
/// run.log("train", [("loss", 0.5)], 1, None);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Board {
    listener: TcpListener,
    address: SocketAddr,
    token: String,
    runs: PathBuf,
}

impl Board {
    /// Listens on a port of the loopback interface; 0 is a free one. The folder holds the folders of runs, or is that of one.
    ///
    /// # Errors
    ///
    /// If there is no such folder, or the port is taken.
    pub fn bind(runs: impl Into<PathBuf>, port: u16) -> Result<Self> {
        let runs = runs.into();
        if !runs.is_dir() {
            return Err(Error::new(
                Kind::NotFound,
                format!(
                    "there is no folder {}: expected one that holds runs, as `runs`; start a run, or name another folder",
                    runs.display()
                ),
            ));
        }
        let listening = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let bound = listening.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|error| {
            Error::new(
                Kind::Io,
                format!(
                    "cannot listen on port {port} of this machine: {error}; choose another port, or 0 for a free one"
                ),
            )
            .with_source(error)
        })?;
        Ok(Self {
            listener,
            address,
            token: uuid::Uuid::new_v4().simple().to_string(),
            runs,
        })
    }

    /// The address of the page, with its token. Who knows it sees the runs.
    ///
    /// ```
    /// # let folder = tempfile::tempdir().unwrap();
    /// let board = accelerator_track::Board::bind(folder.path(), 0)?;
    /// assert!(board.url().starts_with("http://127.0.0.1:"));
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/?token={}", self.address, self.token)
    }

    /// Reads the runs, and answers browsers until the process ends. Runs that are not read yet appear when they are, the
    /// newest first.
    ///
    /// # Errors
    ///
    /// If the system takes the port away.
    pub fn serve(self) -> Result<()> {
        let runs = Arc::new(WatchedRuns::new(self.runs));
        let watched = Arc::clone(&runs);
        let watcher = thread::Builder::new().name("board-runs".to_owned());
        watcher
            .spawn(move || watched.watch())
            .map_err(|error| no_thread(error, "reads runs"))?;
        let api = Api::new(runs, self.address.port(), self.token);
        Server::new(self.listener, api).serve()
    }
}

fn no_thread(error: std::io::Error, purpose: &str) -> Error {
    Error::new(
        Kind::Io,
        format!("cannot start the thread that {purpose}: {error}"),
    )
    .with_source(error)
}
