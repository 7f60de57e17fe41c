use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use accelerator_host::fs::{Draft, Durability, Replace, folder_of};
use accelerator_host::machine::host_name;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::clock::ClockSync;
use super::event::{Event, EventKind, EventSubject, Thread};
use super::recorder::Recorder;
use crate::core::error::{self, Error, Result};

#[derive(Debug, Deserialize, Serialize)]
pub(super) struct RankTrace {
    pub(super) rank: usize,
    host: String,
    process: u32,
    dropped: u64,
    pub(super) clocks: Vec<ClockSync>,
    events: Vec<Row>,
}

/// An event without the names of its fields, of which there are many.
type Row = (EventKind, Thread, u64, u64, u64, u64, EventSubject);

impl RankTrace {
    pub(super) fn new(rank: usize, recorder: &Recorder) -> Self {
        let (events, dropped, clocks) = recorder.events();
        let row = |event: Event| {
            let Event {
                kind,
                thread,
                start,
                end,
                step,
                bytes,
                part,
            } = event;
            (kind, thread, start, end, step, bytes, part)
        };
        Self {
            rank,
            host: host_name(),
            process: std::process::id(),
            dropped,
            clocks,
            events: events.into_iter().map(row).collect(),
        }
    }

    /// Returns when the first event began, in rank 0's time.
    fn beginning(&self) -> Option<i64> {
        let (_, _, start, ..) = self.events.first()?;
        Some(ClockSync::translate(&self.clocks, *start))
    }
}

/// The moment from which the times of a file count.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum TraceStart {
    FirstEvent,
    /// The start of rank 0, which is the same in the files of all ranks.
    Rank0,
}

/// Writes a trace, and says on rank 0 where.
pub(super) fn put(path: &Path, ranks: &[RankTrace], start: TraceStart) -> Result<()> {
    let written =
        TraceFile::find(path).and_then(|place| place.fill(|file| write(file, ranks, start)));
    written.map_err(|error| Error::io("write the trace", path, error))?;
    // Ranks write theirs at the same time: one line of rank 0 stands for all.
    if !ranks.iter().any(|trace| trace.rank == 0) {
        return Ok(());
    }
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    error::tell(&format!(
        "trace of {} written to {}: open it with https://ui.perfetto.dev",
        match ranks {
            [one] => format!("rank {}", one.rank),
            _ => format!("{} ranks", ranks.len()),
        },
        path.display()
    ));
    Ok(())
}

/// Writes the trace event format of Chrome, in the form of an object, which Perfetto reads too: a
/// process is a rank, complete events (`X`) are spans in microseconds, `M` names processes and
/// threads, `C` counts bytes.
fn write(file: &mut impl Write, ranks: &[RankTrace], start: TraceStart) -> io::Result<()> {
    let (zero, since) = match start {
        TraceStart::FirstEvent => {
            let first = ranks.iter().filter_map(RankTrace::beginning).min();
            (first.unwrap_or(0), "the first event")
        }
        TraceStart::Rank0 => (0, "it began"),
    };
    let about: Vec<_> = ranks.iter().map(about).collect();
    write!(
        file,
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\n\"traceEvents\":[",
        json!({ "clock": format!("that of rank 0, in microseconds since {since}"), "ranks": about })
    )?;
    let mut between = "\n";
    let mut put = |event: &Value| {
        file.write_all(between.as_bytes())?;
        between = ",\n";
        serde_json::to_writer(&mut *file, event).map_err(io::Error::from)
    };
    for rank in ranks {
        for event in names(rank) {
            put(&event)?;
        }
        for row in &rank.events {
            let microseconds =
                |time| (ClockSync::translate(&rank.clocks, time) - zero) as f64 / 1e3;
            let (start, end) = (microseconds(row.2), microseconds(row.3));
            put(&span(rank.rank, row, start, end))?;
            if let (EventKind::Step, .., bytes, _) = *row {
                put(&json!({
                    "ph": "C", "name": "gradients sent", "pid": rank.rank, "tid": 0, "ts": end,
                    "args": { "bytes": bytes },
                }))?;
            }
        }
    }
    file.write_all(b"\n]}\n")
}

