//! The report of a folder's runs, served to browsers on this machine and kept up to date.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use accelerator_host::sync::Mutex;

use crate::error::{Error, Kind, Result};
use crate::history::{HistoryReader, RunStatus};
use crate::journal::{JOURNAL, RunLock, rank_journals};
use crate::report::{BoardState, PageData, PageRun, points_of, runs_page};
use crate::runs::Runs;

/// The [report](crate::Report) of the runs in a folder, served to browsers on this machine while runs are written.
///
/// Requests need the random token that is in the [address](Self::url).
///
/// ```
/// use accelerator_track::{Run, internal::Board};
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
    title: String,
    runs: Mutex<WatchedRuns>,
}

impl Board {
    /// Listens on a port of the loopback interface; 0 picks a free one. The folder holds runs, or is one.
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
        let folder = runs.canonicalize();
        let folder = folder.as_ref().unwrap_or(&runs);
        let title = folder.file_name().unwrap_or(folder.as_os_str());
        Ok(Self {
            listener,
            address,
            token: uuid::Uuid::new_v4().simple().to_string(),
            title: title.to_string_lossy().into_owned(),
            runs: Mutex::new(WatchedRuns::new(runs)),
        })
    }

    /// The address of the page, with its token. Whoever knows it sees the runs.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/?token={}", self.address, self.token)
    }

    /// Answers browsers until the process ends. Runs appear when they are read, the newest first.
    pub fn serve(self) -> ! {
        let board = Arc::new(self);
        loop {
            match board.listener.accept() {
                Ok((stream, _)) => {
                    let board = Arc::clone(&board);
                    let answer = move || {
                        if let Err(error) = board.answer(stream) {
                            tracing::debug!(%error, "a browser disconnected");
                        }
                    };
                    // Without a thread the connection closes, and the browser asks again.
                    let _ = thread::Builder::new()
                        .name("board".to_owned())
                        .spawn(answer);
                }
                // Too many files are open; some will be closed.
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        const TEXT: &str = "text/plain; charset=utf-8";
        let Some(head) = read_head(&mut stream)? else {
            return Ok(());
        };
        let target = match head.split(' ').collect::<Vec<_>>()[..] {
            ["GET", target, _] => target,
            _ => return respond(&mut stream, "405 Method Not Allowed", TEXT, "Use GET.\n"),
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let value = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        if !value("token").is_some_and(|token| is_same(token, &self.token)) {
            let text = "The address needs the token that the board printed.\n";
            return respond(&mut stream, "403 Forbidden", TEXT, text);
        }
        let (mime, body) = match path {
            "/" => {
                let mut runs = self.runs.lock();
                runs.look();
                let page = runs_page(&self.title, &runs.changes(0));
                ("text/html; charset=utf-8", page)
            }
            "/data" => {
                let since = value("since").and_then(|since| since.parse().ok());
                let mut runs = self.runs.lock();
                runs.look();
                let changes = runs.changes(since.unwrap_or(0));
                ("application/json", serde_json::to_string(&changes)?)
            }
            _ => {
                return respond(
                    &mut stream,
                    "404 Not Found",
                    TEXT,
                    "There is no such page.\n",
                );
            }
        };
        respond(&mut stream, "200 OK", mime, &body)
    }
}

/// Reads the first line of a request, and its headers away. `None` if the browser disconnected or took too long.
fn read_head(stream: &mut TcpStream) -> io::Result<Option<String>> {
    const LIMIT: usize = 16 * 1024;
    let deadline = Instant::now() + Duration::from_secs(5);
    let (mut head, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() > LIMIT {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk)? {
            0 => return Ok(None),
            read => head.extend_from_slice(&chunk[..read]),
        }
        if head.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&head);
            return Ok(text.lines().next().map(str::to_owned));
        }
    }
}

