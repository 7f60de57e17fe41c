//! The flight recorder of a rank, named after PyTorch's: its last operations, from which a hang is read.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use accelerator_host::{machine::unix_time, sync::Mutex};

use crate::{
    error::Result,
    fingerprint::CollectiveFingerprint,
    wire::{GroupId, message::OpRecord},
};

/// The last operations of one rank, in all its groups, and the time that it has waited for operations.
#[derive(Debug)]
pub(crate) struct FlightRecorder {
    ring: Mutex<Ring>,
    pub(super) waited: Arc<WaitClock>,
}

/// The sum of the times for which callers have waited for operations, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct WaitClock(AtomicU64);

impl WaitClock {
    pub(super) fn add(&self, time: Duration) {
        // Enough for centuries.
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(super) fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// The place of an operation in the recorder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordId(u64);

/// The end of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OpOutcome {
    Done,
    Failed,
}

impl OpOutcome {
    pub(crate) fn of<T>(outcome: &Result<T>) -> Self {
        match outcome {
            Ok(_) => Self::Done,
            Err(_) => Self::Failed,
        }
    }
}

impl FlightRecorder {
    /// Records an operation that begins.
    pub(crate) fn begin(
        &self,
        group: GroupId,
        sequence: u64,
        fingerprint: &CollectiveFingerprint,
        started: Instant,
    ) -> RecordId {
        let mut ring = self.ring.lock();
        let id = ring.begun;
        ring.begun += 1;
        let entry = Entry {
            id,
            fingerprint: *fingerprint,
            group,
            sequence,
            started,
            end: None,
        };
        if ring.entries.len() == CAPACITY {
            // Another thread may begin many while one hangs, which is kept.
            let mut entries = ring.entries.iter();
            let oldest = entries.position(|entry| entry.end.is_some());
            ring.entries.remove(oldest.unwrap_or(0));
        }
        ring.entries.push_back(entry);
        RecordId(id)
    }

    /// Records the end of an operation, unless it is forgotten or has failed already.
    pub(crate) fn end(&self, RecordId(id): RecordId, ended: Instant, outcome: OpOutcome) {
        let mut ring = self.ring.lock();
        // Most likely it is the newest.
        let mut entries = ring.entries.iter_mut().rev();
        if let Some(entry) = entries.find(|entry| entry.id == id) {
            entry.end.get_or_insert((ended, outcome));
        }
    }

    /// Records that an operation has failed, before it ends.
    pub(crate) fn fail(&self, group: GroupId, sequence: u64) {
        let mut ring = self.ring.lock();
        let mut entries = ring.entries.iter_mut();
        let failed = |entry: &&mut Entry| {
            (entry.group, entry.sequence) == (group, sequence) && entry.end.is_none()
        };
        if let Some(entry) = entries.find(failed) {
            entry.end = Some((Instant::now(), OpOutcome::Failed));
        }
    }

    /// The operations, the oldest first.
    pub(crate) fn records(&self) -> Vec<OpRecord> {
        let ring = self.ring.lock();
        let (now, wall) = (Instant::now(), unix_time());
        let time = |at: Instant| {
            let ago = now.saturating_duration_since(at);
            u64::try_from(wall.saturating_sub(ago).as_micros()).unwrap_or(u64::MAX)
        };
        let entries = ring.entries.iter();
        entries.map(|entry| entry.record(time)).collect()
    }
}

impl Default for FlightRecorder {
    fn default() -> Self {
        Self {
            ring: Mutex::new(Ring {
                entries: VecDeque::with_capacity(CAPACITY),
                begun: 0,
            }),
            waited: Arc::default(),
        }
    }
}

#[derive(Debug)]
struct Ring {
    /// The oldest operation first.
    entries: VecDeque<Entry>,
    begun: u64,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    fingerprint: CollectiveFingerprint,
    group: GroupId,
    sequence: u64,
    started: Instant,
    end: Option<(Instant, OpOutcome)>,
}

impl Entry {
    fn record(&self, time: impl Fn(Instant) -> u64) -> OpRecord {
        OpRecord {
            kind: self.fingerprint.kind,
            call: self.fingerprint.call().to_string(),
            site: self.fingerprint.site.to_string(),
            bytes: self.fingerprint.bytes() as u64,
            group: self.group.0,
            sequence: self.sequence,
            started: time(self.started),
            ended: self.end.map(|(ended, _)| time(ended)),
            failed: self
                .end
                .is_some_and(|(_, outcome)| outcome == OpOutcome::Failed),
        }
    }
}

/// The number of operations that are kept.
pub(crate) const CAPACITY: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        element::{DType, ReduceOp},
        fingerprint::{CallSite, OpKind, Purpose},
    };

    #[test]
    fn the_last_operations_are_kept_in_order() {
        let recorder = FlightRecorder::default();
        let fingerprint =
            CollectiveFingerprint::new(OpKind::AllReduce, CallSite::new("train.rs", 12))
                .with_op(ReduceOp::Sum)
                .with_data(DType::F32, 10)
                .with_purpose(Purpose::new("the loss"));
        let begin =
            |sequence| recorder.begin(GroupId::WORLD, sequence, &fingerprint, Instant::now());
        let first = begin(0);
        for sequence in 1..CAPACITY as u64 {
            begin(sequence);
        }
        recorder.end(first, Instant::now(), OpOutcome::Failed);
        let records = recorder.records();
        assert!(records[0].failed && records[0].ended >= Some(records[0].started));
        assert_eq!(records[1].ended, None);
        assert_eq!(records[0].call, "the loss (all_reduce sum f32 x 10)");
        assert_eq!((&*records[0].site, records[0].bytes), ("train.rs:12", 40));
        for sequence in 64..100 {
            let next = begin(sequence);
            recorder.end(next, Instant::now(), OpOutcome::Done);
        }
        // Its place is that of a later operation by now.
        recorder.end(first, Instant::now(), OpOutcome::Done);
        let records = recorder.records();
        let sequences: Vec<_> = records.iter().map(|record| record.sequence).collect();
        // Operations that have not ended are kept, whatever comes after them.
        assert_eq!(sequences, (1..64).chain([99]).collect::<Vec<_>>());
        recorder.fail(GroupId::WORLD, 7);
        assert!(recorder.records()[6].failed);
    }

    #[test]
    fn the_newest_of_those_that_have_ended_are_kept() {
        let recorder = FlightRecorder::default();
        let site = CallSite::new("train.rs", 12);
        let fingerprint = CollectiveFingerprint::new(OpKind::Barrier, site);
        for sequence in 0..200 {
            let record = recorder.begin(GroupId::WORLD, sequence, &fingerprint, Instant::now());
            recorder.end(record, Instant::now(), OpOutcome::Done);
        }
        let records = recorder.records();
        let sequences: Vec<_> = records.iter().map(|record| record.sequence).collect();
        assert_eq!(sequences, (136..200).collect::<Vec<_>>());
    }
}