fn about(rank: &RankTrace) -> Value {
    let error = rank.clocks.iter().map(|clock| clock.error).max();
    json!({
        "rank": rank.rank,
        "host": rank.host,
        "process": rank.process,
        "older_events_dropped": rank.dropped,
        "clock_error_us": error.unwrap_or(0) as f64 / 1e3,
    })
}

fn names(rank: &RankTrace) -> Vec<Value> {
    let name = |what: &str, tid: u32, args: Value| json!({ "ph": "M", "name": what, "pid": rank.rank, "tid": tid, "args": args });
    let label = format!("rank {} ({}, {})", rank.rank, rank.host, rank.process);
    let mut all = vec![
        name("process_name", 0, json!({ "name": label })),
        name("process_sort_index", 0, json!({ "sort_index": rank.rank })),
    ];
    let threads: BTreeSet<Thread> = rank.events.iter().map(|row| row.1).collect();
    for thread in threads {
        let number = thread.number();
        let (label, index) = (
            json!({ "name": thread.name() }),
            json!({ "sort_index": number }),
        );
        all.push(name("thread_name", number, label));
        all.push(name("thread_sort_index", number, index));
    }
    all
}

fn span(rank: usize, row: &Row, start: f64, end: f64) -> Value {
    let &(kind, thread, _, _, step, bytes, part) = row;
    let mut args = json!({ "step": step });
    if let EventKind::Operation(_) | EventKind::Reduce | EventKind::Step = kind {
        args["bytes"] = json!(bytes);
    }
    match part {
        EventSubject::Whole => {}
        EventSubject::Bucket(number) => args["bucket"] = json!(number),
        EventSubject::Control => args["bucket"] = json!("control"),
        EventSubject::Weight => args["bucket"] = json!("weight"),
        EventSubject::Operation(number) => args["operation"] = json!(number),
    }
    json!({
        "ph": "X", "cat": "accelerator", "name": kind.name(), "pid": rank,
        "tid": thread.number(), "ts": start, "dur": end - start, "args": args,
    })
}

/// The file of a trace: a regular file, or one that is not there, in a folder that takes files.
#[derive(Clone, Debug)]
pub(crate) struct TraceFile(PathBuf);

impl TraceFile {
    /// Finds out whether a trace can be written there, before there is anything to lose. A symbolic
    /// link stays, and its target is replaced.
    ///
    /// # Errors
    ///
    /// The obstacle.
    pub(crate) fn find(path: &Path) -> io::Result<Self> {
        let path = match fs::metadata(path) {
            Ok(found) if found.is_dir() => {
                return Err(io::Error::other("it is a folder: name a file in it"));
            }
            // A device or a pipe would be replaced, not written to.
            Ok(found) if !found.is_file() => {
                return Err(io::Error::other("it is there and not a regular file"));
            }
            Ok(_) => path.canonicalize()?,
            Err(_) if fs::symlink_metadata(path).is_ok() => {
                return Err(io::Error::other("it is a link to a file that is not there"));
            }
            Err(_) => path.to_owned(),
        };
        let place = Self(path);
        drop(place.replace().begin()?);
        Ok(place)
    }

    /// Puts a file there, complete or not at all. Nothing else is left, whatever fails.
    pub(super) fn fill(
        &self,
        write: impl FnOnce(&mut BufWriter<Draft>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.replace().write(write)
    }

    fn replace(&self) -> Replace<'_> {
        Replace::new(&self.0, Durability::Flushed)
    }
}

/// Returns the file in which a rank puts its own part when it cannot give it to rank 0.
pub(super) fn of_rank(path: &Path, rank: usize) -> PathBuf {
    path.with_extension(format!("rank{rank}.json"))
}