fn respond(stream: &mut TcpStream, status: &str, mime: &str, body: &str) -> io::Result<()> {
    // Nothing is cached, shown within another page, or told to another.
    let head = format!(
        "HTTP/1.1 {status}\r\n\
         Content-Type: {mime}\r\n\
         Content-Length: {}\r\n\
         Connection: close\r\n\
         Cache-Control: no-store\r\n\
         Content-Security-Policy: frame-ancestors 'none'\r\n\
         Cross-Origin-Resource-Policy: same-origin\r\n\
         Referrer-Policy: no-referrer\r\n\
         X-Content-Type-Options: nosniff\r\n\r\n",
        body.len()
    );
    stream.set_write_timeout(Some(Duration::from_secs(60)))?;
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Compares two words in a time that does not depend on where they differ.
fn is_same(a: &str, b: &str) -> bool {
    let pairs = a.bytes().zip(b.bytes());
    let differences = pairs.fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differences) == 0
}

/// The runs of a folder, read again when they change. Of a finished run only the page's data is kept.
#[derive(Debug)]
struct WatchedRuns {
    folder: PathBuf,
    /// Counts changes.
    version: u64,
    /// The number of runs that remain to be read.
    reading: usize,
    /// The runs by number; numbers are not reused.
    runs: Vec<WatchedRun>,
}

#[derive(Debug)]
struct WatchedRun {
    folder: PathBuf,
    version: u64,
    stamp: Option<RunStamp>,
    page: Option<Result<PageRun>>,
    /// Kept while the run is written.
    reader: Option<HistoryReader>,
}

impl WatchedRuns {
    /// A request reads for this long; the next one continues.
    const LOOK: Duration = Duration::from_millis(250);

    fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            version: 0,
            reading: 0,
            runs: Vec::new(),
        }
    }

    /// Reads the runs that changed since the last look, the newest first.
    fn look(&mut self) {
        let start = Instant::now();
        let found = run_folders(&self.folder);
        for folder in &found {
            if !self.runs.iter().any(|run| run.folder == *folder) {
                self.runs.push(WatchedRun::new(folder.clone()));
            }
        }
        let mut due = Vec::new();
        for (i, run) in self.runs.iter_mut().enumerate() {
            if !found.contains(&run.folder) {
                *run = WatchedRun::new(std::mem::take(&mut run.folder));
                continue;
            }
            let stamp = RunStamp::of(&run.folder);
            if run.stamp.as_ref() != Some(&stamp) {
                due.push((i, stamp));
            }
        }
        due.sort_by_key(|(_, stamp)| std::cmp::Reverse(stamp.modified));
        self.reading = due.len();
        for (i, stamp) in due {
            self.version += 1;
            self.runs[i].read(i, stamp, points_of(found.len()), self.version);
            self.reading -= 1;
            if start.elapsed() > Self::LOOK {
                return;
            }
        }
    }

    /// Returns what changed since a version.
    fn changes(&self, since: u64) -> PageData<'_> {
        let mut data = PageData::of(Vec::new());
        let mut state = BoardState {
            version: self.version,
            reading: self.reading,
            ids: Vec::new(),
            refused: Vec::new(),
        };
        for (i, run) in self.runs.iter().enumerate() {
            match &run.page {
                Some(Ok(page)) => {
                    state.ids.push(i);
                    if run.version > since {
                        data.runs.push(page);
                    }
                }
                Some(Err(error)) => state.refused.push(error.to_string()),
                None => {}
            }
        }
        data.board = Some(state);
        data
    }
}

impl WatchedRun {
    fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            version: 0,
            stamp: None,
            page: None,
            reader: None,
        }
    }

    fn read(&mut self, i: usize, stamp: RunStamp, points: usize, version: u64) {
        self.stamp = Some(stamp);
        self.version = version;
        let reader = match self.reader.take() {
            Some(reader) => Ok(reader),
            None => HistoryReader::open(&self.folder),
        };
        let read = reader.and_then(|mut reader| reader.poll().map(|_| reader));
        self.page = Some(read.map(|reader| {
            let page = PageRun::of(reader.history(), i, points);
            let is_running = reader.history().status() == RunStatus::Running;
            self.reader = Some(reader).filter(|_| is_running);
            page
        }));
    }
}

/// Differs once a run has changed.
#[derive(Clone, Debug, PartialEq)]
struct RunStamp {
    modified: Option<SystemTime>,
    lengths: Vec<u64>,
    is_written_now: bool,
}

