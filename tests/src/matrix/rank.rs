//! A rank of a cell.

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accelerator_collective::internal::{BufferSlice, ShardLayout};
use accelerator_collective::{
    DType, Error, GroupOptions, Launch, Partition, Pending, ProcessGroup, ReduceOp,
};
use serde::{Deserialize, Serialize};

use super::{CONNECT, CULPRIT, Fault, LIVENESS, OPERATION, PROGRESS, STARTED, Way};

/// The report of a rank at its end: one line of JSON on standard output.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Seen {
    pub(crate) rank: usize,
    pub(crate) pid: u32,
    /// `None` if nothing went wrong.
    pub(crate) error: Option<SeenError>,
    /// The error of one more call afterwards.
    pub(crate) later: Option<String>,
    /// The transport of the group, if there was one.
    pub(crate) transport: Option<String>,
    /// The seconds since the beginning of the call that failed.
    pub(crate) seconds: f64,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct SeenError {
    pub(crate) text: String,
    pub(crate) ranks: Vec<usize>,
    pub(crate) typed: bool,
    pub(crate) culprit: Option<SeenCulprit>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct SeenCulprit {
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: Option<u32>,
    pub(crate) cause: String,
}

/// Runs a rank that is a process.
pub fn rank(operation: &str, fault: &str) -> ExitCode {
    let started = Instant::now();
    let launch = match Launch::from_env() {
        Ok(launch) => launch,
        Err(error) => panic!("{error}"),
    };
    let number = launch.topology.rank();
    println!("STARTED {number} {}", std::process::id());
    let fault = Fault::of(fault);
    match ProcessGroup::connect(&launch, &options(fault)) {
        Ok(group) => return live(&group, operation, fault),
        Err(error) => {
            let seen = Seen::new(number, Some(&error), None, started.elapsed());
            print(&seen);
        }
    }
    // Like a program whose `main` returns an error.
    ExitCode::FAILURE
}

/// Runs all ranks of a cell as threads.
pub fn threads(operation: &str, fault: &str) -> ExitCode {
    let fault = Fault::of(fault);
    let groups = ProcessGroup::threads(Way::Threads.world_size(), &options(fault))
        .unwrap_or_else(|e| panic!("{e}"));
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || live(&group, operation, fault));
        }
    });
    ExitCode::FAILURE
}

fn options(fault: Fault) -> GroupOptions {
    if let Fault::OfHost(_) = fault {
        // Silence is detected with the default liveness timeout.
        return GroupOptions::new()
            .with_connect_timeout(5 * CONNECT)
            .with_progress_timeout(10 * PROGRESS);
    }
    GroupOptions::new()
        .with_connect_timeout(CONNECT)
        .with_liveness_timeout(LIVENESS)
        .with_progress_timeout(PROGRESS)
}

/// Calls the operation again and again; returns success if nothing goes wrong.
fn live(group: &ProcessGroup, operation: &str, fault: Fault) -> ExitCode {
    let rank = group.rank();
    let mut number = 0;
    loop {
        if rank == CULPRIT && number == OPERATION {
            match fault {
                Fault::Return => return ExitCode::FAILURE,
                Fault::OfHost(_) => println!("PAUSES"),
                _ => {}
            }
        }
        let mut started = Instant::now();
        let outcome = if operation == "idle" && number == OPERATION {
            idle(group, &mut started)
        } else {
            call(group, operation)
        };
        if let Err(error) = outcome {
            let took = started.elapsed();
            let later = call(group, "barrier").err();
            print(&Seen::new(rank, Some(&error), later.as_ref(), took).over(group));
            return ExitCode::FAILURE;
        }
        let last = match operation {
            "leave" => OPERATION,
            _ => OPERATION + 4,
        };
        if number >= last {
            // The fault did not strike, or nobody noticed it, or the job survived it.
            print(&Seen::new(rank, None, None, started.elapsed()).over(group));
            return match group.close() {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            };
        }
        number += 1;
    }
}

/// Lets the culprit die while nothing is pending; the others must learn of it in their next call. The culprit calls
/// alone.
fn idle(group: &ProcessGroup, started: &mut Instant) -> Result<(), Error> {
    if group.rank() != CULPRIT {
        // The others are busy for longer than any deadline before they call.
        std::thread::sleep(LIVENESS + Duration::from_millis(1500));
        *started = Instant::now();
    }
    group.barrier()
}

