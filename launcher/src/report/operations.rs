//! The last operations of ranks, as reports and `accel-launch inspect` have them.

use std::time::{Duration, UNIX_EPOCH};

use accelerator_collective::internal::{FlightRecords, OpRecord, RankStatus};
use serde::Serialize;

/// A rank and its last operations, the oldest first; `null` if it has never told any.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankOperations {
    rank: usize,
    host: String,
    pid: u32,
    /// Says how old the operations are.
    state: &'static str,
    operations: Option<Vec<Operation>>,
}

impl RankOperations {
    /// Keeps only the newest operations.
    pub(super) fn keep(&mut self, count: usize) {
        if let Some(operations) = &mut self.operations {
            operations.drain(..operations.len().saturating_sub(count));
        }
    }
}

/// An operation of a rank.
#[derive(Clone, Debug, Serialize)]
struct Operation {
    kind: &'static str,
    /// The operation with its arguments and its purpose.
    call: String,
    site: String,
    bytes: u64,
    /// 0 for all ranks; groups of some of them count from 1.
    group: u16,
    /// The number of the operation in its group, the same on every rank.
    sequence: u64,
    /// Times by the clock of the rank's host.
    started: String,
    /// `null` while it was under way.
    ended: Option<String>,
    failed: bool,
}

impl From<FlightRecords> for RankOperations {
    fn from(records: FlightRecords) -> Self {
        let FlightRecords {
            rank,
            host,
            pid,
            state,
            operations,
            ..
        } = records;
        let operations = operations.map(|all| all.into_iter().map(Operation::from).collect());
        Self {
            rank,
            host,
            pid,
            state: match state {
                RankStatus::Answered => "answered",
                RankStatus::Meeting => "connecting",
                RankStatus::Silent => "silent",
                _ => "gone",
            },
            operations,
        }
    }
}

impl From<OpRecord> for Operation {
    fn from(record: OpRecord) -> Self {
        Self {
            kind: record.kind.name(),
            started: time(record.started),
            ended: record.ended.map(time),
            call: record.call,
            site: record.site,
            bytes: record.bytes,
            group: record.group,
            sequence: record.sequence,
            failed: record.failed,
        }
    }
}

/// Formats microseconds since the Unix epoch, of a rank that may tell anything. Times after the year 9999, which have no
/// format, are shown as its end.
fn time(micros: u64) -> String {
    const LAST: Duration = Duration::from_secs(253_402_300_799);
    let since = Duration::from_micros(micros).min(LAST);
    humantime::format_rfc3339_micros(UNIX_EPOCH + since).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_a_format() {
        assert_eq!(time(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(time(u64::MAX), "9999-12-31T23:59:59.000000Z");
    }
}