impl RunStamp {
    fn of(folder: &Path) -> Self {
        let journal = fs::metadata(folder.join(JOURNAL)).ok();
        let mut ranks = rank_journals(folder);
        ranks.sort();
        let ranks = ranks
            .iter()
            .map(|(_, path)| fs::metadata(path).map_or(0, |file| file.len()));
        let length = journal.as_ref().map_or(0, fs::Metadata::len);
        Self {
            modified: journal.and_then(|file| file.modified().ok()),
            lengths: std::iter::once(length).chain(ranks).collect(),
            is_written_now: RunLock::is_held(folder),
        }
    }
}

/// Lists the folders of runs in a folder, or the folder itself if it is a run's.
fn run_folders(folder: &Path) -> Vec<PathBuf> {
    if Runs::is_run(folder) {
        return vec![folder.to_owned()];
    }
    let Ok(inside) = folder.read_dir() else {
        return Vec::new();
    };
    let folders = inside.filter_map(|entry| Some(entry.ok()?.path()));
    folders.filter(|path| Runs::is_run(path)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::run::Run;

    fn changes(runs: &mut WatchedRuns, since: u64) -> Value {
        runs.look();
        serde_json::to_value(runs.changes(since)).unwrap()
    }

    #[test]
    fn a_page_gets_what_has_changed_since_it_asked() {
        let folder = tempfile::tempdir().unwrap();
        let start = |name| {
            Run::builder(name)
                .runs_folder(folder.path())
                .start()
                .unwrap()
        };
        start("old").finish().unwrap();
        let run = start("new");
        run.log("train", [("loss", 0.5)], 1, None);
        run.flush().unwrap();
        let mut runs = WatchedRuns::new(folder.path().to_owned());
        let first = changes(&mut runs, 0);
        assert_eq!(first["board"]["ids"], json!([0, 1]));
        assert_eq!(first["board"]["reading"], 0);
        assert_eq!(first["runs"].as_array().unwrap().len(), 2);
        let version = first["board"]["version"].as_u64().unwrap();
        assert_eq!(changes(&mut runs, version)["runs"], json!([]));

        run.log("train", [("loss", f64::NAN)], 2, None);
        run.flush().unwrap();
        let second = changes(&mut runs, version);
        let [changed] = second["runs"].as_array().unwrap().as_slice() else {
            panic!("one run has changed: {second}");
        };
        assert_eq!(changed["name"], "new");
        assert_eq!(changed["status"], "running");
        assert_eq!(changed["series"][0]["last"], json!({ "v": "NaN", "s": 2 }));
        assert_eq!(changed["series"][0]["max"], json!({ "v": 0.5, "s": 1 }));
        assert_eq!(changed["columns"]["train/loss"]["s"], json!([1, 2]));

        run.finish().unwrap();
        let version = second["board"]["version"].as_u64().unwrap();
        let third = changes(&mut runs, version);
        assert_eq!(third["runs"][0]["status"], "finished");
    }

    #[test]
    fn runs_that_are_damaged_or_gone() {
        let folder = tempfile::tempdir().unwrap();
        let run = Run::builder("gone")
            .runs_folder(folder.path())
            .start()
            .unwrap();
        run.finish().unwrap();
        let damaged = folder.path().join("damaged");
        fs::create_dir(&damaged).unwrap();
        fs::write(damaged.join(JOURNAL), "no journal\n").unwrap();
        fs::create_dir(folder.path().join(".artifacts")).unwrap();

        let mut runs = WatchedRuns::new(folder.path().to_owned());
        let both = changes(&mut runs, 0);
        assert_eq!(both["runs"].as_array().unwrap().len(), 1);
        let refused = both["board"]["refused"][0].as_str().unwrap();
        assert!(refused.contains("damaged"), "{refused}");

        fs::remove_dir_all(folder.path().join("gone")).unwrap();
        assert_eq!(changes(&mut runs, 0)["board"]["ids"], json!([]));
    }

    #[test]
    fn the_folder_of_one_run_is_enough() {
        let folder = tempfile::tempdir().unwrap();
        let run = Run::builder("only")
            .runs_folder(folder.path())
            .start()
            .unwrap();
        let mut runs = WatchedRuns::new(run.folder().to_owned());
        assert_eq!(changes(&mut runs, 0)["runs"][0]["name"], "only");
    }
}
