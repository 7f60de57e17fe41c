//! The last operations of ranks, as reports and `accel-launch inspect` have them.

use std::time::{Duration, UNIX_EPOCH};

use accelerator_collective::internal::{FlightRecords, OpRecord};
use serde::Serialize;

/// A rank and its last operations, the oldest first; `null` if the rank could not be asked and had told none.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankOperations {
    rank: usize,
    host: String,
    pid: u32,
    operations: Option<Vec<Operation>>,
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
    number: u64,
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
            operations,
            ..
        } = records;
        let operations = operations.map(|all| all.into_iter().map(Operation::from).collect());
        Self {
            rank,
            host,
            pid,
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
            number: record.sequence,
            failed: record.failed,
        }
    }
}

/// Formats microseconds since the Unix epoch. A time that no clock has is shown as the epoch.
fn time(micros: u64) -> String {
    let time = UNIX_EPOCH.checked_add(Duration::from_micros(micros));
    humantime::format_rfc3339_micros(time.unwrap_or(UNIX_EPOCH)).to_string()
}