fn call(group: &ProcessGroup, operation: &str) -> Result<(), Error> {
    let rank = group.rank();
    match operation {
        "all_reduce" => group.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum),
        "all_reduce_large" | "all_reduce_large_within" => {
            group.all_reduce(&mut vec![1.0_f32; LARGE], ReduceOp::Sum)
        }
        "all_reduce_buffer" | "all_reduce_buffer_within" => {
            group.all_reduce_buffer(&mut group.buffer(DType::F32, LARGE), ReduceOp::Sum)
        }
        "start_all_reduce" => {
            let buffer = group.buffer(DType::F32, 100_000);
            let pending = group.start_all_reduce(buffer, ReduceOp::Mean)?;
            pending.wait().map(drop)
        }
        "start_several_within" => {
            let pending = (0..STARTED).map(|_| {
                let buffer = group.buffer(DType::F32, LARGE / 2);
                group.start_all_reduce(buffer, ReduceOp::Mean)
            });
            let pending = pending.collect::<Result<Vec<Pending>, Error>>()?;
            pending
                .into_iter()
                .try_for_each(|pending| pending.wait().map(drop))
        }
        "broadcast" => group.broadcast(&mut [rank as u64; 1000], 0),
        "broadcast_from_culprit" => group.broadcast(&mut [rank as u64; 1000], CULPRIT),
        // Rank 1 pauses before the second chunk, which is so small that sending it does not block.
        "leave" => group.broadcast(&mut vec![rank as u8; 300_000], CULPRIT),
        "all_gather" => group.all_gather(&[rank as u64; 1000]).map(drop),
        "all_gather_varied" => group.all_gather_varied(&vec![1_u8; 1000 * rank]).map(drop),
        "all_gather_parts" | "all_gather_parts_within" => {
            let mut buffer = group.buffer(DType::F32, LARGE);
            let length = buffer.bytes().len() / group.world_size();
            let part = |rank| BufferSlice {
                buffer: 0,
                bytes: rank * length..(rank + 1) * length,
            };
            let parts: Vec<_> = (0..group.world_size())
                .map(|rank| vec![part(rank)])
                .collect();
            group.all_gather_parts(&mut [&mut buffer], &parts, |_, _, _| {})
        }
        "reduce_scatter" => group
            .reduce_scatter(&[1.0_f64; 5000], ReduceOp::Max)
            .map(drop),
        "reduce_scatter_buffer" | "reduce_scatter_buffer_within" => {
            let mut buffer = group.buffer(DType::F32, LARGE);
            group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &even(group, LARGE)?)
        }
        "start_reduce_scatter" => {
            let buffer = group.buffer(DType::F32, 100_000);
            let cut = even(group, buffer.len())?;
            let pending = group.start_reduce_scatter(buffer, ReduceOp::Mean, &cut)?;
            pending.wait().map(drop)
        }
        "start_all_gather" => {
            let buffer = group.buffer(DType::F32, LARGE);
            let layout = even(group, buffer.len())?;
            group.start_all_gather(buffer, &layout)?.wait().map(drop)
        }
        "gather_object" => group.gather_object(&format!("rank {rank}"), 0).map(drop),
        "scatter_object" => {
            let values: Vec<String> = (0..group.world_size())
                .map(|rank| format!("for rank {rank}"))
                .collect();
            let values = (rank == 0).then_some(&values[..]);
            group.scatter_object::<String, String>(values, 0).map(drop)
        }
        "broadcast_object" => group
            .broadcast_object((rank == 0).then_some(&42_u64), 0)
            .map(drop),
        _ => group.barrier(),
    }
}

/// Returns a layout in which all ranks keep equally many elements.
fn even(group: &ProcessGroup, len: usize) -> Result<Arc<ShardLayout>, Error> {
    let partition = Partition::new(len, group.world_size());
    let parts = (0..group.world_size()).map(|rank| vec![partition.range(rank)]);
    ShardLayout::new(len, parts.collect()).map(Arc::new)
}

fn print(seen: &Seen) {
    match serde_json::to_string(seen) {
        Ok(line) => println!("SEEN {line}"),
        Err(error) => panic!("{error}"),
    }
}

impl Seen {
    fn new(rank: usize, error: Option<&Error>, later: Option<&Error>, took: Duration) -> Self {
        Self {
            rank,
            pid: std::process::id(),
            error: error.map(|error| SeenError {
                text: error.to_string(),
                ranks: error.ranks().to_vec(),
                typed: error.is_peer_lost()
                    || error.is_timeout()
                    || error.is_rendezvous()
                    || error.is_protocol(),
                culprit: error.culprit().map(|culprit| SeenCulprit {
                    rank: culprit.rank(),
                    host: culprit.host().to_owned(),
                    pid: culprit.pid(),
                    cause: culprit.cause().to_owned(),
                }),
            }),
            later: later.map(Error::to_string),
            transport: None,
            seconds: took.as_secs_f64(),
        }
    }

    /// Returns the error if it has an expected type, blames some of these ranks and no other, and contains one of the
    /// words; in a group, if it names an operation, and the next call has failed too.
    pub(super) fn blames(
        &self,
        culprits: Range<usize>,
        words: &[&str],
        in_group: bool,
    ) -> Result<&SeenError, String> {
        let rank = self.rank;
        let Some(error) = &self.error else {
            return Err(format!("rank {rank} saw no error"));
        };
        let text = &error.text;
        let is_blamed = |rank: &usize| culprits.contains(rank);
        match () {
            () if !error.typed => Err(format!("rank {rank}: no expected type: {text}")),
            () if error.ranks.is_empty() || !error.ranks.iter().all(is_blamed) => {
                Err(format!("rank {rank} blames {:?}: {text}", error.ranks))
            }
            () if !words.iter().any(|word| text.contains(word)) => {
                Err(format!("rank {rank}: none of {words:?} in: {text}"))
            }
            () if in_group && !text.contains("collective #") => {
                Err(format!("rank {rank}: no operation in: {text}"))
            }
            () if in_group && self.later.is_none() => {
                Err(format!("rank {rank}: the next call succeeded"))
            }
            () => Ok(error),
        }
    }

    fn over(self, group: &ProcessGroup) -> Self {
        Self {
            transport: Some(group.transport().to_string()),
            ..self
        }
    }
}

/// The elements of a large buffer: several chunks over any transport.
const LARGE: usize = 1_000_000;
