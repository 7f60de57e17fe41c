//! The observer of a rank's operations.

use std::{fmt, time::Instant};

use super::flight_recorder::{FlightRecorder, OpOutcome, RecordId};
use crate::fingerprint::{CallSite, CollectiveFingerprint, OpKind};
use crate::transport::OpDeadline;
use crate::wire::GroupId;

/// An operation of this rank that has ended, well or not; see
/// [`ProcessGroup::observe`](super::ProcessGroup::observe).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OpEvent {
    /// The operation.
    pub kind: OpKind,
    /// The method that was called, such as `all_reduce`.
    pub name: &'static str,
    /// The group: 0 is the world, and groups that are parts of it count from 1.
    pub group: u16,
    /// The number of the operation in the group, from 0, the same on every rank.
    pub sequence: u64,
    /// The size of the data that this rank passed.
    pub bytes: usize,
    /// The time at which its turn came: the operations before it were done, or it was begun beside them.
    pub started: Instant,
    /// The time at which it was done.
    pub ended: Instant,
    /// The thread it ran on.
    pub thread: ExecThread,
    site: CallSite,
}

impl OpEvent {
    /// The file and the line that errors of the operation name: where it was called.
    pub fn place(&self) -> impl fmt::Display {
        self.site
    }
}

/// The thread that runs an operation.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ExecThread {
    /// The one that called it: a blocking operation.
    Caller,
    /// The group's own, which runs started operations; several of them may be under way at once,
    /// and they end in their order.
    Communication,
}

pub(super) type Callback = Box<dyn Fn(&OpEvent) + Send + Sync>;

/// An operation under way, which the flight recorder and the observer see.
pub(super) struct OpTimer<'a> {
    callback: Option<&'a Callback>,
    recorder: &'a FlightRecorder,
    record: RecordId,
    group: GroupId,
    sequence: u64,
    thread: ExecThread,
    started: Instant,
}

impl<'a> OpTimer<'a> {
    pub(super) fn begin(
        recorder: &'a FlightRecorder,
        callback: Option<&'a Callback>,
        thread: ExecThread,
        (group, sequence): (GroupId, u64),
        fingerprint: &CollectiveFingerprint,
        started: Instant,
    ) -> Self {
        Self {
            callback,
            recorder,
            record: recorder.begin(group, sequence, fingerprint, started),
            group,
            sequence,
            thread,
            started,
        }
    }

    /// Ends it. A short operation that never had to look at the clock, as its `deadline` knows, does not look at it now
    /// either unless there is an observer: that costs some 3% of it.
    pub(super) fn end(
        self,
        fingerprint: &CollectiveFingerprint,
        outcome: OpOutcome,
        deadline: &OpDeadline,
    ) {
        let is_short = fingerprint.bytes() <= SHORT && !deadline.has_looked();
        let ended = match self.callback.is_none() && is_short {
            true => self.started,
            false => Instant::now(),
        };
        self.recorder.end(self.record, ended, outcome);
        if self.thread == ExecThread::Caller {
            self.recorder.waited.add(ended - self.started);
        }
        let Some(callback) = self.callback else {
            return;
        };
        callback(&OpEvent {
            kind: fingerprint.kind,
            name: fingerprint.kind.name(),
            group: self.group.0,
            sequence: self.sequence,
            bytes: fingerprint.bytes(),
            started: self.started,
            ended,
            thread: self.thread,
            site: fingerprint.site,
        });
    }
}

/// The most bytes of an operation that takes no time worth measuring if it does not wait.
const SHORT: usize = 64 * 1024;

impl fmt::Debug for OpTimer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpTimer")
            .field("thread", &self.thread)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        thread,
    };

    use super::*;
    use crate::{DType, GroupOptions, ProcessGroup, ReduceOp};

    #[test]
    fn every_operation_is_seen_before_its_result() {
        let ranks = ProcessGroup::threads(2, &GroupOptions::new()).unwrap();
        thread::scope(|scope| {
            for group in ranks {
                scope.spawn(move || {
                    let seen = Arc::new(Mutex::new(Vec::new()));
                    let notes = Arc::clone(&seen);
                    let notes_seen = Arc::clone(&seen);
                    let note = move |observed: &OpEvent| notes.lock().unwrap().push(*observed);
                    group.observe(note).unwrap();
                    let before = Instant::now();
                    group.all_reduce(&mut [1_u16; 3], ReduceOp::Sum).unwrap();
                    assert_eq!(seen.lock().unwrap().len(), 1);
                    let pending: Vec<_> = (1..6)
                        .map(|len| {
                            let buffer = group.buffer(DType::F64, len);
                            group.start_all_reduce(buffer, ReduceOp::Sum).unwrap()
                        })
                        .collect();
                    for (number, pending) in pending.into_iter().enumerate() {
                        pending.wait().unwrap();
                        assert!(seen.lock().unwrap().len() >= 2 + number);
                    }
                    group.barrier().unwrap();
                    let seen = seen.lock().unwrap();
                    let bytes: Vec<_> = seen.iter().map(|observed| observed.bytes).collect();
                    assert_eq!(bytes, [6, 8, 16, 24, 32, 40, 0]);
                    assert_eq!((seen[6].kind, seen[6].name), (OpKind::Barrier, "barrier"));
                    for (number, observed) in seen.iter().enumerate() {
                        assert_eq!(observed.sequence, number as u64);
                        let beside = (1..6).contains(&number);
                        assert_eq!(observed.thread == ExecThread::Communication, beside);
                        assert!(before <= observed.started && observed.started <= observed.ended);
                    }
                    assert!(seen.windows(2).all(|pair| pair[0].ended <= pair[1].ended));
                    assert!(group.observe(|_| {}).unwrap_err().is_misuse());
                    drop(seen);
                    let part = group.split(0, 0).unwrap();
                    part.barrier().unwrap();
                    let last = notes_seen.lock().unwrap().last().copied().unwrap();
                    assert_eq!((last.kind, last.sequence), (OpKind::Barrier, 0));
                    assert_ne!(last.group, 0);
                });
            }
        });
    }
}