pub(super) fn of_cycle(path: &Path, cycle: u64) -> PathBuf {
    path.with_extension(format!("cycle{cycle}.json"))
}

/// Removes what an earlier run left under the names of [`of_rank`] and [`of_cycle`]: nobody is to take
/// it for this one's. That it cannot be removed is said, and is no error.
pub(crate) fn clear_traces(path: &Path) {
    remove(path, |rest| {
        let (cycle, part) = rest.split_once('.').unwrap_or((rest, ""));
        match is_numbered(cycle, "cycle") {
            true => part.is_empty() || is_numbered(part, "rank"),
            false => is_numbered(rest, "rank"),
        }
    });
}

/// Removes the parts that ranks wrote under the name of [`of_rank`]: the whole takes their place.
pub(super) fn clear_parts(path: &Path) {
    remove(path, |rest| is_numbered(rest, "rank"));
}

/// Removes the files beside `path` called as its stem, a point, something of which `is_old` is true, and
/// `.json`.
fn remove(path: &Path, is_old: impl Fn(&str) -> bool) {
    let Some(stem) = path.file_stem().and_then(OsStr::to_str) else {
        return;
    };
    let Ok(entries) = fs::read_dir(folder_of(path)) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(stem));
        let rest = rest.and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".json"));
        if rest.is_some_and(&is_old)
            && let Err(error) = fs::remove_file(entry.path())
            && error.kind() != io::ErrorKind::NotFound
        {
            let path = entry.path();
            tracing::warn!(%error, path = %path.display(), "an old trace cannot be removed");
        }
    }
}

fn is_numbered(text: &str, what: &str) -> bool {
    let number = text.strip_prefix(what).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(all(test, unix))]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    fn fill(place: &TraceFile, text: &[u8]) -> io::Result<()> {
        place.fill(|file| file.write_all(text))
    }

    #[test]
    fn nothing_but_a_regular_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        assert!(TraceFile::find(folder.path()).is_err());
        assert!(TraceFile::find(Path::new("/dev/null")).is_err());
        assert!(TraceFile::find(&folder.path().join("none/trace.json")).is_err());
        let link = folder.path().join("link.json");
        symlink("trace.json", &link).unwrap();
        assert!(TraceFile::find(&link).is_err());

        fill(&TraceFile::find(&path).unwrap(), b"one").unwrap();
        fill(&TraceFile::find(&link).unwrap(), b"two").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_cannot_be_written_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let place = TraceFile::find(&path).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        fill(&place, b"one").unwrap();
        let failed = place.fill(|file| {
            file.write_all(b"two")?;
            Err(io::Error::other("the disk is full"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn jobs_that_share_a_place_do_not_spoil_it() {
        let folder = tempfile::tempdir().unwrap();
        let place = TraceFile::find(&folder.path().join("trace.json")).unwrap();
        let outer = place.fill(|file| {
            file.write_all(b"one")?;
            fill(&place, b"two")
        });
        outer.unwrap();
        assert_eq!(fs::read(&place.0).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_traces_of_an_earlier_run_are_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let old = [
            "trace.rank0.json",
            "trace.rank12.json",
            "trace.cycle3.json",
            "trace.cycle3.rank1.json",
        ];
        let kept = [
            "trace.json",
            "trace.rank.json",
            "trace.rank1.txt",
            "trace.rankx.json",
            "trace.cycle.json",
            "trace.rank1.cycle2.json",
            "other.rank1.json",
            "trace2.rank1.json",
        ];
        for name in old.iter().chain(&kept) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        clear_parts(&of_cycle(&path, 3));
        assert!(!folder.path().join(old[3]).exists() && folder.path().join(old[2]).exists());
        clear_traces(&path);
        for name in old {
            assert!(!folder.path().join(name).exists(), "{name}");
        }
        for name in kept {
            assert!(folder.path().join(name).exists(), "{name}");
        }
    }
}
