use std::collections::BTreeSet;
use std::io::{self, Write};

use accelerator_host::machine::host_name;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::clock::ClockSync;
use super::event::{Event, EventKind, EventSubject, Thread};
use super::recorder::Recorder;
use super::trace_file::TraceFile;

/// The part of one rank in a trace.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct RankTrace {
    pub(super) rank: usize,
    host: String,
    process: u32,
    /// The number of older events that are gone.
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
    /// The first event in the file.
    FirstEvent,
    /// The start of rank 0, which is the same in the files of all ranks.
    Rank0,
}

/// Writes the trace event format of Chrome, in the form of an object, which Perfetto reads too: a
/// process is a rank, complete events (`X`) are spans in microseconds, `M` names processes and
/// threads, `C` counts bytes.
pub(super) fn write(place: &TraceFile, ranks: &[RankTrace], start: TraceStart) -> io::Result<()> {
    place.fill(|file| write_to(file, ranks, start))
}

fn write_to(file: &mut impl Write, ranks: &[RankTrace], start: TraceStart) -> io::Result<()> {
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

/// The names of a rank and of its threads.
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
